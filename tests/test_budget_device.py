"""`gk.budget(device_memory=)`: all that ops allocate, measured by torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from budget_kinds import BYTES, KINDS, Kind, N, deep, linear, loss_of, net_of, square, trained, weight
from budgets import WIDE, allocated, fitted, under, warm_up
from outcomes import compared, run
from torch import nn

import graphkeep as gk

CHOSEN = (
    "dropout",
    "batch norm",
    "attention",
    "losses",
    "residual in place",
    "routing with noise",
    "an rnn",
    "checkpoint",
    "all kinds of hooks",
    "a generator of its own",
    "seeds are set in the forward",
    "random numbers between forward and backward",
    "random numbers in a backward",
    "accumulated gradients",
    "adam, foreach",
    "a gan",
    "twice",
    "graphs that overlap in time",
    "a loader with a worker",
)


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_thaw() -> Iterator[None]:
    warm_up()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [k for k in KINDS if k.name in CHOSEN], ids=str)
def test_a_kind_of_program_is_as_in_eager(kind: Kind) -> None:
    run(kind.body, nullcontext)
    gc.freeze()
    plain = run(kind.body, nullcontext)
    wide, budget, _ = under(kind.body, WIDE, of="device_memory")
    assert compared(plain, wide) == []
    assert budget.recomputed_ops == 0
    fit = fitted(kind.body, budget.peak * 7 // 8, of="device_memory")
    assert compared(plain, fit.outcome) == []
    assert fit.peak <= fit.limit < budget.peak
    assert fit.recomputed > 0


def test_what_was_chosen_is_there() -> None:
    assert {k.name for k in KINDS} >= set(CHOSEN)


def layers() -> Callable[[], object]:
    torch.manual_seed(0)
    net, x = nn.Sequential(*[layer for _ in range(14) for layer in (linear(), nn.Tanh())]), square(2)

    def step() -> None:
        net.zero_grad(set_to_none=False)
        loss_of(net(x)).backward()

    step()
    return step


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_the_allocator_never_has_more(share: float) -> None:
    step = layers()
    full = allocated(step)
    limit = int(full * share)
    with gk.budget(device_memory=limit) as b:
        measured = allocated(lambda: [step() for _ in range(3)])
        assert b.limit == limit
    assert measured <= limit + 64
    assert measured > limit - 3 * BYTES
    assert b.peak <= limit
    assert b.recomputed_ops > 0


def test_gradients_count_and_what_was_there_before_does_not() -> None:
    w = weight()
    with gk.budget(device_memory=WIDE) as b:
        y = w * 2
        y.sum().backward()
        assert 2 * BYTES <= b.peak <= 2 * BYTES + 64  # the product and the gradient; the sum and its gradient
        del y
        assert b.live == BYTES
        w.grad.mul_(2)
        w.data.add_(1)
        assert b.live == BYTES
        w.grad = None
        assert b.live == 0


def test_a_share_is_one_of_all_that_the_first_step_allocated() -> None:
    step = layers()
    with gk.budget(device_memory=0.75) as b:
        assert b.limit is None
        measured = allocated(step)
        step()
        assert b.limit is not None
        assert abs(b.limit - measured * 0.75) < BYTES
        assert allocated(step) <= b.limit + 64
    assert b.recomputed_ops > 0


def test_what_does_not_fit_is_refused_before_it_is_allocated() -> None:
    w = weight()

    def step() -> None:
        loss_of(deep(w, 4)).backward()

    limit = 2 * BYTES

    def refused() -> None:
        with pytest.raises(gk.BudgetError) as caught:
            with gk.budget(device_memory=limit):
                step()
        error = caught.value
        assert error.smallest > limit
        assert "what the step allocates does not fit in 32.0 KiB" in error.what
        assert error.instead is not None
        assert f"gk.budget(device_memory={error.smallest})" in error.instead
        assert error.where is not None
        assert "test_budget_device.py" in error.where or "budget_kinds.py" in error.where

    assert allocated(refused) <= limit + 64


@pytest.mark.parametrize("spill", ["host", "both"])
def test_with_the_host_as_well(spill: str) -> None:
    def step() -> object:
        return trained(net_of(nn.Dropout(0.2), nn.LayerNorm(N)), square())

    plain = run(step, nullcontext)
    _, budget, _ = under(step, WIDE, of="device_memory")
    fit = fitted(step, budget.peak * 7 // 8, of="device_memory", spill=spill)
    assert compared(plain, fit.outcome) == []
    assert fit.peak <= fit.limit < budget.peak
