"""A batch: which members of a call's arguments have the batch dimension, and how rows are picked and put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphkeep import _graph, _tree
from graphkeep._errors import ArgumentError, ArgumentTypeError
from graphkeep._storage import StorageSet, storages


def is_batch(member: object, size: int, dim: int) -> bool:
    """Whether a member of a pytree is a tensor with the batch dimension."""
    return isinstance(member, torch.Tensor) and _has_dim(member, dim) and member.size(dim) == size


def _has_dim(tensor: torch.Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


@dataclass
class Call:
    """The arguments for some rows, and for each argument that requires a gradient its stand-in, by position."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stand_ins: dict[int, torch.Tensor]


class Arguments:
    """The arguments of a call over a whole batch.

    Arguments:
        args, kwargs: pytrees. Tensors whose size along `dim` is the batch's are split; all else is passed on as it is. The
            batch's size is that of the first tensor that has the dimension.
        dim: the batch dimension.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dim: int) -> None:
        self._tree = (args, dict(kwargs))
        self.dim = dim
        self.members = list(_tree.flatten(self._tree))
        for member in self.members:
            _graph.refuse_hidden(member, "args")
        # a parameter among the arguments is a weight, whatever its size
        tensors = [m for m in self.members if isinstance(m, torch.Tensor) and not issubclass(type(m), torch.nn.Parameter)]
        sizes = [tensor.size(dim) for tensor in tensors if _has_dim(tensor, dim)]
        if not sizes:
            raise ArgumentTypeError(
                f"no argument of the model is a tensor with a dimension {dim}, so there is no batch",
                instead="gk.infer(model, inputs, ...) with the inputs of all samples, and batch_dim= if it is not dimension 0",
            )
        self.size = sizes[0]
        if self.size == 0:
            raise ArgumentError("the batch is empty", instead="at least one sample")
        chosen = {id(tensor) for tensor in tensors if is_batch(tensor, self.size, dim)}
        self._batched = [id(member) in chosen for member in self.members]
        self.versions = [(m, m._version) for m in self.members if isinstance(m, torch.Tensor) and not m.is_inference()]
        self.differentiable = {i: m for i, m in enumerate(self.members) if isinstance(m, torch.Tensor) and m.requires_grad}

    def refuse_ambiguous(self) -> None:
        """Raise if a tensor could be one row a sample as well as one thing for all: a square mask as large as the batch."""
        for position, (member, batched) in enumerate(zip(self.members, self._batched, strict=True)):
            if batched and position != self._batched.index(True) and list(member.shape).count(self.size) > 1:
                raise ArgumentError(
                    f"an argument of shape {list(member.shape)} may be one row for each of {self.size} samples, or one for all",
                    instead="chunk_size=None; if it is for all: gk.infer(lambda x: model(x, mask), x, ...)",
                )

    def describe(self) -> str:
        """The members that are split, and their shapes."""
        split = [f"{list(m.shape)}" for i, m in enumerate(self.members) if self._batched[i]]
        return f"{len(split)} tensor(s) of shape {', '.join(split)}, along dimension {self.dim}"

    def batched(self, position: int) -> bool:
        return self._batched[position]

    def take(self, rows: slice | torch.Tensor) -> Call:
        """The arguments for some rows. What requires a gradient is replaced by a leaf on the same values."""
        stand_ins: dict[int, torch.Tensor] = {}
        positions = iter(range(len(self.members)))

        def pick(member: Any) -> Any:
            i = next(positions)
            if self._batched[i]:
                member = select(member.detach() if i in self.differentiable else member, rows, self.dim)
            if i in self.differentiable:
                stand_ins[i] = member.detach().requires_grad_()
                return stand_ins[i]
            return member

        args, kwargs = _tree.map_members(pick, self._tree)
        return Call(args, kwargs, stand_ins)


def select(tensor: torch.Tensor, rows: slice | torch.Tensor, dim: int) -> torch.Tensor:
    """Rows of a tensor: a view for a slice, a copy for a vector of indices."""
    if isinstance(rows, slice):
        return tensor.narrow(dim, rows.start, rows.stop - rows.start)
    return tensor.index_select(dim, rows.to(tensor.device))


def row_numbers(index: Any, size: int) -> tuple[torch.Tensor, bool]:
    """What a user writes between brackets, as a vector of row numbers (int64, on the CPU).

    Returns:
        The row numbers, and whether it was a single one, which takes the batch dimension away.

    Raises:
        ArgumentError: a row is out of range, or a mask has another length than the batch.
        ArgumentTypeError: not an int, a slice, a list, an index tensor or a mask.
    """
    if isinstance(index, slice):
        return torch.arange(size)[index] if (index.step or 1) > 0 else torch.tensor(
            range(size)[index], dtype=torch.int64
        ), False
    if isinstance(index, tuple):
        raise ArgumentTypeError(
            "out[...] takes rows, in one index", instead="out[rows], and what else is to be picked on what it returns"
        )
    try:
        rows = torch.as_tensor(index).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"rows of type {type(index).__name__}", instead=_ROWS) from error
    if rows.numel() == 0 and rows.dim() == 1 and not rows.dtype.is_complex and rows.dtype is not torch.bool:
        rows = rows.to(torch.int64)
    if (
        rows.dim() > 1
        or rows.dtype.is_floating_point
        or rows.dtype.is_complex
        or (rows.dtype is torch.bool and rows.dim() == 0)
    ):
        raise ArgumentTypeError(f"rows of shape {list(rows.shape)} and dtype {rows.dtype}", instead=_ROWS)
    if rows.dtype is torch.uint8:
        raise ArgumentTypeError("rows of dtype uint8, which torch takes for a mask", instead="rows.bool(), or rows.long()")
    if rows.dtype is torch.bool:
        if len(rows) != size:
            raise ArgumentError(f"a mask of {len(rows)} rows for a batch of {size}", instead="a mask with one value a sample")
        return rows.nonzero()[:, 0], False
    single = rows.dim() == 0
    rows = rows.to(torch.int64).reshape(-1)
    if bool(((rows < -size) | (rows >= size)).any()):
        worst = rows[rows.abs().argmax()].item()
        raise ArgumentError(f"row {worst} of a batch of {size}", instead=f"rows from 0 to {size - 1}, or from -{size} to -1")
    return torch.where(rows < 0, rows + size, rows), single


_ROWS = "an int, a slice, a list of ints, an index tensor, or a boolean mask with one value a sample"


class Outputs:
    """The outputs of all chunks, put together in the types and structure of the model's own.

    Arguments:
        dim: the batch dimension.
    """

    def __init__(self, dim: int) -> None:
        self._tree: Any = None  # the first chunk's output without its tensors, which hold a graph
        self._dim = dim
        self._pieces: list[list[Any]] = []

    def add(self, tree: Any, rows: int) -> list[torch.Tensor]:
        """Take a chunk's output over; returns its tensors, in order, with their graphs."""
        members = list(_tree.flatten(tree))
        for i, member in enumerate(members):
            _graph.refuse_hidden(member, "the model's output")
            if isinstance(member, torch.Tensor) and not is_batch(member, rows, self._dim):
                raise ArgumentError(
                    f"member {i} of the model's output has shape {list(member.shape)}; dimension {self._dim} should be the "
                    f"{rows} samples of the batch",
                    instead="a model that returns one row a sample (reduce afterwards, on out[rows]), or batch_dim=",
                )
            if self._pieces and isinstance(member, torch.Tensor) != isinstance(self._pieces[0][i], torch.Tensor):
                raise ArgumentError(
                    f"member {i} of the model's output is a tensor in one chunk and none in another",
                    instead="the same structure for all samples, or chunk_size=None",
                )
            if self._pieces and not isinstance(member, torch.Tensor) and not _same(member, self._pieces[0][i]):
                raise ArgumentError(
                    f"member {i} of the model's output is no tensor and differs from chunk to chunk: "
                    f"{self._pieces[0][i]!r} and {member!r}",
                    instead="a tensor with one row a sample there, or chunk_size=None",
                )
        if not self._pieces:
            self._tree = _tree.map_tensors(lambda _: _PLACE, tree)
        self._pieces.append([m.detach() if isinstance(m, torch.Tensor) else m for m in members])
        return [member for member in members if isinstance(member, torch.Tensor)]

    def join(self, apart: StorageSet) -> tuple[list[torch.Tensor], Any]:
        """The tensors of all chunks as one, and the whole in the structure of the model's output.

        Arguments:
            apart: memory of the user's, which a model that returns its input would hand out.
        """

        def joined(column: tuple[Any, ...]) -> Any:
            if not isinstance(column[0], torch.Tensor):
                return column[0]
            if len(column) > 1:
                return torch.cat(column, self._dim)
            return column[0].clone() if any(storage in apart for storage in storages(column[0])) else column[0]

        columns = [joined(column) for column in zip(*self._pieces, strict=True)]
        self._pieces = []
        tensors = [column for column in columns if isinstance(column, torch.Tensor)]
        return tensors, self.build(tensors)

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The structure of the model's output with other tensors in it."""
        following = iter(tensors)
        return _tree.map_tensors(lambda _: next(following), self._tree)


_PLACE = torch.empty(0)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and (a is b or bool(a == b))
