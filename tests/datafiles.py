"""Data files for tests: made of records, as `docs/data-file.md` has them, without a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from graphkeep._watch._datafile import FORMAT, SCHEMA_VERSION, DataFile
from graphkeep.report._read import read
from graphkeep.report._run import Run

Record = dict[str, Any]
LEAK = 50_000  # bytes that each step leaves
SOURCE = (
    "import torch\n\n\ndef train(losses):\n    x = hidden(x)\n    loss = out(x)\n    losses.append(loss)\n    loss.backward()\n"
)

FINDING = {
    "id": "GK101", "severity": "bytes grow", "what": "`losses` (list, global of train.py) keeps one graph more each step",
    "where": "train.py:7", "why": "`losses.append(loss)` stores a tensor with its history",
    "instead": "`losses.append(loss.detach())`",
}  # fmt: skip
COSTS = {
    "id": "GK301", "severity": "costs", "what": "retain_graph=True kept the graph 12 times", "where": "train.py:8",
    "why": "it was left on", "instead": "remove retain_graph=True",
}  # fmt: skip
NOTE = {
    "type": "note", "id": "GK201", "error": "RuntimeError: Trying to backward through the graph a second time",
    "text": "graphkeep GK201: this loss reaches a part of the graph that has been freed before\n"
    "  built:   train.py:5 in step 0\n  write instead: `hidden = hidden.detach()`",
}  # fmt: skip


def header(**more: Any) -> Record:
    return {
        "type": "header", "format": FORMAT, "schema_version": SCHEMA_VERSION, "graphkeep": "0.1.0", "torch": "2.13.0",
        "python": "3.11.7", "program": "train.py", "argv": ["train.py", "--lr", "0.1"], "cwd": "/home/me/project", "pid": 4711,
        "host": "box", "started": "2026-11-30T12:00:00+00:00", "rank": 0, "world_size": 1, "group": "", **more,
    }  # fmt: skip


def training(steps: int = 12, leak: int = LEAK, findings: tuple[Record, ...] = (), **more: Any) -> list[Record]:
    """The records of a training loop; `more` goes into the header."""
    made = [
        header(**more),
        {"type": "source", "file": "train.py", "text": SOURCE},
        {"type": "site", "id": 1, "file": "train.py", "line": 5, "function": "train", "module": "Linear"},
        {"type": "site", "id": 2, "file": "train.py", "line": 6, "function": "train", "module": None},
        {"type": "site", "id": 3, "file": "train.py", "line": 8, "function": "train", "module": None},
        {"type": "steps_begin", "at": 0, "boundary": "optimizer"},
    ]
    for k in range(steps):
        at, s, left = 10 * k, 0.5 * k, leak * (k + 1)
        held = [[1, 100_000], [2, left]]
        made += [
            {"type": "sample", "step": k, "at": at + 10, "s": s + 0.2, "bytes": 100_000 + left, "sites": held},
            {
                "type": "backward", "number": k + 1, "site": 3, "step": k, "at": at + 10, "retain_graph": False,
                "create_graph": False, "failed": False, "reused": False, "kept_bytes": left,
            },
            {
                "type": "life", "born": 1, "died": 3, "born_first": at + 1, "born_last": at + 9, "died_at": at + 10,
                "died_step": k, "tensors": 8, "bytes": 100_000, "backward": k + 1,
            },
            {"type": "optimizer_step", "optimizer": "SGD", "site": 3, "step": k, "at": at + 10},
            {
                "type": "step", "first": k, "count": 1, "at": at, "s": s + 0.5, "tensors": 10, "bytes": 100_000 + leak,
                "peak": 100_000 + left, "left": left, "backwards": 1,
            },
        ]  # fmt: skip
    holder = {
        "holder": "`losses` (list, global of train.py)", "kind": "list", "name": "losses", "file": "train.py", "line": 7,
        "nodes": 7 * steps, "bytes": leak * steps, "parts": [[k, 7, leak] for k in range(steps)], "sites": [2],
    }  # fmt: skip
    return [
        *made,
        {"type": "mutation", "saved": 1, "seen": 3, "step": 0, "at": 3},
        {
            "type": "look", "step": steps, "at": 10 * steps, "s": 0.5 * steps, "final": True, "holders": [holder],
            "findings": list(findings),
        },
        {
            "type": "totals",
            "sites": [[1, "addmm", 8 * steps, 100_000 * steps, 0, 0, 8 * steps, 0],
                      [2, None, 2 * steps, leak * steps, 2 * steps, leak * steps, 0, 0]],
            "deaths": [[1, 3, True, steps, 8 * steps, 100_000 * steps]],
            "calls": [[3, steps, 0, 0, 0, 0]],
            "peak": 100_000 + leak * steps,
        },
        {"type": "end", "how": "finished", "error": None, "s": 0.5 * steps},
    ]  # fmt: skip


def changed(records: list[Record], kind: str, **values: Any) -> list[Record]:
    """The same with other values in the records of one type."""
    return [{**copy.deepcopy(one), **(values if one["type"] == kind else {})} for one in records]


def without(records: list[Record], *kinds: str) -> list[Record]:
    return [one for one in records if one["type"] not in kinds]


def write(path: Path, records: list[Record], flushed: bool = False) -> Path:
    file = DataFile(path)
    for record in records:
        file.write(record)
        if flushed:
            file.flush()
    file.close()
    return path


def run(path: Path, records: list[Record]) -> Run:
    return read(write(path, records))
