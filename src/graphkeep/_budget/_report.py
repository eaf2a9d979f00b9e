"""What a `budget` has held and dropped, and why it could not drop more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from graphkeep._budget._trace import Trace
from graphkeep._units import format_bytes

_ROWS = 8


@dataclass(frozen=True)
class Share:
    """Saved tensors of one kind.

    Attributes:
        what: the op that made them, and why they stay if they must.
        tensors: how many storages.
        nbytes: their bytes.
        seconds: to run them again, each from what is held; 0 if that cannot be.
    """

    what: str
    tensors: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class BudgetReport:
    """Where the bytes of the last step were; ``print`` it.

    Attributes:
        limit: in bytes; None before the first step of a share has ended.
        peak: bytes that were held at most, over all steps.
        smallest: the smallest limit in bytes that the last step could have had; None before one has ended.
        steps: that have ended.
        planned: those of them that followed a plan to their end.
        recomputed_ops, recomputed_flops, recomputed_seconds: what ran again, over all steps.
        held: what the last step held when it was fullest, the largest first.
        dropped: what it had saved and not held then.
        stays: what of ``held`` can never be dropped, with the reason.
    """

    limit: int | None
    peak: int
    smallest: int | None
    steps: int
    planned: int
    recomputed_ops: int
    recomputed_flops: int
    recomputed_seconds: float
    held: tuple[Share, ...]
    dropped: tuple[Share, ...]
    stays: tuple[Share, ...]

    def __str__(self) -> str:
        limit = "none yet (a share of the first step)" if self.limit is None else format_bytes(self.limit)
        lines = [f"budget {limit}, peak {format_bytes(self.peak)}"]
        if self.smallest is not None:
            lines[0] += f", smallest limit that would do {format_bytes(self.smallest)} ({self.smallest:,} bytes)"
        lines.append(f"{self.steps:,} steps, {self.planned:,} of them by a plan learned before")
        flops = f", {self.recomputed_flops:.3g} FLOPs" if self.recomputed_flops else ""
        lines.append(f"run again: {self.recomputed_ops:,} ops{flops}, {self.recomputed_seconds:.3g} s")
        for title, shares in (
            ("held when the last step was fullest", self.held),
            ("dropped then", self.dropped),
            ("never dropped", self.stays),
        ):
            lines += _table(title, shares)
        return "\n".join(lines)


def _table(title: str, shares: tuple[Share, ...]) -> list[str]:
    if not shares:
        return []
    lines = [f"{title}: {format_bytes(sum(share.nbytes for share in shares))}"]
    for share in shares[:_ROWS]:
        seconds = f", {share.seconds * 1e3:.3g} ms to run again" if share.seconds else ""
        lines.append(f"  {format_bytes(share.nbytes):>10} in {share.tensors:,} of {share.what}{seconds}")
    if len(shares) > _ROWS:
        lines.append(f"  {format_bytes(sum(share.nbytes for share in shares[_ROWS:])):>10} in others")
    return lines


def shares(trace: Trace, numbers: Iterable[int], there: frozenset[int], why: bool = False) -> tuple[Share, ...]:
    """Sum up values of a trace by the op that made them."""
    found: dict[str, tuple[int, int, float]] = {}
    for v in numbers:
        made = trace.values[v]
        what = trace.ops[made.op].func._overloadpacket.__name__ if made.op >= 0 else "what cannot be run again"
        if why:
            what = f"{what}: {made.pinned}" if made.op >= 0 else made.pinned
        tensors, nbytes, seconds = found.get(what, (0, 0, 0.0))
        again = 0.0 if made.op < 0 or why else trace.again(v, there)
        found[what] = tensors + 1, nbytes + made.nbytes, seconds + again
    return tuple(sorted((Share(what, *sums) for what, sums in found.items()), key=lambda share: -share.nbytes))
