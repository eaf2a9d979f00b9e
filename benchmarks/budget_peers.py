"""Other ways to save memory, and `gk.budget` with no more memory than each of them needs.

*Live bytes* and *time* of a peer are over the plain step's. `gk.budget` gets a limit at which its step has no more live bytes
than the peer's, found by trying: both are measured in the same way, by what torch's allocator gives out. Its time is then over
the peer's, half of whose steps ran before and half after. *checkpoint* is `torch.utils.checkpoint` without reentrance around
every block, or every two blocks in a row; *selective* saves matrix products and convolutions; *compiler* is `torch.compile`
with `activation_memory_budget`, whose partition runs on torch's own kernels (`aot_eager`), as all other variants do. A block
is a transformer layer, a bottleneck, a dense layer, a convolution with its norm (UNet, GAN), ten steps of the LSTM, a node of
a tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import graphkeep as gk
from benchmarks import _budget_bench, _measure
from benchmarks._budget_bench import Bench, Measured
from benchmarks._budget_nets import MODELS
from benchmarks._budget_peers import peers
from benchmarks._measure import Row, mib

TRIES = 3
CLOSE = 1.005  # live bytes that are no more than the peer's


def rows(quick: bool = False) -> Iterator[Row]:
    for model in MODELS:
        yield from of(model, quick)


def of(model: str, quick: bool = False) -> Iterator[Row]:
    bench = Bench(model, quick)
    plain = bench.times(bench.turn)[bench.turn // 2 :]
    known: dict[int, int] = {}
    for name, way in peers(model, quick).items():
        ours: list[Measured | Exception] = []

        def then(peer: Measured, ours: list[Measured | Exception] = ours) -> None:
            try:
                ours.append(_within(bench, peer.live, known))
            except Exception as error:  # without its traceback, which holds a graph
                ours.append(error.with_traceback(None))

        try:
            peer = bench.other(lambda way=way: way(bench.job), then)
        except Exception as error:
            yield _budget_bench.failed("budget_peers", model, name, error)
            continue
        before, plain = plain, bench.times(bench.turn // 2)
        row = _measure.time_row("budget_peers", model, f"{name}: time", peer.times, [*before, *plain])
        pairs = zip(peer.unequal, ("gradients", "buffers"), strict=True)
        wrong = "".join(f"; {count} {what} are not plain's, bit for bit" for count, what in pairs if count)
        yield _measure.with_note(row, row.note + wrong)
        note = f"{mib(peer.live)} over {mib(bench.live)}"
        yield Row("budget_peers", model, f"{name}: live bytes", peer.live / bench.live, note=note)
        yield _beside(model, f"budget with the live bytes of {name}: time over the peer's", bench, peer, ours[0])


def _beside(model: str, figure: str, bench: Bench, peer: Measured, ours: Measured | Exception) -> Row:
    if isinstance(ours, Exception):
        return _budget_bench.failed("budget_peers", model, figure, ours)
    if not ours.times:
        note = f"{mib(ours.live)} at the least, the peer {mib(peer.live)}"
        return Row("budget_peers", model, f"{figure}: not reached", 1, "", wanted=0, note=note)
    row = _measure.time_row("budget_peers", model, figure, ours.times, peer.times, wanted=1.0)
    note = f"{row.note}; live bytes {mib(ours.live)} and {mib(peer.live)}; graph bytes {ours.peak / bench.graph:.1%}"
    return _measure.with_note(row, note)


def _within(bench: Bench, live: int, known: dict[int, int]) -> Measured:
    """Steps under a limit at which a step's live bytes are at most so many; without times if none was found.

    Live bytes fall in steps as the limit does, for they hold more than the graph: each try goes down by what is too much.

    Arguments:
        bench: whose steps.
        live: bytes.
        known: the live bytes of limits that were tried before.
    """
    most = live * CLOSE
    near = [limit for limit, found in known.items() if 0.95 * most <= found <= most]
    limit, floor = max(near, default=bench.graph - (bench.live - live)), bench.graph // 10
    least: Measured | None = None
    for _ in range(TRIES):
        limit = max(limit, floor)
        try:
            ours = bench.limited(limit, lambda found: found <= most)
        except gk.BudgetError as error:
            if limit >= error.smallest:
                raise
            limit = floor = error.smallest
            continue
        known[limit] = ours.live
        if ours.times:
            return ours
        least = ours if least is None or ours.live < least.live else least
        if limit == floor:
            break
        limit -= max(ours.live - live, bench.graph // 20)
    if least is None:
        raise AssertionError(f"no limit from {mib(floor)} on could be met")
    return least


if __name__ == "__main__":
    _budget_bench.main("budget_peers", of, sys.argv[1:])
