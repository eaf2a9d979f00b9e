"""What the graph holds, what of it is dropped, and how it is had again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode, _push_mode

from graphkeep._budget._plan import Plan, plan
from graphkeep._budget._record import Record, changed, kind_of, tensors_in
from graphkeep._budget._values import Geometry, Op, Ref, Scratch, Storage, Value, geometry, refs
from graphkeep._ledger import Call, Entry

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Source:
    """Where an entry's tensor comes from, once it was dropped."""

    __slots__ = ("geometry", "holdings", "value")

    def __init__(self, holdings: Holdings, value: Value, geometry: Geometry) -> None:
        self.holdings = holdings
        self.value = value
        self.geometry = geometry

    @property
    def held(self) -> bool:
        """Whether the graph holds the storage."""
        return self.value.held is not None

    def bring(self, entry: Entry) -> torch.Tensor:
        """The tensor again."""
        return self.holdings.bring(entry)


class Holdings:
    """Listens to the ledger, and holds the storages of the graph.

    Arguments:
        limit: bytes; None for none.
        drop_all: drop whatever can be dropped at once, for tests.
    """

    def __init__(self, limit: int | None = None, drop_all: bool = False) -> None:
        self.record = Record(self.changing)
        self.limit = limit
        self.drop_all = drop_all
        self.live = self.peak = 0
        self.replayed_ops = 0
        self.replayed_seconds = 0.0
        self.values: dict[int, Value] = {}  # those with entries, by id
        self.clock = 0
        self.plans: list[Plan] = []
        self.plan: Plan | None = None  # that is being followed
        self._saves: list[tuple[int, int]] = []
        self._node = -1  # that runs now
        self._in_use: set[int] = set()  # ids of the values that it has been given
        self._lock = threading.RLock()

    # the ledger's events --------------------------------------------------------------------------------------------------

    def saved(self, entry: Entry) -> None:
        tensor: Any = entry.tensor
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
            return
        if tensor.is_leaf and tensor.requires_grad:
            return
        storage = tensor.untyped_storage()
        value = self.record.value_of(storage)
        if value is None or value.apart:
            return
        entry.source = Source(self, value, geometry(tensor))
        self.clock += 1
        value.used = self.clock
        first = not value.slots
        value.slots[entry.number] = weakref.ref(entry)
        if first:
            self.values[id(value)] = value
            number = self.record.trace.number_of(value)
            self.record.trace.events.append(("save", number))
            if self._planned((number, value.nbytes)):
                return
        if self.drop_all:
            if value.held is None:
                self._hold(value, storage)
            self.drop(value)
        elif value.held is None and (first or value.now() is None):
            if self.limit is not None and self.live + value.nbytes > self.limit:
                self._room(value.nbytes, {id(value)})
            self._hold(value, storage)

    def _planned(self, save: tuple[int, int]) -> bool:
        """Whether the plan drops what is saved now; while the stream is another than the plan's, there is none."""
        place = len(self._saves)
        self._saves.append(save)
        if place == 0:
            self.plan = self.plans[-1] if self.plans else None
        if self.plan is not None and (place >= len(self.plan.saves) or self.plan.saves[place] != save):
            n = place + 1
            self.plan = next((plan for plan in reversed(self.plans) if plan.saves[:n] == self._saves), None)
        return self.plan is not None and self.plan.fits and save[0] in self.plan.dropped

    def _forget(self, value: Value) -> None:
        for ref in value.slots.values():
            entry = ref()
            if entry is not None and entry.tombstone is None:
                entry.tensor = None

    def _step_ended(self) -> None:
        trace, followed = self.record.trace, self.plan
        if self.limit is not None and trace.events and (followed is None or len(followed.saves) != len(self._saves)):
            new = plan(trace, self.limit)
            self.plans = [*[old for old in self.plans if old.saves != new.saves][-15:], new]
        self._saves, self.plan = [], None
        self.record.forget()

    def died(self, entry: Entry, _call: Call | None) -> None:
        source = entry.source
        if source is None:
            return
        value = source.value
        value.slots.pop(entry.number, None)
        if not value.slots:
            self.values.pop(id(value), None)
            self._let_go(value)
            if value.trace is self.record.trace:
                self.record.trace.events.append(("die", value.number))

    def failed(self, error: Exception) -> None:
        raise error

    def begins(self, call: Call) -> None:
        # with a dispatch mode active some backward formulas of torch are others (`isTensorSubclassLike`), and slower
        if not call.create_graph and _get_current_dispatch_mode() is self.record:
            _pop_mode()
            call.mark = (self, call.mark)

    def ends(self, call: Call, error: BaseException | None) -> None:
        if isinstance(call.mark, tuple) and call.mark[0] is self:
            _push_mode(self.record)
        self._in_use.clear()
        if not self.values:
            self._step_ended()

    def used(self, entry: Entry) -> None:
        source = entry.source
        if source is not None and source.value.trace is self.record.trace:
            self.record.trace.events.append(("use", source.value.number))

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        pass

    # holding --------------------------------------------------------------------------------------------------------------

    def _hold(self, value: Value, storage: Storage) -> None:
        value.held = storage
        self._add(value.nbytes)

    def _add(self, count: int) -> None:
        self.live += count
        self.peak = max(self.peak, self.live)

    def _let_go(self, value: Value) -> None:
        if value.held is not None:
            value.held = None
            self.live -= value.nbytes

    def drop(self, value: Value) -> bool:
        """Let go of a value that can be had again."""
        if value.pinned or value.held is None:
            return False
        self._forget(value)
        self._let_go(value)
        return True

    def _room(self, need: int, spare: Container[int]) -> None:
        """Drop until so many bytes fit."""
        assert self.limit is not None
        while self.live + need > self.limit:
            best, least = None, 0.0
            for value in self.values.values():
                if value.held is None or value.pinned or id(value) in spare or id(value) in self._in_use:
                    continue
                cost = self._cost(value) / (value.nbytes * (self.clock - value.used + 1))
                if best is None or cost < least:
                    best, least = value, cost
            if best is None:
                raise RuntimeError(f"needs {self.live + need}, has {self.limit}")
            self.drop(best)

    def _cost(self, value: Value) -> float:
        """Seconds to have it again, with all that is not there either."""
        total, seen, todo = 0.0, set(), [value.op]
        while todo:
            op = todo.pop()
            if op is None or id(op) in seen:
                continue
            seen.add(id(op))
            total += op.seconds
            todo += [read.op for read in op.reads if read.now() is None]
        return total

    def changing(self, value: Value) -> None:
        """An op is about to change a storage in place: whatever is dropped and needs what it holds now comes back first."""
        with self._lock:
            for other in list(self.values.values()):
                if other is value or self._needs(other, value):
                    self._bring_back(other)
                    other.pinned = True

    def _needs(self, value: Value, wanted: Value) -> bool:
        seen, todo = {id(value)}, [value]
        while todo:
            one = todo.pop()
            for read in one.op.reads if one.op is not None else ():
                if read is wanted:
                    return True
                if id(read) not in seen:
                    seen.add(id(read))
                    todo.append(read)
        return False

    def _bring_back(self, value: Value) -> None:
        storage = self._storage_of(value)
        for ref in value.slots.values():
            entry = ref()
            if entry is not None and entry.tensor is None and entry.tombstone is None:
                with _disable_current_modes():
                    entry.tensor = entry.source.geometry.on(storage)
                entry.version = 0

    # again ------------------------------------------------------------------------------------------------------------------

    def bring(self, entry: Entry) -> torch.Tensor:
        with self._lock, torch.no_grad():
            value = entry.source.value
            if entry.node != self._node:
                self._node = entry.node
                self._in_use.clear()
            storage = self._storage_of(value)
            self._in_use.add(id(value))
            with _disable_current_modes():
                return entry.source.geometry.on(storage)

    def _storage_of(self, value: Value) -> Storage:
        storage = value.now()
        if storage is None:
            storage = self._replay(value)
        if value.held is None and value.slots:
            self._hold(value, storage)
        return storage

    def _replay(self, wanted: Value) -> Storage:
        """Run what it takes, op by op, and never by recursion. What an op on the stack needs is not dropped meanwhile."""
        there: dict[int, tuple[Value, Storage]] = {}  # what nobody but this call asks for
        locked: dict[int, int] = {}

        def find(value: Value) -> Storage | None:
            found = there.get(id(value))
            return found[1] if found is not None else value.now()

        stack: list[tuple[Op, tuple[Value, ...]]] = []

        def push(op: Op) -> None:
            stack.append((op, op.reads))
            for read in op.reads:
                locked[id(read)] = locked.get(id(read), 0) + 1

        assert wanted.op is not None
        push(wanted.op)
        with _disable_current_modes(), torch.no_grad(), _C._AutoDispatchBelowAutograd(), _no_autocast():
            while stack:
                op, reads = stack[-1]
                missing = [read for read in reads if find(read) is None]
                if missing:
                    assert missing[-1].op is not None, "a leaf is gone"
                    push(missing[-1].op)
                    continue
                makes = [(place, value) for place, ref in op.made if (value := ref()) is not None and find(value) is None]
                if self.limit is not None:
                    need = sum(value.nbytes for _, value in makes)
                    if self.live + need > self.limit:
                        self._room(need, locked.keys())
                made = run(op, find)
                self.replayed_ops += 1
                self.replayed_seconds += op.seconds
                for place, value in makes:
                    if (
                        value.slots
                        and not self.drop_all
                        and (self.plan is None or self.live + value.nbytes <= (self.limit or 0))
                    ):
                        self._hold(value, made[place])
                        value.used = self.clock
                    else:
                        there[id(value)] = value, made[place]
                        self._add(value.nbytes)
                stack.pop()
                for read in reads:
                    locked[id(read)] -= 1
                    if not locked[id(read)]:
                        del locked[id(read)]
                        if id(read) in there:
                            self.live -= there.pop(id(read))[0].nbytes
        found = find(wanted)
        assert found is not None
        for value, _ in there.values():
            self.live -= value.nbytes
        return found


