"""What a node saved: reading it without side effects, and releasing it.

torch frees a node's saved tensors when a backward without ``retain_graph`` has run it, or when its last reference goes;
there is no public call for it. There is one for replacing a saved tensor by something else, though:
``node._raw_saved_self.register_hooks(pack, unpack)`` calls ``pack`` at once and then holds only what ``pack`` returned.
A ``pack`` that returns None therefore releases the tensor, and an ``unpack`` that raises tells a later backward why
(https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html).

What cannot be released that way: what other saved-tensor hooks have packed (`save_on_cpu`, `checkpoint`: a slot takes one
pair of hooks), and what a node keeps outside its slots (the inner node of `CopySlices`, C++ custom functions, attributes
that a custom `Function` sets on ``ctx``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C._autograd import SavedTensor
from torch.autograd.graph import Node

from graphkeep._errors import FreedGraphError
from graphkeep._storage import Storage, storages
from graphkeep._tree import flatten

_PREFIX = "_raw_saved_"
_RELEASED_BY_TORCH = "backward through the graph a second time"
# torch 2.6 has only `register_hooks`; there the values are read through the node's `_saved_*` attributes instead
_HAS_DATA = hasattr(SavedTensor, "unpack_hook") and hasattr(SavedTensor, "data")
_MARK = "graphkeep.released"
# the names depend on the node's class alone, and there are few classes
_names_of: dict[type, tuple[str, ...]] = {}


class State(enum.Enum):
    """What a slot holds."""

    EMPTY = "empty"  # nothing was saved there
    HELD = "held"  # a tensor
    PACKED = "packed"  # whatever somebody's pack hook returned
    DROPPED = "dropped"  # a budget has dropped it, and brings it back when it is asked for
    FREED = "freed"


class Slot(NamedTuple):
    """One saved tensor of a node: its name (``self``, ``result``), its state, and the tensor or packed object."""

    name: str
    state: State
    value: Any = None
    packed: Packed | None = None  # where hooks of graphkeep's own packed it


class Packed:
    """What saved-tensor hooks of graphkeep's own leave in a slot: it can be read and released like the tensor itself.

    Attributes:
        tensor: what was saved; None once released, or dropped by a budget.
        tombstone: says who released it.
    """

    __slots__ = ("__weakref__", "tensor", "tombstone")
    tensor: torch.Tensor | None
    tombstone: Tombstone | None

    def release(self, tombstone: Tombstone) -> None:
        """Let go of the tensor; a backward that asks for it is told why it is not there."""
        if self.tombstone is None:
            self.tombstone, self.tensor = tombstone, None
            self.released()

    def released(self) -> None:
        """For whoever counts them."""


# While this is a list, unpack hooks of our own put the `Packed` there that they are asked for: torch 2.6 shows what a slot
# holds in no other way.
probe: list[Packed] | None = None


class Tombstone:
    """The unpack hook that is left where a tensor was released: it raises, and says who released it.

    Arguments:
        freed_by: what freed the graph, for example ``gk.discard(loss) at train.py:12``.
        instead: what to write to keep it.
    """

    __slots__ = ("freed_by", "instead")

    def __init__(self, freed_by: str, instead: str) -> None:
        self.freed_by = freed_by
        self.instead = instead

    def __call__(self, _packed: object) -> torch.Tensor:
        raise self.error()

    def error(self) -> FreedGraphError:
        """What a backward is told."""
        return FreedGraphError(
            "this part of the graph has been freed, and a backward asked for what it had saved",
            where=f"freed by {self.freed_by}",
            instead=self.instead,
        )


def _drop(_tensor: torch.Tensor) -> None:
    """The pack hook that releases."""


def _names(node: Node) -> tuple[str, ...]:
    kind = type(node)
    names = _names_of.get(kind)
    if names is None:
        names = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
        _names_of[kind] = names
    return names


def _raw(node: Node, name: str) -> tuple[Any, ...] | None:
    """The `SavedTensor`s under one attribute (several for a list), or None where torch has freed them.

    They point into the node: use them before anything else touches it, and do not keep them.
    """
    try:
        raw = getattr(node, name)
    except RuntimeError:  # custom Functions raise once freed
        return None
    return raw if isinstance(raw, tuple) else (raw,)


def is_custom(node: object) -> bool:
    """Whether the node belongs to a custom `torch.autograd.Function`; it is then that function's ``ctx``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _value_name(node: Node, name: str) -> str:
    return "saved_tensors" if is_custom(node) else f"_saved_{name}"


def slots(node: Node) -> Iterator[Slot]:
    """Every saved tensor of a node. Runs no hook, checks no version, changes nothing."""
    for attribute in _names(node):
        name = attribute.removeprefix(_PREFIX)
        raws = _raw(node, attribute)
        if raws is None:
            yield Slot(name, State.FREED)
        elif _HAS_DATA:
            for raw in raws:
                yield _read(name, raw)
        else:
            yield from _read_by_value(node, name)


