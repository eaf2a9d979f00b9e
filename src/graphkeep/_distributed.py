"""Models that are wrapped for several processes: what of the wrapper's forward happens once, and what its backward expects.

`DistributedDataParallel` counts one forward for one synchronised backward; several forwards before a backward leave the ranks
with different gradients, without an error, and so may several backwards. So chunks and replays of `infer` run the wrapped
module itself, the wrapper's own part of a forward (buckets, the broadcast of buffers) runs once, and its reducer is made ready
by the first node of ours that a backward runs; and where a leaf would get its gradient in several backwards, `synchronising`
tells beforehand.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphkeep._errors import ArgumentError


class Plain:
    """A model of one process.

    Attributes:
        forward: what runs the model.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.forward = model

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the wrapper does once before a forward; returns the arguments for the model."""
        return args, kwargs

    def synchronises(self) -> bool:
        """Whether a forward made now would have its backward synchronised."""
        return False

    def before_backward(self, leaves: Iterable[torch.Tensor]) -> None:
        """Called once in a backward that is to be synchronised, before any gradient reaches the leaves."""


class DataParallel(Plain):
    """A module in `torch.nn.parallel.DistributedDataParallel`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.module)
        self._ddp = model
        reason = None
        if model.static_graph:
            reason = "static_graph=True", "DistributedDataParallel without static_graph"
        elif model.mixed_precision is not None:
            reason = "mixed_precision=", "torch.autocast"
        elif model._forward_hooks or model._forward_pre_hooks:
            reason = "forward hooks on the wrapper", "the hooks on model.module"
        if reason is not None:
            raise ArgumentError(
                f"gk.infer cannot replay a DistributedDataParallel model with {reason[0]}",
                instead=f"{reason[1]}, or no gk.infer",
            )

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._ddp._pre_forward(*args, **kwargs)
        self._ddp.require_forward_param_sync = bool(self._ddp.require_backward_grad_sync and torch.is_grad_enabled())
        return tuple(args), dict(kwargs)

    def synchronises(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    def before_backward(self, leaves: Iterable[torch.Tensor]) -> None:
        outputs = []
        if self._ddp.find_unused_parameters:
            # the reducer looks for the parameters that these lead to
            with torch.enable_grad():
                outputs = [leaf.view_as(leaf) for leaf in leaves]
        self._ddp.reducer.prepare_for_backward(outputs)


def wrapped(model: Callable[..., Any]) -> Plain:
    """How to run a model that may be wrapped.

    Raises:
        ArgumentError: it is wrapped in a way whose backward could not be right.
    """
    if isinstance(model, nn.Module):
        for module in model.modules():
            kinds = {kind.__name__ for kind in type(module).__mro__}
            if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
                raise ArgumentError(
                    "gk.infer cannot replay a module that FSDP shards", instead="DistributedDataParallel, or gk.cut"
                )
            if "DistributedDataParallel" in kinds and module is not model:
                raise ArgumentError(
                    "gk.infer got a module with a DistributedDataParallel inside",
                    instead="DistributedDataParallel around the whole model, and that given to gk.infer",
                )
        if "DistributedDataParallel" in {kind.__name__ for kind in type(model).__mro__}:
            return DataParallel(model)
    return Plain(model)


# wrappers that are alive ----------------------------------------------------------------------------------------------------


class _Wrappers:
    """Every `DistributedDataParallel` module of this process, found by looking through all objects when there may be a new one.

    torch keeps no list of them, and a leaf does not show the reducer that waits for it. That there is another reducer, its type
    tells: each object holds a reference to it.
    """

    def __init__(self) -> None:
        self._count: list[int] = []
        self._found: list[weakref.ref[Any]] = []

    def alive(self) -> list[Any]:
        if not dist.is_available() or not dist.is_initialized():
            return []
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415  not every torch has it

        kinds = {DistributedDataParallel, *_subclasses(DistributedDataParallel)}
        reducer: Any = getattr(dist, "Reducer")  # noqa: B009  it is no public name
        found = [ref() for ref in self._found]
        if [sys.getrefcount(kind) for kind in (reducer, *kinds)] != self._count or None in found:
            with warnings.catch_warnings():  # some objects warn when their type is asked for
                warnings.simplefilter("ignore")
                found = [obj for obj in gc.get_objects() if type(obj) in kinds and hasattr(obj, "reducer")]
            self._found = [weakref.ref(module) for module in found]
            self._count = [sys.getrefcount(kind) for kind in (reducer, *kinds)]
        return found


def _subclasses(kind: type) -> Iterable[type]:
    sub: type
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


_wrappers = _Wrappers()


def waiting() -> list[Any]:
    """The `DistributedDataParallel` modules whose last forward was made to be synchronised by one backward."""
    return [ddp for ddp in _wrappers.alive() if ddp.require_forward_param_sync]


def synchronised(leaves: Iterable[torch.Tensor]) -> Any:
    """The module that waits for one gradient of one of these leaves; None if none does."""
    modules = waiting()
    if modules:
        known = {id(leaf) for leaf in leaves}
        for ddp in modules:
            if any(id(parameter) in known for parameter in ddp.module.parameters()):
                return ddp
    return None


def running() -> Any:
    """The `DistributedDataParallel` module whose forward runs now; None if none does."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    return DistributedDataParallel._active_ddp_module


class Gathered:
    """The storages of whole parameters that FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers for a moment.

    Between a module's forward and its backward they are empty, so nothing can be computed from them.
    """

    def __init__(self) -> None:
        self._modules = -1
        self._known: set[int] = set()

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        if not dist.is_available() or not dist.is_initialized():
            return False
        from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415

        if len(_module_state_mapping) != self._modules:
            self._modules, self._known = len(_module_state_mapping), set()
            for ref in list(_module_state_mapping.values()):
                state: Any = ref()
                groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
                for parameter in [parameter for group in groups if group is not None for parameter in group.fsdp_params]:
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is None:  # there is none before the first forward: look again
                        self._modules = -1
                    else:
                        self._known.add(whole.untyped_storage()._cdata)
        return storage._cdata in self._known
