"""What `graphkeep run` costs a program.

Pairs of processes alternate: `python -m benchmarks.watch_jobs` by itself, and the same behind `graphkeep run -q`. *In the loop*
is the CPU time that the program takes around its steps, the looks at what is alive after 8, 16 and 32 of them included. *Whole
process* is the CPU time from its start to its end: importing graphkeep, the last look and reading the file for the verdict
besides. The sizes are those of the data file, and of the page that `graphkeep report --html` makes of it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import ROOT, Row
from benchmarks.watch_jobs import NAMES
from graphkeep.report import html
from graphkeep.report._read import read

ROUNDS = 5
JOBS = {"transformer": 33, "flat": 200}  # the look after 32 steps is in both


def rows(quick: bool = False) -> Iterator[Row]:
    for model, steps in ({"small": 20} if quick else JOBS).items():
        yield from _times(model, steps, 1 if quick else ROUNDS)
    for steps in (40,) if quick else (1_000, 10_000):
        yield from _sizes("small", steps)
    if not quick:
        yield from _sizes("flat", 1_000)


def _times(model: str, steps: int, rounds: int) -> Iterator[Row]:
    ways = {"plain": [], "run": ["-m", "graphkeep", "run", "-q", "-o", os.devnull]}
    loop: dict[str, list[float]] = {way: [] for way in ways}
    whole: dict[str, list[float]] = {way: [] for way in ways}
    for number in _measure.rounds(rounds):
        for way, before in list(ways.items())[:: -1 if number % 2 else 1]:
            inside, outside = _run([*before, "-m", "benchmarks.watch_jobs", model, str(steps), "plain"])
            loop[way].append(inside)
            whole[way].append(outside)
    name = f"{NAMES[model]}, {steps} steps"
    for figure, times in (("in the loop", loop), ("whole process", whole)):
        yield _measure.time_row("run_command", name, f"graphkeep run: time {figure}", times["run"], times["plain"])


def _run(arguments: list[str]) -> tuple[float, float]:
    """Seconds that the program says, and those of the whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(done.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _sizes(model: str, steps: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "run.graphkeep")
        _run(["-m", "graphkeep", "run", "-q", "-o", str(file), "-m", "benchmarks.watch_jobs", model, str(steps), "plain"])
        page = len(html.render([read(file)]).encode())
        name = f"{NAMES[model]}, {steps:,} steps"
        yield Row("run_command", name, "data file", file.stat().st_size / 2**20, "MiB")
        yield Row("run_command", name, "page", page / 2**20, "MiB", wanted=2.0)


if __name__ == "__main__":
    _measure.main(rows)
