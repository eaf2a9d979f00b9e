"""Memory: which storages a tensor stands on, their identity and their bytes.

Two tensors are one piece of memory when they share a storage (views, `expand`, `detach`, `W.t()` of a parameter), so bytes
are counted by storage and never by tensor. A storage is identified by its address only while something holds it
(`data_ptr` and `_cdata` are both reused after a free), hence the weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Storage = torch.UntypedStorage


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The strided tensors that a tensor is made of: itself, or the parts of a sparse, nested or wrapper tensor."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            part = getattr(wrapper, name)
            if isinstance(part, torch.Tensor):  # a `DTensor` names its mesh as well
                yield from dense_parts(part)
    elif tensor.layout is torch.strided and tensor.is_nested:
        yield tensor.values()
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def storages(tensor: torch.Tensor) -> Iterator[Storage]:
    """The storages that a tensor stands on; none for layouts without one (mkldnn) and for the meta device."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        parts: Iterable[torch.Tensor] = (tensor,)  # nearly all tensors, and graphs hold many
    else:
        parts = dense_parts(tensor)
    for part in parts:
        if part.device.type != "meta":
            try:
                storage = part.untyped_storage()
            except RuntimeError:  # opaque layouts have no storage to speak of
                continue
            if storage.device.type != "meta":  # that of what the compiler traces with
                yield storage


class StorageSet:
    """Unique storages, held strongly or weakly.

    Arguments:
        weak: hold only weak references, to ask later what is still alive.
    """

    def __init__(self, items: Iterable[Storage] = (), *, weak: bool = False) -> None:
        self._weak = weak
        self._items: dict[int, tuple[Storage | weakref.ref[Storage], int]] = {}
        for storage in items:
            self.add(storage)

    def add(self, storage: Storage) -> None:
        self._items[storage._cdata] = (weakref.ref(storage) if self._weak else storage, storage.nbytes())

    def add_tensor(self, tensor: torch.Tensor) -> None:
        for storage in storages(tensor):
            self.add(storage)

    def __contains__(self, storage: Storage) -> bool:
        return storage._cdata in self._items

    def __len__(self) -> int:
        return len(self._items)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages that were added, dead or alive."""
        return sum(size for _, size in self._items.values())

    def alive(self) -> Iterator[tuple[Storage, int]]:
        """The storages that still exist, with their bytes when they were added."""
        for held, size in self._items.values():
            storage = held() if isinstance(held, weakref.ref) else held
            if storage is not None:
                yield storage, size
