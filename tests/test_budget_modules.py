"""Every module of torch's own database has its gradients and buffers when as much as can be dropped is dropped."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from budgets import WIDE, faults, fitted, under, warm_up
from outcomes import compared, run
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db

SAMPLES = 3
PARTS = 6


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_thaw() -> Iterator[None]:
    warm_up()
    yield
    gc.unfreeze()


def samples(info: Any, training: bool) -> Iterator[Any]:
    torch.manual_seed(5)
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    found = [sample for sample in inputs if sample.forward_input is not None]
    yield from (*found[: SAMPLES - 1], *found[-1:])  # the last ones have the most options


def program(info: Any, sample: Any, training: bool) -> Any:
    """Three steps on copies of the module and its inputs, each with ops before and after."""

    def body() -> object:
        torch.manual_seed(7)
        module: nn.Module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        module.train(training)
        args, kwargs = tree_map(_copied, (sample.forward_input.args, sample.forward_input.kwargs))
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        for _ in range(2):
            out = module(*_moved(args), **_moved(kwargs))
            sums = [t.sin().square().sum() for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
            if not sums:
                return None
            sum(s.abs() if s.is_complex() else s for s in sums).backward()
        grads = [t.grad for t in [*leaves, *module.parameters()]]
        return grads, [t.detach() for t in module.state_dict().values()]

    return body


def _copied(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _moved(tree: Any) -> Any:
    """The arguments as something before the module would have made them."""
    return tree_map(lambda t: t * 1 if isinstance(t, Tensor) and t.requires_grad else t, tree)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_module_of_torchs_database_is_as_in_eager_when_all_is_dropped(part: int) -> None:
    wrong, checked, recomputed = [], 0, 0
    gc.freeze()
    for info in module_db[part::PARTS]:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            for number, sample in enumerate(samples(info, training)):
                name = f"{info.name} {'train' if training else 'eval'} {number}"
                body = program(info, sample, training)
                plain, again = run(body, nullcontext), run(body, nullcontext)
                if plain.result is None or compared(plain, again):
                    continue  # what fails in torch itself; no gradient, or other ones each time
                wide, budget, _ = under(body, WIDE)
                tight = fitted(body, budget.smallest or 1)
                checked += 1
                recomputed += tight.recomputed
                found = compared(plain, wide) + faults(plain, tight)
                wrong += [f"{name}: {fault[:200]}" for fault in found[:1]]
                if tight.limit > max(budget.peak, 1):
                    wrong.append(f"{name}: {tight.limit} of {budget.peak}")
    assert wrong == []
    assert checked >= 30
    assert recomputed > 100
