"""A training step under `watch`, over the same step in plain torch.

A round is one step of a network of large ops, or eight of one of tiny ops; all variants of a job alternate in one process, and
what a tool does when it is switched on and off (`watch` looks at everything that is alive, a profiler works through its events)
is outside the clock. *Large ops*: the share of a forward's time that is spent in ops of at least 500 us. The chain of sines is
the dearest shape that the bar for these knows: each op saves a tensor, and takes little more. *Identity hooks*,
`saved_tensors_hooks` with two lambdas that return what they are given, are the least that any tool with hooks pays. memray can
only be had for a whole process: pairs of processes alternate, and the clock is each one's own, around its steps. *After a
watch*: a process that has left one, over a process that never had any.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import LEAST, ROOT, Row, in_child, silent, with_note
from benchmarks.watch_jobs import NAMES, Job, build
from graphkeep import _engine, _ledger

Way = Callable[[], contextlib.AbstractContextManager[Any]]


def identity() -> contextlib.AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def profiler(stack: bool) -> Way:
    @contextlib.contextmanager
    def way() -> Iterator[None]:
        with silent():
            profiling = profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=stack)
            profiling.start()
        try:
            yield
        finally:
            with silent():
                profiling.stop()

    return way


@contextlib.contextmanager
def running(watch: gk.watch) -> Iterator[None]:
    """One watch for all rounds, as a program has one for all steps."""
    watch.start()
    try:
        yield
    finally:
        watch.stop()


LABELS = {
    "watch": "watch: time",
    "identity": "identity hooks: time",
    "profiler": "torch.profiler, profile_memory: time",
    "stack": "torch.profiler, profile_memory and with_stack: time",
    "memray": "memray, whole process: time",
    "after": "after a watch: time",
}


def rows(quick: bool = False) -> Iterator[Row]:
    rounds, few, pairs = (2, 1, 0) if quick else (31, 7, 5)
    for model in ("small",) if quick else ("conv", "mlp", "chain", "transformer", "loop", "flat", "nested"):
        job = build(model)
        yield from _times(model, job, rounds, few)
    if not quick:
        yield from _parts(build("flat"), rounds)
    yield _originals()
    if not quick:
        yield from _processes("flat", 150, pairs)


def _times(model: str, job: Job, rounds: int, few: int) -> Iterator[Row]:
    where = NAMES[model]
    ops = _op_times(job)
    large = sum(each for each in ops if each >= 500) / sum(ops)
    if model in ("conv", "mlp", "chain") and large < 0.95:
        raise AssertionError(f"{where}: ops of 500 us make only {large:.0%} of the forward")
    watch = gk.watch()
    saved = _saved_tensors(job)
    ways: dict[str, Way] = {"plain": contextlib.nullcontext, "watch": lambda: running(watch), "identity": identity}
    times = alternate(ways, job.round, rounds)
    row = _measure.time_row("watch", where, LABELS["watch"], times["watch"], times["plain"], job.wanted)
    each = (statistics.median(times["watch"]) - statistics.median(times["plain"])) / job.steps / saved * 1e6
    note = _milliseconds(times["watch"], times["plain"], job.steps)
    note += f"; large ops {large:.0%} (of {len(ops)}, the median takes {statistics.median(ops):.0f} us)"
    yield with_note(row, f"{note}; {saved} tensors saved, {each:.1f} us each")
    row = _measure.time_row("watch", where, LABELS["identity"], times["identity"], times["plain"])
    yield with_note(row, _milliseconds(times["identity"], times["plain"], job.steps))
    # apart, so that nothing that a profiler leaves behind weighs on the figures above
    ways = {"plain": contextlib.nullcontext, "profiler": profiler(False), "stack": profiler(True)}
    times = alternate(ways, job.round, few)
    for key in ("profiler", "stack"):
        row = _measure.time_row("watch", where, LABELS[key], times[key], times["plain"])
        yield with_note(row, _milliseconds(times[key], times["plain"], job.steps))


def _parts(job: Job, rounds: int) -> Iterator[Row]:
    """The same tiny ops seen otherwise."""
    watch = gk.watch()
    ways: dict[str, Way] = {"plain": contextlib.nullcontext, "watch": lambda: running(watch), "identity": identity}
    for what, run, collector in (
        ("forward and backward only", job.round_without_optimizer, False),
        ("with Python's collector on", job.round, True),
    ):
        times = alternate(ways, run, rounds, collector=collector)
        for key in ("watch", "identity"):
            row = _measure.time_row("watch", f"{NAMES['flat']}, {what}", LABELS[key], times[key], times["plain"])
            yield with_note(row, _milliseconds(times[key], times["plain"], job.steps))


def _processes(model: str, steps: int, pairs: int) -> Iterator[Row]:
    here = ["plain", "after", "watch"]
    if importlib.util.find_spec("memray") is None:
        print("  memray is not installed and is left out: pip install --target DIR memray, PYTHONPATH=DIR", file=sys.stderr)
    else:
        here.append("memray")
    times: dict[str, list[float]] = {way: [] for way in here}
    for pair in range(pairs):
        for way in here[:: -1 if pair % 2 else 1]:
            arguments = [model, str(steps), way]
            if way == "memray":
                times[way].append(_under_memray(*arguments))
            else:
                times[way].append(in_child("benchmarks.watch_jobs", *arguments, steady=True))
    for way in here[1:]:
        where = f"{NAMES[model]}, processes"
        row = _measure.time_row("watch", where, LABELS[way], times[way], times["plain"], 1.01 if way == "after" else None)
        yield with_note(row, _milliseconds(times[way], times["plain"], steps))


def _under_memray(*arguments: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "memray", "run", "-q", "-o", f"{folder}/out.bin", "-m", "benchmarks.watch_jobs", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def _originals() -> Row:
    """What a watch patches is what it was."""
    patches = [_engine.calls, *(value for value in vars(_ledger).values() if isinstance(value, _ledger.Patch))]
    before = [vars(patch._owner).get(patch._name) for patch in patches]
    with gk.watch():
        during = [vars(patch._owner).get(patch._name) for patch in patches]
    after = [vars(patch._owner).get(patch._name) for patch in patches]
    if any(a is b for a, b in zip(before, during, strict=True)):
        raise AssertionError("a patch that is known here was not in place under the watch")
    left = sum(a is not b for a, b in zip(before, after, strict=True))
    left += torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    note = f"of {len(patches)}, and the stack of saved-tensor hooks"
    return Row("watch", "after a watch", "functions of torch's that are still replaced", left, "", wanted=0, note=note)


def alternate(ways: dict[str, Way], run: Callable[[], object], most: int, *, collector: bool = False) -> dict[str, list[float]]:
    """As `_measure.alternate`, with each variant's context entered and left outside its time."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in _measure.rounds(most + 1, LEAST + 1):
        for name, way in list(ways.items())[:: -1 if number % 2 else 1]:
            gc.collect()
            with way():
                if not collector:
                    gc.disable()
                start = time.process_time()
                run()
                seconds = time.process_time() - start
                gc.enable()
            if number:  # the first warms up
                times[name].append(seconds)
    return times


def _op_times(job: Job) -> list[float]:
    """Microseconds of each op that a forward calls; of each the median of five forwards."""
    found = []
    for i in range(6):
        with silent(), profile(activities=[ProfilerActivity.CPU]) as seen:
            job.forward()
        events = [event for event in seen.events() if event.cpu_parent is None and event.name.startswith("aten::")]
        if i:
            found.append([event.cpu_time_total for event in sorted(events, key=lambda event: event.time_range.start)])
    return [statistics.median(each) for each in zip(*found, strict=True)]


def _saved_tensors(job: Job) -> int:
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        job.step()
    return count


def _milliseconds(times: list[float], baseline: list[float], steps: int) -> str:
    a, b = (statistics.median(each) / steps * 1e3 for each in (times, baseline))
    return f"{a:.2f} ms over {b:.2f} ms a step"


if __name__ == "__main__":
    _measure.main(rows)
