"""The record of a watch as files: JSON of our own, and Chrome trace events.

Trace format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from graphkeep._watch import _tables
from graphkeep._watch._finding import Finding
from graphkeep._watch._frames import Site
from graphkeep._watch._timeline import Timeline

SCHEMA_VERSION = 1
_STEP = 1000  # microseconds that one step is drawn as; within it, saved tensors stand at equal distances


def write_json(path: str | os.PathLike[str], timeline: Timeline, findings: list[Finding], held: list[dict[str, Any]]) -> None:
    """Write everything that was recorded."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "torch": str(torch.__version__),
        "steps": [
            {
                "first": step.first,
                "count": step.count,
                "tensors": step.tensors,
                "bytes": step.bytes,
                "peak_bytes": step.peak,
                "left_bytes": step.left,
                "backwards": step.backwards,
            }
            for step in timeline.steps
        ],
        "sites": [
            {
                **_site(site),
                "module": site.module_type,
                "op": site.op,
                "tensors": site.tensors,
                "bytes": site.bytes,
                "live_tensors": site.live_tensors,
                "live_bytes": site.live_bytes,
                "freed_by_backward": site.by_backward,
                "freed_by_reference_count": site.by_count,
            }
            for site in timeline.sites
            if site.tensors
        ],
        "lives": [
            {
                "born": _site(life.born),
                "born_at": [life.born_first, life.born_last],
                "tensors": life.tensors,
                "bytes": life.bytes,
                "freed_by": "reference count" if life.backward is None else "backward",
                "backward": life.backward,
                "died": _site(life.died),
                "died_step": life.died_step,
                "died_at": life.died_at,
            }
            for life in timeline.lives
        ],
        "backwards": [
            {
                "number": backward.number,
                **_site(backward.site),
                "step": backward.step,
                "retain_graph": backward.retain_graph,
                "create_graph": backward.create_graph,
                "failed": backward.failed,
                "reused": backward.reused,
                "kept_bytes": backward.kept,
            }
            for backward in timeline.backwards
        ],
        "optimizer_steps": [
            {"optimizer": step.kind, **_site(step.site), "step": step.step} for step in timeline.optimizer_steps
        ],
        "mutations": [{"saved": _site(m.saved), "seen": _site(m.seen), "step": m.step} for m in timeline.mutations],
        "tables": {key: _tables.group(timeline, key) for key in ("line", "module", "op")},
        "holders": held,
        "findings": [finding.as_dict() for finding in findings],
    }
    Path(path).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _site(site: Site) -> dict[str, Any]:
    return {"file": site.file, "line": site.line, "function": site.function}


def write_trace(path: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write Chrome trace events: steps, the lives of graphs, backward calls, and the bytes held."""
    process = os.getpid()
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((1, "steps"), (2, "backwards"), (3, "graphs"))
    ]
    for step in timeline.steps:
        begin, length = step.first * _STEP, step.count * _STEP
        events.append(_span(process, 1, f"step {step.first}", begin, length, {"tensors": step.tensors, "bytes": step.bytes}))
        events.append(
            {"ph": "C", "pid": process, "name": "graph bytes", "ts": begin, "args": {"peak": step.peak, "left": step.left}}
        )
    for backward in timeline.backwards:
        begin = _time(timeline, backward.at, backward.step)
        events.append(
            {
                "ph": "i", "s": "t", "pid": process, "tid": 2, "ts": begin, "name": f"backward at {backward.site.where}",
                "args": {"retain_graph": backward.retain_graph, "kept_bytes": backward.kept},
            }
        )  # fmt: skip
    for number, life in enumerate(timeline.lives):
        begin = _time(timeline, life.born_first, None)
        end = max(_time(timeline, life.died_at, life.died_step), begin + 1)
        what = {
            "born": life.born.where,
            "freed by": "reference count" if life.backward is None else f"backward {life.backward}",
            "at": life.died.where,
            "bytes": life.bytes,
            "tensors": life.tensors,
        }
        common = {"pid": process, "tid": 3, "cat": "graph", "id": number, "name": life.born.where}
        events.append({"ph": "b", "ts": begin, "args": what, **common})
        events.append({"ph": "e", "ts": end, **common})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _span(process: int, thread: int, name: str, begin: float, length: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": begin, "dur": length, "args": args}


def _time(timeline: Timeline, at: int, step: int | None) -> int:
    """Where on the axis the saving of a tensor stands: within its step, by its place among that step's tensors."""
    first = max(timeline.step_of(at), timeline.steps[0].first)
    record = next(step for step in timeline.steps if step.first == first)
    length = record.count * _STEP
    begin = record.first * _STEP + length * (at - record.at) // max(record.tensors, at - record.at, 1)
    return begin if step is None else max(begin, step * _STEP)
