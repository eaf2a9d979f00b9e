"""The storages of the graph: what is held of them within the limit, and what is dropped to make room.

What is over the limit is dropped by what it costs to have it again, over its bytes and the time until a backward comes to it,
as Kirisame et al. 2021 do (Dynamic Tensor Rematerialization, https://arxiv.org/abs/2006.09616); where a plan is followed, as
it says. The costs of all candidates are not asked for at every drop, but when the cheapest of them have gone.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Container

import torch

from graphkeep._budget._host import Host
from graphkeep._budget._meter import Meter
from graphkeep._budget._record import Record
from graphkeep._budget._rerun import aside
from graphkeep._budget._steps import Steps
from graphkeep._budget._values import Storage, Value
from graphkeep._errors import BudgetError, caller
from graphkeep._units import format_bytes

_DEEPEST = 64  # ops that are looked at to tell what having a value again costs
_PARTS = 16  # the cheapest 16th of what can be dropped goes before all are looked at again
_DEARER = 1.5  # times what it was thought to cost, a victim stays for now
NO_TENSOR = "it is no plain tensor"
GONE = "what it was made from is gone"
UNWRITTEN = "its step was not written down; it may go to the host"
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Mine(threading.local):
    node = -1  # that runs now

    def __init__(self) -> None:
        self.in_use: set[int] = set()  # ids of the values that it has been given


class Store:
    """Holds storages within a limit.

    Arguments:
        steps: know the limit, and the plan.
        record: of ops, with the trace of the step.
        spill: what dropping is: ``"recompute"``, ``"host"``, or ``"both"``, whichever costs less.
        meter: counts what is on the device instead, if that is what the limit is for.

    Attributes:
        values: those that entries stand on, by id.
        numbered: the same, those of this trace by their numbers.
        drop_all: keep nothing that can be dropped; for tests.
        active: whether anybody counts.
    """

    def __init__(self, steps: Steps, record: Record, spill: str, meter: Meter | None) -> None:
        self.steps = steps
        self.record = record
        self.host: Host | None = None if spill == "recompute" else Host()
        self._spare = self.host or Host()
        self.recompute = spill != "host"
        self.meter = meter
        self.drop_all = False
        self.active = True
        self.dropped_bytes = 0
        self.values: dict[int, Value] = {}
        self.numbered: dict[int, Value] = {}
        self.mine = _Mine()
        self.in_use: set[int] = set()  # ids of the values that nodes which run now, in any thread, have been given
        self.call = -1  # of the engine, in which inputs are not changed by hooks
        self.checked: list[Value] = []  # inputs whose content was looked at in it
        self.alone: list[weakref.ref[Value]] = []  # inputs that the program has let go of
        self.first_broken = math.inf  # the number of the first op that cannot run again
        self._victims: list[tuple[float, Value]] = []  # the first to go are the last
        self._live = self._peak = 0

    @property
    def live(self) -> int:
        return self._live if self.meter is None else self.meter.live

    @property
    def peak(self) -> int:
        return self._peak if self.meter is None else self.meter.peak

    def new_peak(self) -> None:
        """Count the most anew."""
        self._peak = self._live
        if self.meter is not None:
            self.meter.peak = self.meter.live

    def clear(self) -> None:
        """Hold nothing, and know of nothing."""
        for known in (self.values, self.numbered, self.in_use, self._victims):
            known.clear()
        self._live = 0

    def rest(self) -> None:
        """A step has ended."""
        self._victims.clear()
        self.numbered.clear()
        self.alone.clear()

    # holding --------------------------------------------------------------------------------------------------------------

    def count(self, more: int) -> None:
        """So many bytes more are held, or less."""
        if self.active:
            self._live += more
            self._peak = max(self._peak, self._live)

    def hold(self, value: Value, storage: Storage) -> None:
        """The graph holds a storage."""
        if value.held is None and value.kept is None:
            value.held = storage
            self.count(value.nbytes)

    def let_go(self, value: Value) -> None:
        """It holds it no more."""
        if value.held is not None:
            value.held = None
            self.count(-value.nbytes)

    def drop(self, value: Value) -> None:
        """Let go of what can be had again."""
        for ref in value.slots.values():
            entry = ref()
            if entry is not None and entry.tombstone is None and entry.tensor is not None:
                entry.source.part_with(entry)
                entry.tensor = None
        self.spill(value, value.held)
        self.let_go(value)
        self.dropped_bytes += value.nbytes

    def spill(self, value: Value, storage: Storage | None) -> None:
        """Put on the host what is about to be dropped, if that is where it is to come from."""
        host = self._spare if value.pinned == UNWRITTEN else self.host
        if host is None or value.spilled is not None or storage is None:
            return
        if not value.current and storage is value.alive():
            return  # it was changed in place since
        copied = host.seconds(value.nbytes, storage.device)
        again = self.recompute and value.op is not None and not value.pinned and not value.awaited
        if not again or self._cost(value) > copied or not self._relies(value):
            with aside():
                value.spilled = host.put(storage), storage.device

    def unspill(self, value: Value) -> Storage:
        """A copy of what is on the host."""
        with aside():
            return self._spare.get(*value.spilled)

    def fits(self, need: int) -> bool:
        """Whether so many bytes more are within the limit."""
        return self.steps.limit is None or self.live + need <= self.steps.limit or not self.active

    def room(self, need: int, spare: Container[int]) -> bool:
        """Drop until so many bytes fit; whether they do."""
        while not self.fits(need):
            if not self._victims:
                self._victims = self._cheapest(spare)
                if not self._victims:
                    if self._give_up_inputs(need):
                        continue
                    return False
            score, value = self._victims.pop()
            if self.may_go(value, spare) and (self.score(value) <= _DEARER * score or not self._victims):
                self.drop(value)
        return True

    def lose(self, value: Value) -> None:
        """A value that cannot be made again has gone."""
        self.first_broken = min(self.first_broken, value.break_readers())

    def _give_up_inputs(self, need: int) -> bool:
        """Let go of inputs that only ops still need of which nothing was dropped; that can then not be. Whether any went."""
        todo = [value.op for value in list(self.values.values()) if value.held is None and value.kept is None]
        needed: set[int] = set()
        seen = {id(op) for op in todo}
        while todo:
            op = todo.pop()
            for read in op.reads if op is not None else ():
                needed.add(id(read))
                if read.op is not None and id(read.op) not in seen:  # what is there now may be gone when it is wanted
                    seen.add(id(read.op))
                    todo.append(read.op)
        went = False
        for ref in list(self.alone):
            value = ref()
            if value is None or value.kept is None:
                self.alone.remove(ref)
            elif id(value) not in needed and not self.fits(need):
                self.alone.remove(ref)
                value.kept, value.current = None, False  # others may come to stand on its memory
                self.lose(value)
                for other in list(self.values.values()):
                    if not other.pinned and other.broken(self.first_broken):
                        other.pinned = GONE
                went = True
        return went

    def worth(self, value: Value, spare: Container[int]) -> bool:
        """Whether what was run again is kept: it fits, or more than others it deserves to; these are dropped."""
        if self.fits(value.nbytes):
            return True
        if self.steps.following is not None:
            return False  # it says what is dropped for it
        over = self.live + value.nbytes - (self.steps.limit or 0)
        below = self.score(value)
        if not self._victims:
            self._victims = self._cheapest(spare)
        cheaper: list[Value] = []
        for _, other in reversed(self._victims):
            if over <= 0 or self.score(other) >= below:
                break
            if self.may_go(other, spare):
                cheaper.append(other)
                over -= other.nbytes
        if over > 0:
            return False
        for other in cheaper:
            self.drop(other)
        return self.fits(value.nbytes)

    def _cheapest(self, spare: Container[int]) -> list[tuple[float, Value]]:
        """Of what can be dropped, the first to go; the very first last."""
        scored = [(self.score(value), value) for value in list(self.values.values()) if self.may_go(value, spare)]
        scored.sort(key=_first)
        return scored[: max(len(scored) // _PARTS, 1)][::-1]

    def later(self, back: int, k: int) -> None:
        """Drop what the plan says for this moment."""
        plan = self.steps.following
        if plan is not None:
            for number in plan.later.get((len(self.record.trace.events) + back, k), ()):
                value = self.numbered.get(number)
                if value is not None and self.may_go(value, ()):
                    self.drop(value)

    def may_go(self, value: Value, spare: Container[int]) -> bool:
        """Whether it can be dropped now."""
        return value.held is not None and not self.stays(value) and id(value) not in spare and id(value) not in self.in_use

    def stays(self, value: Value) -> bool:
        """Whether it must not be dropped."""
        if not value.pinned or (value.pinned == UNWRITTEN and not value.outside):
            return False
        return self.host is None or value.outside or value.pinned == NO_TENSOR

    def score(self, value: Value) -> float:
        """What dropping it costs for each byte and for each node until a backward comes to it."""
        now = self.mine.node if self.mine.node >= 0 else _sequence_number()
        return self._cost(value) / ((value.nbytes or 1) * (abs(now - value.last) + 1))

    def _cost(self, value: Value) -> float:
        """Seconds to have it again, with all that is not there either."""
        if value.op is None or not self.recompute:
            return float(value.nbytes)  # all are copied, by their bytes
        assert value.op is not None
        total, seen, todo = 0.0, {id(value.op)}, [value.op]
        while todo and len(seen) < _DEEPEST:
            op = todo.pop()
            total += op.seconds
            for read in op.reads:
                there = read.held is not None or read.kept is not None or read.spilled is not None
                if not there and read.op is not None and id(read.op) not in seen:
                    seen.add(id(read.op))
                    todo.append(read.op)
        return total

    def _relies(self, value: Value) -> bool:
        """Whether having it again takes little room, whatever else is dropped; what it is made from then counts on a copy."""
        assert value.op is not None
        most = (self.steps.limit or 0) >> 2
        total, there, seen, todo = 0, [], {id(value.op)}, [value.op]
        while todo and total <= most:
            op = todo.pop()
            total += op.nbytes
            for read in op.reads:
                if read.held is not None or read.spilled is not None:
                    there.append(read)
                    total += read.nbytes
                elif read.kept is None and read.op is not None and id(read.op) not in seen:
                    seen.add(id(read.op))
                    todo.append(read.op)
        if todo or total > most:
            return False
        for read in there:
            read.awaited = True
        return True

    def asked_for(self, value: Value) -> bool:
        """Whether an entry stands on it."""
        return bool(value.slots) and (self.active or any(ref() is not None for ref in value.slots.values()))

    # too small --------------------------------------------------------------------------------------------------------------

    def too_small(self, need: int) -> BudgetError:
        """The error where so many bytes more do not fit."""
        limit = self.steps.limit or 0
        least = max(self.live + need, limit + 1)
        if self.host is None and self.meter is None:
            # what is missing now may be more than the whole step needs with less dropped
            planned = max(self.steps.smallest(self.record.trace), self.steps.too_small)
            least = planned if planned > limit else least
        what = "the graph cannot be held in" if self.meter is None else "what the step allocates does not fit in"
        call = f"gk.budget({least})" if self.meter is None else f"gk.budget(device_memory={least})"
        error = BudgetError(
            f"{what} {format_bytes(limit)} ({limit:,} bytes)",
            where=caller(),
            instead=f"{call}, at least ({format_bytes(least)}), for what has run up to here",
        )
        error.smallest = least
        return error


def _first(item: tuple[float, Value]) -> float:
    return item[0]
