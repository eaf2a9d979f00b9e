"""A model on the bench: plain steps, steps under a limit, steps in somebody else's way, and what is compared of them."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.utils.flop_counter import FlopCounterMode

import graphkeep as gk
from benchmarks import _measure
from benchmarks._budget_nets import MODELS, build
from benchmarks._measure import Row, allocated_peak, frozen, graph_peak, in_child

CHECKED = 1  # the number of the step whose gradients are compared
Way = Callable[[], AbstractContextManager[object]]


class Bench:
    """A model, and what it does in plain torch.

    Attributes:
        graph: the most bytes that its graph saves, parameters and the batch apart.
        live: how far the allocator's bytes rise in a step.
        flops: those of a step.
    """

    def __init__(self, model: str, quick: bool = False) -> None:
        self.model = model
        self.job = build(model, quick)
        self._turns = 1 if quick else 2
        self.buffers = [buffer for net in self.job.nets for buffer in net.buffers()]
        self.before = [buffer.clone() for buffer in self.buffers]
        self.expected: list[torch.Tensor] = []
        self.unequal()
        self.expected = self._state()
        self.graph = graph_peak(self.check, self.job.apart())
        self.live = allocated_peak(self.check)
        with FlopCounterMode(display=False) as counter:
            self.check()
        self.flops = counter.get_total_flops()
        if any(self.unequal()):
            raise AssertionError(f"{model}: two plain steps give other gradients")

    def check(self) -> None:
        """Run the step that is checked."""
        self.job.step(CHECKED)

    def unequal(self) -> tuple[int, int]:
        """Run it; how many gradients, and how many buffers, are others than after the plain one, bit for bit."""
        for buffer, before in zip(self.buffers, self.before, strict=True):
            buffer.copy_(before)
        self.job.zero_grad()
        self.check()
        others = [not torch.equal(a, b) for a, b in zip(self._state(), self.expected, strict=False)]
        gradients = len(self.job.gradients())
        return sum(others[:gradients]), sum(others[gradients:])

    def _state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in (*self.job.gradients(), *self.buffers)]

    def alternate(self, ways: Mapping[str, Way]) -> tuple[dict[str, list[float]], dict[str, Exception]]:
        """Seconds of the steps of each way and of ``plain``, A B B A; and why one failed.

        Each turn enters the way's context, takes a first step that is not counted, and three that are; in the second turn, two.
        """
        all_ways: dict[str, Way] = {"plain": nullcontext, **ways}
        times: dict[str, list[float]] = {name: [] for name in all_ways}
        errors: dict[str, Exception] = {}
        with frozen():
            for turn in range(self._turns):
                for name, way in list(all_ways.items())[:: -1 if turn % 2 else 1]:
                    if name not in errors:
                        try:
                            times[name] += self._turn(way, 100 * turn, 3 - turn)
                        except Exception as error:  # without its traceback, which holds a graph
                            errors[name] = error.with_traceback(None)
        return times, errors

    def _turn(self, way: Way, number: int, steps: int) -> list[float]:
        found = []
        gc.collect()
        gc.disable()
        try:
            with way():
                for i in range(1 + steps):
                    self.job.zero_grad()
                    start = time.process_time()
                    self.job.step(number + i)
                    found.append(time.process_time() - start)
        finally:
            gc.enable()
        return found[1:]


class Limited:
    """Steps under a limit: a context that may be entered again, for plans outlive it.

    Attributes:
        live: how far the allocator's bytes rise in a planned step.
        peak: the most bytes of the graph, over all steps.
        unequal: how many gradients, and how many buffers, are not plain's bit for bit, in the first step or in a planned one.
        flops, seconds: what a planned step runs again, as shares of the plain step's FLOPs and in seconds.
    """

    def __init__(self, bench: Bench, limit: int) -> None:
        self.budget = gk.budget(limit)
        self.peak = 0
        with self:
            first = bench.unequal()
            bench.job.step(0)
            planned = bench.unequal()
            flops, self.seconds = self.budget.recomputed_flops, self.budget.recomputed_seconds
            self.live = allocated_peak(bench.check)
            self.flops = (self.budget.recomputed_flops - flops) / bench.flops
            self.seconds = self.budget.recomputed_seconds - self.seconds
        self.unequal = max(first[0], planned[0]), max(first[1], planned[1])

    def __enter__(self) -> Limited:
        self.budget.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.peak = max(self.peak, self.budget.peak)
        self.budget.__exit__(kind, error, tb)


def failed(benchmark: str, model: str, figure: str, error: BaseException, wanted: float | None = 0) -> Row:
    """A row for what did not run; `wanted` is None where that is no fault of ours."""
    said = (str(error).strip().splitlines() or [""])[0][:200].replace("|", "/")
    return Row(benchmark, model, f"{figure}: failed", 1, "", wanted=wanted, note=f"{type(error).__name__}: {said}")


def main(module: str, rows_of: Callable[[str], Iterable[Row]], arguments: list[str]) -> None:
    """Run some models, or those in ``BUDGET_MODELS``, or all, each in a process of its own: ``child MODEL`` is one of these."""
    if arguments[:1] == ["child"]:
        _measure.main(lambda: rows_of(arguments[1]))
        return
    models = arguments or [name for name in os.environ.get("BUDGET_MODELS", "").split(",") if name] or MODELS
    print(json.dumps([dataclasses.asdict(row) for row in _children(module, models)]))


def _children(module: str, models: Iterable[str]) -> Iterator[Row]:
    for model in models:
        try:
            yield from (Row(**row) for row in in_child(f"benchmarks.{module}", "child", model, steady=True))
        except subprocess.CalledProcessError as error:
            print(f"  {model}: {error}", file=sys.stderr)
            yield failed(module, model, "its process", error)
