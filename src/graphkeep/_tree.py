"""Pytrees of tensors: tuples, lists, dicts, named tuples, dataclasses, and whatever `torch.utils._pytree` knows.

Dataclasses need no registration here: users hand over the output objects of their models as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree

T = TypeVar("T")


def _is_plain_dataclass(obj: object) -> bool:
    return dataclasses.is_dataclass(obj) and not isinstance(obj, type) and type(obj) not in _pytree.SUPPORTED_NODES


def _is_leaf(obj: object) -> bool:
    # a GradientEdge is a named tuple to torch, and one thing to us
    return isinstance(obj, GradientEdge) or _is_plain_dataclass(obj)


def flatten(tree: object) -> Iterator[Any]:
    """Every member of a tree, in order."""
    if type(tree) is torch.Tensor:  # the commonest tree; a pytree walk would cost as much as the rest of a `cut`
        yield tree
        return
    for member in _pytree.tree_leaves(tree, is_leaf=_is_leaf):
        if _is_plain_dataclass(member):
            for field in dataclasses.fields(member):
                if hasattr(member, field.name):  # init=False, and never set
                    yield from flatten(getattr(member, field.name))
        else:
            yield member


def map_members(fn: Callable[[Any], Any], tree: T) -> T:
    """A tree of the same types and structure with ``fn`` applied to each member, in the order of `flatten`."""
    if type(tree) is torch.Tensor:
        return cast(T, fn(tree))

    def visit(member: Any) -> Any:
        return _map_dataclass(fn, member) if _is_plain_dataclass(member) else fn(member)

    return _pytree.tree_map(visit, tree, is_leaf=_is_leaf)


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: T) -> T:
    """A tree of the same types and structure with ``fn`` applied to each tensor; all else is passed through."""
    return map_members(lambda member: fn(member) if isinstance(member, torch.Tensor) else member, tree)


def _map_dataclass(fn: Callable[[Any], Any], obj: Any) -> Any:
    # copy, then set: a constructor may do work, and frozen classes and init=False fields refuse `replace`
    new = copy.copy(obj)
    for field in dataclasses.fields(obj):
        if hasattr(obj, field.name):
            object.__setattr__(new, field.name, map_members(fn, getattr(obj, field.name)))
    return new


def hidden_tensor(member: object) -> str | None:
    """Where an object that is no pytree holds a tensor with a graph, or may do so unseen; None if it does not."""
    if isinstance(member, (torch.Tensor, torch.nn.Module, type, str, bytes)):
        return None
    if isinstance(member, Iterator):
        return "what it would yield"
    for name, value in getattr(member, "__dict__", {}).items():
        if _has_graph(value):
            return f"its attribute `{name}`"
    if isinstance(member, functools.partial) and any(map(_has_graph, (*member.args, *member.keywords.values()))):
        return "one of its arguments"
    # sets, and subclasses of dict and list, which pytrees do not look into
    if isinstance(member, Mapping):
        members: Iterable[Any] = member.values()
    else:
        members = member if isinstance(member, Collection) else ()
    return "one of its members" if any(map(_has_graph, members)) else None


def _has_graph(value: object, depth: int = 3) -> bool:
    """Whether something is, or holds within a few levels (a cache: tensors in lists in attributes), a tensor with a graph."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if depth == 0 or isinstance(value, (str, bytes, type, torch.nn.Module, Iterator)):
        return False
    if isinstance(value, Mapping):
        members: Iterable[Any] = value.values()
    else:
        members = value if isinstance(value, (list, tuple, set, frozenset)) else getattr(value, "__dict__", {}).values()
    return any(_has_graph(member, depth - 1) for member in list(members)[:100])
