"""Which graphs are alive, who holds them, and when their parts were built.

One look at everything that Python's collector knows. It is taken when somebody asks, never on the way of a training step.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import Node

from graphkeep import _deep, _graph, _saved
from graphkeep._ledger import Entry
from graphkeep._storage import StorageSet
from graphkeep._storage import storages as tensor_storages
from graphkeep._watch._frames import Site
from graphkeep._watch._holders import Holder, find
from graphkeep._watch._timeline import Timeline

_MOST_NODES = 400_000  # of one holder's graph
_LEAF = "AccumulateGrad"
# the getter of the C base class, whatever a subclass makes of the name
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__


@dataclass
class Part:
    """What of a graph was built in one step."""

    nodes: int = 0
    bytes: int = 0


@dataclass
class Held:
    """A holder and the graph that it keeps.

    Attributes:
        holder: who holds it; None where nobody in Python does.
        roots: nodes of the held tensors.
        nodes: all that they lead to.
        bytes: bytes of saved storages, parameters apart.
        parts: the same by step; -1 stands for before the watch.
        sites: the sites of the saved tensors in it.
        root_steps: the steps in which the held tensors were made.
        freed: how many saved tensors in it have been freed.
        used: how many a backward has asked for.
        starts: of a loop that may build one graph, the steps in which a part began that nothing saved links to the others.
    """

    holder: Holder | None
    roots: list[Node] = field(repr=False)
    nodes: int = 0
    bytes: int = 0
    parts: dict[int, Part] = field(default_factory=dict)
    sites: set[Site] = field(default_factory=set, repr=False)
    root_steps: list[int] = field(default_factory=list)
    freed: int = 0
    used: int = 0
    starts: set[int] = field(default_factory=set)


def live_tensors(ignore: Collection[int] = ()) -> list[torch.Tensor]:
    """Every live tensor that has a history; none of those that the compiler traces with."""
    with torch._C.DisableTorchFunction():
        return [
            obj
            for obj in instances(torch.Tensor)
            if id(obj) not in ignore and not type(obj).__module__.startswith(_TRACED) and grad_fn(obj) is not None
        ]


_TRACED = "torch._subclasses."


def instances(kind: type) -> list[Any]:
    """Every live instance of a class or a subclass that the collector knows; runs none of the program's code."""
    kinds: set[type] = {kind}
    todo = [kind]
    while todo:
        subclasses: list[type] = type.__subclasses__(todo.pop())
        new = [sub for sub in subclasses if sub not in kinds]
        kinds.update(new)
        todo += new
    return [obj for obj in gc.get_objects() if type(obj) in kinds]


def grad_fn(tensor: torch.Tensor) -> Node | None:
    try:
        return _GRAD_FN(tensor)
    except RuntimeError:  # a view whose base was changed in a way that torch refuses
        return None


def take(timeline: Timeline, seconds: float = 2.0, ended: BaseException | None = None) -> list[Held]:
    """Every graph that is alive, by holder; the largest first."""
    until = time.monotonic() + seconds
    tensors = live_tensors()
    found: list[Held] = []
    try:
        with torch._C.DisableTorchFunction():
            holders = _find(tensors, seconds, ended)
            reached: set[int] = set()
            for holder in holders:
                roots = [node for i in holder.targets if (node := grad_fn(tensors[i])) is not None]
                if roots and time.monotonic() < until + seconds:
                    found.append(measure(Held(holder, roots), timeline))
                    reached.update(holder.targets)
            rest = [grad_fn(tensor) for i, tensor in enumerate(tensors) if i not in reached]
            alone = _unreachable([node for node in rest if node is not None], found)
            if alone:
                found.append(measure(Held(None, alone), timeline))
    finally:
        tensors.clear()
    return sorted(found, key=lambda held: (-held.bytes, -held.nodes))


def keepers(nodes: set[Node], seconds: float = 2.0) -> list[tuple[Holder, set[Node]]]:
    """Who holds a tensor that leads to some of the given nodes, and to which."""
    tensors = live_tensors()
    try:
        # whoever shares no more than a parameter with a graph does not keep it
        inner = {node for node in nodes if type(node).__name__ != _LEAF} or nodes
        above = _above(inner, [fn for tensor in tensors if (fn := grad_fn(tensor)) is not None])
        tensors[:] = [tensor for tensor in tensors if grad_fn(tensor) in above]
        found = []
        for holder in _find(tensors, seconds):
            roots = [fn for i in holder.targets if (fn := grad_fn(tensors[i])) is not None]
            found.append((holder, walk(roots) & nodes))
        return found
    finally:
        tensors.clear()


