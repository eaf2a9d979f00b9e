"""Which ops of a step have to be written down, where its stream and its plan are known.

A plan says what is dropped, so it is known which ops will run again. The others need not be written down: the step is compared
with the one before by what it saves, as in `_slack`, and where it turns out to be another, what was not written down is held,
or goes to the host. What does have to be:

* an op that will run again,
* what made a value that such an op reads, unless the graph has saved the value before,
* an op that changes something in place which one of these has read or made, or which was saved.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from graphkeep._budget._slack import Saved
from graphkeep._budget._trace import Trace
from graphkeep._budget._values import Op, Value

_WORTH = 0.8  # share of the ops above which it is not worth it


class Schedule(NamedTuple):
    """When ops are written down.

    Attributes:
        first: whether they are before anything is saved.
        switches: at which call of the hook they are from then on, or are no more.
    """

    first: bool
    switches: dict[int, bool]


def schedule(trace: Trace, calls: tuple[Saved, ...], again: frozenset[int]) -> Schedule | None:
    """When to write down; None where it is not worth it, or cannot be told.

    Arguments:
        trace: of a step like it.
        calls: what that step has saved.
        again: the ops that run again by the plan.
    """
    kinds = {kind for kind, _ in trace.events}
    forward = trace.events[: next((i for i, (kind, _) in enumerate(trace.events) if kind == "use"), len(trace.events))]
    if (
        trace.closed
        or trace.hidden_changes
        or kinds & {"keep", "free"}
        or len(forward) < sum(k == "save" for k, _ in trace.events)
    ):
        return None
    wanted = _Wanted(trace, calls, again).ops
    if wanted is None or len(wanted) > _WORTH * len(trace.ops):
        return None
    nodes = [saved.node for saved in calls]
    if nodes != sorted(nodes):
        return None
    on: set[int] = set()  # after which calls; -1: from the beginning
    for number in wanted:
        node = trace.ops[number].node - trace.first
        on.update(range(max(bisect.bisect_left(nodes, node) - 1, -1), bisect.bisect_right(nodes, node)))
    switches = {c: c in on for c in range(len(calls)) if (c in on) != (c - 1 in on)}
    return Schedule(-1 in on, switches)


class _Wanted:
    """Attributes:
    ops: those to write down; None if it cannot be told.
    """

    def __init__(self, trace: Trace, calls: tuple[Saved, ...], again: frozenset[int]) -> None:
        self.trace = trace
        self.saved: dict[int, int] = {}  # values, and the first node that saves each
        for saved in calls:
            if saved.counts:
                self.saved.setdefault(saved.value, saved.node)
        self.ops: set[int] | None = set(again)
        self.read: set[int] = set()
        todo = list(again)
        while todo and self.ops is not None:
            self._close(todo)
            todo = [k for k, op in enumerate(trace.ops) if k not in self.ops and op.writes and any(map(self._known, op.writes))]
            self.ops.update(todo)

    def _known(self, value: int) -> bool:
        assert self.ops is not None
        return value in self.read or value in self.saved or self.trace.values[value].op in self.ops

    def _close(self, todo: list[int]) -> None:
        """Add what made what the ops read."""
        trace = self.trace
        while todo:
            number = todo.pop()
            op = trace.ops[number]
            for value in op.reads:
                self.read.add(value)
                made = trace.values[value]
                before = value in self.saved and self.saved[value] <= op.node - trace.first and value not in op.writes
                if made.op < 0:
                    if not (made.apart or before):
                        self.ops = None  # a custom kernel's, for which nobody would look
                        return
                elif not before and self.ops is not None and made.op not in self.ops:
                    self.ops.add(made.op)
                    todo.append(made.op)


class Skeleton(Trace):
    """The trace of a step that is not written down whole: it counts what happens, for the plan's moments."""

    def add_op(self, op: Op, node: int = 0, changed: Iterable[Value] = ()) -> int:
        return -1

    def add(self, value: Value, op: int) -> int:
        value.trace, value.number = self, -1
        return -1

    def note(self, what: str, value: Value, node: int) -> None:
        self.note_number(what, -1, node)
        if what == "save":
            self.saved_bytes += value.nbytes

    def also(self, value: Value, node: int) -> None:
        pass

    def ended(self) -> Trace:
        return Trace()  # nothing can be told from it
