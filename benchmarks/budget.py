"""Time and memory of a training step under `gk.budget`, over the same step in plain torch, at ever smaller limits.

Limits are shares of the most bytes that the plain step's graph saves, parameters and the batch apart, seen by a pair of
saved-tensor hooks. *Graph bytes* are `b.peak`, from the first step on; *live bytes* are how far the bytes that torch's
allocator has given out rise in one step, gradients on their way and workspaces included. *FLOPs again*: those of the ops that
ran again, over those of the plain step. A limit has had four steps before it is timed, for the first is not planned yet; then
all limits and plain torch alternate, five steps in two turns. Gradients and buffers of the first step and of the third are
compared with the plain step's.

Each model has a process of its own. All of them run with an allocator that keeps what is freed (`MALLOC_MMAP_MAX_=0`,
`MALLOC_TRIM_THRESHOLD_` at its largest), plain steps too: else what is measured is how often glibc gives a page back to the
system and fetches it again.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator

import graphkeep as gk
from benchmarks import _budget_bench, _measure
from benchmarks._budget_bench import Bench, Limited
from benchmarks._budget_nets import MODELS
from benchmarks._measure import Row, mib

LIMITS = (210, 110, 70, 50, 30, 20)
SLACK = 1.03
WANTED = {
    "GPT": {50: 1.10, 30: 1.20},
    "ResNet-50": {50: 1.10, 30: 1.20},
    "DenseNet-121": {50: 1.10, 30: 1.20},
    "UNet": {48: 1.25},
    "TreeLSTM": {45: 1.30},
}


def rows(quick: bool = False) -> Iterator[Row]:
    for model in MODELS:
        yield from of(model, quick)


def of(model: str, quick: bool = False) -> Iterator[Row]:
    bench = Bench(model, quick)
    wanted = WANTED.get(model, {}) | {110: SLACK, 210: SLACK}
    found: dict[int, Limited] = {}
    for percent in sorted({110, 60, 20} if quick else {*LIMITS, *wanted}, reverse=True):
        where = f"at {percent} %"
        try:
            found[percent] = Limited(bench, bench.graph * percent // 100)
        except gk.BudgetError as error:
            least = error.smallest / bench.graph
            bar = percent / 100 if percent in wanted else None
            yield Row("budget", model, f"{where}: refused; the smallest limit", least, wanted=bar, note=mib(error.smallest))
        except Exception as error:
            yield _budget_bench.failed("budget", model, where, error)
    times, errors = bench.alternate({str(percent): lambda here=here: here for percent, here in found.items()})
    for percent, here in found.items():
        where = f"at {percent} %"
        if str(percent) in errors:
            yield _budget_bench.failed("budget", model, where, errors[str(percent)])
            continue
        row = _measure.time_row("budget", model, f"{where}: time", times[str(percent)], times["plain"], wanted.get(percent))
        note = f"{row.note}; graph bytes {here.peak / bench.graph:.1%} of {mib(bench.graph)}"
        note += f"; again {here.flops:.1%} of the FLOPs, {here.seconds / statistics.median(times['plain']):.1%} of the time"
        yield _measure.with_note(row, note)
        note = f"{mib(here.live)} over {mib(bench.live)}"
        yield Row("budget", model, f"{where}: live bytes", here.live / bench.live, note=note)
    if found:
        yield from _counts(model, bench, found)


def _counts(model: str, bench: Bench, found: dict[int, Limited]) -> Iterator[Row]:
    """What must never happen, whatever the machine."""
    over = [percent for percent, here in found.items() if here.peak > bench.graph * percent // 100]
    yield _count(model, "limits that were exceeded", over, len(found))
    pairs = itertools.pairwise(found.items())
    rises = [percent for (_, larger), (percent, here) in pairs if here.peak > larger.peak]
    yield _count(model, "smaller limits with a higher peak", rises, len(found))
    unequal = [percent for percent, here in found.items() if any(here.unequal)]
    yield _count(model, "limits where gradients or buffers are not plain's, bit for bit", unequal, len(found))


def _count(model: str, figure: str, which: list[int], all_: int) -> Row:
    note = f"of {all_}" + (": at " + ", ".join(f"{percent} %" for percent in which) if which else "")
    return Row("budget", model, figure, len(which), "", wanted=0, note=note)


if __name__ == "__main__":
    _budget_bench.main("budget", of, sys.argv[1:])
