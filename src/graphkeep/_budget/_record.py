"""The record of ops: what made each storage, written down while a graph is being built.

A `Mode` (a dispatch mode, one for each thread) passes every aten op on to the `Record`. Views cost one look-up; an op that
computes is written down with a reference to the *value* of each storage that it reads, never to a tensor, so that the record
keeps nothing alive but what cannot be made again. What ran before the first op with a history is no part of the graph: its
results are the graph's inputs.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from graphkeep._budget import _roofline
from graphkeep._budget._kind import Kind, changed, count_changes, default_generator, is_plain, kind_of, tensors_in
from graphkeep._budget._section import Section
from graphkeep._budget._trace import Trace
from graphkeep._budget._values import Alive, Kept, Op, Ref, Scratch, Storage, Value, checksum, geometry
from graphkeep._distributed import Gathered

if TYPE_CHECKING:
    from graphkeep._budget._meter import Meter

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_grad_enabled = torch.is_grad_enabled
_now = time.perf_counter
_stack: Callable[[], Any] = _get_current_dispatch_mode_stack
SMALL = 1 << 14  # bytes of a result of a random op that is rather kept than drawn again: a generator's state takes 5,056


class Mode(TorchDispatchMode):
    """Shows a record the ops of one thread.

    Arguments:
        meter, room: where all that is allocated counts: what does, and what makes room for so many bytes.
    """

    def __init__(self, record: Record, meter: Meter | None = None, room: Callable[[int], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record
        self.off = 0  # above 0, ops are run and not written down
        self.within = -1  # the sequence number at which it was put on in the middle of an op; no new node has been made since
        self.meter = meter
        self.room = room

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What `torch.compile` has compiled runs as it is; without this nothing is compiled while the mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = kind_of(func)
        if (kind.view and not kind.collective) or (self.record.idle and not kind.writes) or self.record.closed:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.meter is not None and self.room is not None:
            self.room(self.meter.need(func, kind, args, kwargs or {}))
            out = self._run(func, kind, args, kwargs)
            self.meter.saw(out, changed(kind, args, kwargs or {}))
            return out
        return self._run(func, kind, args, kwargs)

    def _run(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        if kind.lists:
            versions = [tensor._version for tensor in changed(kind, args, kwargs or {})]
        if self.within >= 0 and self.within != _sequence_number():
            self.within = -1
        if self.off:
            out = func(*args, **kwargs) if kwargs else func(*args)
        elif self.within >= 0 or (self.record.idle and not self.record.knows(changed(kind, args, kwargs or {}))):
            out = self.record.run_unwritten(func, kind, args, kwargs or {}, own=False)
        else:
            out = self.record.run(func, kind, args, kwargs or {})
        if kind.lists:  # with a dispatch mode active torch does not count these changes
            count_changes(changed(kind, args, kwargs or {}), versions)
        return out


class Owner(Protocol):
    """Whom a record tells."""

    def changing(self, value: Value) -> None:
        """An op is about to change the storage of a value without an op, which ops have read."""

    def follow(self, old: Value, new: Value, storage: Storage) -> None:
        """Who has saved the first of two values on the same storage has the second from now on."""

    def changed(self, old: Value, new: Value) -> None:
        """What somebody has saved was changed in place: a version error, unless what was saved does not count that change."""

    def alone(self, value: Value) -> None:
        """The program has let go of an input that ops have read which may run again."""

    def end_step(self) -> None:
        """The first op runs after the last graph has gone."""


class Record:
    """Which op made each storage that is alive.

    Arguments:
        owner: is told what happens, and held weakly.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner: Callable[[], Owner | None] = weakref.ref(owner)
        self.lock = Section()
        self.resting = False  # the last graph has gone
        self.begun = False  # an op with a history has run
        self.idle = False  # for now, only what changes something is looked at
        self.closed = False  # nobody listens any more; a thread that nobody has told may still have the mode on
        self.trace = Trace()
        self.small = 0  # integer results of so many bytes at most are kept
        self._made: dict[int, Value] = {}
        self._leaves: weakref.WeakValueDictionary[int, Value] = weakref.WeakValueDictionary()
        self._gone = functools.partial(_gone, self._made)
        self._gathered = Gathered()

    def forget(self) -> None:
        """A step has ended: what there is now are the inputs of the next, but for what graphs have saved that live on."""
        known = [(key, value) for key, value in list(self._made.items()) if value.slots]
        self._made.clear()
        self._made.update(known)
        self.trace = Trace()
        self.begun = self.resting = self.idle = False

    def close(self) -> None:
        """Nobody listens any more."""
        self.closed = True
        self.forget()
        self._made.clear()

    def value_of(self, storage: Storage) -> Value | None:
        """What a storage holds now; None if the record has not seen it."""
        return self._made.get(storage._cdata) or self._leaves.get(storage._cdata)

    def knows(self, tensors: list[torch.Tensor]) -> bool:
        """Whether one of them has been made by the graph, as far as that is written down."""
        values = [self.value_of(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)]
        return any(value is not None and not value.apart for value in values)

    def guard(self) -> bool:
        """A backward begins: if hooks of leaves may change leaves in it, be able to tell. Whether they may."""
        leaves = list(self._leaves.values())
        may = any(_has_hooks(tensor) for leaf in leaves if (tensor := leaf.seen()) is not None)
        for leaf in leaves if may else ():
            if leaf.checksum is None and leaf.kept is not None and leaf.current:
                leaf.checksum = checksum(leaf.kept.storage)
        return may

    def adopt(self, storage: Storage) -> Value:
        """A storage of the graph that the record has not seen being made: it cannot be made again."""
        return self._make(None, 0, storage)

    # an op ----------------------------------------------------------------------------------------------------------------

    def run(self, func: Any, kind: Kind, args: Any, kwargs: Any) -> Any:
        """Run an op and write it down."""
        owner = self.owner()
        if self.resting and owner is not None:
            owner.end_step()
        if not self.begun and _grad_enabled():
            self.begun = any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        if not self.begun or not _grad_enabled():
            return self.run_unwritten(func, kind, args, kwargs)
        norm = kind.statistics >= 0 and len(args) > kind.training and bool(args[kind.training])
        changes = self._about_to_change(kind, args, kwargs, norm)
        before = [value for storage in changes if (value := self.value_of(storage)) is not None] if changes else []
        values: dict[int, Value] = {}
        op: Op | None = None
        if not kind.opaque and (norm or all(map(self._can_be_had, changes))):
            reads = args
            if norm:  # its results do not depend on the statistics, and running it again must not move them
                k = kind.statistics
                reads = (*args[:k], *(None if t is None else Scratch(geometry(t)) for t in args[k : k + 2]), *args[k + 2 :])
            try:
                if _modes() and any(map(_alters, _stack())):  # without it, the op would give something else
                    raise _OpaqueError
                written = self._written(reads, values)
                op = Op(func, written, self._written(kwargs, values) if kwargs else kwargs, tuple(values.values()))
                for value in op.reads:
                    if value.op is None:
                        value.readers.append(weakref.ref(op))
            except _OpaqueError:
                op = None
        if kind.random:
            out, op = self._random(func, kind, args, kwargs, op)
        else:
            begun = _now()
            out = func(*args, **kwargs)
            if op is not None:
                op.seconds = _now() - begun
        if op is not None:
            some = next(tensors_in(out), None)
            if some is not None and not _roofline.waits(some):
                with _disable_current_modes():
                    nbytes = sum([value.nbytes for value in op.reads]) + sum([t.nbytes for t in tensors_in(out)])
                    op.seconds = _roofline.seconds(func, args, kwargs, out, nbytes)
        with self.lock:  # another thread may be at it, or end the step
            if op is not None:
                op.traced = self.trace.add_op(op, _sequence_number() - 1, before)
            elif before:
                self.trace.hidden_changes = True
            if norm or kind.collective:
                for storage in changes:
                    self._lost(storage, counted=False)
            elif changes:
                for n, tensor in enumerate(changed(kind, args, kwargs)):
                    if is_plain(tensor):
                        self._new_version(op, -1 - n, tensor, kind.counted)
            self._results(op, out, values if op is not None else None, args, kwargs)
        return out

    def run_unwritten(self, func: Any, kind: Kind, args: Any, kwargs: Any, own: bool = True) -> Any:
        """Run an op that is not written down, but for what it changes.

        Arguments:
            own: whether what it makes is known from then on, as something that cannot be made again.
        """
        norm = kind.statistics >= 0 and len(args) > kind.training and bool(args[kind.training])
        changes = self._about_to_change(kind, args, kwargs, norm)
        out = func(*args, **kwargs)
        with self.lock:
            for storage in changes:
                self.trace.hidden_changes = self.trace.hidden_changes or self.value_of(storage) is not None
                self._lost(storage, counted=not (norm or kind.collective))
            if self.begun and own:
                self._results(None, out, None, args, kwargs)
        return out

    def _random(self, func: Any, kind: Kind, args: Any, kwargs: Any, op: Op | None) -> tuple[Any, Op | None]:
        generator = kwargs.get("generator")
        device = next((tensor.device for tensor in tensors_in((args, kwargs))), None)
        if generator is None:
            generator = default_generator(device)
        if op is None or generator is None:
            return func(*args, **kwargs), None
        before = generator.get_state()
        begun = _now()
        out = func(*args, **kwargs)
        op.seconds = _now() - begun
        if not torch.equal(before, generator.get_state()):
            drawn = sum(t.untyped_storage().nbytes() for t in [*tensors_in(out), *changed(kind, args, kwargs)] if is_plain(t))
            if drawn <= SMALL or not (kind.generator or (device is not None and device.type == "cuda")):
                return out, None
            op.generator = before
        if "generator" in op.kwargs:
            op.kwargs = {key: value for key, value in op.kwargs.items() if key != "generator"}
        return out, op

    def _about_to_change(self, kind: Kind, args: Any, kwargs: Any, norm: bool) -> list[Storage]:
        """The storages that an op changes; who needs what they hold now is told."""
        if norm:
            tensors: Any = [t for t in args[kind.statistics : kind.statistics + 2] if t is not None]
        elif kind.collective:
            tensors = list(tensors_in((args, kwargs)))
        elif kind.changes:
            tensors = changed(kind, args, kwargs)
        else:
            return []
        found = {}
        for tensor in tensors:
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage
        for key in found:
            value = self._leaves.get(key) or self._made.get(key)
            if value is not None and value.op is None and value.needed:
                owner = self.owner()
                if owner is not None:
                    owner.changing(value)
        return list(found.values())

    def _can_be_had(self, storage: Storage) -> bool:
        """Whether what a storage holds can be made again once it was changed in place."""
        value = self._made.get(storage._cdata)
        return value is not None and value.op is not None

    def _lost(self, storage: Storage, counted: bool) -> None:
        """A storage was changed, which is not written down; who has saved it sees the change unless torch counts it."""
        value = self._made.pop(storage._cdata, None)
        leaf = self._leaves.pop(storage._cdata, None)
        for old in (value, leaf):
            if old is not None:
                old.current = False
        old = value or leaf
        if old is not None and not old.apart:
            new = self._make(None, 0, storage)
            self._tell(old, new, storage, counted)

    def _tell(self, old: Value, new: Value, storage: Storage, counted: bool) -> None:
        owner = self.owner()
        if owner is not None and (old.slots or old.late):
            if counted:
                owner.changed(old, new)
            else:
                owner.follow(old, new, storage)

    # arguments and results ------------------------------------------------------------------------------------------------

    def _written(self, tree: Any, values: dict[int, Value]) -> Any:
        """Arguments with a `Ref` for each tensor; the values that they stand on are put in ``values`` by storage."""
        kind = type(tree)
        if kind is tuple or kind is list:
            written = []
            for item in tree:
                kind = type(item)
                if kind in _PLAIN or isinstance(item, torch.Tensor):
                    written.append(self._ref(item, values))
                elif kind is list or kind is tuple or kind is dict:
                    written.append(self._written(item, values))
                else:
                    written.append(item)
            return written if type(tree) is list else tuple(written)
        if kind is dict:
            return {key: self._written(item, values) for key, item in tree.items()}
        return self._ref(tree, values) if isinstance(tree, torch.Tensor) else tree

    def _ref(self, tensor: torch.Tensor, values: dict[int, Value]) -> Ref:
        if not is_plain(tensor):
            raise _OpaqueError
        storage = tensor.untyped_storage()
        key = storage._cdata
        value = values.get(key)
        if value is None:
            value = self._made.get(key)
            if value is None:
                value = self._leaf(tensor, storage)
            elif value.op is None and not (value.slots or value.kept):
                # it cannot be made again, and to keep it would take more than the graph does without a budget
                raise _OpaqueError
            elif value.op is not None and not storage.resizable():  # numpy has it, and may have written into it
                self._lost(storage, counted=False)
                raise _OpaqueError
            values[key] = value
        return Ref(value, geometry(tensor))

    def _leaf(self, tensor: torch.Tensor, storage: Storage) -> Value:
        """A parameter or an input: it is kept for as long as an op that read it is."""
        key = storage._cdata
        value = self._leaves.get(key)
        if value is None or not value.current:
            base = tensor if tensor._base is None else tensor._base
            if (tensor.requires_grad and not base.is_leaf) or storage in self._gathered:
                raise _OpaqueError  # the graph's, and made where nobody looked; or not there when it is wanted
            value = Value(None, 0, storage.nbytes(), weakref.ref(storage))
            value.apart = True
            value.watch(base)
            value.kept = Kept(storage, None)
            if not tensor.requires_grad and type(base) is torch.Tensor:
                if storage.device.type == "cpu":
                    value.checksum = checksum(storage)
                if self.begun:
                    value.witness = weakref.ref(base, functools.partial(_let_go_of, self.owner, weakref.ref(value)))
            self._leaves[key] = value
        return value

    def _results(self, op: Op | None, out: Any, read: dict[int, Value] | None, args: Any, kwargs: Any) -> None:
        if type(out) in _PLAIN:
            self._result(op, 0, out, read, args, kwargs)
        else:
            for place, tensor in enumerate(tensors_in(out)):
                self._result(op, place, tensor, read, args, kwargs)

    def _result(self, op: Op | None, place: int, out: Any, read: dict[int, Value] | None, args: Any, kwargs: Any) -> None:
        if not is_plain(out):
            return
        storage = out.untyped_storage()
        key = storage._cdata
        if key in self._made:
            return
        if read is None:
            if key in self._leaves or any(
                is_plain(t) and t.untyped_storage()._cdata == key for t in tensors_in((args, kwargs))
            ):
                return
        elif key in read or (op is not None and op.made and key in self._leaves):
            return
        value = self._make(op, place, storage, out)
        if op is not None and value.nbytes <= self.small and not (out.is_floating_point() or out.is_complex()):
            value.pinned = INDICES

    def _make(self, op: Op | None, place: int, storage: Storage, tensor: torch.Tensor | None = None) -> Value:
        key = storage._cdata
        alive = Alive(storage, self._gone)
        alive.key = key
        value = Value(op, place, storage.nbytes(), alive)
        if tensor is not None:
            value.watch(tensor)
        if op is not None:
            op.made.append((place, weakref.ref(value)))
            op.nbytes += value.nbytes
        self.trace.add(value, -1 if op is None else op.traced)
        self._made[key] = value
        return value

    def _new_version(self, op: Op | None, place: int, tensor: torch.Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        old = self._made.pop(storage._cdata, None) or self._leaves.pop(storage._cdata, None)
        if old is not None:
            old.current = False
            # a parameter, a buffer or an input is what it is; the rest is the graph's
            if not old.apart:
                new = self._make(op, place, storage, tensor)
                new.version += counted  # torch counts it after the op has run
                self._tell(old, new, storage, counted)


def _let_go_of(owner: Callable[[], Owner | None], value: Callable[[], Value | None], _tensor: object) -> None:
    who, what = owner(), value()
    if who is not None and what is not None:
        who.alone(what)


def _has_hooks(leaf: Any) -> bool:
    return bool(leaf._backward_hooks) or bool(getattr(leaf, "_post_accumulate_grad_hooks", None))


def _gone(made: dict[int, Value], alive: Alive) -> None:
    value = made.get(alive.key)
    if value is not None and value.ref is alive:
        del made[alive.key]


class _OpaqueError(Exception):
    pass


def _alters(mode: object) -> bool:
    """Whether a dispatch mode of the program's may change results."""
    return type(mode).__name__ not in _HARMLESS and not isinstance(mode, Mode)


_HARMLESS = ("FlopCounterMode", "_FlopCounterMode", "CommDebugMode", "_CachingTorchDispatchMode", "_CachedTorchDispatchMode")


INDICES = "its few integers (indices, a mask) must not come out otherwise"
