"""Running recorded ops again, so that they give the same bits: the same kernels on the same arguments.

Ops run below autograd, without modes and autocast. What an op changes in place is a copy, unless nobody needs it any more;
random numbers come from a generator of its own in the state of then, so that the program's generators are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _modes_before_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from graphkeep._budget._kind import Kind, changed, default_generator, kind_of, tensors_in
from graphkeep._budget._values import Op, Ref, Scratch, Storage, Value, refs

Find = Callable[[Value], Storage]


class aside:
    """No modes, no autograd, no autocast: for what is done many times in a step, so that it costs little where none is on."""

    __slots__ = ("_below", "_others", "_recorded")

    def __enter__(self) -> None:
        self._others = contextlib.ExitStack() if _is_disturbed() else None
        if self._others is not None:
            self._others.enter_context(_disable_current_modes())
            for device in _AUTOCAST:
                if torch.is_autocast_enabled(device):
                    self._others.enter_context(torch.autocast(device, enabled=False))
        self._recorded = torch.is_grad_enabled()
        _C._set_grad_enabled(True)  # as then: some kernels (oneDNN's LSTM) give more where gradients are wanted
        self._below: Any = _C._AutoDispatchBelowAutograd()
        self._below.__enter__()

    def __exit__(self, *error: object) -> None:
        self._below.__exit__(*error)
        _C._set_grad_enabled(self._recorded)
        if self._others is not None:
            self._others.close()


_AUTOCAST = ("cpu", "cuda")
_modes: Callable[[], int] = _C._len_torch_dispatch_stack


def _is_disturbed() -> bool:
    return bool(_modes() or _modes_before_dispatch() or any(map(torch.is_autocast_enabled, _AUTOCAST)))


class Rerun:
    """One op that runs again.

    Arguments:
        find: the storage of a value that the op reads.
        spent: whether nobody needs a value's storage after this op, so that it may be changed.

    Attributes:
        storages: of its results, by place.
        flops: that it took, as far as torch knows them.
    """

    __slots__ = ("flops", "storages")

    def __init__(self, op: Op, find: Find, spent: Callable[[Value], bool]) -> None:
        kind = kind_of(op.func)
        own: dict[int, Storage] = {}
        for position, name in kind.changes:
            for ref in refs(op.args[position] if position < len(op.args) else op.kwargs.get(name)):
                if id(ref.value) not in own:
                    storage = find(ref.value)
                    own[id(ref.value)] = storage if spent(ref.value) else storage.clone()

        args, kwargs = _built(op.args, find, own), _built(op.kwargs, find, own) if op.kwargs else {}
        dtype = torch.get_default_dtype()
        if dtype is not op.dtype:
            torch.set_default_dtype(op.dtype)
        try:
            out = op.func(*args, **kwargs) if op.generator is None else self._random(op, kind, args, kwargs)
        finally:
            if dtype is not op.dtype:
                torch.set_default_dtype(dtype)
        self.storages = {place: tensor.untyped_storage() for place, tensor in enumerate(tensors_in(out))}
        self.storages |= {-1 - n: tensor.untyped_storage() for n, tensor in enumerate(changed(kind, args, kwargs))}
        count: Any = flop_registry.get(op.func._overloadpacket)
        self.flops = 0 if count is None else int(count(*args, **kwargs, out_val=out))

    def _random(self, op: Op, kind: Kind, args: Any, kwargs: Any) -> Any:
        assert op.generator is not None
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), torch.device("cpu"))
        if kind.generator:
            return op.func(*args, **kwargs, generator=torch.Generator(device).set_state(op.generator))
        generator = default_generator(device)
        assert generator is not None
        now = generator.get_state()
        generator.set_state(op.generator)
        try:
            return op.func(*args, **kwargs)
        finally:
            generator.set_state(now)


# a function of its own: one that is defined inside and calls itself is a cycle, which would hold the storages
def _built(tree: Any, find: Find, own: dict[int, Storage]) -> Any:
    """Arguments with tensors in the places of the `Ref`s."""
    if type(tree) is Ref:
        storage = own.get(id(tree.value))
        return tree.geometry.on(find(tree.value) if storage is None else storage)
    if type(tree) is Scratch:
        g = tree.geometry
        return torch.zeros(g.size, dtype=g.dtype, device=g.device)
    if type(tree) in (tuple, list):
        return type(tree)([_built(item, find, own) for item in tree])
    if type(tree) is dict:
        return {key: _built(item, find, own) for key, item in tree.items()}
    return tree
