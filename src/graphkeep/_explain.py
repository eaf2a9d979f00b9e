"""`explain`: what a graph consists of, what it holds, and whether it has been freed."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from graphkeep import _graph, _saved
from graphkeep._modules import parameter_storages
from graphkeep._saved import State
from graphkeep._storage import StorageSet, format_bytes


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. ``str()`` is for people; Jupyter shows it as a table.

    Attributes:
        nodes: number of nodes in the graph, those of the leaves (`AccumulateGrad`) included.
        saved_bytes: bytes of the unique storages that the nodes hold for their backward, and of tensors that custom functions
            keep on their ``ctx``; parameters and buffers apart.
        saved_tensors: number of saved tensors that are still held.
        parameter_bytes: bytes of the held storages that belong to a leaf of the graph, or to a parameter or a buffer of a
            live module. Freeing the graph does not free them.
        leaves: the leaf tensors that the graph leads to.
        freed_tensors: number of saved tensors that have been freed.
        ops: how many nodes each forward op has, the commonest first.
        hidden_nodes: nodes that may hold tensors which Python cannot see (in-place ops on views, C++ custom functions).
    """

    nodes: int
    saved_bytes: int
    saved_tensors: int
    parameter_bytes: int
    leaves: tuple[torch.Tensor, ...] = field(repr=False)
    freed_tensors: int
    ops: dict[str, int] = field(repr=False)
    hidden_nodes: int

    @property
    def freed(self) -> bool:
        """Whether the graph has been freed: it saved something once, and holds nothing any more."""
        return self.freed_tensors > 0 and self.saved_tensors == 0

    @property
    def state(self) -> str:
        """``no graph``, ``alive``, ``partly freed`` or ``freed``."""
        if not self.nodes:
            return "no graph"
        if self.freed:
            return "freed"
        return "partly freed" if self.freed_tensors else "alive"

    def _rows(self) -> list[tuple[str, str]]:
        rows = [
            ("state", self.state),
            ("nodes", f"{self.nodes:,}"),
            ("saved", f"{format_bytes(self.saved_bytes)} in {self.saved_tensors:,} tensors"),
            ("parameters apart", format_bytes(self.parameter_bytes)),
            ("leaves", f"{len(self.leaves):,}"),
        ]
        if self.freed_tensors:
            rows.append(("freed", f"{self.freed_tensors:,} saved tensors"))
        if self.hidden_nodes:
            rows.append(("hidden", f"{self.hidden_nodes:,} nodes whose contents Python cannot see"))
        most = ", ".join(f"{name} x{count}" for name, count in list(self.ops.items())[:6])
        return [*rows, ("ops", most)] if most else rows

    def __str__(self) -> str:
        if not self.nodes:
            return "no graph: nothing here requires a gradient"
        parts = [
            f"graph: {self.nodes:,} nodes, {len(self.leaves):,} {'leaf' if len(self.leaves) == 1 else 'leaves'}, {self.state}"
        ]
        parts += [f"  {name:<17} {value}" for name, value in self._rows()[2:] if name != "leaves"]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table>{rows}</table>"


def explain(x: object) -> Explanation:
    """Say what the graph behind ``x`` consists of and what it holds. Runs no hook and changes nothing.

    Arguments:
        x: a tensor, a `torch.autograd.graph.GradientEdge`, or a pytree of them, whose graphs are taken as one: a storage that
            two of them hold is counted once. A tensor without a graph gives an explanation with ``nodes == 0``.

    Returns:
        Explanation: counts, and bytes as integers.

    Raises:
        ArgumentTypeError: there is no tensor in ``x``.

    Example:
        >>> import torch, graphkeep as gk
        >>> x = torch.ones(1000, requires_grad=True)
        >>> y = x.exp().sum()
        >>> gk.explain(y).saved_bytes  # the result of exp, float32
        4000
        >>> y.backward()
        >>> gk.explain(y).freed, gk.explain(y).saved_bytes
        (True, 0)
    """
    empty = isinstance(x, (tuple, list, dict)) and not x  # nothing is being watched, which is no mistake
    roots = [] if empty else [edge.node for edge in _graph.edges(x, "x", needs_graph=False)]
    nodes = _graph.reach(roots)
    # one variable can have several accumulators over its life, hence by identity
    leaves = tuple({id(leaf): leaf for leaf in _graph.leaves(nodes)}.values())
    apart = parameter_storages(leaves)
    saved, parameters = StorageSet(), StorageSet()
    held = freed = 0
    for node in nodes:
        for slot in _saved.slots(node):
            held += slot.state in (State.HELD, State.PACKED)
            freed += slot.state is State.FREED
            for storage in _saved.slot_storages(slot):
                (parameters if storage in apart else saved).add(storage)
        for _, tensor in _saved.attributes(node):
            saved.add_tensor(tensor)
    return Explanation(
        nodes=len(nodes),
        saved_bytes=saved.nbytes,
        saved_tensors=held,
        parameter_bytes=parameters.nbytes,
        leaves=leaves,
        freed_tensors=freed,
        ops=_count(_graph.op(node) for node in nodes if _graph.leaf(node) is None),
        hidden_nodes=sum(map(_saved.hides, nodes)),
    )


def _count(ops: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(ops).items(), key=lambda item: (-item[1], item[0])))
