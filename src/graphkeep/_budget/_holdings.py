"""What the graph has saved: `Holdings` listens to the ledger.

A saved tensor whose storage the record knows becomes a `Source`: the storage is held once for all entries on it (`_store`), and
may be dropped. A node that asks for a dropped one has it brought back (`_again`).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from graphkeep._budget._again import Again, changed_since
from graphkeep._budget._meter import Meter
from graphkeep._budget._modes import Modes
from graphkeep._budget._outside import Outside
from graphkeep._budget._record import Mode, Record
from graphkeep._budget._rerun import aside
from graphkeep._budget._slack import Saved, Slack
from graphkeep._budget._source import Source
from graphkeep._budget._sparse import Schedule, Skeleton
from graphkeep._budget._steps import Steps
from graphkeep._budget._store import GONE, NO_TENSOR, UNWRITTEN, Store
from graphkeep._budget._trace import Trace
from graphkeep._budget._values import OPAQUE, Geometry, Kept, Storage, Value, geometry
from graphkeep._ledger import LEDGER, Call, Companion, Entry, changed_error
from graphkeep._storage import storages

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LITTLE = 0.25  # of what a step has saved, that may live on when it has ended
_SMALL = 1 << 20  # bytes of integers that are kept at most
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Holdings(Companion):
    """Listens to the ledger, and holds the storages of the graph.

    Arguments:
        steps: know the limit; or the limit in bytes, None for none.
        drop_all: drop whatever can be dropped at once, for tests.
        spill: what dropping is: ``"recompute"``, ``"host"``, or ``"both"``, whichever costs less.
        device: whose memory the limit is for, instead of what the graph holds.
    """

    def __init__(
        self,
        steps: Steps | int | None = None,
        drop_all: bool = False,
        spill: str = "recompute",
        device: torch.device | None = None,
    ) -> None:
        self.record = Record(self)
        self.steps = steps if isinstance(steps, Steps) else Steps(steps, None, plans=spill == "recompute")
        self.record.small = min(_SMALL, (self.steps.limit or 0) >> 8)
        self.store = Store(self.steps, self.record, spill, None if device is None else Meter(device))
        self.store.drop_all = drop_all
        self.again = Again(self.store)
        self.outside = Outside(self.record, self.store)
        self.modes = Modes(self._mode, self.store)
        self.slack = Slack()
        self.sparse: Schedule | None = None  # which ops are written down; None: all of them, or none while a step is expected
        self._orphans: list[Value] = []  # nobody has them any more, and others can only be had again from them
        self._waiting: list[weakref.ref[Value]] = []  # those with entries, once nobody counts
        self._lock = self.record.lock

    def _mode(self) -> Mode:
        return Mode(self.record, self.store.meter, self._make_room)

    def _make_room(self, need: int) -> None:
        """An op that runs now will allocate so many bytes."""
        with self._lock:
            if not self.store.room(need, ()):
                raise self.store.too_small(need)

    def enter(self) -> None:
        """This thread is inside."""
        self.modes.enter()

    def exit(self) -> None:
        """It is outside."""
        self.modes.exit()

    # the ledger's events --------------------------------------------------------------------------------------------------

    def saved(self, entry: Entry) -> None:
        tensor: Any = entry.tensor
        if tensor.is_leaf and tensor.requires_grad:
            return
        with self._lock:
            plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
            if plain and forward_ad._current_level < 0:  # otherwise it may have a tangent, which a storage has not
                self._saved(entry, tensor, tensor.untyped_storage(), geometry(tensor))
            else:
                for storage in storages(tensor):
                    self._saved(entry, tensor, storage, None)

    def _saved(self, entry: Entry, tensor: torch.Tensor, storage: Storage, where: Geometry | None) -> None:
        value = self.record.value_of(storage)
        if self.slack.expected:
            if self.record.resting:  # the graph of the step before has gone without a backward
                self.end_step()
                self.slack.mixed = True  # what has run since was not written down
            counted = self._expected(entry, tensor, storage)
            if counted is False:
                return
            if counted:
                value = value or self._unwritten(storage)
        if value is None:
            base = tensor if tensor._base is None else tensor._base
            if base.is_leaf or not tensor.requires_grad:
                self._note(entry, tensor, storage, False)
                return  # an input
            value = self._unwritten(storage) if self.slack.unwritten else self.record.adopt(storage)
        counts = not (value.apart or entry.source is not None or storage in self.outside)
        if self.sparse is not None and counts and value.number < 0:  # that of the plan
            value.number = self.sparse_value(value)
        self._note(entry, tensor, storage, counts, value)
        if not counts:
            return
        if where is None:  # a subclass, or sparse: counted, and never dropped
            value.pinned = NO_TENSOR
            where = _NOWHERE
        entry.source = Source(self, value, where)
        value.last = max(value.last, entry.node)
        if self.slack.unwritten and value.op is None and value.pinned == OPAQUE:
            value.pinned = UNWRITTEN
        if self.modes.others_rest:  # and may change what it would be made from
            value.pinned = value.pinned or UNWRITTEN
        first = not value.slots
        if self.steps.too_small:
            raise self.store.too_small(0)
        value.slots[entry.number] = weakref.ref(entry)
        if first:
            if self.store.first_broken < math.inf and not value.pinned and value.broken(self.store.first_broken):
                value.pinned = GONE
            self.store.values[id(value)] = value
            self.record.trace.note("save", value, entry.node)
            self.store.numbered[value.number] = value
            goes = (self.sparse is not None or not self.slack.expected) and self.steps.drops(value)
            if goes and not value.pinned:
                entry.source.part_with(entry)
                self.store.dropped_bytes += value.nbytes
                return
        else:
            self.record.trace.also(value, entry.node)
        if value.held is not None or value.kept is not None:
            return
        if not first and not value.pinned:
            entry.source.part_with(entry)  # it was dropped before
        if self.store.drop_all and not value.pinned:
            entry.source.part_with(entry)
            self.store.dropped_bytes += value.nbytes
        elif first or value.pinned:
            self.store.later(-1, 0)
            if self.store.room(value.nbytes, ()):
                self.store.hold(value, storage)
            elif self.store.stays(value):
                raise self.store.too_small(value.nbytes)
            else:
                entry.source.part_with(entry)
                self.store.spill(value, storage)
                self.store.dropped_bytes += value.nbytes

    def _expected(self, entry: Entry, tensor: torch.Tensor, storage: Storage) -> bool | None:
        """Whether what is saved counts, in a step that is not written down; None if from now on it is."""
        base = tensor if tensor._base is None else tensor._base
        own = tensor.requires_grad and not base.is_leaf and storage not in self.outside
        counts = self.slack.counts(len(self.steps.calls), storage.nbytes(), tensor.requires_grad, own, entry.node)
        if self.sparse is not None and counts is not None:
            switch = self.sparse.switches.get(len(self.steps.calls))
            if switch is not None:
                self.record.begun = self.record.begun or switch
                self.record.idle = not switch
        if counts is False:
            self._note(entry, tensor, storage, False)
        elif counts is None and self.sparse is not None:
            self.sparse = None
            self.record.begun = True
            self.record.idle = False
        elif counts is None:
            self.record.begun = True
            if not LEDGER.active:  # otherwise once the engine has ended
                self.modes.on(within=True)
        return counts

    def _note(self, entry: Entry, tensor: torch.Tensor, storage: Storage, counts: bool, value: Value | None = None) -> None:
        number = value.number if counts and value is not None else -1
        self.steps.calls.append(Saved(storage.nbytes(), counts, tensor.requires_grad, self.slack.number(entry.node), number))

    def sparse_value(self, value: Value) -> int:
        """The number that a value has in the plan."""
        place = len(self.steps.calls)
        return self.slack.expected[place].value if place < len(self.slack.expected) else -1

    def _unwritten(self, storage: Storage) -> Value:
        value = self.record.adopt(storage)
        value.pinned = UNWRITTEN
        return value

    def died(self, entry: Entry, call: Call | None) -> None:
        source = entry.source
        if source is not None and source.holdings is self:
            self._lock.call(functools.partial(self._died, source, entry.number, entry.node, call is None))

    def _died(self, source: Source, number: int, node: int, quietly: bool) -> None:
        value = source.value
        if value.slots.pop(number, None) is not None and not value.slots:
            self.store.values.pop(id(value), None)
            if self.store.numbered.get(value.number) is value:
                del self.store.numbered[value.number]
            self.store.in_use.discard(id(value))
            if value.op is None and value.held is not None and self._needed(value):
                self._orphans.append(value)
            else:
                self._part(value)
            if self._orphans:
                for orphan in [orphan for orphan in self._orphans if not self._needed(orphan)]:
                    self._orphans.remove(orphan)
                    self._part(orphan)
            if value.trace is self.record.trace:
                self.record.trace.note("die", value, node)
            if not self.store.values and quietly:
                self.record.resting, self.record.idle = True, False

    def _part(self, value: Value) -> None:
        """Let go of a value; what was made from it can then not be had again if the value cannot."""
        if value.op is None and value.kept is None:
            self.store.lose(value)
        self.store.let_go(value)

    def _needed(self, value: Value) -> bool:
        """Whether something that a backward may still ask for can only be had again from a value that cannot itself."""
        first = min([op.number for ref in value.readers if (op := ref()) is not None], default=None)
        if first is None:
            return False
        todo = [other.op for other in list(self.store.values.values()) if other.op is not None and other.op.number >= first]
        seen = {id(op) for op in todo}
        while todo:
            op = todo.pop()
            for read in op.reads:
                if read is value:
                    return True
                if read.op is not None and read.op.number >= first and id(read.op) not in seen:
                    seen.add(id(read.op))
                    todo.append(read.op)
        return False

    def failed(self, error: Exception) -> None:
        raise error

    def begins(self, call: Call) -> None:
        outermost = not self.modes.calls
        self.modes.begins(call)
        if outermost and self.store.values:
            with aside():
                self.store.call = -1 if self.record.guard() else call.number
        elif self.store.call >= 0:
            self.store.call = call.number

    def ends(self, call: Call, error: BaseException | None) -> None:
        with self._lock:
            popped = self.modes.ends(call)
        if popped is None:
            return
        outermost = not self.modes.calls
        if outermost:
            self.store.call = -1
            checked, self.store.checked = self.store.checked, []
            for value in checked if error is None else ():
                fault = changed_since(value)
                if fault is not None:  # raised when everybody has heard of the end
                    LEDGER.faults.append((self, fault))
                    break
        if outermost and self._over(call, error):
            self.end_step(ran=True)
            if popped and self.modes.threads == 1 and not self.store.values:
                self.slack.expected, self.sparse = self.steps.slack()
                if self.sparse is not None:
                    self.record.trace = Skeleton()
                    self.record.idle = not self.sparse.first
        if (self.sparse is not None or not self.slack.expected) and (popped or outermost):
            self.modes.on()
        else:
            self.modes.rest()

    def _over(self, call: Call, error: BaseException | None) -> bool:
        """Whether a step has ended with a call of the engine: no graph is left, or little, which lives on."""
        if not self.store.values:
            return True
        trace = self.record.trace
        if error is not None or call.retain_graph or not trace.saved_bytes:
            return False
        left = sum([value.nbytes for value in list(self.store.values.values()) if value.trace is trace])
        return left <= _LITTLE * trace.saved_bytes

    def used(self, entry: Entry) -> None:
        source = entry.source
        if source is not None and source.holdings is self:
            self._given(entry, source.value)
            if source.value.trace is self.record.trace:
                self.record.trace.note("use", source.value, entry.node)

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        self.used(entry)

    def applied(self, args: Any, outputs: Any) -> None:
        with self._lock:
            self.outside.applied(args, outputs)

    def _given(self, entry: Entry, value: Value) -> None:
        """A node that runs has been given a value: until the next one runs it is there, whoever drops it."""
        mine = self.store.mine
        with self._lock:
            if entry.node != mine.node:
                self.store.in_use -= mine.in_use
                mine.node, mine.in_use = entry.node, set()
            mine.in_use.add(id(value))
            self.store.in_use.add(id(value))

    # steps ----------------------------------------------------------------------------------------------------------------

    def end_step(self, ran: bool = False) -> None:
        """A step has ended, with a backward or without."""
        with self._lock:
            without = self.steps.limit is None
            self.record.trace.first = self.slack.first
            as_expected = self.slack.end(len(self.steps.calls))
            if self.sparse is not None:  # if something lives on that was dropped, every change has to be seen
                self.sparse, self.slack.expected = None, ()
            if as_expected is None:
                self.steps.end(self.record.trace, self.store.peak, self.store.live, ran)
            else:
                self.steps.end_slack(as_expected)
            if without and self.steps.limit is not None:
                self.store.new_peak()  # under the limit, which is a share of what it was without
            for orphan in [orphan for orphan in self._orphans if not self._needed(orphan)]:
                self._orphans.remove(orphan)
                self.store.let_go(orphan)
            if not self.store.values:
                self.store.first_broken = math.inf
            self.store.rest()
            self.record.forget()
            self.record.small = min(_SMALL, (self.steps.limit or 0) >> 8)

    # holding --------------------------------------------------------------------------------------------------------------

    def follow(self, old: Value, new: Value, storage: Storage) -> None:
        """What a graph has saved was changed, and torch does not count that (running statistics): the graph has the new."""
        with self._lock:
            self.store.let_go(old)
            new.slots, old.slots, new.last = old.slots, {}, old.last
            self.store.values.pop(id(old), None)
            self.store.values[id(new)] = new
            for ref in new.slots.values():
                entry: Any = ref()
                if entry is not None:
                    entry.source.value = new
            self.record.trace.note("save", new, new.last)
            if self.store.room(new.nbytes, ()):
                self.store.hold(new, storage)
            elif new.pinned:
                raise self.store.too_small(new.nbytes)

    def changing(self, value: Value) -> None:
        """An op is about to change in place what ops that may run again have read: they will read a copy."""
        with self._lock:
            storage = value.now()
            if storage is None:
                return
            if not self.store.room(value.nbytes, ()):
                value.kept = None  # who needs it will be refused; torch may refuse that backward before
                self._part(value)
                return
            with aside():
                copy = storage.clone()
            trace = self.record.trace
            trace.note("keep", value, _sequence_number())
            value.kept = Kept(copy, functools.partial(self._copied, weakref.ref(trace), value.number))
            value.apart, value.witness = False, _gone

    def alone(self, value: Value) -> None:
        """The program has let go of an input that ops have read which may run again: now it is held for them."""
        self._lock.call(functools.partial(self._alone, value))

    def _alone(self, value: Value) -> None:
        trace = self.record.trace
        if self.store.active and value.kept is not None and value.kept.count is None and value.trace is trace:
            if not self._needed(value):  # by what is saved: what comes later and needs it will not be dropped
                value.kept, value.current = None, False
                self.store.lose(value)
                return
            self.store.alone.append(weakref.ref(value))
            self.store.room(value.nbytes, ())
            if value.kept is not None:
                trace.note("keep", value, _sequence_number())
                count = functools.partial(self._copied, weakref.ref(trace), value.number)
                value.kept = Kept(value.kept.storage, count)

    def _copied(self, trace: Callable[[], Trace | None], number: int, more: int) -> None:
        """A copy has come, or gone."""
        self.store.count(more)
        if more < 0 and trace() is self.record.trace:
            self.record.trace.note_number("free", number, self.store.mine.node)

    # again ------------------------------------------------------------------------------------------------------------------

    def bring(self, entry: Entry) -> torch.Tensor:
        with self._lock:
            source: Source = entry.source
            value = source.value
            if source.counter is not None and source.counter._version != source.version:
                raise self._changed(entry, source, source.counter._version)
            if source.latest is not None:
                value = self._later_version(entry, source, source.latest)
            self._given(entry, value)
            storage = self.again.storage(value)
            with aside():
                return source.geometry.on(storage)

    def changed(self, old: Value, new: Value) -> None:
        """What was saved has been changed in place: where the tensor does not count that, it has what is there in the end."""
        with self._lock:
            for ref in [*old.slots.values(), *old.late]:
                entry: Any = ref()
                if entry is not None and entry.source is not None:
                    entry.source.latest = new
                    new.late.append(ref)

    def _later_version(self, entry: Entry, source: Source, latest: Value) -> Value:
        old = source.value
        ref = old.slots.pop(entry.number, None)
        if not old.slots:
            self.store.values.pop(id(old), None)
            self.store.let_go(old)
        if ref is not None:
            latest.slots[entry.number] = ref
            latest.last = max(latest.last, entry.node)
            self.store.values[id(latest)] = latest
        source.value, source.latest = latest, None
        return latest

    def _changed(self, entry: Entry, source: Source, version: int) -> RuntimeError:
        """Make torch's error for a saved tensor that was changed in place."""
        entry.version = source.version
        storage = source.value.alive()
        with aside():
            like = source.geometry.on(torch.UntypedStorage(source.value.nbytes) if storage is None else storage)
        return changed_error(entry, like, version)

    def left(self) -> None:
        """Nobody counts any more. What entries that are still alive stand on is theirs alone."""
        with self._lock:
            self._waiting = [weakref.ref(value) for value in self.store.values.values()]
            self._keep_inputs()
            self.store.active = self.store.drop_all = False
            self.store.clear()
            self.outside.clear()
            self.modes.make = None
            self._orphans.clear()
            self.record.close()

    def _keep_inputs(self) -> None:
        """Copies of the inputs that dropped values will be had from: from now on nobody sees them change."""
        todo = [value.op for value in self.store.values.values() if value.now() is None]
        seen = {id(op) for op in todo}
        while todo:
            op = todo.pop()
            for read in op.reads if op is not None else ():
                if read.checksum is not None and read.kept is not None and read.current:
                    with aside():
                        read.kept = Kept(read.kept.storage.clone(), None)
                    read.current, read.witness = False, _gone
                elif read.op is not None and id(read.op) not in seen:
                    seen.add(id(read.op))
                    todo.append(read.op)

    def bring_all(self) -> None:
        """All that was dropped and that somebody may still ask for, whatever it takes."""
        with self._lock:
            for ref in self._waiting:
                value = ref()
                if value is not None and value.current:
                    self.store.hold(value, self.again.storage(value))


def _gone() -> None:
    return None


_NOWHERE = Geometry(torch.float32, torch.device("cpu"), (0,), (1,), 0, False, False)
