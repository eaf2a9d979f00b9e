"""Having a dropped value again.

The recorded ops that are missing run in the order in which they ran, each after room was made for its results; what else they
give and somebody will ask for is kept where it fits. If that does not do, everything else is dropped and they run once more
with nothing kept: that is the least that can be had (`_plan.smallest`).
"""

from __future__ import annotations

from typing import Any

from graphkeep._budget._rerun import Rerun, aside
from graphkeep._budget._store import Store
from graphkeep._budget._values import Op, Storage, Value, checksum
from graphkeep._errors import ChangedGraphError, caller


class Again:
    """Brings values back into a store.

    Attributes:
        ops, flops, seconds: that have run again; the seconds are those that they took the first time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ops = self.flops = 0
        self.seconds = 0.0
        self._short = 0  # bytes that did not fit, with all that was held

    def storage(self, value: Value) -> Storage:
        """That of a value, which is held from now on."""
        store = self.store
        if value.held is None and value.kept is None:
            storage = value.now()
            if (storage is not None or value.spilled is not None) and store.room(value.nbytes, (id(value),)):
                store.hold(value, storage if storage is not None else store.unspill(value))
            elif value.op is None and value.spilled is None:
                raise _gone_for_good()
            elif value.op is None or not self._run(value, strict=False):
                for other in list(store.values.values()):
                    if store.may_go(other, ()):
                        store.drop(other)
                self._short = store.live + value.nbytes
                if value.op is None or not self._run(value, strict=True):
                    raise store.too_small(self._short - store.live)
        found = value.now()
        assert found is not None
        return found

    def _run(self, wanted: Value, strict: bool) -> bool:
        """Run what it takes; False where there is no room for it."""
        store = self.store
        missing = _Missing(wanted, store)
        readers, there = missing.readers, missing.there
        own: dict[int, Value] = {}  # what is there for this call only
        try:
            for value in missing.spilled:
                if not store.room(value.nbytes, readers):
                    self._short = store.live + value.nbytes
                    return False
                there[id(value)], own[id(value)] = store.unspill(value), value
                store.count(value.nbytes)
            with aside():
                for k, op in enumerate(missing.ops):
                    store.later(0, 2 * k)
                    if not store.room(op.nbytes, readers):
                        self._short = store.live + op.nbytes
                        return False
                    again = Rerun(op, lambda v: there[id(v)], lambda v: id(v) in own and readers[id(v)] == 1)
                    self.ops += 1
                    self.seconds += op.seconds
                    self.flops += again.flops
                    store.count(op.nbytes)
                    store.count(-op.nbytes)
                    for read in op.reads:
                        readers[id(read)] -= 1
                        if not readers[id(read)]:
                            del readers[id(read)], there[id(read)]
                            if own.pop(id(read), None) is not None:
                                store.count(-read.nbytes)
                    for place, ref in op.made:
                        made = ref()
                        if made is not None and made.now() is None:
                            store.later(0, 2 * k + 1)
                            self._result(made, again.storages[place], wanted, strict, readers, there, own)
                    if store.meter is not None:
                        for storage in again.storages.values():
                            store.meter.add(storage)
            return True
        finally:
            for value in own.values():
                store.count(-value.nbytes)

    def _result(
        self,
        value: Value,
        storage: Storage,
        wanted: Value,
        strict: bool,
        readers: dict[int, int],
        there: dict[int, Storage],
        own: dict[int, Value],
    ) -> None:
        store = self.store
        keep = not strict and not store.drop_all and value.current and value.held is None and store.asked_for(value)
        if value is wanted or (keep and store.worth(value, readers)):
            store.hold(value, storage)
            if id(value) in readers:
                there[id(value)] = storage
        elif id(value) in readers:
            there[id(value)], own[id(value)] = storage, value
            store.count(value.nbytes)


class _Missing:
    """What it takes to have a value again.

    Attributes:
        ops: to run, in order.
        readers: how many of them read each value, by id; one more for the value itself.
        there: the storages that are there, by the value's id.
        spilled: the values that are on the host.
    """

    def __init__(self, wanted: Value, store: Store) -> None:
        self.store = store
        ops: dict[int, Op] = {}
        self.readers: dict[int, int] = {}
        self.there: dict[int, Storage] = {}
        self.spilled: list[Value] = []
        todo = [wanted.op]
        while todo:
            op = todo.pop()
            if op is None or id(op) in ops:
                continue
            ops[id(op)] = op
            for read in op.reads:
                known = self.readers.get(id(read), 0)
                self.readers[id(read)] = known + 1
                if not known and not self._is_there(read):
                    todo.append(read.op)
        self.readers[id(wanted)] = self.readers.get(id(wanted), 0) + 1
        self.ops = sorted(ops.values(), key=_number)

    def _is_there(self, value: Value) -> bool:
        storage = value.now()
        if storage is not None:
            if (
                value.checksum is not None
                and value.nbytes > _SMALL
                and self.store.call >= 0
                and value.checked != self.store.call
            ):
                self.store.checked.append(value)  # and once more when it has ended
            _check_unchanged(value, self.store.call)
            self.there[id(value)] = storage
        elif value.spilled is not None:
            self.spilled.append(value)
        elif value.op is None:
            raise _gone_for_good()
        else:
            return False
        return True


def _check_unchanged(value: Value, call: int) -> None:
    """Refuse what was changed while nobody looked: inside a backward, in another thread, by numpy.

    Arguments:
        call: in which a content need be looked at once only; -1: each time.
    """
    changed = False
    if value.op is None:
        witness = value.seen()
        changed = witness is not None and witness._version != value.version
        if value.checked != call or call < 0 or value.nbytes <= _SMALL:
            value.checked = call
            fault = changed_since(value)
            if fault is not None:
                raise fault
    elif value.held is not None:
        for ref in value.slots.values():
            entry: Any = ref()
            if entry is not None and entry.tensor is not None:
                changed = entry.tensor._version != entry.version
                break
    if changed:
        raise _changed()


_SMALL = 1 << 16  # bytes that are looked at each time


def changed_since(value: Value) -> ChangedGraphError | None:
    """The error for an input whose content is no longer what it was."""
    if value.checksum is None or value.kept is None:
        return None
    with aside():
        same = checksum(value.kept.storage) == value.checksum
    return None if same else _changed()


def _changed() -> ChangedGraphError:
    return ChangedGraphError(
        "what was dropped needs what a tensor held that was changed inside a backward, after the budget, or through numpy",
        where=caller(),
        instead="change it after the backward, or give the forward a .clone() of it",
    )


def _gone_for_good() -> ChangedGraphError:
    return ChangedGraphError(
        "what was dropped needs what a tensor held before it was changed in place, and there was no room for a copy of that",
        where=caller(),
        instead="change it after the backward, or give the budget more bytes",
    )


def _number(op: Op) -> int:
    return op.number
