"""Runs as Chrome trace events, which Perfetto opens: a process for each rank, with steps, backwards, graphs and bytes held.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import datetime
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from graphkeep.report._plain import where
from graphkeep.report._run import Run

_SECOND = 1_000_000  # the unit of the format is a microsecond
_DAY = 86_400  # seconds; starts that lie further apart are of clocks that do not agree


def write(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Write one file for all runs.

    Raises:
        OSError: the path cannot be written.
    """
    starts = [_started(run) for run in runs]
    known = [start for start in starts if start is not None]
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        first = True
        for process, (run, start) in enumerate(zip(runs, starts, strict=True)):
            later = 0.0 if start is None or start - min(known) > _DAY else start - min(known)
            for event in _events(run, process, later):
                file.write(("" if first else ",\n") + json.dumps(event))
                first = False
        file.write("\n]}\n")


def _started(run: Run) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(run.header.get("started")).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _events(run: Run, process: int, later: float) -> Iterator[dict[str, Any]]:
    clock = _Clock(run, later)
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"rank {run.rank}: {run.header.get('program')}"}}
    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": run.rank}}
    for tid, name in enumerate(("steps", "backwards", "graphs"), 1):
        yield {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}}
    begin = clock.at(run.begun_at)
    for step in run.steps:
        end = max(clock.second(step.s), begin)
        name = f"step {step.first}" if step.count == 1 else f"steps {step.first} to {step.first + step.count - 1}"
        args = {"tensors": step.tensors, "bytes": step.bytes, "peak": step.peak, "left": step.left}
        yield {"ph": "X", "pid": process, "tid": 1, "name": name, "ts": begin, "dur": end - begin, "args": args}
        begin = end
    held = [(clock.second(sample.s), sample.bytes) for sample in run.samples]
    # steps of which there are no samples, in a long run, have what was left
    held += [(clock.second(step.s), step.left) for step in run.steps]
    for ts, size in sorted(held):
        yield {"ph": "C", "pid": process, "name": "graph bytes", "ts": ts, "args": {"bytes": size}}
    for call in run.backwards:
        args = {"number": call.number, "retain_graph": call.retain_graph, "failed": call.failed, "kept_bytes": call.kept_bytes}
        name = f"backward at {where(run, call.site)}"
        yield {"ph": "i", "s": "t", "pid": process, "tid": 2, "ts": clock.at(call.at), "name": name, "args": args}
    for number, life in enumerate(run.lives):
        common = {"pid": process, "tid": 3, "cat": "graph", "id": f"{process}.{number}", "name": where(run, life.born)}
        start = clock.at(life.born_first)
        what = {
            "freed by": "reference count" if life.backward is None else f"backward {life.backward}",
            "at": where(run, life.died),
            "bytes": life.bytes,
            "tensors": life.tensors,
        }
        yield {"ph": "b", "ts": start, "args": what, **common}
        yield {"ph": "e", "ts": max(clock.at(life.died_at), start + 1), **common}


_MOST = 2.0**53  # microseconds; a damaged file may say anything


class _Clock:
    """Microseconds of a moment that the file knows as `at`: between those of which it knows both, evenly."""

    def __init__(self, run: Run, later: float) -> None:
        self._later = later
        known = [(0, 0.0), *((sample.at, sample.s) for sample in run.samples)]
        known += [(step.at + step.tensors, step.s) for step in run.steps]
        self._at, self._s = [0], [0.0]
        for at, s in sorted(known):
            if at > self._at[-1] and s >= self._s[-1]:
                self._at.append(at)
                self._s.append(s)

    def second(self, s: float) -> int:
        return round(min((self._later + s) * _SECOND, _MOST))

    def at(self, at: int) -> int:
        after = bisect_right(self._at, at)
        if after == len(self._at):
            return self.second(self._s[-1])
        if after == 0:
            return self.second(0.0)
        low, high = self._at[after - 1], self._at[after]
        return self.second(self._s[after - 1] + (self._s[after] - self._s[after - 1]) * (at - low) / (high - low))
