"""Running recorded ops again, so that they give the same bits: the same kernels on the same arguments.

Ops run below autograd, without modes and autocast. What an op changes in place is a copy, unless nobody needs it any more;
random numbers come from a generator of its own in the state of then, so that the program's generators are not touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from graphkeep._budget._record import Kind, changed, default_generator, kind_of, tensors_in
from graphkeep._budget._values import Op, Ref, Scratch, Storage, Value, refs

Find = Callable[[Value], Storage]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """No modes, no autograd, no autocast."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_C._AutoDispatchBelowAutograd())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


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

        def built(tree: Any) -> Any:
            if type(tree) is Ref:
                storage = own.get(id(tree.value))
                return tree.geometry.on(find(tree.value) if storage is None else storage)
            if type(tree) is Scratch:
                g = tree.geometry
                return torch.zeros(g.size, dtype=g.dtype, device=g.device)
            if type(tree) in (tuple, list):
                return type(tree)([built(item) for item in tree])
            if type(tree) is dict:
                return {key: built(item) for key, item in tree.items()}
            return tree

        args, kwargs = built(op.args), built(op.kwargs) if op.kwargs else {}
        out = op.func(*args, **kwargs) if op.generator is None else self._random(op, kind, args, kwargs)
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
