"""What custom functions have saved: it is not dropped, since ``ctx.saved_tensors`` holds it, but it is the graph's and counts.

It made no entries, so nobody tells when the function lets go; it counts for as long as its storage is alive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from graphkeep import _saved
from graphkeep._budget._kind import tensors_in
from graphkeep._budget._record import Record
from graphkeep._budget._store import Store
from graphkeep._budget._values import Storage, Value
from graphkeep._storage import storages

_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Outside:
    """Counts it.

    Arguments:
        record: knows which op made a storage.
        store: counts.
    """

    def __init__(self, record: Record, store: Store) -> None:
        self.record = record
        self.store = store
        self._counted: dict[int, weakref.ref[Storage]] = {}

    def __contains__(self, storage: Storage) -> bool:
        return storage._cdata in self._counted

    def clear(self) -> None:
        """Count nothing more."""
        self._counted.clear()

    def applied(self, args: Any, outputs: Any) -> None:
        """A custom function has run."""
        name, saved = saved_by_function(outputs)
        if not saved:
            return
        given = {storage._cdata for tensor in tensors_in(args) for storage in storages(tensor)}
        self.record.begun = True
        for tensor in saved:
            base = tensor if tensor._base is None else tensor._base
            for storage in storages(tensor):
                value = self.record.value_of(storage)
                if value is None and not (storage._cdata in given or (base.is_leaf and base.requires_grad)):
                    value = self.record.adopt(storage)
                if value is not None and not value.apart:
                    self._count(value, storage, name)

    def _count(self, value: Value, storage: Storage, name: str) -> None:
        value.pinned, value.outside = f"the custom function {name} has saved it", True
        if value.held is None and value.kept is None and storage not in self:
            if not self.store.room(value.nbytes, ()):
                raise self.store.too_small(value.nbytes)
            key = storage._cdata
            self._counted[key] = weakref.ref(storage, functools.partial(self._gone, key, value))
            self.store.count(value.nbytes)
            self.record.trace.note("keep", value, _sequence_number())

    def _gone(self, key: int, value: Value, _ref: Any) -> None:
        if self._counted.pop(key, None) is not None:
            self.store.count(-value.nbytes)
            if value.trace is self.record.trace:
                self.record.trace.note("free", value, self.store.mine.node)


def saved_by_function(outputs: Any) -> tuple[str, list[torch.Tensor]]:
    """What the custom function that gave some outputs has saved, with its name."""
    for output in tensors_in(outputs):
        node: Any = output.grad_fn
        if node is not None and _saved.is_custom(node):
            held = [slot.value for slot in _saved.slots(node) if slot.state is _saved.State.HELD]
            return type(node).__name__.removesuffix("Backward"), held
    return "", []
