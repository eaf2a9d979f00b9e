"""What an op's record does not show: collectives, numpy, other modes, the collector, other threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import graphkeep as gk


def same_or_refused(program: Callable[[], Tensor | None], limit: int) -> None:
    """As in plain torch, at this limit or at the first that works of those that are stated instead."""
    plain = program()
    for _ in range(24):
        try:
            with gk.budget(limit) as b:
                ours = program()
            break
        except gk.BudgetError as error:
            limit = max(error.smallest, limit + 1)
    assert ours is not None
    assert plain is not None
    assert torch.equal(ours, plain)
    assert b.peak <= limit


FILLED: dict[str, Callable[[np.ndarray[Any, Any]], Tensor]] = {
    "zeros": lambda source: torch.zeros(1000),
    "empty": lambda source: torch.empty(1000),
    "a clone": lambda source: torch.ones(1000).detach().clone(),
}


@pytest.mark.parametrize("make", FILLED.values(), ids=FILLED)
def test_numpy_fills_a_tensor_that_was_made_inside_the_step(make: Callable[[Any], Tensor]) -> None:
    def program() -> Tensor | None:
        torch.manual_seed(0)
        w = torch.randn(1000, requires_grad=True)
        h = w * 1.0
        for k in range(6):
            source = np.full(1000, k, dtype="f")
            t = make(source)
            t.numpy()[:] = source
            h = (h * 0.1 + t).sin()
            del t
        h.sum().backward()
        return w.grad

    same_or_refused(program, 12_000)


def test_numpy_refills_a_tensor_that_ops_have_read() -> None:
    def program() -> Tensor | None:
        torch.manual_seed(0)
        w = torch.randn(1000, requires_grad=True)
        h, t = w * 1.0, torch.zeros(1000)
        for k in range(6):
            t.numpy()[:] = k
            h = (h * 0.1 + t).sin()
        h.sum().backward()
        return w.grad

    same_or_refused(program, 12_000)


def test_inputs_that_come_and_go_inside_a_step_are_not_held() -> None:
    w = torch.randn(1000, requires_grad=True)

    def program() -> int:
        refs, h = [], w.exp()
        for _ in range(50):
            t = torch.from_numpy(np.ones(1000, "f"))
            refs.append(weakref.ref(t.untyped_storage()))
            h = h + t
            del t
        loss = h.sin().sum()
        del h
        held = 4000 * sum(ref() is not None for ref in refs)
        loss.backward()
        return held

    with gk.budget(12_000) as b:
        assert program() <= 12_000 - b.live
    assert b.peak <= 12_000


def test_an_input_that_the_program_lets_go_of_counts_while_it_is_needed() -> None:
    """Each sine is dropped, and can be had again only from the input that was added before it."""

    def program() -> Tensor | None:
        torch.manual_seed(0)
        w = torch.randn(1000, requires_grad=True)
        h = w * 1.0
        for k in range(8):
            t = torch.from_numpy(np.full(1000, k, dtype="f"))
            h = (h + t).sin()
            del t
        h.sum().backward()
        return w.grad

    for limit in (12_000, 20_000, 28_000):
        same_or_refused(program, limit)


class Half(TorchDispatchMode):
    """Changes results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.mul.Tensor else out


def chain() -> Tensor | None:
    torch.manual_seed(0)
    w = torch.randn(1000, requires_grad=True)
    y = w
    for _ in range(8):
        y = (y * w).sin()
    y.sum().backward()
    return w.grad


def test_a_dispatch_mode_of_the_program_that_changes_results() -> None:
    with Half():
        same_or_refused(chain, 12_000)


def test_a_counter_of_flops_around_it_does_not_keep_anything_from_being_dropped() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False), gk.budget(12_000) as b:
        chain()
    assert b.recomputed_ops > 0
    assert b.peak <= 12_000


def test_the_default_dtype_is_another_in_the_backward() -> None:
    def program() -> Tensor | None:
        torch.manual_seed(0)
        w = torch.randn(1000, requires_grad=True)
        y = w
        torch.set_default_dtype(torch.float64)
        try:
            for _ in range(6):
                y = (y * (torch.arange(1000) / 7)).sin()
        finally:
            torch.set_default_dtype(torch.float32)
        y.sum().backward()
        return w.grad

    same_or_refused(program, 24_000)


def test_the_collector_frees_graphs_while_room_is_made() -> None:
    """Graphs in cycles die wherever an object is made, in the middle of anything."""
    thresholds = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        with gk.budget(40_000) as b:
            for k in range(60):
                torch.manual_seed(k)
                w = torch.randn(1000, requires_grad=True)
                y = w
                for _ in range(24):
                    y = (y * 1.1).sin()
                cycle: list[Any] = [y]
                cycle.append(cycle)
                del y, cycle
        assert b.peak <= 40_000
    finally:
        gc.set_threshold(*thresholds)


def test_a_context_that_is_left_in_another_thread_writes_nothing_down_any_more() -> None:
    b = gk.budget("8KiB")
    b.__enter__()
    record = b._holdings.record
    thread = threading.Thread(target=b.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    try:
        for _ in range(2):
            w = torch.ones(3, requires_grad=True)
            w.sin().sum().backward()
            assert torch.equal(w.grad, torch.ones(3).cos())  # type: ignore[arg-type]
        assert not record.trace.ops
        with gk.budget("8KiB") as again:
            w.exp().sin().sum().backward()
        assert again.peak > 0
    finally:
        while torch._C._len_torch_dispatch_stack():
            torch.utils._python_dispatch._pop_mode()


@pytest.mark.parametrize("limit", [2_100, 2_752, 4_200, 6_000])
def test_a_budget_that_is_too_small_for_a_cut_says_so_itself(limit: int) -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.GELU())
    head, x = nn.Linear(32, 1), torch.randn(16, 16)

    def step() -> Tensor | None:
        trunk.zero_grad()
        with gk.cut(trunk(x)) as z:
            head(z).pow(2).mean().backward()
        return trunk[0].weight.grad

    same_or_refused(step, limit)


@pytest.mark.parametrize("size", [1_000, 40_000])
def test_a_hook_that_fills_an_input_through_numpy_is_found_out(size: int) -> None:
    """A small input is looked at each time that it is read again, a large one once more when the backward has ended."""

    def program() -> Tensor | None:
        torch.manual_seed(0)
        w, x = torch.randn(size, requires_grad=True), torch.randn(size)
        h = w * 1.0
        for k in range(8):
            h = (w * 0.1 + x * k).sin() * h
            if k == 5:
                h.register_hook(lambda grad: x.numpy().fill(0) and None)
        h.sum().backward()
        return w.grad

    with pytest.raises(gk.ChangedGraphError, match="through numpy"), gk.budget(20 * size):
        program()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch._C._len_torch_dispatch_stack()
    with gk.budget("1MiB") as again:
        chain()
    assert again.peak > 0
