"""Other ways to save memory, and `gk.budget` with no more memory than each of them needs.

*Live bytes* and *time* of a peer are over the plain step's. `gk.budget` gets a limit at which its step has no more live bytes
than the peer's, found by trying: both are measured in the same way, by what torch's allocator gives out. Its time is then over
the peer's; plain torch, all peers and their budgets alternate, five steps in two turns. *checkpoint* is
`torch.utils.checkpoint` without reentrance around every block, or every two blocks in a row; *selective* saves matrix products
and convolutions; *compiler* is `torch.compile` with `activation_memory_budget`, whose partition runs on torch's own kernels
(`aot_eager`), as all other variants do; *torch-remat* is version 0.2.2, without more, or with every linear layer and
convolution a region that is saved. A block is a transformer layer, a bottleneck, a dense layer, a convolution with its norm
(UNet, GAN), ten steps of the LSTM, a node of a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import graphkeep as gk
from benchmarks import _budget_bench, _measure
from benchmarks._budget_bench import Bench, Limited, Way
from benchmarks._budget_nets import MODELS
from benchmarks._budget_peers import peers
from benchmarks._measure import Row, allocated_peak, mib

TRIES = 5
CLOSE = 1.005  # live bytes that are no more than the peer's


def rows(quick: bool = False) -> Iterator[Row]:
    for model in MODELS:
        yield from of(model, quick)


@dataclass
class Peer:
    """What one of them gives, and the budget that is set beside it, or why there is none."""

    way: Way
    live: int
    unequal: tuple[int, int]
    ours: Limited | None = None
    failed: Exception | None = None


def of(model: str, quick: bool = False) -> Iterator[Row]:
    bench = Bench(model, quick)
    found: dict[str, Peer] = {}
    budgets: list[Limited] = []
    for name, around in peers(model, quick).items():
        try:
            found[name] = peer = _peer(bench, lambda around=around: around(bench.job))
        except Exception as error:
            yield _budget_bench.failed("budget_peers", model, name, error, None)
            continue
        try:
            peer.ours = _within(bench, peer.live, budgets)
        except Exception as error:
            peer.failed = error.with_traceback(None)
    # all in one row of turns: plain torch and a budget that is near to two peers have one turn for both
    ways = {name: peer.way for name, peer in found.items()}
    ways |= {f"budget {i}": lambda ours=ours: ours for i, ours in enumerate(budgets) if _used(ours, found)}
    times, errors = bench.alternate(ways)
    for name, peer in found.items():
        if name in errors:
            yield _budget_bench.failed("budget_peers", model, name, errors[name], None)
        else:
            key = f"budget {budgets.index(peer.ours)}" if peer.ours is not None else ""
            yield from _beside(bench, name, peer, times, key, errors.get(key) or peer.failed)


def _peer(bench: Bench, way: Way) -> Peer:
    with way():
        bench.check()
        unequal = bench.unequal()
        return Peer(way, allocated_peak(bench.check), unequal)


def _used(ours: Limited, found: dict[str, Peer]) -> bool:
    return any(peer.ours is ours for peer in found.values())


def _beside(
    bench: Bench, name: str, peer: Peer, times: dict[str, list[float]], key: str, error: Exception | None
) -> Iterator[Row]:
    model, live = bench.model, peer.live
    row = _measure.time_row("budget_peers", model, f"{name}: time", times[name], times["plain"])
    pairs = zip(peer.unequal, ("gradients", "buffers"), strict=True)
    wrong = "".join(f"; {count} {what} are not plain's, bit for bit" for count, what in pairs if count)
    yield _measure.with_note(row, row.note + wrong)
    note = f"{mib(live)} over {mib(bench.live)}"
    yield Row("budget_peers", model, f"{name}: live bytes", live / bench.live, note=note)
    figure = f"budget with the live bytes of {name}: time over the peer's"
    if error is not None:
        yield _budget_bench.failed("budget_peers", model, figure, error)
    elif peer.ours is not None:
        row = _measure.time_row("budget_peers", model, figure, times[key], times[name], wanted=1.0)
        note = f"{row.note}; live bytes {mib(peer.ours.live)} and {mib(live)}; graph bytes {peer.ours.peak / bench.graph:.1%}"
        yield _measure.with_note(row, note)


def _within(bench: Bench, live: int, budgets: list[Limited]) -> Limited:
    """A budget under which a step's live bytes are at most so many.

    Live bytes fall in steps as the limit does, for they hold more than the graph: each try goes down by what is too much.

    Arguments:
        bench: whose steps.
        live: bytes.
        budgets: those that were tried before; new ones are added.
    """
    most = live * CLOSE
    near = [ours for ours in budgets if 0.95 * most <= ours.live <= most]
    if near:
        return max(near, key=lambda ours: ours.live)
    limit, floor = bench.graph - (bench.live - live), bench.graph // 10
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
        budgets.append(ours)
        if ours.live <= most:
            return ours
        least = min(least, ours.live)
        if limit == floor:
            break
        limit -= max(ours.live - live, bench.graph // 20)
    raise MemoryError(f"{mib(least)} were the least of {TRIES} tries, the peer has {mib(live)}")


if __name__ == "__main__":
    _budget_bench.main("budget_peers", of, sys.argv[1:])
