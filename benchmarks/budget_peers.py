"""Other ways to save memory, and `gk.budget` with no more memory than each of them needs.

*Live bytes* and *time* of a peer are over the plain step's. `gk.budget` gets a limit at which its step has no more live bytes
than the peer's, found by trying: both are measured in the same way, by what torch's allocator gives out. Its time is then over
the peer's; plain torch, the peer and `gk.budget` alternate, two steps a turn. *checkpoint* is `torch.utils.checkpoint` without
reentrance around every block, or every two blocks in a row; *selective* saves matrix products and convolutions; *compiler* is
`torch.compile` with `activation_memory_budget`, whose partition runs on torch's own kernels (`aot_eager`), as all other
variants do; *torch-remat* is version 0.2.2, without more, or with every linear layer and convolution a region that is saved. A
block is a transformer layer, a bottleneck, a dense layer, a convolution with its norm (UNet, GAN), ten steps of the LSTM, a
node of a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import graphkeep as gk
from benchmarks import _budget_bench, _measure
from benchmarks._budget_bench import Bench, Limited, Way
from benchmarks._budget_nets import MODELS
from benchmarks._budget_peers import peers
from benchmarks._measure import Row, allocated_peak, mib

TRIES = 3
CLOSE = 1.005  # live bytes that are no more than the peer's


def rows(quick: bool = False) -> Iterator[Row]:
    for model in MODELS:
        yield from of(model, quick)


def of(model: str, quick: bool = False) -> Iterator[Row]:
    bench = Bench(model, quick)
    known: dict[int, int] = {}
    for name, way in peers(model, quick).items():
        figure = f"budget with the live bytes of {name}: time over the peer's"
        ways: dict[str, Way] = {"peer": lambda way=way: way(bench.job)}
        try:
            with ways["peer"]():
                bench.check()
                unequal = bench.unequal()
                live = allocated_peak(bench.check)
        except Exception as error:
            yield _budget_bench.failed("budget_peers", model, name, error, None)
            continue
        ours: Limited | None = None
        try:
            ours = _within(bench, live, known)
            ways["ours"] = lambda ours=ours: ours
        except Exception as error:
            yield _budget_bench.failed("budget_peers", model, figure, error)
        times, errors = bench.alternate(ways)
        if "peer" in errors:
            yield _budget_bench.failed("budget_peers", model, name, errors["peer"], None)
            continue
        row = _measure.time_row("budget_peers", model, f"{name}: time", times["peer"], times["plain"])
        pairs = zip(unequal, ("gradients", "buffers"), strict=True)
        wrong = "".join(f"; {count} {what} are not plain's, bit for bit" for count, what in pairs if count)
        yield _measure.with_note(row, row.note + wrong)
        note = f"{mib(live)} over {mib(bench.live)}"
        yield Row("budget_peers", model, f"{name}: live bytes", live / bench.live, note=note)
        if "ours" in errors:
            yield _budget_bench.failed("budget_peers", model, figure, errors["ours"])
        elif ours is not None:
            row = _measure.time_row("budget_peers", model, figure, times["ours"], times["peer"], wanted=1.0)
            note = f"{row.note}; live bytes {mib(ours.live)} and {mib(live)}; graph bytes {ours.peak / bench.graph:.1%}"
            yield _measure.with_note(row, note)


def _within(bench: Bench, live: int, known: dict[int, int]) -> Limited:
    """A limit under which a step's live bytes are at most so many.

    Live bytes fall in steps as the limit does, for they hold more than the graph: each try goes down by what is too much.

    Arguments:
        bench: whose steps.
        live: bytes.
        known: the live bytes of limits that were tried before.
    """
    most = live * CLOSE
    near = [limit for limit, found in known.items() if 0.95 * most <= found <= most]
    limit, floor = max(near, default=bench.graph - (bench.live - live)), bench.graph // 10
    least = bench.live
    for _ in range(TRIES):
        limit = max(limit, floor)
        try:
            ours = Limited(bench, limit)
        except gk.BudgetError as error:
            if limit >= error.smallest:
                raise
            limit = floor = error.smallest
            continue
        known[limit] = ours.live
        if ours.live <= most:
            return ours
        least = min(least, ours.live)
        if limit == floor:
            break
        limit -= max(ours.live - live, bench.graph // 20)
    raise MemoryError(f"{mib(least)} were the least of {TRIES} tries, the peer has {mib(live)}")


if __name__ == "__main__":
    _budget_bench.main("budget_peers", of, sys.argv[1:])
