"""The record of ops: a dispatch mode that writes down what made each storage, while a graph is being built."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphkeep._budget._plan import Trace
from graphkeep._budget._values import Op, Ref, Scratch, Storage, Value, geometry

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_aten = torch.ops.aten


class Kind(NamedTuple):
    """What is known of an op from its schema.

    Attributes:
        view: whether all it gives are views of what it was given.
        changes: position and name of each argument that it changes.
        random: whether it may draw random numbers.
        statistics: position of the first of two running statistics that a batch norm writes without saying so; -1: none.
        training: position of its argument that says whether it does.
    """

    view: bool
    changes: tuple[tuple[int, str], ...]
    random: bool
    statistics: int
    training: int


@functools.cache
def kind_of(func: Any) -> Kind:
    schema = func._schema
    changes = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    view = not changes and bool(schema.returns) and all(result.alias_info is not None for result in schema.returns)
    names = [argument.name for argument in schema.arguments]
    statistics = names.index("running_mean") if "running_mean" in names and "running_var" in names else -1
    training = next((i for i, name in enumerate(names) if name in ("training", "train", "is_training")), -1)
    if changes or training < 0:
        statistics = -1
    return Kind(view, changes, torch.Tag.nondeterministic_seeded in func.tags, statistics, training)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_in(item)


def changed(kind: Kind, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an op changes, in order."""
    found: list[torch.Tensor] = []
    for position, name in kind.changes:
        found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


class Record(TorchDispatchMode):
    """Which op made each storage that is alive.

    Attributes:
        off: above 0, ops are run and not written down.
        changing: is told of a value before an op changes its storage.
    """

    def __init__(self, changing: Callable[[Value], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.off = 0
        self.changing = changing
        self.trace = Trace()
        self._made: dict[int, Value] = {}
        self._leaves: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()

    def forget(self) -> None:
        """No graph is alive: what there is now are the inputs of the next."""
        self._made.clear()
        self.trace = Trace()

    def value_of(self, storage: Storage) -> Value | None:
        """What a storage holds now; None if no op of the record made it."""
        return self._made.get(storage._cdata) or self._leaves.get(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.off:
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind.view:
            return func(*args, **kwargs)
        before = self._before(kind, args, kwargs) if kind.changes else []
        norm = kind.statistics >= 0 and len(args) > kind.training and bool(args[kind.training])
        if norm:
            before = self._statistics(args[kind.statistics : kind.statistics + 2])
        if not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            for storage in before:
                self._lost(storage)
            return out
        out = self._run(func, kind, args, kwargs, norm)
        if norm:
            for storage in before:
                self._lost(storage)
        return out

    def _statistics(self, tensors: Any) -> list[Storage]:
        found = [tensor.untyped_storage() for tensor in tensors if type(tensor) in _PLAIN]
        for storage in found:
            value = self._made.get(storage._cdata) or self._leaves.get(storage._cdata)
            if value is not None:
                self.changing(value)
        return found

    def _before(self, kind: Kind, args: Any, kwargs: Any) -> list[Storage]:
        found = {}
        for tensor in changed(kind, args, kwargs):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
        for key in found:
            value = self._made.get(key) or self._leaves.get(key)
            if value is not None:
                self.changing(value)
        return list(found.values())

    def _lost(self, storage: Storage) -> None:
        """A storage was changed in a way that is not written down."""
        value = self._made.pop(storage._cdata, None) or self._leaves.pop(storage._cdata, None)
        if value is not None:
            value.current, value.kept = False, None

    def _run(self, func: Any, kind: Kind, args: Any, kwargs: Any, norm: bool) -> Any:
        state = _generators(args, kwargs) if kind.random else None
        try:
            reads = args
            if norm:  # its results do not depend on the statistics; running it again must not move them
                k = kind.statistics
                reads = (*args[:k], *(None if t is None else Scratch(geometry(t)) for t in args[k : k + 2]), *args[k + 2 :])
            written = self._written(reads), self._written(kwargs)
        except _OpaqueError:
            written = None
        begun = time.perf_counter()
        out = func(*args, **kwargs)
        seconds = time.perf_counter() - begun
        if written is not None and (state is None or state == _generators(args, kwargs)):
            op = Op(func, *written, seconds)
            op.number = self.trace.add_op(seconds, tuple(self.trace.number_of(value) for value in op.reads))
        else:
            op = None
        keys = self._keys(args, kwargs)
        for n, tensor in enumerate(changed(kind, args, kwargs)):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                self._new_version(op, -1 - n, tensor.untyped_storage())
        for place, tensor in enumerate(tensors_in(out)):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
                storage = tensor.untyped_storage()
                if storage._cdata not in keys and storage._cdata not in self._made:
                    self._make(op, place, storage)
        return out

    def _keys(self, args: Any, kwargs: Any) -> set[int]:
        found = set()
        for tensor in tensors_in((args, kwargs)):
            if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
                found.add(tensor.untyped_storage()._cdata)
        return found

    def _written(self, tree: Any) -> Any:
        """Arguments with a `Ref` for each tensor."""
        if isinstance(tree, torch.Tensor):
            if type(tree) not in _PLAIN or tree.layout is not torch.strided or tree.is_nested:
                raise _OpaqueError
            return Ref(self._read(tree.untyped_storage()), geometry(tree))
        if type(tree) in (tuple, list):
            return type(tree)(self._written(item) for item in tree)
        if type(tree) is dict:
            return {key: self._written(item) for key, item in tree.items()}
        if isinstance(tree, torch.Generator):
            raise _OpaqueError
        return tree

    def _read(self, storage: Storage) -> Value:
        key = storage._cdata
        value = self._made.get(key)
        if value is not None and value.op is None:  # it cannot be made again: who reads it keeps it
            del self._made[key]
            value.kept = storage
            self._leaves[key] = value
        elif value is None:
            value = self._leaves.get(key)
            if value is None or not value.current:
                value = Value(None, 0, storage)
                value.kept, value.apart = storage, True
                self._leaves[key] = value
        return value

    def _make(self, op: Op | None, place: int, storage: Storage) -> None:
        value = Value(op, place, storage)
        key = storage._cdata
        made = self._made

        def gone(ref: Any) -> None:
            if made.get(key) is not None and made[key].alive is ref:
                del made[key]

        value.alive = weakref.ref(storage, gone)
        if op is not None:
            op.made.append((place, weakref.ref(value)))
        self.trace.add(value, -1 if op is None else op.number)
        made[key] = value

    def _new_version(self, op: Op | None, place: int, storage: Storage) -> None:
        key = storage._cdata
        old = self._made.pop(key, None)
        if old is not None:
            old.current = False
            # what cannot be made again is gone now
            self._make(op if old.op is not None else None, place, storage)
        else:  # a parameter, a buffer, an input: it is what it is
            leaf = self._leaves.pop(key, None)
            if leaf is not None:
                leaf.current, leaf.kept = False, None


class _OpaqueError(Exception):
    pass


def _generators(args: Any, kwargs: Any) -> list[Any]:
    """The states of the generators that an op may draw from; equal before and after, it drew nothing."""
    states: list[Any] = [torch.default_generator.get_state().numpy().tobytes()]
    if torch.cuda.is_initialized():
        states += [generator.get_state().numpy().tobytes() for generator in torch.cuda.default_generators]
    return states
