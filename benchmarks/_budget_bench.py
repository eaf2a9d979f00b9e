"""A model on the bench: plain steps, steps under a limit, steps in somebody else's way, and what is compared of them."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch.utils.flop_counter import FlopCounterMode

import graphkeep as gk
from benchmarks import _measure
from benchmarks._budget_nets import MODELS, build
from benchmarks._measure import Row, allocated_peak, graph_peak, in_child

CHECKED = 1  # the number of the step whose gradients are compared
WARM = 4  # the first step under a limit is not planned yet, the third is


@dataclasses.dataclass
class Measured:
    """Steps in one way.

    Attributes:
        times: seconds of each.
        live: how far the allocator's bytes rise in one.
        unequal: how many gradients, and how many buffers, are not plain's bit for bit.
        peak: the most bytes of the graph; -1 where it cannot be seen.
        flops: share of the plain step's FLOPs that is run again; the same of its time.
    """

    times: list[float]
    live: int
    unequal: tuple[int, int]
    peak: int = -1
    flops: float = 0.0
    seconds: float = 0.0


class Bench:
    """A model, and what it does in plain torch.

    Attributes:
        graph: the most bytes that its graph saves, parameters and the batch apart.
        live: how far the allocator's bytes rise in a step.
        flops: those of a step.
        turn: how many steps are timed in a row.
    """

    def __init__(self, model: str, quick: bool = False) -> None:
        self.model = model
        self.job = build(model, quick)
        self.turn = 2 if quick else 4
        self.buffers = [buffer for net in self.job.nets for buffer in net.buffers()]
        self.before = [buffer.clone() for buffer in self.buffers]
        self.expected: list[torch.Tensor] = []
        self.unequal()
        self.expected = self._state()
        self.graph = graph_peak(lambda: self.job.step(CHECKED), self.job.apart())
        self.live = allocated_peak(lambda: self.job.step(CHECKED))
        with FlopCounterMode(display=False) as counter:
            self.job.step(CHECKED)
        self.flops = counter.get_total_flops()
        if any(self.unequal()):
            raise AssertionError(f"{model}: two plain steps give other gradients")

    def unequal(self) -> tuple[int, int]:
        """Run the step that is checked; how many gradients, and how many buffers, are others than after the plain one."""
        for buffer, before in zip(self.buffers, self.before, strict=True):
            buffer.copy_(before)
        self.job.zero_grad()
        self.job.step(CHECKED)
        others = [not torch.equal(a, b) for a, b in zip(self._state(), self.expected, strict=False)]
        gradients = len(self.job.gradients())
        return sum(others[:gradients]), sum(others[gradients:])

    def _state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.job.gradients(), *self.buffers)]

    def times(self, steps: int) -> list[float]:
        """Seconds of each of some steps."""
        found = []
        gc.collect()
        gc.disable()
        for i in range(steps):
            self.job.zero_grad()
            start = time.process_time()
            self.job.step(100 + i)
            found.append(time.process_time() - start)
        gc.enable()
        return found

    def limited(self, limit: int, on: Callable[[int], bool] = lambda _: True) -> Measured:
        """Steps under a limit.

        Arguments:
            limit: bytes.
            on: is told the live bytes of a step; if it says no, none is timed.
        """
        with gk.budget(limit) as b:
            first = self.unequal()
            for i in range(WARM - 2):
                self.job.step(i)
            unequal = _most(first, self.unequal())
            live = allocated_peak(lambda: self.job.step(CHECKED))
            flops, seconds = b.recomputed_flops, b.recomputed_seconds
            times = self.times(self.turn) if on(live) else []
            flops, seconds = ((b.recomputed_flops - flops), (b.recomputed_seconds - seconds)) if times else (0, 0.0)
        steps = len(times) or 1
        return Measured(times, live, unequal, b.peak, flops / steps / self.flops, seconds / steps)

    def other(self, way: Callable[[], AbstractContextManager[None]], then: Callable[[Measured], object]) -> Measured:
        """Steps in somebody else's way, half of them before `then` and half after it."""
        with way():
            unequal = _most(self.unequal(), self.unequal())
            live = allocated_peak(lambda: self.job.step(CHECKED))
            found = Measured(self.times(self.turn // 2), live, unequal)
        then(found)
        with way():
            self.job.step(CHECKED)
            found.times += self.times(self.turn // 2)
        return found


def _most(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return max(first[0], second[0]), max(first[1], second[1])


def failed(benchmark: str, model: str, figure: str, error: BaseException) -> Row:
    """A row for what did not run."""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    return Row(benchmark, model, f"{figure}: failed", 1, "", wanted=0, note=f"{type(error).__name__}: {said}")


def main(module: str, rows_of: Callable[[str], Iterable[Row]], arguments: list[str]) -> None:
    """Run some models, or all, each in a process of its own: ``child MODEL`` is one of these."""
    if arguments[:1] == ["child"]:
        _measure.main(lambda: rows_of(arguments[1]))
        return
    print(json.dumps([dataclasses.asdict(row) for row in _children(module, arguments or MODELS)]))


def _children(module: str, models: Iterable[str]) -> Iterator[Row]:
    for model in models:
        try:
            yield from (Row(**row) for row in in_child(f"benchmarks.{module}", "child", model, steady=True))
        except subprocess.CalledProcessError as error:
            print(f"  {model}: {error}", file=sys.stderr)
            yield failed(module, model, "its process", error)
