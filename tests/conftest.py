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
    before = torch.autograd.backward, torch.autograd._engine_run_backward
    yield
    gc.collect()  # a cut that a failed test's traceback holds
    assert (torch.autograd.backward, torch.autograd._engine_run_backward) == before
    x = torch.ones(2, requires_grad=True)
    assert x.sin().grad_fn._raw_saved_self.data is x if hasattr(torch._C._autograd.SavedTensor, "data") else True


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Freed means freed by reference counting: the cyclic collector is off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
