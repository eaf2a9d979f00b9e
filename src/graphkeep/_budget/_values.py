"""What a step has computed: versions of storages, and the recorded ops that made them.

A `Value` is the content of one storage between two in-place ops. It knows the op that made it, and that op knows the values
that it read, so a value that was dropped can be had again by running recorded ops (never Python) from values that are there.
Values hold ops, and ops the values they read, and never the other way: when nothing asks for a value any more, reference
counting takes it and all that only it needed.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import weakref
import zlib
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
        number: ops are numbered in the order in which they ran.
        func, args, kwargs: what ran, with a `Ref` in the place of each tensor.
        reads: the values that it read.
        generator: the state that its random numbers were drawn from; None if it drew none.
        seconds: what it took.
        made: the values that it made, weakly, with the place of each among its results.
        nbytes: of all its results.
        broken: whether something that it read is gone for good.
        dtype: the default one then.
    """

    __slots__ = (
        "__weakref__",
        "args",
        "broken",
        "dtype",
        "func",
        "generator",
        "kwargs",
        "made",
        "nbytes",
        "number",
        "reads",
        "seconds",
        "traced",
    )

    def __init__(self, func: Any, args: Any, kwargs: Any, reads: tuple[Value, ...]) -> None:
        self.number = next(_numbers)
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.generator: torch.Tensor | None = None
        self.seconds = 0.0
        self.made: list[tuple[int, weakref.ref[Value]]] = []
        self.nbytes = 0
        self.traced = -1
        self.broken = False
        self.dtype = torch.get_default_dtype()


_numbers = itertools.count()


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


class Alive(weakref.ref[Any]):
    """A weak reference to a storage that knows where it is written down."""

    __slots__ = ("key",)
    key: int


class Value:
    """The content of a storage between two in-place ops.

    Attributes:
        op: what made it; None for what cannot be made again (a parameter, an input, a custom kernel's result).
        place: where among the results of the op its storage is; ``-1 - n``: it is the n-th tensor that the op changes.
        nbytes: of the storage.
        ref: the storage, weakly: somebody else may hold it.
        witness: a tensor on it, weakly, and its version then: whether what is alive still has this content.
        held: the storage, if the graph holds it.
        kept: the storage of a value without an op, if the record holds it because ops have read it.
        readers: of a value without an op: the ops that have read it, weakly.
        awaited: whether something dropped without a copy is to be made from it: then it does not go without one itself.
        apart: whether it was there before the graph: a parameter, an input.
        checksum: of an input's content: what numpy writes into it torch does not count.
        checked: the call of the engine in which the content was compared with it last.
        current: whether no later op has changed that storage.
        pinned: why it must not be dropped; empty if it may be.
        slots: the entries that stand on it, by number.
        outside: whether a custom function holds it.
        last: the highest number of a node that has saved it.
        late: entries that stand on an earlier version of its storage.
    """

    __slots__ = (
        "__weakref__",
        "apart",
        "awaited",
        "checked",
        "checksum",
        "current",
        "held",
        "kept",
        "last",
        "late",
        "nbytes",
        "number",
        "op",
        "outside",
        "pinned",
        "place",
        "readers",
        "ref",
        "slots",
        "spilled",
        "trace",
        "version",
        "witness",
    )

    def __init__(self, op: Op | None, place: int, nbytes: int, storage: Callable[[], Storage | None]) -> None:
        self.op = op
        self.place = place
        self.nbytes = nbytes
        self.ref = storage
        self.witness: Callable[[], torch.Tensor | None] = _nobody
        self.version = 0
        self.held: Storage | None = None
        self.kept: Kept | None = None
        self.checksum: int | None = None
        self.checked = -1
        self.current = True
        self.apart = False
        self.pinned = "" if op is not None else OPAQUE
        self.slots: dict[int, weakref.ref[Any]] = {}
        self.outside = False
        self.last = 0
        self.readers: list[weakref.ref[Op]] = []
        self.late: list[weakref.ref[Any]] = []
        self.spilled: Any = None
        self.awaited = False
        self.trace: Any = None
        self.number = -1

    def watch(self, tensor: torch.Tensor) -> None:
        """Remember a tensor on it."""
        if not tensor.is_inference():
            self.witness, self.version = weakref.ref(tensor), tensor._version

    def break_readers(self) -> float:
        """It is gone for good: no op that has read it can run again. The number of the first, infinite if there is none."""
        ops = [op for ref in self.readers if (op := ref()) is not None]
        for op in ops:
            op.broken = True
        return min([op.number for op in ops], default=math.inf)

    def broken(self, first: float) -> bool:
        """Whether it cannot be had again, once nothing is held, since something that it was made from is gone.

        Arguments:
            first: the number of the first op that cannot run again.
        """
        seen, todo = set(), [self.op]
        while todo:
            op = todo.pop()
            if op is None or op.number < first or id(op) in seen:
                continue
            if op.broken:
                return True
            seen.add(id(op))
            todo += [read.op for read in op.reads]
        return False

    def alive(self) -> Storage | None:
        """The storage, if somebody holds it."""
        return _fixed(self.ref())

    @property
    def needed(self) -> bool:
        """Whether an op that may run again has read it."""
        return any(op() is not None for op in self.readers)

    def seen(self) -> torch.Tensor | None:
        """The tensor that was seen on it, if that is alive."""
        return _fixed(self.witness())

    def now(self) -> Storage | None:
        """The storage, if it is there with this content."""
        if self.kept is not None:
            return self.kept.storage
        if self.held is not None and (self.current or self.held is not self.alive()):
            return self.held
        if self.current:
            witness = self.seen()
            if witness is not None and witness._version == self.version:
                storage = self.alive()
                if storage is not None and (self.op is None or storage.resizable()):  # else numpy may have written into it
                    return storage
        return None


def _fixed(found: Any) -> Any:
    """What a weak reference gave, made whole: torch 2.6 asks for that."""
    if found is not None:
        found._fix_weakref()
    return found


def checksum(storage: Storage) -> int:
    """That of a storage's content; of a large one, of words spread over it."""
    nbytes = storage.nbytes()
    if storage.device.type != "cpu" or nbytes > _LARGE:
        words = nbytes // 8
        step = max(words // (_LARGE // 8), 1)
        data = torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage, 0, (words // step,), (step,))
        storage = data.cpu().contiguous().untyped_storage()
        nbytes = words // step * 8
    # not through numpy, whose tensors cannot be resized any more
    return zlib.crc32((ctypes.c_char * nbytes).from_address(storage.data_ptr())) if nbytes else 0


_LARGE = 1 << 22  # bytes
OPAQUE = "its producer cannot be run again"


def _nobody() -> None:
    return None


class Kept:
    """A storage that the record keeps, since ops read it that may have to run again.

    Arguments:
        count: is told how many bytes more, or less, are held for it; None for what is not counted.
    """

    __slots__ = ("count", "storage")

    def __init__(self, storage: Storage, count: Callable[[int], None] | None) -> None:
        self.storage = storage
        self.count = count
        if count is not None:
            count(storage.nbytes())

    def __del__(self) -> None:
        if self.count is not None:
            self.count(-self.storage.nbytes())
