"""All bytes that ops allocate on a device, for `device_memory=`: activations, gradients, what is in between.

On a GPU torch's allocator is asked. On the CPU every result of an op is seen by the dispatch mode, which stays on in the
backward, and counted until its storage is gone. So that room can be made *before* an op runs, its results' sizes are found from
its arguments on the meta device; what they depend on values (``nonzero``), and what a kernel needs inside, is not known before.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch

from graphkeep._budget._kind import Kind, tensors_in
from graphkeep._budget._rerun import aside
from graphkeep._budget._values import Storage
from graphkeep._storage import storages


class Meter:
    """Counts what is allocated from now on.

    Arguments:
        device: where.

    Attributes:
        live, peak: bytes now, and at most.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0
        self._sum = 0
        self._seen: dict[int, Any] = {}
        self._sizes: dict[Any, int] = {}
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    @property
    def live(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device) - self._before)
        return self._sum

    def need(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> int:
        """Bytes that the results of an op will take."""
        if kind.view or kind.changes:
            return 0
        key = func, _signature(args), _signature(kwargs)
        found = self._sizes.get(key)
        if found is None:
            if len(self._sizes) > _MOST:
                self._sizes.clear()
            found = self._sizes[key] = self._ask(func, args, kwargs)
        return found

    def _ask(self, func: Any, args: Any, kwargs: Any) -> int:
        try:
            with aside():
                left = {k: v for k, v in _meta(kwargs).items() if k not in ("generator", "device", "pin_memory")}
                if any(argument.name == "device" for argument in func._schema.arguments):
                    left["device"] = "meta"  # elsewhere it would draw from the program's generator
                out = func(*_meta(args), **left)
        except Exception:  # no meta kernel, or a size that depends on values: nothing can be said before
            return 0
        return sum(math.prod(t.shape) * t.element_size() for t in tensors_in(out))

    def saw(self, tree: Any, changed: list[torch.Tensor]) -> None:
        """Count the results of an op that are new, which those that it has changed are not."""
        if self.device.type == "cpu":
            known = {storage._cdata for tensor in changed for storage in storages(tensor)}
            for tensor in tensors_in(tree):
                if tensor.device.type == "cpu":
                    for storage in storages(tensor):
                        if storage._cdata not in known:
                            self.add(storage)
        self.peak = max(self.peak, self.live)

    def add(self, storage: Storage) -> None:
        """Count a storage, once."""
        key = storage._cdata
        if key not in self._seen:
            nbytes = storage.nbytes()
            self._seen[key] = weakref.ref(storage, functools.partial(self._gone, key, nbytes))
            self._sum += nbytes
            self.peak = max(self.peak, self.live)

    def _gone(self, key: int, nbytes: int, ref: Any) -> None:
        if self._seen.get(key) is ref:
            del self._seen[key]
            self._sum -= nbytes


_MOST = 10_000


def _signature(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return (tuple(tree.shape), tree.dtype) if tree.layout is torch.strided and not tree.is_nested else id(tree)
    if isinstance(tree, (tuple, list)):
        return tuple([_signature(item) for item in tree])
    if isinstance(tree, dict):
        return tuple([(key, _signature(item)) for key, item in tree.items()])
    try:
        hash(tree)
    except TypeError:
        return id(tree)
    return type(tree), tree


def _meta(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return torch.empty_strided(tree.size(), tree.stride(), dtype=tree.dtype, device="meta")
    if isinstance(tree, (tuple, list)):
        return type(tree)([_meta(item) for item in tree])
    if isinstance(tree, dict):
        return {key: _meta(item) for key, item in tree.items()}
    return tree
