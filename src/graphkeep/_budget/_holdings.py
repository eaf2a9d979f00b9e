"""What the graph holds of what it has saved, what of it is dropped, and how it is had again.

`Holdings` listens to the ledger. A saved tensor whose storage the record knows becomes a `Source`: the storage is held once for
all entries on it, and may be dropped. Where a plan is followed it says what is dropped at once; whatever else is over the limit
is dropped by what it costs to have it again, over its bytes and the time until a backward comes to it, as Kirisame et al. 2021
do (Dynamic Tensor Rematerialization, https://arxiv.org/abs/2006.09616).

Bringing back: the recorded ops that are missing run in the order in which they ran, each after room was made for its results.
If that does not fit, everything else is dropped and they run once more with nothing kept: that is the least that can be had.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from graphkeep._budget._record import Mode, Record, tensors_in
from graphkeep._budget._rerun import Rerun, aside
from graphkeep._budget._steps import Steps
from graphkeep._budget._values import Geometry, Kept, Op, Storage, Value, geometry
from graphkeep._errors import BudgetError, ChangedGraphError, caller
from graphkeep._ledger import LEDGER, Call, Companion, Entry, changed_error
from graphkeep._storage import storages
from graphkeep._units import format_bytes

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DEEPEST = 64  # ops that are looked at to tell what having a value again costs
_FEW = 16  # victims; of more, only the first half is dropped before all are looked at again
_SMALL = 1 << 20  # bytes of integers that are kept at most
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Mine(threading.local):
    mode: Mode | None = None
    node = -1  # that runs now

    def __init__(self) -> None:
        self.in_use: set[int] = set()  # ids of the values that it has been given


class Source:
    """Where an entry's tensor comes from."""

    __slots__ = ("geometry", "holdings", "value")

    def __init__(self, holdings: Holdings, value: Value, geometry: Geometry) -> None:
        self.holdings = holdings
        self.value = value
        self.geometry = geometry

    @property
    def held(self) -> bool:
        """Whether the graph holds the storage."""
        return self.value.held is not None or self.value.kept is not None

    def bring(self, entry: Entry) -> torch.Tensor:
        """The tensor again."""
        return self.holdings.bring(entry)


def saved_by_function(outputs: Any) -> tuple[torch.Tensor, ...]:
    """What the custom function that gave some outputs holds in ``ctx.saved_tensors``."""
    for output in tensors_in(outputs):
        node: Any = output.grad_fn
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            saved: tuple[Any, ...] = node.saved_tensors
            return tuple([tensor for tensor in saved if tensor is not None])
    return ()