def _find(tensors: list[torch.Tensor], seconds: float, ended: BaseException | None = None) -> list[Holder]:
    """Holders of the program's; what a node holds by an entry of ours is no holder."""
    ours = {id(obj) for obj in instances(_saved.Packed)} | {id(tensors)}
    return [h for h in find(tensors, ignore=ours, seconds=seconds, ended=ended) if h.kind != "unknown"]


def _above(nodes: set[Node], roots: Iterable[Node]) -> set[Node]:
    """The nodes from which some of the given ones can be reached."""
    parents = _graph.parents(walk(roots))
    found, todo = set(nodes), list(nodes)
    while todo:
        for parent in parents.get(todo.pop(), ()):
            if parent not in found:
                found.add(parent)
                todo.append(parent)
    return found


def _unreachable(nodes: Iterable[Node], found: list[Held]) -> list[Node]:
    """Of the given nodes those that no held graph leads to."""
    walked = set().union(*(walk(held.roots) for held in found)) if found else set()
    return [node for node in nodes if node not in walked]


def walk(roots: Iterable[Node], most: int = _MOST_NODES) -> set[Node]:
    """All nodes that some roots lead to, up to a number."""
    seen = set(roots)
    stack = list(seen)
    while stack and len(seen) < most:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    _deep.guard(seen)
    return seen


def _is_number(slot: _saved.Slot) -> bool:
    """Whether it is a Python number that an op saved (``x / 3``): a tensor without dimensions that no hook was shown."""
    return slot.packed is None and isinstance(slot.value, torch.Tensor) and slot.value.dim() == 0 and slot.value.grad_fn is None


def learn_ops(roots: Iterable[Node], most: int = 20_000) -> None:
    """Write down at each site of a graph which op saved its tensors there: only the node knows."""
    for node in walk(roots, most):
        for slot in _saved.slots(node):
            if isinstance(slot.packed, Entry) and slot.packed.mark is not None:
                site = slot.packed.mark[0]
                if site.op is None:
                    site.op = _graph.op(node)


def measure(held: Held, timeline: Timeline) -> Held:
    """Fill in what a holder's graph consists of."""
    nodes = walk(held.roots)
    storages, apart = StorageSet(), StorageSet()
    saving: dict[Node, int] = {}  # nodes that saved something, and their steps
    for leaf in _graph.leaves(nodes):
        apart.add_tensor(leaf)
    for node in nodes:
        if type(node).__name__ == _LEAF:
            continue
        slots = list(_saved.slots(node))
        held.freed += sum(slot.state is _saved.State.FREED for slot in slots)
        entries = [slot.packed for slot in slots if isinstance(slot.packed, Entry) and slot.packed.mark is not None]
        held.used += sum(entry.used > 0 for entry in entries)
        # sequence numbers are each thread's own; entries are numbered over all
        numbers = [entry.number for entry in entries if entry.number]
        step = timeline.step_of(numbers[0]) if numbers else timeline.step_of_node(node._sequence_nr())
        if entries:
            saving[node] = step
        part = held.parts.get(step)
        if part is None:
            part = held.parts[step] = Part()
        part.nodes += 1
        held.nodes += 1
        held.sites.update(entry.mark[0] for entry in entries)
        kept = [storage for slot in slots if not _is_number(slot) for storage in _saved.slot_storages(slot)]
        kept += [storage for _, tensor in _saved.attributes(node) for storage in tensor_storages(tensor)]
        for storage in kept:
            if storage not in storages and storage not in apart:
                storages.add(storage)
                part.bytes += storage.nbytes()
    held.bytes = storages.nbytes
    if timeline.unrolls:
        held.starts = _starts(saving)
    learn_ops(held.roots)
    held.root_steps = [timeline.step_of_node(node._sequence_nr()) for node in held.roots]
    return held


def _starts(saving: dict[Node, int]) -> set[int]:
    """The first steps of the parts of a graph, if only what leads from one saved tensor to another holds it together.

    Layers one upon another, or steps of time, are one part. The outputs of several forwards are several, also when they were
    added up: a sum saves nothing.
    """
    parts: dict[Node, Node] = {}

    def part(node: Node) -> Node:
        while (above := parts.setdefault(node, node)) is not node:
            parts[node] = node = parts.setdefault(above, above)
        return node

    met: set[Node] = set()
    for top in saving:
        todo = [top]
        while todo:
            for child, _ in todo.pop().next_functions:
                if child is not None and type(child).__name__ != _LEAF:
                    parts[part(child)] = part(top)
                    if child not in saving and child not in met:
                        met.add(child)
                        todo.append(child)
    first: dict[Node, int] = {}
    for node, step in saving.items():
        first[part(node)] = min(step, first.get(part(node), step))
    return set(first.values())