def _no_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


def run(op: Op, find: Any) -> dict[int, Storage]:
    """Run a recorded op again; the storages of its results by place."""
    kind = kind_of(op.func)
    own: dict[int, Storage] = {}  # storages that it changes are copies

    def copies(tree: Any) -> None:
        for ref in refs(tree):
            if id(ref.value) not in own:
                own[id(ref.value)] = find(ref.value).clone()

    for position, name in kind.changes:
        copies(op.args[position] if position < len(op.args) else op.kwargs.get(name))

    def built(tree: Any) -> Any:
        if type(tree) is Ref:
            storage = own.get(id(tree.value))
            return tree.geometry.on(find(tree.value) if storage is None else storage)
        if type(tree) is Scratch:
            g = tree.geometry
            return torch.zeros(g.size, dtype=g.dtype, device=g.device)
        if type(tree) in (tuple, list):
            return type(tree)(built(item) for item in tree)
        if type(tree) is dict:
            return {key: built(item) for key, item in tree.items()}
        return tree

    args, kwargs = built(op.args), built(op.kwargs)
    out = op.func(*args, **kwargs)
    results = {place: tensor.untyped_storage() for place, tensor in enumerate(tensors_in(out))}
    results |= {-1 - n: tensor.untyped_storage() for n, tensor in enumerate(changed(kind, args, kwargs))}
    return results
