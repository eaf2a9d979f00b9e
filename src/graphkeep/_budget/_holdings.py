"""What the graph has saved: `Holdings` listens to the ledger.

A saved tensor whose storage the record knows becomes a `Source`: the storage is held once for all entries on it (`_store`), and
may be dropped. A node that asks for a dropped one has it brought back (`_again`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode

from graphkeep._budget._again import Again
from graphkeep._budget._meter import Meter
from graphkeep._budget._record import Mode, Record, tensors_in
from graphkeep._budget._rerun import aside
from graphkeep._budget._steps import Steps
from graphkeep._budget._store import NO_TENSOR, Store
from graphkeep._budget._values import Geometry, Kept, Storage, Value, geometry
from graphkeep._ledger import LEDGER, Call, Companion, Entry, changed_error
from graphkeep._storage import storages

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SMALL = 1 << 20  # bytes of integers that are kept at most
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class _Mine(threading.local):
    mode: Mode | None = None


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
        self.record = Record(self.changing, self.follow, self.end_step)
        self.steps = steps if isinstance(steps, Steps) else Steps(steps, None, plans=spill == "recompute")
        self.record.small = min(_SMALL, (self.steps.limit or 0) >> 8)
        self.store = Store(self.steps, lambda: self.record.trace, spill, None if device is None else Meter(device))
        self.store.drop_all = drop_all
        self.again = Again(self.store)
        self._outside: dict[int, Any] = {}  # storages that custom functions have saved
        self._orphans: list[Value] = []  # nobody has them any more, and others can only be had again from them
        self._waiting: list[weakref.ref[Value]] = []  # those with entries, once nobody counts
        self._calls: dict[int, _Outer] = {}
        self._lock = threading.RLock()
        self._mine = _Mine()

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
            value.pinned = value.pinned or NO_TENSOR
            where = _NOWHERE
        entry.source = Source(self, value, where)
        value.last = max(value.last, entry.node)
        first = not value.slots
        if self.steps.too_small:
            raise self.store.too_small(0)
        value.slots[entry.number] = weakref.ref(entry)
        if first:
            self.store.values[id(value)] = value
            self.record.trace.note("save", value, entry.node)
            self.store.numbered[value.number] = value
            if self.steps.drops(value) and not value.pinned:
                self.store.dropped_bytes += value.nbytes
                return
        else:
            self.record.trace.also(value, entry.node)
        if value.held is not None or value.kept is not None:
            return
        if self.store.drop_all and not value.pinned:
            self.store.dropped_bytes += value.nbytes
        elif first or value.pinned:
            self.store.later(-1, 0)
            if self.store.room(value.nbytes, ()):
                self.store.hold(value, storage)
            elif self.store.stays(value):
                raise self.store.too_small(value.nbytes)
            else:
                self.store.spill(value, storage)
                self.store.dropped_bytes += value.nbytes

    def died(self, entry: Entry, call: Call | None) -> None:
        source = entry.source
        if source is None or source.holdings is not self:
            return
        with self._lock:
            value = source.value
            if value.slots.pop(entry.number, None) is None or value.slots:
                return
            self.store.values.pop(id(value), None)
            if self.store.numbered.get(value.number) is value:
                del self.store.numbered[value.number]
            self.store.in_use.discard(id(value))
            if value.op is None and value.held is not None and self._needed(value):
                self._orphans.append(value)
            else:
                self.store.let_go(value)
            if self._orphans:
                for orphan in [orphan for orphan in self._orphans if not self._needed(orphan)]:
                    self._orphans.remove(orphan)
                    self.store.let_go(orphan)
            if value.trace is self.record.trace:
                self.record.trace.note("die", value, entry.node)
            if not self.store.values and call is None:
                self.record.resting = True

    def _needed(self, value: Value) -> bool:
        """Whether something that a backward may still ask for can only be had again from a value that cannot itself."""
        first = min([op.number for ref in value.readers if (op := ref()) is not None], default=None)
        if first is None:
            return False
        todo = [other.op for other in self.store.values.values() if other.op is not None and other.op.number >= first]
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
        mine = self.store.mine
        mode = self._mine.mode
        popped = False
        # with a dispatch mode active some backward formulas of torch are others (`isTensorSubclassLike`), and slower
        if mode is not None and not call.create_graph:
            popped = self.store.meter is None and _get_current_dispatch_mode() is mode
            if popped:
                _pop_mode()
            else:  # not the innermost, or it counts what is allocated: it stays, and writes nothing down
                mode.off += 1
        self._calls[call.number] = _Outer(mine.node, mine.in_use, None if call.create_graph else mode, popped)
        mine.node, mine.in_use = -1, set()

    def ends(self, call: Call, error: BaseException | None) -> None:
        outer = self._calls.pop(call.number, None)
        if outer is None:
            return
        mine = self.store.mine
        with self._lock:
            self.store.in_use -= mine.in_use
        mine.node, mine.in_use = outer.node, outer.in_use
        if outer.mode is not None and outer.mode is self._mine.mode:  # nobody has left meanwhile
            if outer.popped:
                _push_mode(outer.mode)
            else:
                outer.mode.off -= 1
        if not self.store.values:
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
            if not self.store.room(value.nbytes, ()):
                raise self.store.too_small(value.nbytes)
            key = storage._cdata
            self._outside[key] = weakref.ref(storage, functools.partial(self._outside_gone, key, value))
            self.store.count(value.nbytes)
            self.record.trace.note("keep", value, _sequence_number())

    def _outside_gone(self, key: int, value: Value, _ref: Any) -> None:
        if self._outside.pop(key, None) is not None:
            self.store.count(-value.nbytes)
            if value.trace is self.record.trace:
                self.record.trace.note("free", value, self.store.mine.node)

    def _given(self, entry: Entry, value: Value) -> None:
        """A node that runs has been given a value: until the next one runs it is there, whoever drops it."""
        mine = self.store.mine
        with self._lock:
            if entry.node != mine.node:
                self.store.in_use -= mine.in_use
                mine.node, mine.in_use = entry.node, set()
            mine.in_use.add(id(value))
            self.store.in_use.add(id(value))

    # this thread ----------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Write down what this thread runs."""
        mode = self._mine.mode = Mode(self.record, self.store.meter, self._make_room)
        _push_mode(mode)
        LEDGER.has_mode(1)

    def _make_room(self, need: int) -> None:
        """An op that runs now will allocate so many bytes."""
        with self._lock:
            if not self.store.room(need, ()):
                raise self.store.too_small(need)

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
        without = self.steps.limit is None
        self.steps.end(self.record.trace, self.store.peak)
        if without and self.steps.limit is not None:
            self.store.new_peak()  # under the limit, which is a share of what it was without
        for orphan in self._orphans:
            self.store.let_go(orphan)
        self._orphans.clear()
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
            if not self.store.room(value.nbytes, ()):
                raise self.store.too_small(value.nbytes)
            storage = value.now()
            if storage is None:
                return
            with aside():
                copy = storage.clone()
            value.kept = Kept(copy, self.store.count)
            value.apart, value.witness = False, _gone

    # again ------------------------------------------------------------------------------------------------------------------

    def bring(self, entry: Entry) -> torch.Tensor:
        with self._lock:
            source: Source = entry.source
            value = source.value
            if not value.current:
                raise self._changed(entry, source)
            self._given(entry, value)
            storage = self.again.storage(value)
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
            self._waiting = [weakref.ref(value) for value in self.store.values.values()]
            self.store.active = self.store.drop_all = False
            self.store.clear()
            self._outside.clear()
            self._orphans.clear()
            self.record.forget()

    def bring_all(self) -> None:
        """All that was dropped and that somebody may still ask for, whatever it takes."""
        with self._lock:
            for ref in self._waiting:
                value = ref()
                if value is not None and value.current:
                    self.store.hold(value, self.again.storage(value))


class _Outer(NamedTuple):
    """What a call of the engine finds: the node that runs, what it was given, the mode, and whether that was taken off."""

    node: int
    in_use: set[int]
    mode: Mode | None
    popped: bool


def _gone() -> None:
    return None


_NOWHERE = Geometry(torch.float32, torch.device("cpu"), (0,), (1,), 0, False, False)
