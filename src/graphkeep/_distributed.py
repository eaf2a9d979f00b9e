"""Models that are wrapped for several processes: what of the wrapper's forward happens once, and what its backward expects.

`DistributedDataParallel` counts one forward for one synchronised backward; several forwards before a backward leave the ranks
with different gradients, without an error. So chunks and replays run the wrapped module itself, the wrapper's own part of a
forward (buckets, the broadcast of buffers) runs once, and its reducer is made ready by the first node of ours that a backward
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
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
                    "gk.infer cannot replay a module that FSDP shards yet", instead="DistributedDataParallel, or gk.cut"
                )
            if "DistributedDataParallel" in kinds and module is not model:
                raise ArgumentError(
                    "gk.infer got a module with a DistributedDataParallel inside",
                    instead="DistributedDataParallel around the whole model, and that given to gk.infer",
                )
        if "DistributedDataParallel" in {kind.__name__ for kind in type(model).__mro__}:
            return DataParallel(model)
    return Plain(model)
