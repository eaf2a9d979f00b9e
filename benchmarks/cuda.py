"""What graphkeep does on one GPU: gradients equal plain torch's, then times and memory, within 8 minutes.

``python -m benchmarks.cuda`` prints a line for each check and a table; its exit code is 1 if a gradient differs or a limit was
exceeded. ``--device cpu`` runs the same small, to test the script itself. Streams are waited for before and after each step;
memory is torch's `max_memory_allocated` (on the CPU, what its allocator has given out). Nothing here is a part of `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import graphkeep as gk
from benchmarks._budget_nets import GPT, Net, ResNet
from benchmarks._measure import allocated_peak

ROUNDS = 5
Step = Callable[[], object]


class Bench:
    """A network on a device, and a step of it."""

    def __init__(self, name: str, device: torch.device) -> None:
        small = device.type == "cpu"
        torch.manual_seed(0)
        self.name, self.device = name, device
        if name == "GPT":
            self.net: Net = GPT(2, 32, 2, 16, 64) if small else GPT(12, 768, 12, 512, 8192)
            self.data = torch.randint(64, (2, 16) if small else (16, 512), device=device)
            self.target = torch.randint(64, (self.data.numel(),), device=device)
        else:
            self.net = ResNet((1, 1, 1, 1), 10) if small else ResNet()
            self.data = torch.randn(2 if small else 64, 3, 32 if small else 224, 32 if small else 224, device=device)
            self.target = torch.randint(10, (len(self.data),), device=device)
        self.net.to(device)

    def loss(self, rows: Any = slice(None)) -> Tensor:
        return cross_entropy(self.net(self.data[rows]), self.target if rows == slice(None) else self.target[rows])

    def plain(self) -> None:
        self.loss().backward()

    def gradients(self, step: Step) -> list[Tensor]:
        """After one step, from the same random numbers and buffers."""
        torch.manual_seed(1)
        before = [buffer.clone() for buffer in self.net.buffers()]
        self.net.zero_grad()
        step()
        found = [parameter.grad.clone() for parameter in self.net.parameters() if parameter.grad is not None]
        found += [buffer.clone() for buffer in self.net.buffers()]
        for buffer, value in zip(self.net.buffers(), before, strict=True):
            buffer.data.copy_(value)
        return found

    def measure(self, step: Step) -> tuple[float, int]:
        """Seconds of a step, and the bytes that it takes at most beyond what was there."""
        step()
        times = []
        for _ in range(ROUNDS if self.device.type == "cuda" else 1):
            self._wait()
            start = time.perf_counter()
            step()
            self._wait()
            times.append(time.perf_counter() - start)
        if self.device.type == "cpu":
            return statistics.median(times), allocated_peak(step)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        self._wait()
        return statistics.median(times), torch.cuda.max_memory_allocated(self.device) - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def steps_under(bench: Bench, context: Callable[[], AbstractContextManager[Any]], times: int) -> list[Tensor]:
    """Gradients of the last of some steps in one context, so that a plan is followed."""
    found: list[Tensor] = []
    with context():
        for _ in range(times):
            found = bench.gradients(bench.plain)
    return found


class Report:
    """Prints checks, and remembers whether one has failed."""

    failed = False

    def check(self, what: str, holds: bool, more: str = "") -> None:
        self.failed = self.failed or not holds
        print(f"{'ok  ' if holds else 'FAIL'}  {what}{'  ' + more if more else ''}", flush=True)


def budgets(bench: Bench, report: Report) -> list[tuple[str, Step | None, AbstractContextManager[Any]]]:
    """Each limit and each way to drop: equal, within the limit; returns what is to be measured."""
    plain = bench.gradients(bench.plain)
    report.check(f"{bench.name}: plain steps repeat", all(map(torch.equal, plain, bench.gradients(bench.plain))))
    with gk.budget("1TiB") as wide:
        bench.gradients(bench.plain)
    full, ways = wide.peak, [("plain", bench.plain, nullcontext())]
    for percent in (110, 90, 50, 30) if bench.device.type == "cuda" else (110, 50):
        for spill in ("recompute", "host", "both"):
            limit, what = full * percent // 100, f"{bench.name}: budget {percent} %, {spill}"
            b = gk.budget(limit, spill=spill)  # type: ignore[arg-type]
            try:
                found = steps_under(bench, lambda b=b: b, 4)  # type: ignore[misc]
            except gk.BudgetError as error:
                report.check(what, error.smallest > limit, f"refused, {error.smallest / full:.0%} would do")
                continue
            report.check(what, all(map(torch.equal, found, plain)) and b.peak <= limit, f"peak {b.peak / full:.0%}")
            ways.append((what, bench.plain, b))
    return ways  # type: ignore[return-value]


def verbs(bench: Bench, report: Report) -> None:
    """`infer`, `cut`, `keep`, `discard` and `watch` on the device."""
    net, device = bench.net, bench.device
    net.eval()
    rows = torch.tensor([0, 1], device=device)
    joint = bench.gradients(lambda: cross_entropy(net(bench.data).view(len(bench.data), -1)[rows], bench.target[:2]).backward())

    def infer() -> None:
        out = gk.infer(lambda x: net(x).view(len(x), -1), bench.data, chunk_size=2)
        cross_entropy(out[rows], bench.target[:2]).backward()

    near = [torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(bench.gradients(infer), joint, strict=True)]
    report.check(f"{bench.name}: infer", all(near))
    trunk, heads = nn.Linear(64, 64, device=device), [nn.Linear(64, 1, device=device) for _ in range(3)]
    x = torch.randn(128, 64, device=device)
    parameters = [*trunk.parameters(), *(p for head in heads for p in head.parameters())]

    def after(step: Step) -> list[Tensor]:
        for parameter in parameters:
            parameter.grad = None
        step()
        return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]

    def summed() -> None:
        h = trunk(x).tanh()
        sum((head(h).square().sum() for head in heads), torch.zeros((), device=device)).backward()

    def cut() -> None:
        with gk.cut(trunk(x).tanh()) as h:
            for head in heads:
                head(h).square().sum().backward()

    def keep() -> None:
        h = trunk(x).tanh()
        for head in heads[:-1]:
            gk.backward(head(h).square().sum(), keep=h)
        heads[-1](h).square().sum().backward()

    def watch() -> None:
        with gk.watch():
            summed()

    def discard() -> None:
        gk.discard(heads[0](trunk(x)).sum())
        summed()

    expected = after(summed)
    for verb in (cut, keep, watch, discard):
        near = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(after(verb), expected, strict=True)]
        report.check(f"{verb.__name__} on three heads", all(near))
    net.train()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args(arguments).device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    report, start = Report(), time.monotonic()
    table = ["| network | way | time over plain | memory over plain |", "|---|---|---|---|"]
    for name in ("GPT", "ResNet-50"):
        bench = Bench(name, device)
        verbs(bench, report)
        base: tuple[float, int] | None = None
        for what, step, context in budgets(bench, report):
            assert step is not None
            try:
                with context:
                    seconds, nbytes = bench.measure(step)
            except gk.BudgetError as error:
                report.check(f"{what}: as many steps as one likes", False, str(error))
                continue
            base = base or (seconds, nbytes)
            table.append(f"| {name} | {what.partition(': ')[2] or what} | {seconds / base[0]:.3f} | {nbytes / base[1]:.3f} |")
    print("\n".join(["", *table, "", f"{time.monotonic() - start:.0f} s on {device}"]))
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
