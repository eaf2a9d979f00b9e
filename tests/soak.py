"""Thousands of steps with every verb, and exceptions at random points, on each of some ranks.

``python -m torch.distributed.run --nproc-per-node 2 soak.py STEPS``. Each step draws a verb and, one time in three, a point at
which an exception is thrown: in the forward, in a hook on a tensor or on a leaf in the backward, in the program between two
backwards. Gradients of the other steps are compared with those of a plain twin that has no graphkeep around it and runs the
joint backward over the batches of all ranks. After every so many steps, bytes of graphs, storages, Python objects, files and
modes must be what they were.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk
from graphkeep._ledger import LEDGER

BLOCKS = 10  # parts of the run, after each of which nothing may have grown
SETTLED = 4  # of them pass before that is asked
SAMPLES = 6


class Net(nn.Module):
    """A trunk and two heads, with a dropout that is never on and an in-place op."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))
        self.cut: gk.cut[Tensor] | None = None

    def forward(self, x: Tensor, cutting: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        throw.at("forward")
        h = self.trunk(x)
        if h.requires_grad:
            h.register_hook(throw.hook)
        if cutting:
            self.cut = gk.cut(h)
            h = self.cut.stand_ins
        return h, self.heads[0](h), self.heads[1](h)


class Thrown(Exception):
    """By the soak."""


class Throw:
    """Throws once, when it comes to a point for the n-th time."""

    def __init__(self) -> None:
        self.point, self.count = "", 0

    def at(self, point: str) -> None:
        if point == self.point:
            self.count -= 1
            if self.count < 0:
                self.point = ""
                raise Thrown(point)

    def hook(self, grad: Tensor) -> None:
        self.at("backward")

    def leaf_hook(self, _leaf: Tensor) -> None:
        self.at("leaf")


throw = Throw()
Verb = Callable[[Any, Tensor, list[int]], None]


def losses(out: Any, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
    return out[1][rows].square().sum(), out[2][rows].sin().sum()


def plain(model: Any, x: Tensor, _rows: list[int]) -> None:
    sum(losses(model(x)), torch.zeros(())).backward()


def keep(model: Any, x: Tensor, _rows: list[int]) -> None:
    out = model(x)
    a, b = losses(out)
    gk.backward(a, keep=out[0])
    throw.at("program")
    b.backward()


def cut(model: Any, x: Tensor, _rows: list[int]) -> None:
    net = model.module
    a, b = losses(model(x, cutting=True))
    a.backward()
    throw.at("program")
    b.backward()
    net.cut.close()


def cut_outside(model: Any, x: Tensor, _rows: list[int]) -> None:
    net = model.module
    h = net.trunk(x)
    h.register_hook(throw.hook)
    with gk.cut(h) as h:
        net.heads[0](h).square().sum().backward()
        throw.at("program")
        net.heads[1](h).sin().sum().backward()


def infer(model: Any, x: Tensor, rows: list[int]) -> None:
    out = gk.infer(model, x, chunk_size=random.Random(len(rows)).choice([2, 3, None]))
    throw.at("program")
    sum(losses(out[rows]), torch.zeros(())).backward()


def budget(model: Any, x: Tensor, rows: list[int]) -> None:
    with gk.budget(700):
        out = model(x)
        throw.at("program")
        sum(losses(out), torch.zeros(())).backward()


def budget_on_the_host(model: Any, x: Tensor, rows: list[int]) -> None:
    with gk.budget(700, spill="both"):
        plain(model, x, rows)


def watch(model: Any, x: Tensor, rows: list[int]) -> None:
    with gk.watch() as w:
        plain(model, x, rows)
        throw.at("program")
        w.step()


def discard(model: Any, x: Tensor, rows: list[int]) -> None:
    with model.no_sync():
        loss = sum(losses(model(x)), torch.zeros(()))
    gk.discard(loss)
    throw.at("program")
    plain(model, x, rows)


def all_of_them(model: Any, x: Tensor, rows: list[int]) -> None:
    with gk.watch(), gk.budget(2_000):
        infer(model, x, rows)


VERBS: dict[str, Verb] = {
    verb.__name__: verb
    for verb in (plain, keep, cut, cut_outside, infer, budget, budget_on_the_host, watch, discard, all_of_them)
}
ALONE = {"keep", "cut_outside"}  # not synchronised: DDP refuses the first, and does not see the second
ROWS = {"infer", "all_of_them"}
POINTS = ("forward", "backward", "leaf", "program")


def state() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    objects = gc.get_objects()
    return {
        "objects": len(objects),
        "tensors": sum(issubclass(type(obj), torch.Tensor) for obj in objects),
        "entries": sum(str(type(obj).__module__).startswith("graphkeep") for obj in objects),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "listeners": len(LEDGER.listeners),
        "modes": torch._C._len_torch_dispatch_stack(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
    }


def main(steps: int) -> None:
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(throw.leaf_hook)
    ddp = DistributedDataParallel(net)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (net, twin)]
    draw = random.Random(0)  # the same on every rank
    thrown, before, block = 0, None, steps // BLOCKS
    for step in range(steps):
        name = draw.choice(list(VERBS))
        rows = [draw.sample(range(SAMPLES), draw.randrange(SAMPLES)) for _ in range(count)]
        fails = draw.randrange(3) == 0
        batches = torch.randn(count, SAMPLES, 5, generator=torch.Generator().manual_seed(step))
        throw.point, throw.count = "", 0
        for optimizer in optimizers:
            optimizer.zero_grad()
        if fails:  # not synchronised: DDP itself does not get over an exception in a backward
            throw.point, throw.count = draw.choice(POINTS), draw.randrange(3)
            try:
                with ddp.no_sync():
                    VERBS[name](ddp, batches[rank], rows[rank])
            except Thrown as error:
                thrown += 1
                del error
            throw.point = ""
        else:
            _compare(ddp, twin, name, batches, rows)
            if name not in ALONE:
                for optimizer in optimizers:
                    optimizer.step()
                twin.load_state_dict(net.state_dict())  # rounding must not add up
        net.cut = None
        if step % block == block - 1:
            for optimizer in optimizers:
                optimizer.zero_grad()  # a step that has failed early leaves none
            now = state()
            if step // block == SETTLED:
                before = now
            elif before is not None:
                grown = {key: (before[key], now[key]) for key in now if now[key] > before[key] + _NOISE.get(key, 0)}
                assert not grown, (step, grown)
    assert thrown > steps // 20
    print(f"rank {rank}: {steps} steps, {thrown} exceptions: ok", flush=True)


def _compare(ddp: Any, twin: nn.Module, name: str, batches: Tensor, rows: list[list[int]]) -> None:
    """One step with a verb, and the joint backward of the twin."""
    rank, count, alone = dist.get_rank(), dist.get_world_size(), name in ALONE
    with ddp.no_sync() if alone else contextlib.nullcontext():
        VERBS[name](ddp, batches[rank], rows[rank])
    for r in [rank] if alone else range(count):
        a, b = losses(twin(batches[r]), rows[r] if name in ROWS else slice(None))
        ((a + b) / (1 if alone else count)).backward()
    for ours, theirs in zip(ddp.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5), name


_NOISE = {"objects": 60, "entries": 3}  # caches that have not filled yet

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.collect()
    gc.freeze()  # `watch` looks through every object
    try:
        main(int(sys.argv[1]))
        gc.collect()  # see `ddp_programs.py`
        dist.barrier()
    finally:
        dist.destroy_process_group()
