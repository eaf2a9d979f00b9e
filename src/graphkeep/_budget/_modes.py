"""The dispatch modes of the threads, and what each thread is doing in the engine.

With a dispatch mode active some backward formulas of torch are others (`isTensorSubclassLike`), and slower, so the mode is
taken off while the engine runs, but for ``create_graph``, whose graph is written down. It is off as well in steps that need not
be written down (`_slack`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from graphkeep._budget._record import Mode
from graphkeep._budget._store import Store
from graphkeep._ledger import LEDGER, Call

_on_stack: Callable[[], int] = torch._C._len_torch_dispatch_stack
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Outer(NamedTuple):
    """What a call of the engine finds: the node that runs, what it was given, the mode if it looks away, or was taken off."""

    node: int
    in_use: set[int]
    looking_away: Mode | None
    popped: bool


class _Mine(threading.local):
    mode: Mode | None = None
    on = False  # whether it is on the stack


class Modes:
    """One for each thread that is inside the budget.

    Arguments:
        make: makes one.
        store: has what each thread's node has been given.

    Attributes:
        threads: that are inside.
        calls: of the engine, in any thread.
        resting: idents of those of the threads in whose steps nothing is written down.
    """

    def __init__(self, make: Callable[[], Mode], store: Store) -> None:
        self.make: Callable[[], Mode] | None = make
        self.store = store
        self.threads = 0
        self.calls: dict[int, _Outer] = {}
        self.resting: set[int] = set()
        self._mine = _Mine()

    def enter(self) -> None:
        """Write down what this thread runs."""
        if self.make is not None:
            self._mine.mode = self.make()
            self.threads += 1
            self.on()
            LEDGER.has_mode(1)

    def exit(self) -> None:
        """No more."""
        mode, self._mine.mode = self._mine.mode, None
        if mode is None:
            return
        LEDGER.has_mode(-1)
        self.threads -= 1
        self.resting.discard(threading.get_ident())
        on, self._mine.on = self._mine.on, False
        above = []
        while on and _on_stack():
            other = _pop_mode()
            if other is mode:
                break
            above.append(other)  # left in another order than entered
        for other in reversed(above):
            _push_mode(other)

    def on(self, within: bool = False) -> None:
        """Put it on this thread's stack, if it is not there.

        Arguments:
            within: an op that is running, whose own calls of other ops are not written down.
        """
        mine = self._mine
        if mine.mode is not None and not mine.on:
            mine.on = True
            mine.mode.within = _sequence_number() if within else -1
            _push_mode(mine.mode)
            self.resting.discard(threading.get_ident())

    def rest(self) -> None:
        """It stays off in this thread."""
        if self._mine.mode is not None and not self._mine.on:
            self.resting.add(threading.get_ident())

    @property
    def others_rest(self) -> bool:
        """Whether another thread may change things unseen."""
        return bool(self.resting) and not self.resting <= {threading.get_ident()}

    def begins(self, call: Call) -> None:
        """The engine is about to run."""
        mine, given = self._mine, self.store.mine
        mode = mine.mode if mine.on and not call.create_graph else None
        popped = mode is not None and self.store.meter is None and _get_current_dispatch_mode() is mode
        if popped:
            _pop_mode()
            mine.on = False
        elif mode is not None:  # not the innermost, or it counts what is allocated: it stays, and writes nothing down
            mode.off += 1
        self.calls[call.number] = _Outer(given.node, given.in_use, None if popped else mode, popped)
        given.node, given.in_use = -1, set()

    def ends(self, call: Call) -> bool | None:
        """It has run. Whether the mode had been taken off; None if nothing is known of the call."""
        outer = self.calls.pop(call.number, None)
        if outer is None:
            return None
        given = self.store.mine
        self.store.in_use -= given.in_use
        given.node, given.in_use = outer.node, outer.in_use
        if outer.looking_away is not None:
            outer.looking_away.off -= 1
        return outer.popped
