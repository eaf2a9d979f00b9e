"""Steps that settle are not written down any more; then something else comes, at limits that hold just what came before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphkeep as gk

FIRST_OPS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(64),
    "layer norm": lambda: nn.LayerNorm(64),
    "group norm": lambda: nn.GroupNorm(4, 64),
    "linear": lambda: nn.Linear(64, 64),
    "attention": lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
    "LSTM": lambda: nn.LSTM(64, 64),
}


def grows(make: Callable[[], nn.Module], last: int) -> list[Tensor]:
    """Seven equal steps, and then a larger one."""
    torch.manual_seed(0)
    module = make()
    for rows in [32] * 7 + [last]:
        module.zero_grad()
        out: Any = module(torch.randn(rows, 64))
        out = out[0] if isinstance(out, tuple) else out
        for _ in range(6):
            out = (out * 1.1).sin()
        out.pow(2).mean().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", FIRST_OPS)
@pytest.mark.parametrize("share", [1.0, 1.2, 1.6])
def test_the_op_in_whose_middle_a_step_turns_out_to_be_another_is_not_run_again_in_part(name: str, share: float) -> None:
    make = FIRST_OPS[name]
    plain = grows(make, 64)
    with gk.budget("1GiB") as wide:
        grows(make, 32)
    limit = int(wide.peak * share)
    try:
        with gk.budget(limit) as b:
            ours = grows(make, 64)
    except gk.BudgetError as error:
        limit = error.smallest
        with gk.budget(limit) as b:
            ours = grows(make, 64)
    assert all(map(torch.equal, ours, plain))
    assert b.peak <= limit


def test_what_was_an_input_and_is_computed_now_counts() -> None:
    weights = [torch.randn(1000, requires_grad=True) for _ in range(20)]
    other, inputs = torch.randn(1000, requires_grad=True), [torch.randn(1000) for _ in weights]

    def step(computed: bool) -> int:
        refs, out = [], torch.zeros(())
        for weight, x in zip(weights, inputs, strict=True):
            h = x + other if computed else x
            refs.append(weakref.ref(h.untyped_storage()))
            out = out + (weight * h).sum()
            del h
        out = out.exp()
        held = 4000 * sum(ref() is not None for ref in refs) if computed else 0
        out.backward()
        return held

    with gk.budget("8KiB") as b:
        for _ in range(12):
            step(False)
        held = step(True)
    assert b.limit is not None
    assert held <= b.limit
    assert b.peak <= b.limit


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "an input": lambda x, w: x.add_(1),
    "a weight": lambda x, w: w.add_(1),
    "a weight's data": lambda x, w: w.data.add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_while_steps_are_settled_does_not_reach_a_graph_of_before(write: Callable[[Tensor, Tensor], object]) -> None:
    def program() -> Tensor | None:
        torch.manual_seed(0)
        w, u, v = (torch.randn(n, requires_grad=True) for n in (1000, 1000, 10))
        x = torch.randn(1000)
        y = w + x
        for _ in range(6):
            y = y.sin()
        old, z = y.sum(), u
        del y
        for _ in range(30):
            z = z.cos()
        z.sum().backward()
        del z
        for _ in range(12):
            v.exp().sin().sum().backward()
        with torch.no_grad():
            write(x, w)
        old.backward()
        return w.grad

    plain = program()
    with gk.budget(20_000) as b:
        ours = program()
    assert ours is not None
    assert plain is not None
    assert torch.equal(ours, plain)
    assert b.peak <= 20_000


@pytest.mark.parametrize("write", [WRITES["an input"], WRITES["a weight's data"]], ids=["an input", "a weight's data"])
def test_a_write_by_a_settled_thread_does_not_reach_the_graph_of_another(write: Callable[[Tensor, Tensor], object]) -> None:
    def program() -> Tensor | None:
        torch.manual_seed(0)
        w, v, x = torch.randn(1000, requires_grad=True), torch.randn(10, requires_grad=True), torch.randn(1000)
        graphs: list[Tensor] = []
        for _ in range(12):
            v.exp().sin().sum().backward()

        def build() -> None:
            y = w + x
            for _ in range(6):
                y = y.sin()
            graphs.append(y.sum())

        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        with torch.no_grad():
            write(x, w)
        graphs.pop().backward()
        return w.grad

    plain = program()
    with gk.budget(12_000) as b:
        ours = program()
    assert ours is not None
    assert plain is not None
    assert torch.equal(ours, plain)
    assert b.peak <= 12_000


def test_what_lives_on_from_a_settled_step_makes_room() -> None:
    """One limit that works, and a larger one that does not, would be a limit that was not true."""

    def program() -> Tensor | None:
        torch.manual_seed(0)
        w = torch.randn(1000, requires_grad=True)

        def chain(length: int) -> Tensor:
            y = w
            for _ in range(length):
                y = y.sin()
            return y.sum()

        for _ in range(8):
            chain(8).backward()
        lives_on = chain(8)
        chain(20).backward()
        lives_on.backward()
        return w.grad

    plain = program()
    for limit in range(36_000, 64_001, 4_000):
        with gk.budget(limit) as b:
            ours = program()
        assert ours is not None
        assert plain is not None
        assert torch.equal(ours, plain)
        assert b.peak <= limit
