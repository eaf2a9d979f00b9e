"""The modules that are alive: the memory of their parameters and buffers, and what the program calls them.

torch keeps no register of modules, so these walk what Python's collector knows: tens of milliseconds in a large program. For
reports and error messages, never on the way of a training step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from graphkeep._storage import StorageSet


def _alive() -> list[torch.nn.Module]:
    # type() and not isinstance(): the heap holds proxies whose __class__ runs code
    return [obj for obj in gc.get_objects() if issubclass(type(obj), torch.nn.Module)]


def parameter_storages(leaves: Iterable[torch.Tensor] = ()) -> StorageSet:
    """Storages of the given leaves and of every live module's parameters and buffers.

    A graph that holds one of these does not cost its bytes. They are told by storage, since `Linear` saves ``W.t()``, which
    is no `Parameter`.
    """
    found = StorageSet()
    for leaf in leaves:
        found.add_tensor(leaf)
    for module in _alive():
        for table in (module.__dict__.get("_parameters"), module.__dict__.get("_buffers")):
            for tensor in list((table or {}).values()):
                if isinstance(tensor, torch.Tensor):
                    found.add_tensor(tensor)
    return found


def describe(leaf: torch.Tensor, among: Iterable[torch.nn.Module] | None = None) -> str:
    """How the program calls a leaf: by the longest path of a module that holds it, else by its shape and dtype.

    Arguments:
        leaf: the leaf.
        among: the modules to look in; None for all that are alive.
    """
    names = [
        (name.count("."), f"`{name}` of {type(module).__name__}")
        for module in (_alive() if among is None else among)
        if "_parameters" in module.__dict__  # else still being built
        for name, parameter in module.named_parameters()
        if parameter is leaf
    ]
    kind = "parameter" if isinstance(leaf, torch.nn.Parameter) else "leaf"
    shape = f"a {kind} of shape {list(leaf.shape)} and dtype {leaf.dtype}"
    return f"{max(names)[1]}, {shape}" if names else shape