class Holdings(Companion):
    """Listens to the ledger, and holds the storages of the graph.

    Arguments:
        limit: bytes; None for none yet.
        share: of what the first step needed, to become the limit.
        drop_all: drop whatever can be dropped at once, for tests.
    """

    def __init__(self, limit: int | None = None, share: float | None = None, drop_all: bool = False) -> None:
        self.record = Record(self.changing, self.follow, self.end_step)
        self.record.small = min(_SMALL, (limit or 0) >> 8)
        self.steps = Steps(limit, share)
        self.drop_all = drop_all
        self.active = True
        self.live = self.peak = 0
        self.recomputed_ops = self.recomputed_flops = self.dropped_bytes = 0
        self.recomputed_seconds = 0.0
        self.values: dict[int, Value] = {}  # those with entries, by id
        self._numbered: dict[int, Value] = {}  # those of this trace, by number
        self._outside: dict[int, Any] = {}  # storages that custom functions have saved
        self._victims: list[tuple[float, Value]] = []  # the first to go are the last
        self._orphans: list[Value] = []  # nobody has them any more, and others can only be had again from them
        self._waiting: list[weakref.ref[Value]] = []  # those with entries, once nobody counts
        self._in_use: set[int] = set()  # ids of the values that nodes which run now have been given
        self._calls: dict[int, tuple[tuple[int, set[int]], Mode | None, bool | None]] = {}
        self._lock = threading.RLock()
        self._mine = _Mine()

    @property
    def limit(self) -> int | None:
        return self.steps.limit

    # the ledger's events --------------------------------------------------------------------------------------------------

    def saved(self, entry: Entry) -> None:
        tensor: Any = entry.tensor
        if tensor.is_leaf and tensor.requires_grad:
            return
        with self._lock:
            if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
                self._saved(entry, tensor, tensor.untyped_storage(), geometry(tensor))
            else:
                for storage in storages(tensor):
                    self._saved(entry, tensor, storage, None)

    def _saved(self, entry: Entry, tensor: torch.Tensor, storage: Storage, where: Geometry | None) -> None:
        value = self.record.value_of(storage)
        if value is None:
            base = tensor if tensor._base is None else tensor._base
            if base.is_leaf or not tensor.requires_grad:
                return  # an input
            value = self.record.adopt(storage)
        if value.apart or entry.source is not None or storage._cdata in self._outside:
            return
        if where is None:  # a subclass, or sparse: counted, and never dropped
            value.pinned = value.pinned or "it is no plain tensor"
            where = _NOWHERE
        entry.source = Source(self, value, where)
        value.last = max(value.last, entry.node)
        first = not value.slots
        if self.steps.too_small:
            raise self._too_small(0)
        value.slots[entry.number] = weakref.ref(entry)
        if first:
            self.values[id(value)] = value
            self.record.trace.note("save", value, entry.node)
            self._numbered[value.number] = value
            if self.steps.drops(value) and not value.pinned:
                self.dropped_bytes += value.nbytes
                return
        else:
            self.record.trace.also(value, entry.node)
        if value.held is not None or value.kept is not None:
            return
        if self.drop_all and not value.pinned:
            self.dropped_bytes += value.nbytes
        elif first or value.pinned:
            self._later(-1, 0)
            if self._room(value.nbytes, ()):
                self._hold(value, storage)
            elif value.pinned:
                raise self._too_small(value.nbytes)
            else:
                self.dropped_bytes += value.nbytes

    def died(self, entry: Entry, call: Call | None) -> None:
        source = entry.source
        if source is None or source.holdings is not self:
            return
        with self._lock:
            value = source.value
            if value.slots.pop(entry.number, None) is None or value.slots:
                return
            self.values.pop(id(value), None)
            if self._numbered.get(value.number) is value:
                del self._numbered[value.number]
            self._in_use.discard(id(value))
            if value.op is None and value.held is not None and self._needed(value):
                self._orphans.append(value)
            else:
                self._let_go(value)
            if self._orphans:
                for orphan in [orphan for orphan in self._orphans if not self._needed(orphan)]:
                    self._orphans.remove(orphan)
                    self._let_go(orphan)
            if value.trace is self.record.trace:
                self.record.trace.note("die", value, entry.node)
            if not self.values and call is None:
                self.record.resting = True

    def _needed(self, value: Value) -> bool:
        """Whether something that a backward may still ask for can only be had again from a value that cannot itself."""
        first = min([op.number for ref in value.readers if (op := ref()) is not None], default=None)
        if first is None:
            return False
        todo = [other.op for other in self.values.values() if other.op is not None and other.op.number >= first]
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
        mine = self._mine
        outer = mine.node, mine.in_use
        mine.node, mine.in_use = -1, set()
        mode: Mode | None = mine.mode
        popped: bool | None = None
        # with a dispatch mode active some backward formulas of torch are others (`isTensorSubclassLike`), and slower
        if mode is not None and not call.create_graph:
            popped = _get_current_dispatch_mode() is mode
            if popped:
                _pop_mode()
            else:  # not the innermost: it stays, and looks away
                mode.off += 1
        self._calls[call.number] = outer, mode, popped

    def ends(self, call: Call, error: BaseException | None) -> None:
        if call.number not in self._calls:
            return
        mine = self._mine
        with self._lock:
            self._in_use -= mine.in_use
        (mine.node, mine.in_use), mode, popped = self._calls.pop(call.number)
        if mode is not None and mode is mine.mode:  # nobody has left meanwhile
            if popped:
                _push_mode(mode)
            elif popped is False:
                mode.off -= 1
        if not self.values:
            self.end_step()

    def used(self, entry: Entry) -> None:
        source = entry.source
        if source is not None and source.holdings is self:
            self._given(entry, source.value)
            if source.value.trace is self.record.trace:
                self.record.trace.note("use", source.value, entry.node)

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        self.used(entry)

    def applied(self, args: Any, outputs: Any) -> None:
        """Count what a custom function has saved for as long as that is alive: the function holds it, and it is not dropped."""
        saved = saved_by_function(outputs)
        if not saved:
            return
        given = {s._cdata for t in tensors_in(args) for s in storages(t)}
        with self._lock:
            self.record.begun = True
            for tensor in saved:
                base = tensor if tensor._base is None else tensor._base
                for storage in storages(tensor):
                    value = self.record.value_of(storage)
                    if value is None and not (storage._cdata in given or (base.is_leaf and base.requires_grad)):
                        value = self.record.adopt(storage)
                    if value is not None and not value.apart:
                        self._foreign(value, storage)

    def _foreign(self, value: Value, storage: Storage) -> None:
        value.pinned, value.outside = "a custom autograd function has saved it", True
        if value.held is None and value.kept is None and storage._cdata not in self._outside:
            if not self._room(value.nbytes, ()):
                raise self._too_small(value.nbytes)
            key = storage._cdata
            self._outside[key] = weakref.ref(storage, functools.partial(self._outside_gone, key, value))
            self._count(value.nbytes)
            self.record.trace.note("keep", value, _sequence_number())

    def _outside_gone(self, key: int, value: Value, _ref: Any) -> None:
        if self._outside.pop(key, None) is not None:
            self._count(-value.nbytes)
            if value.trace is self.record.trace:
                self.record.trace.note("free", value, self._mine.node)

    def _given(self, entry: Entry, value: Value) -> None:
        """A node that runs has been given a value: until the next one runs it is there, whoever drops it."""
        mine = self._mine
        with self._lock:
            if entry.node != mine.node:
                self._in_use -= mine.in_use
                mine.node, mine.in_use = entry.node, set()
            mine.in_use.add(id(value))
            self._in_use.add(id(value))

    # this thread ----------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Write down what this thread runs."""
        mode = self._mine.mode = Mode(self.record)
        _push_mode(mode)
        LEDGER.has_mode(1)

    def exit(self) -> None:
        mine, self._mine.mode = self._mine.mode, None
        LEDGER.has_mode(-1)
        above = []
        while mine is not None and _modes():
            mode = _pop_mode()
            if mode is mine:
                break
            above.append(mode)  # left in another order than entered
        for mode in reversed(above):
            _push_mode(mode)

    # steps ----------------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """No graph is alive."""
        without = self.limit is None
        self.steps.end(self.record.trace, self.peak)
        if without and self.limit is not None:
            self.peak = self.live  # under the limit, which is a share of what it was without
        for orphan in self._orphans:
            self._let_go(orphan)
        self._orphans.clear()
        self._victims.clear()
        self._numbered.clear()
        self.record.forget()
        self.record.small = min(_SMALL, (self.limit or 0) >> 8)

    # holding --------------------------------------------------------------------------------------------------------------

    def follow(self, old: Value, new: Value, storage: Storage) -> None:
        """What a graph has saved was changed, and torch does not count that (running statistics): the graph has the new."""
        with self._lock:
            self._let_go(old)
            new.slots, old.slots, new.last = old.slots, {}, old.last
            self.values.pop(id(old), None)
            self.values[id(new)] = new
            for ref in new.slots.values():
                entry: Any = ref()
                if entry is not None:
                    entry.source.value = new
            self.record.trace.note("save", new, new.last)
            if self._room(new.nbytes, ()):
                self._hold(new, storage)
            elif new.pinned:
                raise self._too_small(new.nbytes)

    def _count(self, more: int) -> None:
        if self.active:
            self.live += more
            self.peak = max(self.peak, self.live)

    def _hold(self, value: Value, storage: Storage) -> None:
        if value.held is None and value.kept is None:
            value.held = storage
            self._count(value.nbytes)

    def _let_go(self, value: Value) -> None:
        if value.held is not None:
            value.held = None
            self._count(-value.nbytes)

    def _drop(self, value: Value) -> None:
        for ref in value.slots.values():
            entry = ref()
            if entry is not None and entry.tombstone is None:
                entry.tensor = None
        self._let_go(value)
        self.dropped_bytes += value.nbytes

    def _fits(self, need: int) -> bool:
        return self.limit is None or self.live + need <= self.limit or not self.active

    def _room(self, need: int, spare: Container[int]) -> bool:
        """Drop until so many bytes fit; whether they do."""
        rebuilt = False
        while not self._fits(need):
            while self._victims:
                score, value = self._victims.pop()
                if self._may_go(value, spare) and self._score(value) <= 1.5 * score:
                    self._drop(value)
                    break
            else:
                if rebuilt:
                    return False
                rebuilt = True
                victims = [(self._score(value), value) for value in self.values.values() if self._may_go(value, spare)]
                victims.sort(key=_first, reverse=True)
                self._victims = victims[len(victims) // 2 :] if len(victims) > _FEW else victims
                if not victims:
                    return False
                continue
            rebuilt = False
        return True

    def _later(self, back: int, k: int) -> None:
        """Drop what the plan says for this moment."""
        if self.steps.plan is not None:
            for number in self.steps.plan.later.get((len(self.record.trace.events) + back, k), ()):
                value = self._numbered.get(number)
                if value is not None and value.held is not None and id(value) not in self._in_use:
                    self._drop(value)

    def _may_go(self, value: Value, spare: Container[int]) -> bool:
        return value.held is not None and not value.pinned and id(value) not in spare and id(value) not in self._in_use

    def _score(self, value: Value) -> float:
        now = self._mine.node if self._mine.node >= 0 else _sequence_number()
        return self._cost(value) / ((value.nbytes or 1) * (abs(now - value.last) + 1))

    def _cost(self, value: Value) -> float:
        """Seconds to have it again, with all that is not there either."""
        assert value.op is not None
        total, seen, todo = 0.0, {id(value.op)}, [value.op]
        while todo and len(seen) < _DEEPEST:
            op = todo.pop()
            total += op.seconds
            for read in op.reads:
                if read.held is None and read.kept is None and read.op is not None and id(read.op) not in seen:
                    seen.add(id(read.op))
                    todo.append(read.op)
        return total

    def changing(self, value: Value) -> None:
        """An op is about to change in place what ops that may run again have read: they will read a copy."""
        with self._lock:
            if not self._room(value.nbytes, ()):
                raise self._too_small(value.nbytes)
            storage = value.now()
            if storage is None:
                return
            with aside():
                copy = storage.clone()
            value.kept = Kept(copy, self._count)
            value.apart, value.witness = False, _gone

    # again ------------------------------------------------------------------------------------------------------------------

    def bring(self, entry: Entry) -> torch.Tensor:
        with self._lock:
            source: Source = entry.source
            value = source.value
            if not value.current:
                raise self._changed(entry, source)
            self._given(entry, value)
            storage = self._storage_of(value)
            with aside():
                return source.geometry.on(storage)

    def _changed(self, entry: Entry, source: Source) -> RuntimeError:
        witness = source.value.witness()
        if witness is not None:
            return changed_error(entry, witness, witness._version)
        with aside():
            like = source.geometry.on(torch.UntypedStorage(source.value.nbytes, device=source.geometry.device))
        return changed_error(entry, like, entry.version + 1)

    def left(self) -> None:
        """Nobody counts any more. What entries that are still alive stand on is theirs alone."""
        with self._lock:
            self.active = self.drop_all = False
            waiting = list(self.values.values())
            for kept in (self.values, self._numbered, self._outside, self._orphans, self._in_use, self._victims):
                kept.clear()
            self.record.forget()
            self.live = 0
            self._waiting = [weakref.ref(value) for value in waiting]

    def bring_all(self) -> None:
        """All that was dropped and that somebody may still ask for, whatever it takes."""
        with self._lock:
            for ref in self._waiting:
                value = ref()
                if value is not None and value.current:
                    self._hold(value, self._storage_of(value))

    def _storage_of(self, value: Value) -> Storage:
        if value.held is None and value.kept is None:
            storage = value.now()
            if storage is not None and self._room(value.nbytes, (id(value),)):
                self._hold(value, storage)
            elif not self._again(value, strict=False):
                for other in list(self.values.values()):
                    if self._may_go(other, ()):
                        self._drop(other)
                if not self._again(value, strict=True):
                    raise self._too_small(0)
        found = value.now()
        assert found is not None
        return found

    def _missing(self, wanted: Value) -> tuple[list[Op], dict[int, int], dict[int, Storage]]:
        """The ops to run, in order; how many of them read each value; the storages that are there, by value."""
        ops: dict[int, Op] = {}
        readers: dict[int, int] = {}
        there: dict[int, Storage] = {}
        todo = [wanted.op]
        while todo:
            op = todo.pop()
            if op is None or id(op) in ops:
                continue
            ops[id(op)] = op
            for read in op.reads:
                known = id(read) in readers
                readers[id(read)] = readers.get(id(read), 0) + 1
                if known:
                    continue
                storage = read.now()
                if storage is not None:
                    self._unchanged(read)
                    there[id(read)] = storage
                elif read.op is None:
                    raise ChangedGraphError(
                        "a tensor that an op read is gone, and a dropped tensor needs it",
                        where=caller(),
                        instead="keep it as it is until the backward has run",
                    )
                else:
                    todo.append(read.op)
        readers[id(wanted)] = readers.get(id(wanted), 0) + 1
        return sorted(ops.values(), key=_number), readers, there

    def _unchanged(self, value: Value) -> None:
        """Refuse what was changed while nobody looked: inside a backward, or in another thread."""
        changed = False
        if value.op is None:
            witness = value.witness()
            changed = witness is not None and witness._version != value.version
        elif value.held is not None:
            for ref in value.slots.values():
                entry: Any = ref()
                if entry is not None and entry.tensor is not None:
                    changed = entry.tensor._version != entry.version
                    break
        if changed:
            raise ChangedGraphError(
                "a tensor was changed in place inside a backward, and what was dropped depends on what it held before",
                where=caller(),
                instead="change it after the backward, or give the budget more bytes",
            )

    def _again(self, wanted: Value, strict: bool) -> bool:
        """Run what it takes; False where there is no room for it."""
        ops, readers, there = self._missing(wanted)
        own: dict[int, Value] = {}  # what is there for this call only
        try:
            with aside():
                for k, op in enumerate(ops):
                    self._later(0, k)
                    if not self._room(op.nbytes, readers):
                        return False
                    again = Rerun(
                        op, lambda value: there[id(value)], lambda value: id(value) in own and readers[id(value)] == 1
                    )
                    self.recomputed_ops += 1
                    self.recomputed_seconds += op.seconds
                    self.recomputed_flops += again.flops
                    self._count(op.nbytes)
                    self._count(-op.nbytes)
                    for read in op.reads:
                        readers[id(read)] -= 1
                        if not readers[id(read)]:
                            del readers[id(read)], there[id(read)]
                            if own.pop(id(read), None) is not None:
                                self._count(-read.nbytes)
                    for place, ref in op.made:
                        value = ref()
                        if value is None or value.held is not None or value.kept is not None:
                            continue
                        storage = again.storages[place]
                        if value is wanted:
                            there[id(value)] = storage
                            self._hold(value, storage)
                        elif self._asked_for(value) and not strict and not self.drop_all and self._fits(value.nbytes):
                            self._hold(value, storage)
                            if id(value) in readers:
                                there[id(value)] = storage
                        elif id(value) in readers:
                            there[id(value)], own[id(value)] = storage, value
                            self._count(value.nbytes)
            return True
        finally:
            for value in own.values():
                self._count(-value.nbytes)

    def _asked_for(self, value: Value) -> bool:
        """Whether an entry stands on it."""
        return bool(value.slots) and (self.active or any(ref() is not None for ref in value.slots.values()))

    # too small --------------------------------------------------------------------------------------------------------------

    def _too_small(self, need: int) -> BudgetError:
        limit = self.limit or 0
        least = max(self.steps.smallest(self.record.trace), self.live + need, self.steps.too_small)
        error = BudgetError(
            f"the graph cannot be held in {format_bytes(limit)} ({limit:,} bytes)",
            where=caller(),
            instead=f"gk.budget({least}), at least ({format_bytes(least)}), for what has run up to here",
        )
        error.smallest = least
        return error


def _gone() -> None:
    return None


def _first(item: tuple[float, Value]) -> float:
    return item[0]


def _number(op: Op) -> int:
    return op.number


_NOWHERE = Geometry(torch.float32, torch.device("cpu"), (0,), (1,), 0, False, False)
