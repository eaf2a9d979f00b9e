"""Keeping `torch.compile` out of graphkeep's own functions.

What a compiled function calls, dynamo traces or compiles as well: hooks that run while it is in eager mode for a moment, and
verbs that it calls. None of them can be: they deal with nodes, versions and identities. A function that is marked here breaks
the graph where a compiled function calls it, and runs as it is, with all that it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
_frames: Any = torch._C._dynamo.eval_frame


def eager(function: F) -> F:
    """Mark a function; what `torch.compiler.disable` does, but for the wrapper and its cost on each call."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "graphkeep looks at the graph itself"  # type: ignore[attr-defined]
    code = function.__code__
    if hasattr(_frames, "set_code_exec_strategy"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    else:  # torch 2.6
        _frames.skip_code(code)
    return function
