"""`install`: the spelled wish, ``y.backward(retain_graph=x)``."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from graphkeep import _keep
from graphkeep._errors import ArgumentError
from graphkeep._patch import Patch
from graphkeep._tree import flatten


class _Handle(RemovableHandle):
    """Takes the wrapper off again when the last `install` is removed."""

    def __init__(self) -> None:
        super().__init__(OrderedDict())
        self._number = _patch.add(None)

    def remove(self) -> None:
        super().remove()
        _patch.remove(self._number)


def install() -> RemovableHandle:
    """Let ``retain_graph`` be a tensor: ``y.backward(retain_graph=x)`` is then ``gk.backward(y, keep=x)``.

    `torch.autograd.backward`, which `torch.Tensor.backward` calls too, is wrapped until the handle's ``remove()``; booleans and
    None do what they always did. Importing graphkeep alone patches nothing.

    Returns:
        torch.utils.hooks.RemovableHandle: its ``remove()`` takes the wrapper off; it is a context manager as well.

    Example:
        >>> import torch, graphkeep as gk
        >>> handle = gk.install()
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> x = w + 10
        >>> (x * x).backward(retain_graph=x)
        >>> w.grad
        tensor(22.)
        >>> handle.remove()
    """
    return _Handle()


def _wrap(original: Any) -> Any:
    @functools.wraps(original)
    def backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not _patch.users or not _is_wish(retain_graph):
            original(tensors, grad_tensors, retain_graph, create_graph, *args, **kwargs)
            return
        rest = [value for value in (*args, *kwargs.values()) if value is not None]
        if rest:
            raise ArgumentError(
                "retain_graph=x cannot be combined with inputs=: what is freed would then depend on the inputs",
                instead="y.backward(retain_graph=x), or torch.autograd.grad(y, inputs, retain_graph=True)",
            )
        _keep.backward(tensors, grad_tensors, keep=retain_graph, create_graph=create_graph)

    return backward


_patch = Patch(torch.autograd, "backward", _wrap)


def _is_wish(retain_graph: object) -> bool:
    if retain_graph is None or isinstance(retain_graph, (bool, int)):
        return False
    # torch takes a bool tensor for a bool, and so it stays
    return any(
        isinstance(member, GradientEdge) or (isinstance(member, torch.Tensor) and member.dtype is not torch.bool)
        for member in flatten(retain_graph)
    )
