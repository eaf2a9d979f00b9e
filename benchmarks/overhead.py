"""What `cut` and `backward(keep=)` cost where the graph itself costs nothing: on a few scalars.

Each figure is the difference of two medians, in microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row

CALLS = 200
ROUNDS = 25
NODES = 1000


def rows() -> Iterator[Row]:
    yield from _cut()
    yield from _keep()


def _microseconds(variants: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    def many(fn: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                fn()

        return run

    times = _measure.alternate({name: many(fn) for name, fn in variants.items()}, ROUNDS)
    return {name: statistics.median(each) / calls * 1e6 for name, each in times.items()}


def _cut() -> Iterator[Row]:
    w = torch.tensor(2.0, requires_grad=True)
    w.grad = torch.zeros(())

    def with_cut() -> None:
        with gk.cut(w.exp()) as h:
            (h * h).backward()

    def by_hand() -> None:
        trunk = w.exp()
        h = trunk.detach().requires_grad_()
        (h * h).backward()
        trunk.backward(h.grad)

    def joint() -> None:
        h = w.exp()
        (h * h).backward()

    cost = _microseconds({"cut": with_cut, "hand": by_hand, "joint": joint}, CALLS)
    note = f"{cost['cut']:.0f} us; by hand {cost['hand']:.0f}; one backward {cost['joint']:.0f}"
    model = "3 nodes"
    yield Row("overhead", model, "cut, over a leaf by hand", cost["cut"] - cost["hand"], "us", wanted=50, note=note)
    yield Row("overhead", model, "cut, over one backward", cost["cut"] - cost["joint"], "us", wanted=50, note=note)


def _keep() -> Iterator[Row]:
    w = torch.tensor(0.5, requires_grad=True)
    w.grad = torch.zeros(())

    def chain(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        h = w.exp()
        y = h
        for _ in range(nodes):
            y = y.sin()
        return h, y

    def with_keep(nodes: int) -> None:
        h, y = chain(nodes)
        gk.backward(y, keep=h)

    def with_retain(nodes: int) -> None:
        _, y = chain(nodes)
        y.backward(retain_graph=True)

    few = _microseconds({"keep": lambda: with_keep(1), "retain": lambda: with_retain(1)}, CALLS)
    many = _microseconds({"keep": lambda: with_keep(NODES), "retain": lambda: with_retain(NODES)}, 1)
    fixed = few["keep"] - few["retain"]
    note = f"{few['keep']:.0f} us; retain_graph=True {few['retain']:.0f}"
    yield Row("overhead", "1 node", "backward(keep=), over retain_graph=True", fixed, "us", note=note)
    note = f"{many['keep'] / 1e3:.1f} ms; retain_graph=True {many['retain'] / 1e3:.1f}; forward included"
    per_node = (many["keep"] - many["retain"] - fixed) / NODES
    yield Row("overhead", f"{NODES} nodes", "backward(keep=), each node", per_node, "us", note=note)


if __name__ == "__main__":
    _measure.main(rows)