def _read(name: str, raw: Any) -> Slot:
    if raw is None:  # an optional member of a list, or None given to save_for_backward
        return Slot(name, State.EMPTY)
    unpack = raw.unpack_hook
    if unpack is not None:
        if isinstance(raw.data, Packed):
            return _read_packed(name, raw.data)
        return Slot(name, State.FREED) if isinstance(unpack, Tombstone) else Slot(name, State.PACKED, raw.data)
    value = raw.data
    if value is not None:
        return Slot(name, State.HELD, value)
    try:
        raw.unpack()  # None where nothing was saved, raises where it has been freed
    except RuntimeError:
        return Slot(name, State.FREED)
    return Slot(name, State.EMPTY)


def _read_packed(name: str, packed: Packed) -> Slot:
    if packed.tombstone is not None:
        return Slot(name, State.FREED, packed)
    return Slot(name, State.DROPPED if packed.tensor is None else State.HELD, packed.tensor, packed)


def _read_by_value(node: Node, name: str) -> Iterator[Slot]:
    value, error, asked = _ask(node, name)
    if asked:
        yield from (_read_packed(name, packed) for packed in asked)
    elif isinstance(error, FreedGraphError):
        yield Slot(name, State.FREED)
    elif error is not None:
        # any other error (a version that changed) comes from a slot that does hold something we cannot see
        yield Slot(name, State.FREED if _RELEASED_BY_TORCH in str(error) else State.PACKED)
    else:
        for item in value if isinstance(value, tuple) else (value,):
            yield Slot(name, State.EMPTY) if item is None else Slot(name, State.HELD, item)


def _ask(node: Node, name: str) -> tuple[Any, Exception | None, list[Packed]]:
    """A value by torch's public attribute: that or the error, and the packed objects of our own behind it."""
    global probe  # noqa: PLW0603
    before, probe = probe, []
    try:
        return getattr(node, _value_name(node, name)), None, probe
    except Exception as error:
        return None, error, probe
    finally:
        probe = before


def slot_storages(slot: Slot) -> list[Storage]:
    """The storages that a slot keeps alive, those inside a packed object (a tensor or a pytree of them) too."""
    if slot.state is State.HELD:
        return list(storages(slot.value))
    if slot.state is not State.PACKED:
        return []
    tensors = (member for member in flatten(slot.value) if isinstance(member, torch.Tensor))
    return [storage for tensor in tensors for storage in storages(tensor)]


def release(node: Node, tombstone: Tombstone) -> bool:
    """Free what a node saved.

    Returns:
        False if a slot stays as it is because other saved-tensor hooks own it.
    """
    done = True
    for attribute in _names(node):
        for raw in _raw(node, attribute) or ():
            if raw is None:
                continue
            if _HAS_DATA and (raw.unpack_hook is not None or raw.data is None):
                if isinstance(raw.data, Packed):
                    raw.data.release(tombstone)
                else:
                    done = done and (raw.unpack_hook is None or isinstance(raw.unpack_hook, Tombstone))
                continue
            try:
                raw.register_hooks(_drop, tombstone)
                if not _HAS_DATA:
                    _metadata(node)[_MARK] = True  # there, nothing tells our hooks from other ones
            except RuntimeError as error:  # torch 2.6: empty, freed, or owned, told apart by its message only
                done = done and ("have already been set" not in str(error) or _release_asked(node, attribute, tombstone))
    return done


def _release_asked(node: Node, attribute: str, tombstone: Tombstone) -> bool:
    """Release what our own hooks packed, on a torch that shows it to nobody else."""
    if _MARK in _metadata(node):
        return True
    asked = _ask(node, attribute.removeprefix(_PREFIX))[2]
    for packed in asked:
        packed.release(tombstone)
    return bool(asked)


def _metadata(node: Any) -> dict[str, Any]:
    return node.metadata  # torch's stub has a method there


def release_all(nodes: Iterable[Node], tombstone: Tombstone) -> list[Node]:
    """Free what the nodes saved; returns those that may hold something still."""
    # a list first: every node has to be released, whatever the one before it answered
    released = [(node, release(node, tombstone)) for node in nodes]
    return [node for node, done in released if not done or hides(node)]


def check(node: Node) -> None:
    """Raise torch's own error if a backward through this node would: freed before, or changed in place since.

    Slots that other saved-tensor hooks own are not touched: unpacking them may recompute a forward. Nor are those that a
    budget has dropped: it checks them when it brings them back.
    """
    for attribute in _names(node):
        name = attribute.removeprefix(_PREFIX)
        raws = _raw(node, attribute) or ()
        if _HAS_DATA and any(raw is not None and (_is_foreign(raw) or _is_dropped(raw)) for raw in raws):
            continue
        getattr(node, _value_name(node, name))


def _is_foreign(raw: Any) -> bool:
    hook = raw.unpack_hook
    return hook is not None and not isinstance(hook, Tombstone) and not isinstance(raw.data, Packed)


def _is_dropped(raw: Any) -> bool:
    return _read("", raw).state is State.DROPPED


def hides(node: Node) -> bool:
    """Whether the node may hold tensors that Python can neither see nor free.

    `CopySlices` (an in-place op on a view) owns the node of that op; C++ custom functions and `_foreach` ops own theirs.
    """
    return type(node).__name__ in ("CopySlices", "CppFunction")


def attributes(node: Node) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that a custom `Function` keeps as attributes of ``ctx``; they go only with the node."""
    if is_custom(node):
        for name, value in vars(node).items():
            if isinstance(value, torch.Tensor):
                yield name, value
