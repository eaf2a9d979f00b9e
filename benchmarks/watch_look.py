"""One look at everything that is alive: what `w.findings` takes, and `gk.explain`, with ever more Python objects around.

A third of the objects are small lists, a third instances, a third tuples inside dicts; the program holds the losses of 40 steps
in a list, so that there is something to find. Wall time, the median of five looks.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row
from benchmarks.watch_jobs import build

kept: list[Any] = []  # what the program keeps, as a global
heap: list[Any] = []


class Thing:
    def __init__(self, name: str, others: list[int]) -> None:
        self.name = name
        self.others = others


def rows(quick: bool = False) -> Iterator[Row]:
    job = build("small")
    with gk.watch() as watch:
        for _ in range(40):
            kept.append(job.step())
        for wanted in (0,) if quick else (300_000, 1_000_000):
            _fill(wanted)
            count = len(gc.get_objects())
            where = f"{count:,} objects"
            limit = 2000 if wanted == 1_000_000 else None
            seconds = _median(lambda: watch.findings, 1 if quick else 5)
            found = watch.findings
            if not any("kept" in finding.what for finding in found):
                raise AssertionError(f"the list that keeps the losses was not found: {found}")
            note = f"longest {max(seconds) * 1e3:.0f} ms; found: {found[0].id} {found[0].what}"
            yield _row(where, "watch: w.findings", seconds, limit, note)
            seconds = _median(lambda: str(gk.explain(kept[-1])), 1 if quick else 5)
            yield _row(where, "gk.explain(loss)", seconds, limit, f"longest {max(seconds) * 1e3:.0f} ms")
    kept.clear()
    heap.clear()


def _fill(wanted: int) -> None:
    i = 0
    while len(gc.get_objects()) < wanted:
        for _ in range(20_000):
            i += 1
            if i % 3 == 0:
                heap.append([i, i + 1])
            elif i % 3 == 1:
                heap.append(Thing(f"thing {i}", [i]))
            else:
                heap.append({"key": ([i], i)})


def _median(fn: Callable[[], object], rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return seconds


def _row(where: str, figure: str, seconds: list[float], wanted: float | None, note: str) -> Row:
    return Row("watch_look", where, figure, statistics.median(seconds) * 1e3, "ms", wanted=wanted, note=note)


if __name__ == "__main__":
    _measure.main(rows)
