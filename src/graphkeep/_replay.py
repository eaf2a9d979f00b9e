"""Running a forward again so that it gives the same values: generators, autocast, modes and buffers as they were then.

A forward depends on more than its arguments and parameters. `World` remembers the rest at a moment, and `World.restored` puts
it back for as long as a replay runs: the states of all default generators (CPU and the accelerator's), autocast's settings
with an empty cast cache, every module's ``training`` flag, and the buffers. Buffers are not written to: a module gets copies
for the time of the replay and its own back afterwards, so a replay updates no running statistics (`native_batch_norm` writes
them without a version bump, which rules out looking for changes by version alone).

What it cannot put back: generators of numpy and Python, objects outside modules. A replay's values are compared with those
that were handed out, so these are found out.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from graphkeep import _tree

Key = tuple[nn.Module, str]
_lock = threading.RLock()


def modules_of(fn: object) -> list[nn.Module]:
    """Every module that a callable uses, as far as it can be seen: itself, the object of a bound method, a `partial`'s
    arguments, what a function's closure, defaults and global names hold, and all their submodules.
    """
    found: dict[nn.Module, None] = {}
    seen: set[int] = set()
    stack: list[Any] = [fn]
    while stack:
        obj = stack.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, nn.Module):
            found.update(dict.fromkeys(obj.modules()))
        elif isinstance(obj, functools.partial):
            stack += [obj.func, *obj.args, *obj.keywords.values()]
        elif isinstance(obj, types.MethodType):
            stack += [obj.__self__, obj.__func__]
        elif isinstance(obj, types.FunctionType):
            stack += [getattr(obj, "__wrapped__", None), *(obj.__defaults__ or ()), *(obj.__kwdefaults__ or {}).values()]
            stack += [cell.cell_contents for cell in obj.__closure__ or () if _filled(cell)]
            stack += [obj.__globals__.get(name) for name in _names_used(obj.__code__)]
        elif isinstance(obj, (list, tuple, set, frozenset)):
            stack += obj
        elif isinstance(obj, dict):
            stack += obj.values()
        elif not isinstance(obj, (type, types.ModuleType, torch.Tensor)) and hasattr(obj, "__dict__") and callable(obj):
            stack += vars(obj).values()
    return list(found)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names_used(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_used(constant)


class World:
    """What a forward depends on besides its arguments and parameters, at the moment it is made.

    Arguments:
        modules: the modules whose flags and buffers count.
        before: the world of the chunk before; buffers that did not change are shared with it.
    """

    def __init__(self, modules: Sequence[nn.Module], before: World | None = None) -> None:
        self.generators = generator_states()
        self.autocast = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _device_types()
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.training: list[tuple[nn.Module, bool]] = []
        self.buffers: dict[Key, torch.Tensor] = {}
        self._originals: dict[Key, tuple[torch.Tensor, int]] = {}
        self._lazy: set[Key] = set()
        self._values: dict[int, torch.Tensor] = {}  # by identity of the buffers, which `_originals` holds
        self.include(modules, before)

    def include(self, modules: Iterable[nn.Module], before: World | None = None) -> None:
        """Remember the flags and buffers of these modules as they are now."""
        modules = list(modules)
        self.training += [(module, module.training) for module in modules]
        self._lazy |= {(m, name) for m in modules for name, b in m._buffers.items() if b is not None and is_lazy(b)}
        for key, buffer in _buffers(modules):
            shared = before is not None and key in before.buffers and before.unchanged(key, buffer)
            self._originals[key] = (buffer, _version(buffer))
            if before is not None and shared:
                self.buffers[key] = before.buffers[key]
            else:  # one buffer of two modules stays one
                self.buffers[key] = self._values.setdefault(id(buffer), buffer.detach().clone())

    def unchanged(self, key: Key, buffer: torch.Tensor | None) -> bool:
        """Whether a buffer still has the value that it had here."""
        original, version = self._originals[key]
        if buffer is None:
            return False
        if buffer is original and _version(buffer) == version and not isinstance(key[0], _NormBase):
            return True
        return same_values(buffer, self.buffers[key])

    def changed_by(self, later: World) -> set[Key]:
        """The buffers that changed between this moment and a later one; the worlds between must have been made in order."""
        return {key for key, value in later.buffers.items() if self.buffers.get(key) is not value}

    def drew_random(self, later: World) -> bool:
        """Whether a default generator was used between this moment and a later one."""
        return any(not torch.equal(a, b) for a, b in zip(self.generators, later.generators, strict=True))

    @contextlib.contextmanager
    def restored(self, changing: Iterable[Key] = ()) -> Iterator[None]:
        """The world as it was, for the time of the block. Nothing of it stays, whatever happens inside.

        Arguments:
            changing: buffers that the forward itself changes; the replay gets copies of them to change.
        """
        # one at a time: modules and generators are the process's, and a backward may run in any thread
        with _lock, contextlib.ExitStack() as stack:
            stack.callback(_set_generator_states, generator_states())
            _set_generator_states(self.generators)
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache))
            # casts that are cached carry the graph of the forward that made them
            stack.callback(torch.clear_autocast_cache)
            torch.clear_autocast_cache()
            stack.callback(_set_training, [(module, module.training) for module, _ in self.training])
            _set_training(self.training)
            self._swap_buffers(stack, set(changing))
            stack.enter_context(torch.enable_grad())
            yield

    def _swap_buffers(self, stack: contextlib.ExitStack, changing: set[Key]) -> None:
        copies: dict[int, torch.Tensor] = {}
        for key, value in self.buffers.items():
            module, name = key
            present = module._buffers.get(name)
            if key in changing or not self.unchanged(key, present):
                stack.callback(module._buffers.__setitem__, name, present)
                module._buffers[name] = copies.setdefault(id(value), value.clone())

        for module, name in changing - self.buffers.keys() - self._lazy:  # registered by the forward itself
            stack.callback(module._buffers.__setitem__, name, module._buffers.pop(name, None))

    def put_back(self, key: Key) -> None:
        """Give a buffer the value that it had, for good."""
        with torch.no_grad():
            original, _ = self._originals[key]
            original.copy_(self.buffers[key])
            key[0]._buffers[key[1]] = original


def _buffers(modules: Iterable[nn.Module]) -> Iterator[tuple[Key, torch.Tensor]]:
    for module in modules:
        for name, buffer in module._buffers.items():
            if isinstance(buffer, torch.Tensor) and not is_lazy(buffer):
                yield (module, name), buffer


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _set_training(flags: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in flags:
        module.training = training


def _device_types() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", accelerator.type] if accelerator else ["cpu"]


def generator_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    for device in _device_types()[1:]:
        module: Any = torch.get_device_module(device)
        if getattr(module, "is_initialized", lambda: True)():
            states += [module.get_rng_state(i) for i in range(module.device_count())]
    return states


def _set_generator_states(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device in _device_types()[1:] if len(states) > 1 else ():
        module: Any = torch.get_device_module(device)
        for i, state in enumerate(states[1:]):
            module.set_rng_state(state, i)


def couples_rows(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that mix the samples of a batch as they are set now: batch norms that use batch statistics."""
    return [
        module
        for module in modules
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and (module.training or (module.running_mean is None and module.running_var is None))
    ]


