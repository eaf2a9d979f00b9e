"""What every test shares: a fixed seed, one hypothesis profile, and a check that nothing of graphkeep stays behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# no deadline: a time limit would be a timing assertion
settings.register_profile("graphkeep", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("graphkeep")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_of_ours_stays() -> Iterator[None]:
    """After every test, failed or not: torch is unpatched and no saved-tensor hook is active."""
    torch.manual_seed(0)
    before = _state()
    yield
    if _state() != before:
        gc.collect()  # a cut that a failed test's traceback holds; not after every test, for it takes a quarter of a second
    assert _state() == before


def _state() -> tuple[object, ...]:
    x = torch.ones(2, requires_grad=True)
    slot = x.sin().grad_fn._raw_saved_self
    has_hooks = slot.data is not x if hasattr(slot, "data") else False
    return torch.autograd.backward, torch.autograd._engine_run_backward, has_hooks


@pytest.fixture(scope="module")
def heap_of_its_own() -> Iterator[None]:
    """What other tests of the process have left is not looked at by those who look at all that is alive."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Freed means freed by reference counting: the cyclic collector is off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
