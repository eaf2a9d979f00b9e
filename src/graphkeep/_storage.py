"""Memory: which storages a tensor stands on, their identity and their bytes.

Two tensors are one piece of memory when they share a storage (views, `expand`, `detach`, `W.t()` of a parameter), so bytes
are counted by storage and never by tensor. A storage is identified by its address only while something holds it
(`data_ptr` and `_cdata` are both reused after a free), hence the weak references.
"""

from __future__ import annotations

import gc
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
            yield from dense_parts(getattr(wrapper, name))
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
    for part in dense_parts(tensor.detach() if tensor.requires_grad else tensor):
        if part.device.type != "meta":
            try:
                yield part.untyped_storage()
            except (NotImplementedError, RuntimeError):  # opaque layouts have no storage to speak of
                continue


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


def parameter_storages(leaves: Iterable[torch.Tensor] = ()) -> StorageSet:
    """Storages of the given leaves and of every live module's parameters and buffers.

    A graph that holds one of these does not cost its bytes. They are told by storage, since `Linear` saves ``W.t()``, which
    is no `Parameter`. Walks the objects that Python's collector knows: tens of milliseconds in a large program.
    """
    found = StorageSet()
    for leaf in leaves:
        found.add_tensor(leaf)
    # type() and not isinstance(): the heap holds proxies whose __class__ runs code
    modules = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.Module)]
    for module in modules:
        for table in (module.__dict__.get("_parameters"), module.__dict__.get("_buffers")):
            for tensor in list((table or {}).values()):
                if isinstance(tensor, torch.Tensor):
                    found.add_tensor(tensor)
    return found


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """Bytes for people: ``12.4 MiB``."""
    power = min((max(count.bit_length(), 1) - 1) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / (1 << 10 * power):.1f} {_UNITS[power]}"
