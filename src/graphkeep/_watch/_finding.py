"""A finding, and what is said of several. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SEVERITIES = ("will raise", "bytes grow", "nodes grow", "costs")  # the gravest first


@dataclass(frozen=True)
class Finding:
    """One diagnosed fault.

    Attributes:
        id: stable, ``GK101``.
        severity: ``bytes grow``, ``nodes grow``, ``will raise`` or ``costs``.
        what: what was seen, by the program's own names.
        where: ``file.py:12``, or None.
        why: what causes it.
        instead: what to write instead.
    """

    id: str
    severity: str
    what: str
    where: str | None
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.id} {self.severity}: {self.what}{self.place}\n  why: {self.why}\n  write instead: {self.instead}"

    @property
    def place(self) -> str:
        """`where` in parentheses, unless `what` has it already."""
        return f" ({self.where})" if self.where and not self.what.endswith(self.where) else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verdict(findings: Sequence[Finding]) -> str:
    """Three lines before any table: verdict, why, next."""
    if not findings:
        return (
            "verdict: nothing grows\n"
            "why:     no holder gains a graph with each step, and no graph is kept for nothing\n"
            "next:    nothing"
        )
    first = findings[0]
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"verdict: {first.id} {first.severity}: {first.what}{more}\nwhy:     {first.why}\nnext:    {first.instead}"
