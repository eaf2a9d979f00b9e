"""The one place where graphkeep looks at calls of the autograd engine.

`torch.autograd.backward`, `torch.Tensor.backward` and `torch.autograd.grad` all go through ``_engine_run_backward``, which
`torch.autograd` has imported by name. While somebody listens, that name stands for a wrapper; with the last listener the
original comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from graphkeep._eager import eager
from graphkeep._patch import Patch


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @eager
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        proceed = original
        for around in list(calls.users.values()):
            proceed = functools.partial(around, proceed)
        return proceed(*args, **kwargs)

    return run_backward


# each user is called as ``around(proceed, outputs, gradients, retain_graph, create_graph, inputs, ...)`` and calls ``proceed``
calls = Patch(torch.autograd, "_engine_run_backward", _wrap)