def name_of(module: nn.Module, modules: Iterable[nn.Module]) -> str:
    """``layers.0.norm, a BatchNorm1d``: the longest path by which one of the modules leads to it."""
    paths = [path for root in modules for path, sub in root.named_modules() if sub is module and path]
    kind = type(module).__name__
    return f"`{max(paths, key=len)}`, a {kind}" if paths else f"a {kind}"


# values that a replay gives on other shapes (fewer rows) differ by the order of sums; ten times what a layer shows
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_LOW_PRECISION = 5e-2
_LOOSEST = 0.1
_CANCELLED = 8  # times the dtype's epsilon, that a sum of terms around 1 may be off where it is next to zero


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN being equal to NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def near_values(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> bool:
    """To the dtype's tolerance, relative to each value and to the typical one; integers and booleans exactly."""
    if same_values(a, b):
        return True
    if a.shape != b.shape or a.dtype != b.dtype or not (a.is_floating_point() or a.is_complex()):
        return False
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not same_values(a.masked_fill(finite, 0), b.masked_fill(finite, 0)):
        return False
    a, b = a.masked_fill(~finite, 0), b.masked_fill(~finite, 0)
    gap, size = (a - b).abs(), b.abs()
    # a constant such as -1e9 in a mask must not set the scale of the rest: that is what differs
    typical = size[gap > 0].median()
    limit = min(_TOLERANCE.get(a.dtype, _LOW_PRECISION) * factor, _LOOSEST)
    # where terms cancel, a value next to zero is all rounding, and may be the only one that differs
    nonzero = size[size > 0].flatten()
    small = nonzero.kthvalue(max(len(nonzero) // 10, 1)).values if len(nonzero) else size.new_zeros(())
    floor = torch.minimum(limit * small, small.new_tensor(_CANCELLED * torch.finfo(a.dtype).eps))
    return bool((gap <= limit * (size + typical) + floor).all())


def first_difference(run: Callable[[], object], modules: Iterable[nn.Module]) -> nn.Module | None:
    """The first module, in order of call, whose output differs between two runs of the same thing; None if none does."""
    traces = [_trace(run, modules), _trace(run, modules)]
    for (module, a), (other, b) in zip(*traces, strict=False):
        if module is not other or len(a) != len(b) or not all(map(same_values, a, b)):
            return module
    return None


def _trace(run: Callable[[], object], modules: Iterable[nn.Module]) -> list[tuple[nn.Module, list[torch.Tensor]]]:
    trace: list[tuple[nn.Module, list[torch.Tensor]]] = []

    def record(module: nn.Module, _args: object, output: object) -> None:
        trace.append((module, [t.detach().clone() for t in _tree.flatten(output) if isinstance(t, torch.Tensor)]))

    handles = [module.register_forward_hook(record) for module in modules]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return trace
