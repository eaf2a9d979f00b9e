"""What a program does that can be seen from outside, compared bit for bit: inside something of graphkeep's, and without."""

from __future__ import annotations

import concurrent.futures.thread
import dataclasses
import gc
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torture import Later

Around = Callable[[], AbstractContextManager[Any]]

# Where something of graphkeep's may have patched something: none of it may differ afterwards.
PATCHABLE = (
    torch,
    torch.Tensor,
    torch._C._autograd,
    torch.autograd,
    torch.autograd.graph,
    torch.autograd.function,
    torch.autograd.function.Function,
    torch.autograd.function.FunctionCtx,
    torch.autograd.function.BackwardCFunction,
    torch.autograd.graph.saved_tensors_hooks,
    torch.autograd.graph.disable_saved_tensors_hooks,
    torch.func,
    torch._functorch.eager_transforms,
    torch._functorch.apis,
    torch.nn.Module,
    torch.utils.checkpoint,
    threading,
    threading.Thread,
    concurrent.futures.thread.ThreadPoolExecutor,
)


@dataclasses.dataclass
class Outcome:
    """All that a program did that can be seen from outside."""

    result: object = None
    raised: tuple[type[BaseException], str] | None = None
    warned: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    state: list[object] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


def tensors_alive(known: set[int] = frozenset()) -> list[Tensor]:  # type: ignore[assignment]
    """Those with values: what the compiler and the meta device make is none of it."""
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and id(o) not in known]
    return [t for t in found if type(t).__name__ != "FakeTensor" and t.device.type == "cpu" and t.numel()]


def read_later(value: object) -> object:
    """The result with every ``Later`` asked."""
    if isinstance(value, Later):
        return read_later(value.value())
    if isinstance(value, tuple | list):
        return [read_later(v) for v in value]
    if isinstance(value, Mapping):
        return {k: read_later(v) for k, v in value.items()}
    return value


def run(body: Callable[[], object], around: Around) -> Outcome:
    """What the program does inside ``around()``, and what it leaves alive once its result is dropped."""
    outcome = Outcome()
    torch.manual_seed(0)
    random.seed(0)
    gc.collect()
    known = {id(t) for t in tensors_alive()}
    gc.disable()
    try:
        result: object = None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with around():
                    result = body()
                result = read_later(result)
            except BaseException as error:
                result, outcome.raised = None, (type(error), str(error))
                traceback.clear_frames(error.__traceback__)
        outcome.warned = [(w.category.__name__, str(w.message)) for w in warned]
        outcome.result = frozen(result)
        outcome.state = [
            torch.get_rng_state().sum().item(),
            random.random(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            torch._C._autograd._saved_tensors_hooks_is_enabled(),
        ]
        del result, warned
        outcome.left = sorted(f"{type(t).__name__} of {t.numel()} {t.dtype}" for t in tensors_alive(known))
    finally:
        gc.enable()
        gc.collect()
    return outcome


def frozen(value: object) -> object:
    """The pytree with every tensor replaced by all that is compared of it, so that no tensor is held."""
    if isinstance(value, Tensor):
        return {
            "type": type(value).__name__,
            "dtype": value.dtype,
            "shape": tuple(value.shape),
            "stride": value.stride() if value.layout == torch.strided else None,
            "layout": value.layout,
            "requires_grad": value.requires_grad,
            "is_leaf": value.is_leaf,
            "grad_fn": value.grad_fn.name() if value.grad_fn is not None else None,
            "bits": bits(value),
        }
    if isinstance(value, tuple | list):
        return [frozen(v) for v in value]
    if isinstance(value, Mapping):
        return {k: frozen(v) for k, v in value.items()}
    return value


def bits(t: Tensor) -> bytes:
    t = t.detach()
    t = (t.to_dense() if t.layout != torch.strided else t).resolve_conj().resolve_neg().contiguous()
    return t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def differences(a: object, b: object, where: str = "result") -> list[str]:
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for k, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{k}]")]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f"{where}.{k}")]
    if type(a) is type(b) and (a == b or (a != a and b != b)):  # noqa: PLR0124 (nan is nan)
        return []
    return [f"{where}: {a!r} without, {b!r} with"]


def compared(plain: Outcome, other: Outcome) -> list[str]:
    return [d for f in dataclasses.fields(Outcome) for d in differences(getattr(plain, f.name), getattr(other, f.name), f.name)]


def patched() -> dict[tuple[str, str], object]:
    return {(repr(home), name): value for home in PATCHABLE for name, value in vars(home).items() if name != "__doc__"}


def active_hooks() -> object:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True)
    node = torch.ones(2, requires_grad=True).sin().grad_fn
    assert node is not None
    node._raw_saved_self.register_hooks(lambda t: t, lambda t: t)  # raises where a pair has been at work
    return None
