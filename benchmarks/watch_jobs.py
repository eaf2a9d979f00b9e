"""Training steps to watch, from ops of milliseconds down to ops of microseconds.

As a program of its own, ``python -m benchmarks.watch_jobs MODEL STEPS WAY``, it takes some steps and prints the seconds that
they took: for what can only be switched on for a whole process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphkeep as gk
from benchmarks import _models


@dataclass
class Job:
    """A network, its batch, and a training step on them.

    Attributes:
        steps: how many of them make one timed round.
        wanted: the most that `watch` may cost on it, as a ratio of times.
    """

    net: Callable[[Tensor], Tensor]
    inputs: Tensor
    loss: Callable[[Tensor], Tensor]
    parameters: list[Tensor]
    steps: int = 1
    wanted: float | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-3)
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def forward(self) -> Tensor:
        return self.loss(self.net(self.inputs))

    def step(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss

    def round(self) -> None:
        for _ in range(self.steps):
            self.step()

    def round_without_optimizer(self) -> None:
        for _ in range(self.steps):
            self.forward().backward()

    def apart(self) -> list[Tensor]:
        """What is there before and in every variant: parameters, gradients, the batch."""
        return [*self.parameters, *(parameter.grad for parameter in self.parameters if parameter.grad is not None), self.inputs]


def build(name: str) -> Job:
    torch.manual_seed(0)
    return JOBS[name]()


def _conv() -> Job:
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers)
    target = torch.randn(8, 32, 96, 96)
    return Job(net, torch.randn(8, 3, 96, 96), lambda y: F.mse_loss(y, target), list(net.parameters()), 1, 1.05)


def _mlp() -> Job:
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))
    target = torch.randn(8192, 256)
    return Job(net, torch.randn(8192, 256), lambda y: F.mse_loss(y, target), list(net.parameters()), 1, 1.05)


def _chain() -> Job:
    """The dearest shape that a bar on ops of 500 us knows: nothing but such ops, each of which saves a tensor."""
    x = nn.Parameter(torch.randn(CHAIN))

    def net(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x.sin()
        return x

    return Job(net, x, lambda y: y.sum(), [x], 1, 1.05)


CHAIN = 450_000


def _transformer() -> Job:
    """The trunk of the other benchmarks with one head."""
    job = _models.build("transformer")
    net = nn.Sequential(job.trunk, job.heads[0])
    return Job(net, job.inputs, lambda y: F.cross_entropy(y, job.targets[0]), list(net.parameters()), 1, 1.05)


TINY = 100


def _tiny(net: Callable[[Tensor], Tensor], modules: list[nn.Module]) -> Job:
    parameters: list[Tensor] = [parameter for module in modules for parameter in module.parameters()]
    return Job(net, torch.randn(8, 16), lambda y: (y * y).mean(), parameters, 8, 1.50)


def _flat() -> Job:
    net = nn.Sequential(*(layer for _ in range(TINY) for layer in (nn.Linear(16, 16), nn.Tanh())))
    return _tiny(net, [net])


def _loop() -> Job:
    layers: list[nn.Module] = [nn.Linear(16, 16) for _ in range(TINY)]

    def net(x: Tensor) -> Tensor:
        for layer in layers:
            x = torch.tanh(layer(x))
        return x

    return _tiny(net, layers)


def _nested() -> Job:
    def block() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(10)))

    net = nn.Sequential(*(nn.Sequential(block()) for _ in range(TINY // 10)))
    return _tiny(net, [net])


def _small() -> Job:
    """For ten thousand steps."""
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    return _tiny(net, [net])


JOBS: dict[str, Callable[[], Job]] = {
    "conv": _conv,
    "mlp": _mlp,
    "chain": _chain,
    "transformer": _transformer,
    "loop": _loop,
    "flat": _flat,
    "nested": _nested,
    "small": _small,
}
NAMES = {
    "conv": "conv net, 8 x 3 x 96 x 96",
    "mlp": "MLP, 8192 x 256",
    "chain": f"50 x sin of {CHAIN:,} numbers",
    "transformer": "transformer, 6 x 128 x 128",
    "loop": f"{TINY} tiny layers, a loop",
    "flat": f"{TINY} tiny layers, one Sequential",
    "nested": f"{TINY} tiny layers, nested Sequentials",
    "small": "4 tiny layers",
}


def main(model: str, steps: str, way: str) -> None:
    torch.set_num_threads(1)
    job = build(model)
    if way == "after":
        with gk.watch():
            job.step()
    watch = gk.watch()
    if way == "watch":
        watch.start()
    for _ in range(3):
        job.step()
    start = time.process_time()
    for _ in range(int(steps)):
        job.step()
    seconds = time.process_time() - start
    watch.stop()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
