"""What `infer` did and why: the counts that can be read as ``out.plan``."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphkeep._errors import ArgumentError
from graphkeep._units import format_bytes, parse_bytes


@dataclass
class Plan:
    """What an `infer` did so far. ``str()`` says it in words.

    Attributes:
        samples: samples in the batch.
        chunks: chunks that they ran forward in.
        keep: what was asked to be kept.
        kept_chunks: chunks whose graph is held now.
        kept_bytes: bytes that these graphs hold, parameters apart.
        rows_asked: rows whose gradient has been asked for by a backward, each counted once a backward.
        rows_backward: samples that ran backward for it. Equal to `rows_asked` where rows are computed alone.
        rows_replayed: samples that ran forward again.
        replays: forwards that were run again.
        why: the reasons for what was done, in order, each said once.
    """

    samples: int
    chunks: int
    keep: str
    kept_chunks: int = 0
    kept_bytes: int = 0
    rows_asked: int = 0
    rows_backward: int = 0
    rows_replayed: int = 0
    replays: int = 0
    why: list[str] = field(default_factory=list)

    def say(self, reason: str) -> None:
        if reason not in self.why:
            self.why.append(reason)

    def __str__(self) -> str:
        kept = f"{self.kept_chunks} kept ({format_bytes(self.kept_bytes)})" if self.kept_chunks else "none kept"
        lines = [
            f"{self.samples:,} samples forward, chunks: {self.chunks:,}, {kept} (keep={self.keep})",
            f"{self.rows_asked:,} rows asked for, {self.rows_backward:,} run backward, {self.rows_replayed:,} run forward "
            f"again, replays: {self.replays:,}",
        ]
        return "\n".join(lines + [f"  {reason}" for reason in self.why])


@dataclass
class History:
    """What was seen of a model in earlier calls, from which ``keep="auto"`` decides.

    Attributes:
        share: rows asked for, of all.
        forward_seconds, backward_seconds: of one sample.
        alone: whether rows could be computed by themselves.
        trusted: what was found out of its samples' independence, by the modes of its modules.
    """

    share: float = 1.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    alone: bool = False
    trusted: dict[object, object] = field(default_factory=dict)

    @property
    def replays_are_cheaper(self) -> bool:
        return self.alone and self.share * (self.forward_seconds + self.backward_seconds) < self.backward_seconds


_histories: weakref.WeakKeyDictionary[object, dict[object, History]] = weakref.WeakKeyDictionary()


def history_of(model: object, modules: Sequence[object]) -> History:
    """The history of a model, kept for as long as it lives.

    A function made anew in each step (a lambda around a module) is known by its code and the first module that it uses.
    """
    code = getattr(model, "__code__", None)
    try:
        return _histories.setdefault(modules[0] if modules and code is not None else model, {}).setdefault(code, History())
    except TypeError:  # it cannot be hashed, or not be referred to weakly
        return History()


def parse_keep(keep: int | str, budget: int | str | None) -> int | None:
    """How many bytes of graph may be kept; None for no limit."""
    if budget is not None and keep != "auto":
        raise ArgumentError('budget= goes with keep="auto"', instead='keep="auto", budget=..., or the bytes as keep=')
    if keep == "nothing":
        return 0
    if keep == "everything" or (keep == "auto" and budget is None):
        return None
    if keep == "auto":
        return parse_bytes(budget or 0, "budget")
    try:
        return parse_bytes(keep, "keep")
    except ArgumentError as error:
        raise ArgumentError(
            f"keep={keep!r}", instead='"nothing", "everything", "auto", or bytes such as 2**30 or "1GiB"'
        ) from error
