"""Other ways to save memory, put around a `Job` as contexts: torch's checkpoints, the compiler's, and torch-remat.

torch-remat is taken if it is installed: ``pip install --no-deps torch-remat==0.2.2``. It asks for torch 2.10 or newer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks._budget_nets import Job

Way = Callable[[Job], AbstractContextManager[None]]
_aten = torch.ops.aten
HEAVY = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default]


@contextlib.contextmanager
def around(job: Job, run: Callable[..., Any], at_once: int = 1) -> Iterator[None]:
    """Run every block, or so many in a row, through `run`."""
    before = [(net.around, net.at_once) for net in job.nets]
    for net in job.nets:
        net.around, net.at_once = run, at_once
    try:
        yield
    finally:
        for net, (was, many) in zip(job.nets, before, strict=True):
            net.around, net.at_once = was, many


def checkpointed(job: Job, at_once: int = 1) -> AbstractContextManager[None]:
    return around(job, partial(checkpoint, use_reentrant=False), at_once)


def selective(job: Job) -> AbstractContextManager[None]:
    contexts = partial(create_selective_checkpoint_contexts, HEAVY)
    return around(job, partial(checkpoint, use_reentrant=False, context_fn=contexts))


@contextlib.contextmanager
def compiled(job: Job, budget: float) -> Iterator[None]:
    """What inductor's partitioner saves, run by torch's own kernels: inductor's would be another comparison."""
    if budget not in job.compilations:
        torch._dynamo.reset()
        job.compilations[budget] = {i: torch.compile(net, backend="aot_eager") for i, net in enumerate(job.nets)}
    with torch._functorch.config.patch(activation_memory_budget=budget):  # it compiles when it first runs
        job.compiled = job.compilations[budget]
        try:
            yield
        finally:
            job.compiled = {}


class _Generator:
    """torch-remat runs a block again with other random numbers unless somebody tells it their state."""

    def snapshot(self) -> torch.Tensor:
        return torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


@contextlib.contextmanager
def remat(job: Job, save: bool) -> Iterator[None]:
    """torch-remat around each block.

    Arguments:
        job: whose blocks.
        save: whether to keep what linear layers and convolutions save and give.
    """
    import torch_remat

    numbers = itertools.count()

    def run(block: Callable[..., Any], *args: Any) -> Any:
        def numbered(*args: Any) -> Any:
            nonlocal numbers
            numbers = itertools.count()  # a region's name is its own in a block, and the same when it runs again
            return block(*args)

        return torch_remat.checkpoint(region_name="block", recompute_state_hooks=(_Generator(),))(numbered)(*args)

    def kept(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            out = torch_remat.region(forward, f"heavy {next(numbers)}", recompute=False)(*args)
            torch_remat.recompute_needs_tensor(out)
            return out

        return call

    heavy = []
    if save:
        for net in job.nets:
            blocks = getattr(net, "blocks", None) or net
            heavy += [module for module in blocks.modules() if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d))]
    for module in heavy:
        module.forward = kept(module.forward)  # type: ignore[method-assign]
    try:
        with around(job, run):
            yield
    finally:
        for module in heavy:
            del module.forward


def peers(model: str, quick: bool = False) -> dict[str, Way]:
    """Those that apply to a model."""
    ways: dict[str, Way] = {"checkpoint": checkpointed}
    if model != "TreeLSTM":  # its blocks are no chain
        ways["checkpoint, two blocks"] = partial(checkpointed, at_once=2)
    ways["selective checkpoint"] = selective
    if quick:
        return ways
    if model not in ("LSTM", "TreeLSTM"):  # its steps unrolled; another graph each step
        ways |= {f"compiler, budget {budget}": partial(compiled, budget=budget) for budget in (0.5,)}
    if importlib.util.find_spec("torch_remat") is None:
        print("  torch-remat is not installed and is left out", file=sys.stderr)
    else:
        ways |= {"torch-remat": partial(remat, save=False), "torch-remat, heavy ops saved": partial(remat, save=True)}
    return ways
