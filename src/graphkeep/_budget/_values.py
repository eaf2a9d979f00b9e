"""What a step has computed: versions of storages, and the recorded ops that made them.

A `Value` is the content of one storage between two in-place ops. It knows the op that made it, and that op knows the values
that it read, so a value that was dropped can be had again by running recorded ops (never Python) from values that are there.
Values hold ops, and ops the values they read, and never the other way: when nothing asks for a value any more, reference
counting takes it and all that only it needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import _C

Storage = torch.UntypedStorage
_set_conj: Callable[[torch.Tensor, bool], None] = getattr(_C, "_set_conj")  # noqa: B009 not in the stubs
_set_neg: Callable[[torch.Tensor, bool], None] = getattr(_C, "_set_neg")  # noqa: B009


class Geometry(NamedTuple):
    """How a tensor lies on its storage."""

    dtype: torch.dtype
    device: torch.device
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    def on(self, storage: Storage) -> torch.Tensor:
        """Such a tensor; without a history, at version 0."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conj:
            _set_conj(tensor, True)
        if self.neg:
            _set_neg(tensor, True)
        return tensor


def geometry(tensor: torch.Tensor) -> Geometry:
    """That of a strided tensor."""
    return Geometry(
        tensor.dtype,
        tensor.device,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


class Ref(NamedTuple):
    """A tensor among the arguments of a recorded op."""

    value: Value
    geometry: Geometry


class Scratch(NamedTuple):
    """A tensor that a recorded op writes to and does not read: it gets a new one."""

    geometry: Geometry


class Op:
    """One aten op as it ran.

    Attributes:
        func, args, kwargs: what ran, with a `Ref` in the place of each tensor.
        seconds: what it took.
        made: the values that it made, weakly, with the place of each among its results.
    """

    __slots__ = ("args", "func", "kwargs", "made", "number", "reads", "seconds")
    number: int

    def __init__(self, func: Any, args: Any, kwargs: Any, seconds: float) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.reads = tuple({id(ref.value): ref.value for ref in refs((args, kwargs))}.values())
        self.seconds = seconds
        self.made: list[tuple[int, weakref.ref[Value]]] = []


def refs(tree: Any) -> Iterator[Ref]:
    """All `Ref`s in arguments."""
    if type(tree) is Ref:
        yield tree
    elif type(tree) in (tuple, list):
        for item in tree:
            yield from refs(item)
    elif type(tree) is dict:
        for item in tree.values():
            yield from refs(item)


class Value:
    """The content of a storage between two in-place ops.

    Attributes:
        op: what made it; None for a leaf (a parameter, an input, what an op made that cannot be repeated).
        place: where among the results of the op its storage is; ``-1 - n``: it is the n-th tensor that the op changes.
        nbytes: of the storage.
        alive: the storage, weakly: somebody else may hold it.
        held: the storage, if the graph holds it.
        kept: the storage of a leaf that some op has read.
        apart: whether it was there before: a parameter, an input.
        current: whether no later op has changed that storage.
        pinned: whether it must not be dropped.
        slots: the entries that stand on it, by number.
    """

    __slots__ = (
        "__weakref__",
        "alive",
        "apart",
        "current",
        "held",
        "kept",
        "nbytes",
        "number",
        "op",
        "pinned",
        "place",
        "slots",
        "trace",
        "used",
    )

    def __init__(self, op: Op | None, place: int, storage: Storage) -> None:
        self.op = op
        self.place = place
        self.nbytes = storage.nbytes()
        self.alive: Callable[[], Storage | None] = weakref.ref(storage)
        self.held: Storage | None = None
        self.kept: Storage | None = None
        self.current = True
        self.apart = False
        self.pinned = op is None
        self.slots: dict[int, weakref.ref[Any]] = {}
        self.used = 0
        self.trace: Any = None
        self.number = -1

    def now(self) -> Storage | None:
        """The storage, if it is there with this content."""
        if self.held is not None:
            return self.held
        if self.kept is not None:
            return self.kept
        return self.alive() if self.current else None
