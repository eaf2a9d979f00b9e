"""What is known of an op from its schema, and of the tensors that it is given."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REPEATABLE = ("aten", "prims", "prim")  # a kernel of somebody else's, or a collective, is not run again
_COLLECTIVE = ("c10d", "c10d_functional", "_c10d_functional", "fsdp", "symm_mem")  # may write to whatever they are given
_strided = torch.strided
_UNCOUNTED = (torch.ops.aten.rrelu_with_noise,)  # it saves the noise, then writes it


class Kind(NamedTuple):
    """What is known of an op from its schema.

    Attributes:
        view: whether all it gives are views of what it was given.
        opaque: whether it must not be run again.
        changes: position and name of each argument that it changes.
        random: whether it may draw random numbers.
        generator: whether it can be told from which generator.
        statistics: position of the first of two running statistics that a batch norm writes without saying so; -1: none.
        training: position of its argument that says whether it does.
        counted: whether torch counts, in the version, that it changes them.
        lists: whether it changes the tensors of lists, and torch counts that without a dispatch mode.
        collective: whether it may change all that it is given, without saying so.
        writes: whether it changes anything.
    """

    view: bool
    opaque: bool
    changes: tuple[tuple[int, str], ...]
    random: bool
    generator: bool
    statistics: int
    training: int
    counted: bool
    lists: bool
    collective: bool
    writes: bool


@functools.cache
def kind_of(func: Any) -> Kind:
    schema = func._schema
    changes = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    view = not changes and bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)
    names = [argument.name for argument in schema.arguments]
    statistics = names.index("running_mean") if "running_mean" in names and "running_var" in names else -1
    training = next((i for i, name in enumerate(names) if name in ("training", "train", "is_training")), -1)
    if changes or training < 0:
        statistics = -1
    return Kind(
        view,
        func.namespace not in _REPEATABLE,
        changes,
        torch.Tag.nondeterministic_seeded in func.tags,
        "generator" in names,
        statistics,
        training,
        func.overloadpacket not in _UNCOUNTED,
        bool(changes) and func.__name__.startswith("_foreach_"),
        func.namespace in _COLLECTIVE,
        bool(changes) or statistics >= 0 or func.namespace in _COLLECTIVE,
    )


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def changed(kind: Kind, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op changes, in order."""
    found: list[torch.Tensor] = []
    for position, name in kind.changes:
        found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


def count_changes(tensors: list[torch.Tensor], before: list[int]) -> None:
    """Raise the versions of tensors that have been changed since they were those, if torch has not."""
    for tensor, version in zip(tensors, before, strict=True):
        if tensor._version == version:
            try:
                _set_versions([tensor], [version + 1])
            except TypeError:  # torch 2.6 takes one tensor
                _set_versions(tensor, version + 1)


_set_versions: Any = torch._C._autograd._unsafe_set_version_counter


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor and no subclass, and its storage is all that it is."""
    return type(tensor) in _PLAIN and tensor.layout is _strided and not tensor.is_nested and not tensor.is_quantized


def default_generator(device: torch.device | None) -> torch.Generator | None:
    """That from which an op on a device draws; None where that is not known."""
    if device is None or device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda" and torch.cuda.is_initialized():
        return torch.cuda.default_generators[device.index or 0]
    return None
