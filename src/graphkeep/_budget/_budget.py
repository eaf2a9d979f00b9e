"""`budget`: any eager step within so many bytes."""

from __future__ import annotations

import contextlib
import operator
import threading
from types import TracebackType
from typing import Any, Literal

import torch
from typing_extensions import Self

from graphkeep._budget._holdings import Holdings
from graphkeep._budget._plan import smallest
from graphkeep._budget._report import BudgetReport, Share, shares
from graphkeep._budget._steps import Steps
from graphkeep._eager import eager
from graphkeep._errors import ArgumentError, ArgumentTypeError, BudgetError, caller
from graphkeep._ledger import LEDGER
from graphkeep._units import format_bytes, parse_bytes

_one = threading.Lock()  # there is one ledger, and one owner of what it holds


class budget:
    """Hold the saved tensors of every graph that is built inside within a number of bytes.

    Nothing in the program changes: gradients, buffers, hooks and random numbers are those of plain PyTorch. Over the limit,
    saved tensors are dropped, and when a backward asks for one, the ops that made it run again.

    Arguments:
        limit: bytes, as an int or a string (``2**30``, ``"512MiB"``), or a float, ``0 < limit <= 1``: that share of what the
            first step needs, which then runs without a limit. A step ends when no graph is left alive, the first with
            a backward; a later one that needs more raises a limit that is a share. Counted are the unique
            storages that the graph holds, in forward and backward, with what is there for running again; parameters, and
            what was there before the step's first op with a history (its inputs), are not.
        device_memory: a limit, written in the same way, for all that ops allocate on the device inside (the current GPU, or the
            CPU where there is none): activations, gradients and what is in between, beside the graph. Room is made before an
            op runs; what a kernel needs inside, and results whose size depends on values, are not known before.
        spill: what happens to what is dropped: ``"recompute"``: the ops that made it run again; ``"host"``: it is copied to
            pinned memory of the host, on a stream of its own (without a GPU: to a file), and back, also what cannot be run
            again; ``"both"``: whichever is estimated to take less time.
        on_exit: what becomes of graphs that are alive on leaving: ``"recompute"``: what was dropped is run again when a
            backward asks for it, without a limit; ``"bring"``: it is brought back at once.

    Attributes:
        limit: in bytes; None before the first step has ended, for a share.
        live: bytes that are held now.
        peak: bytes that were held at most; of a share, since the first step, which has no limit, has ended.
        recomputed_ops, recomputed_flops, recomputed_seconds: what ran again: aten ops, their floating-point operations as
            `torch.utils.flop_counter` counts them, and the seconds that they took the first time.
        steps: that have ended.

    Raises:
        ArgumentError: a limit that is no number of bytes and no share, or a second budget while one is active.
        BudgetError: inside, where no choice of what to drop fits; ``.smallest`` is the limit, in bytes, that would have done
            for what had run up to there.

    Example:
        >>> import graphkeep as gk
        >>> net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        >>> with gk.budget("64KiB") as b:
        ...     net(torch.ones(256, 64)).sum().backward()
        Traceback (most recent call last):
            ...
        graphkeep._errors.BudgetError: ...

    Sources: Kirisame et al. 2021 (Dynamic Tensor Rematerialization, https://arxiv.org/abs/2006.09616), Jain et al. 2020
    (Checkmate, https://arxiv.org/abs/1910.02653), `torch.utils.checkpoint`.
    """

    def __init__(
        self,
        limit: int | float | str | None = None,
        *,
        device_memory: int | float | str | None = None,
        spill: Literal["recompute", "host", "both"] = "recompute",
        on_exit: Literal["recompute", "bring"] = "recompute",
    ) -> None:
        if (limit is None) == (device_memory is None):
            raise ArgumentError(
                "one limit is needed, for the graph or for all that is allocated",
                where=caller(),
                instead='gk.budget("2GiB") or gk.budget(device_memory="16GiB")',
            )
        name = "limit" if limit is not None else "device_memory"
        given: Any = limit if limit is not None else device_memory
        if not isinstance(given, (bool, str, float)):
            with contextlib.suppress(TypeError):
                given = operator.index(given)
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise ArgumentTypeError(
                f"{name}={given!r} is {type(given).__name__}",
                where=caller(),
                instead='bytes, gk.budget("2GiB"), or a share of what the first step needs, gk.budget(0.5)',
            )
        if spill not in ("recompute", "host", "both"):
            raise ArgumentError(f"spill={spill!r}", where=caller(), instead='spill="recompute", "host" or "both"')
        if on_exit not in ("recompute", "bring"):
            raise ArgumentError(f"on_exit={on_exit!r}", where=caller(), instead='on_exit="recompute" or on_exit="bring"')
        self._share: float | None = None
        self._limit: int | None = None
        if isinstance(given, float):
            if not 0 < given <= 1:
                raise ArgumentError(
                    f"{name}={given!r}: a float is a share of what the first step needs, above 0 and at most 1",
                    where=caller(),
                    instead="gk.budget(0.5), or bytes as an int",
                )
            self._share = given
        else:
            self._limit = parse_bytes(given, name)
            if self._limit < 1:
                raise ArgumentError(f"{name}={given!r}: no graph fits in that", where=caller(), instead='gk.budget("2GiB")')
        self._device: torch.device | None = None
        if device_memory is not None:
            self._device = (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        self._on_exit = on_exit
        self._active = False
        self._spill = spill
        self._holdings = self._new(Steps(self._limit, self._share, plans=spill == "recompute" and self._device is None))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, by `copy.deepcopy` or `torch.save` of a module that holds it, is one that nobody has entered."""
        limit = self._limit if self._share is None else self._share
        return _fresh, (type(self), "limit" if self._device is None else "device_memory", limit, self._spill, self._on_exit)

    def _new(self, steps: Steps) -> Holdings:
        """What a `with` begins with: it knows the streams of those before."""
        return Holdings(steps, spill=self._spill, device=self._device)

    @eager
    def __enter__(self) -> Self:
        if not _one.acquire(blocking=False):
            raise ArgumentError(
                "a budget is active already, and it holds the graphs of all threads",
                where=caller(),
                instead="one gk.budget around both",
            )
        self._active = True
        self._holdings = self._new(self._holdings.steps)
        try:
            LEDGER.join(self._holdings)
            self._holdings.enter()
        except BaseException:
            self._leave()
            raise
        return self

    @eager
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if not self._active:
            raise ArgumentError("this budget is not active", where=caller(), instead="with gk.budget(...) as b:")
        fault = self._leave()
        if error is None and fault is not None:
            raise fault
        if self._on_exit == "bring" and error is None:
            self._holdings.bring_all()

    def _leave(self) -> Exception | None:
        self._active = False
        try:
            self._holdings.exit()
            return LEDGER.leave(self._holdings)
        finally:
            self._holdings.left()
            _one.release()

    @property
    def limit(self) -> int | None:
        return self._holdings.steps.limit if self._active else (self._holdings.steps.limit or self._limit)

    @property
    def live(self) -> int:
        return self._holdings.store.live

    @property
    def peak(self) -> int:
        return self._holdings.store.peak

    @property
    def steps(self) -> int:
        return self._holdings.steps.count

    @property
    def smallest(self) -> int | None:
        """The smallest limit, in bytes, that the last step could have had; None before one has ended."""
        last = self._holdings.steps.last
        return None if last is None or not self._holdings.steps.planning else smallest(last)

    @property
    def recomputed_ops(self) -> int:
        return self._holdings.again.ops

    @property
    def recomputed_flops(self) -> int:
        return self._holdings.again.flops

    @property
    def recomputed_seconds(self) -> float:
        return self._holdings.again.seconds

    def report(self) -> BudgetReport:
        """Where the bytes are: what the last step held when it was fullest, what it dropped, what can never be dropped."""
        h = self._holdings
        trace = h.steps.last
        held: frozenset[int] = frozenset()
        saved: set[int] = set()
        if trace is not None:
            planned = h.steps.plan_of(trace)
            limit = h.steps.limit or 1 << 62
            held = trace.simulate(planned.dropped if planned is not None else (), limit).full
            saved = {v for what, v in trace.events if what == "save"}
        none: tuple[Share, ...] = ()
        return BudgetReport(
            self.limit,
            h.store.peak,
            self.smallest,
            h.steps.count,
            h.steps.followed,
            h.again.ops,
            h.again.flops,
            h.again.seconds,
            none if trace is None else shares(trace, held, held),
            none if trace is None else shares(trace, saved - held, held),
            none if trace is None else shares(trace, [v for v in held if trace.values[v].pinned], held, why=True),
        )

    def __repr__(self) -> str:
        limit = f"{self._share}" if self.limit is None else format_bytes(self.limit)
        return f"<graphkeep.budget {limit}, peak {format_bytes(self.peak)}>"


def _fresh(kind: type[budget], name: str, limit: Any, spill: Any, on_exit: Any) -> budget:
    return kind(**{name: limit}, spill=spill, on_exit=on_exit)


__all__ = ["BudgetError", "budget"]
