"""What an op takes on a device that runs beside Python, where timing it would mean waiting for it.

Seconds by the roofline (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785): what is larger, the floating-point
operations over what the device does of them, or the bytes over what its memory moves. Only ratios of such seconds matter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_FLOPS = 1e14  # per second: a GPU's matrix units, as they are used
_BYTES = 2e12  # per second: its memory
_LAUNCH = 3e-6  # seconds


def seconds(func: Any, args: Any, kwargs: Any, out: Any, nbytes: int) -> float:
    """For an op that reads and writes so many bytes."""
    count: Any = flop_registry.get(func._overloadpacket)
    flops = 0 if count is None else int(count(*args, **kwargs, out_val=out))
    return max(flops / _FLOPS, nbytes / _BYTES) + _LAUNCH


def waits(tensor: torch.Tensor) -> bool:
    """Whether an op on that device has run when its call returns."""
    return tensor.device.type == "cpu"
