"""Reading a graph: its edges, what is reachable, its leaves, and a node's name.

Graphs can be a million nodes deep, so nothing here recurses. A node's Python wrapper is the same object for as long as
somebody holds it, so a set of wrappers is a set of nodes while that set lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from graphkeep import _deep, _saved, _tree
from graphkeep._errors import ArgumentError, ArgumentTypeError


def edges(tree: object, argument: str, *, needs_graph: bool = True) -> list[GradientEdge]:
    """The gradient edges of all tensors and edges in a tree.

    Arguments:
        tree: a tensor, a `GradientEdge`, or a pytree of them. None and members that cannot carry a gradient (integers,
            strings) are passed over as long as one member does.
        argument: the argument's name, for the message.
        needs_graph: refuse a tree in which no tensor has a graph; else the list is empty then.

    Raises:
        ArgumentTypeError: there is no tensor in it, or a member is of a type that cannot be looked into.
        ArgumentError: no tensor in it has a graph, and `needs_graph`.
    """
    found: list[GradientEdge] = []
    tensors = 0
    for member in _tree.flatten(tree):
        if isinstance(member, GradientEdge):
            found.append(member)
        elif isinstance(member, torch.Tensor):
            tensors += 1
            if member.requires_grad:
                found.append(get_gradient_edge(member))
        else:
            refuse_hidden(member, argument)
    if not found and not tensors:
        raise ArgumentTypeError(
            f"`{argument}` holds no tensor, it is {_kind(tree)}",
            instead=f"as `{argument}` a tensor, a GradientEdge, or a tuple, list, dict or dataclass of them",
        )
    if not found and needs_graph:
        raise ArgumentError(
            f"no tensor in `{argument}` requires a gradient, so there is no graph behind it",
            instead=f"as `{argument}` a tensor that was computed, with gradients enabled, from one with requires_grad=True",
        )
    return found


def refuse_hidden(member: object, argument: str) -> None:
    """Raise if a member of a tree is an object that holds tensors where a pytree does not look."""
    place = _tree.hidden_tensor(member)
    if place is not None:
        kind = type(member).__name__
        raise ArgumentTypeError(
            f"`{argument}` holds an object of type {kind}, and {place}, a tensor, would be overlooked",
            instead=f"pass the tensors themselves, make {kind} a dataclass, or register it with "
            "torch.utils._pytree.register_pytree_node",
        )


def _kind(tree: object) -> str:
    if isinstance(tree, (tuple, list, dict)) and not tree:
        return "empty"
    return "of type " + type(tree[0] if isinstance(tree, tuple) and len(tree) == 1 else tree).__name__


def reach(nodes: Iterable[Node], without: Collection[Node] = ()) -> set[Node]:
    """All nodes that a backward from `nodes` would run, less `without` and what lies only behind it."""
    seen = {node for node in nodes if node not in without}
    stack = list(seen)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen and child not in without:
                seen.add(child)
                stack.append(child)
    _deep.guard(seen)
    return seen


def parents(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """For each node that some of the given ones lead to directly, those that do."""
    found: dict[Node, list[Node]] = {}
    for node in nodes:
        for child, _ in node.next_functions:
            if child is not None:
                found.setdefault(child, []).append(node)
    return found


def entries(head: Iterable[Node], trunk: Collection[Node]) -> set[Node]:
    """The nodes of the trunk that some node of the head leads to directly."""
    return {child for node in head for child, _ in node.next_functions if child is not None and child in trunk}


def leaf(node: Node) -> torch.Tensor | None:
    """The leaf tensor whose `.grad` an `AccumulateGrad` node adds to; None for any other node."""
    variable: Any = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
    return variable if isinstance(variable, torch.Tensor) else None


# a leaf that nodes of our own hang on, so that they run in a backward; no gradient ever reaches it
ANCHOR = torch.zeros((), requires_grad=True)


def leaves(nodes: Iterable[Node]) -> Iterator[torch.Tensor]:
    """The leaf tensors of the user's among the nodes."""
    for node in nodes:
        variable = leaf(node)
        if variable is not None and variable is not ANCHOR:
            yield variable


def number(node: Node) -> int:
    """Nodes are numbered as they are made, in each thread; those of leaves come last."""
    return node._sequence_nr()


def op(node: Node) -> str:
    """The forward op of a node, as a user knows it: ``mul`` for ``MulBackward0``, ``MyFunction`` for a custom one."""
    variable = leaf(node)
    if variable is not None:
        return f"a leaf of shape {list(variable.shape)}"
    name = node.name().rpartition("::")[2]
    stem = name.rstrip("0123456789").removesuffix("Backward")
    if _saved.is_custom(node):
        return stem
    if stem == "CopySlices":
        return "an in-place op on a view"
    words = "".join(f"_{c.lower()}" if c.isupper() else c for c in stem).strip("_")
    return words or name
