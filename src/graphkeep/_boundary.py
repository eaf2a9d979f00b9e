"""What stands at the boundary of a cut: the node of a stand-in, the gradient that arrives there, and what it refuses.

A backward that reaches a stand-in must reach nothing else of the cut: not the trunk by a path around (its nodes would run now
and again on leaving, hooks twice, each time with a part of the gradient), and no cut that has closed or was dropped, or its
gradient would be lost without a word.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from graphkeep import _distributed, _engine, _graph, _saved
from graphkeep._eager import eager
from graphkeep._errors import ArgumentError, BypassedCutError, ChangedGraphError, ClosedCutError


class Trunk:
    """The part of a graph below a cut, as long as the cut is open.

    Arguments:
        where: the line of the user's that made the cut.
        cut: a weak reference to its object.

    Attributes:
        edges, nodes, leaves: what it consists of, once it has been read; empty again when the cut has closed.
        reached: the ids of leaves that have had a gradient from a head, where somebody counts them.
    """

    def __init__(self, where: str, cut: Callable[[], object]) -> None:
        self.where = where
        self.cut = cut
        self.closed = False
        self.edges: list[GradientEdge] = []
        self.nodes: set[Node] = set()
        self.leaves: list[torch.Tensor] = []
        self.reached: set[int] = set()
        self._bottom: list[Node] = []

    def read(self, edges: list[GradientEdge]) -> None:
        self.edges = edges
        self.nodes = _graph.reach(edge.node for edge in edges)
        for node in self.nodes:
            children = node.next_functions
            if not children:
                variable = _graph.leaf(node)
                if variable is not None and variable is not _graph.ANCHOR:
                    self.leaves.append(variable)
            # whatever enters the trunk runs one of the nodes that have only leaves below them
            elif not any(child is not None and child.next_functions for child, _ in children):
                self._bottom.append(node)

    def close(self) -> None:
        self.closed = True
        self.edges, self.nodes, self.leaves, self._bottom = [], set(), [], []

    def refuse_bypass(self) -> None:
        """Raise if the backward that is running now enters the trunk."""
        if any(map(_runs, self._bottom)):
            running = {node for node in self.nodes if node.next_functions and _runs(node)}
            entered = running - {child for node in running for child, _ in node.next_functions}
            names = ", ".join(sorted(map(_graph.op, entered)))
            raise BypassedCutError(
                "a head leads to the trunk of its cut by a path around the stand-ins",
                where=f"the result of {names}, below gk.cut() at {self.where}",
                instead="cut that tensor too, `with gk.cut((x, skip)) as (x, skip):`, and use its stand-in in the head. If it "
                "is none of yours: parametrize.cached() keeps what it made of a weight; one context for trunk, one for heads",
            )


class Gate:
    """One tensor of a cut: its edge, its stand-in, and the gradient that has arrived there."""

    def __init__(self, trunk: Trunk, tensor: torch.Tensor) -> None:
        self.trunk = trunk
        self.edge = get_gradient_edge(tensor)
        self._tensor = weakref.ref(tensor)
        # before torch had ownership tokens, the edge of a custom function did not keep its node alive
        self._owner = tensor if _saved.is_custom(self.edge.node) and not hasattr(self.edge, "ownership_token") else None
        self._grad_fn = tensor.grad_fn
        self._version = tensor._version
        self._stand_in: Callable[[], torch.Tensor | None] = lambda: None
        self.arrived: torch.Tensor | None = None
        self._own = False

    def stand_in_for(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_nested and tensor.layout is torch.strided:
            raise ArgumentError(
                "gk.cut() got a nested tensor of strided layout",
                instead="layout=torch.jagged there",
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise ArgumentError("forward-mode derivatives do not pass a cut", instead="no gk.cut() on a dual tensor")
        apply: Any = _apply if not torch._C._are_functorch_transforms_active() else _Boundary.apply
        if torch.is_grad_enabled():
            stand_in: torch.Tensor = apply(self, [tensor], _graph.ANCHOR)
        else:
            with torch.enable_grad():
                stand_in = apply(self, [tensor], _graph.ANCHOR)
        self._stand_in = weakref.ref(stand_in)
        return stand_in

    def final(self) -> torch.Tensor | None:
        """What is to flow on: what has arrived, or what the user has put into the stand-in's ``.grad`` since."""
        stand_in = self._stand_in()
        if self.arrived is None or stand_in is None:
            return self.arrived
        try:
            return stand_in.grad
        except UserWarning:  # `.grad` of a tensor that is no leaf warns where it is None, here where the user took it out
            return None

    def arrive(self, node: Node, grad: torch.Tensor) -> None:
        trunk = self.trunk
        if trunk.closed or trunk.cut() is None:
            raise ClosedCutError(
                "a backward reached a stand-in of a cut that has closed"
                if trunk.closed
                else "a backward reached a stand-in of a cut whose object is gone, so that nobody can close it",
                where=f"gk.cut() at {trunk.where}",
                instead="every backward on what was built from the stand-ins inside the `with gk.cut(x) as x:` block"
                if trunk.closed
                else "keep each gk.cut() object until its close(): one for each forward, not one name for all",
            )
        if grad.requires_grad:
            raise ArgumentError(
                "a head ran backward(create_graph=True); second derivatives cannot pass a cut",
                where=f"gk.cut() at {trunk.where}",
                instead="torch.autograd.grad(y, x, create_graph=True) on the stand-in inside the block, and backward() of what "
                "you make of it; or no cut there",
            )
        trunk.refuse_bypass()
        self._refuse_change(node)
        self._add(grad)

    def _refuse_change(self, node: Node) -> None:
        """The stand-in shares the memory of the tensor that was cut, and not what is done to that in place afterwards."""
        tensor, stand_in = self._tensor(), self._stand_in()
        changed = tensor is not None and tensor.grad_fn is not self._grad_fn
        if not changed and (stand_in is None or stand_in.grad_fn is node):
            holder = tensor if stand_in is None else stand_in
            changed = holder is not None and holder._version != self._version
        if changed:
            raise ChangedGraphError(
                "a tensor that was cut, or what it is a view of, was changed in place after the cut",
                where=f"gk.cut() at {self.trunk.where}",
                instead="the change before the cut, out of place, or on the stand-in",
            )

    def _add(self, grad: torch.Tensor) -> None:
        before = self.final()
        if before is None:
            # an expanded gradient (that of `sum`) would not bear what users do to a `.grad` in place
            self.arrived, self._own = grad.clone() if _is_expanded(grad) else grad, False
        elif self._own and before is self.arrived and _is_plain(before) and _is_plain(grad):
            before.add_(grad)
        else:  # the first one may be somebody else's memory
            self.arrived, self._own = before + grad, True
        stand_in = self._stand_in()
        if stand_in is not None:
            stand_in.grad = self.arrived


class _Boundary(torch.autograd.Function):
    """The node of a stand-in: nothing below it, and a gradient that arrives is kept."""

    @staticmethod
    @eager
    def forward(ctx: Any, gate: Gate, source: list[torch.Tensor], _anchor: torch.Tensor) -> torch.Tensor:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return source[0].detach()

    @staticmethod
    @eager
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:
        if grad is not None:
            ctx.gate.arrive(ctx, grad)
        return None, None, None


def _is_plain(grad: torch.Tensor) -> bool:
    return grad.layout is torch.strided and not grad.is_nested and not grad._is_zerotensor()


def _is_expanded(grad: torch.Tensor) -> bool:
    return _is_plain(grad) and 0 in grad.stride()


# Function.apply looks for torch.func's wrappers among the arguments, which takes a tenth of a small cut
_apply: Any = super(torch.autograd.Function, _Boundary).apply


def _runs(node: Node) -> bool:
    """Whether the backward that is running now will run this node (what `register_multi_grad_hook` asks as well)."""
    return bool(torch._C._will_engine_execute_node(node))


class _OpenTrunks:
    """The trunks that wait; while there are any, calls of the engine with ``inputs=`` are looked at."""

    def __init__(self) -> None:
        self.trunks: dict[int, Trunk] = {}
        self._listening: int | None = None
        self._ids = itertools.count()

    def add(self, trunk: Trunk) -> int:
        number = next(self._ids)
        self.trunks[number] = trunk
        if self._listening is None:
            self._listening = _engine.calls.add(_look)
        return number

    def remove(self, number: int) -> None:
        """Removing twice does nothing."""
        self.trunks.pop(number, None)
        if not self.trunks and self._listening is not None:
            _engine.calls.remove(self._listening)
            self._listening = None


def _look(proceed: Any, outputs: Any, grads: Any, keep: Any, create: Any, inputs: Any = (), *args: Any, **kwargs: Any) -> Any:
    if inputs:
        _refuse_partial(outputs, inputs)
    elif _distributed.waiting():
        _refuse_second_gradient(outputs)
    return proceed(outputs, grads, keep, create, inputs, *args, **kwargs)


def _refuse_partial(outputs: Any, inputs: Any) -> None:
    """Refuse a gradient with respect to something below an open cut when a part of it would have to pass the cut."""
    wanted = [(_node(tensor), tensor) for tensor in inputs]
    trunks = [trunk for trunk in open_trunks.trunks.values() if any(node in trunk.nodes for node, _ in wanted)]
    if not trunks:
        return
    # through the boundaries of other open cuts, as the gradient would go without them
    nodes, todo = set[Node](), [_node(tensor) for tensor in outputs]
    met: set[Trunk] = set()
    while todo:
        found = _graph.reach(todo, without=nodes)
        nodes |= found
        gates = [node.gate for node in found if isinstance(node, _Boundary._backward_cls)]  # type: ignore[attr-defined]
        met.update(gate.trunk for gate in gates)
        todo = [gate.edge.node for gate in gates if not gate.trunk.closed]
    for trunk in trunks:
        if trunk in met:
            raise BypassedCutError(
                "a gradient was asked for of something below a cut, and a part of it would have to pass the cut",
                where=f"gk.cut() at {trunk.where}",
                instead="ask for the gradient of the stand-in; what is below gets its own in .grad when the block is left",
            )


def _refuse_second_gradient(outputs: Any) -> None:
    """A `DistributedDataParallel` model synchronises a gradient as soon as one backward has reached its leaf."""
    nodes = _graph.reach(_node(t) for t in outputs if isinstance(t, GradientEdge) or t.requires_grad)  # torch refuses others
    trunks = {node.gate.trunk for node in nodes if isinstance(node, _Boundary._backward_cls)}  # type: ignore[attr-defined]
    for trunk in trunks:
        leaves = {id(leaf): leaf for leaf in _graph.leaves(nodes)}
        below = {id(leaf) for leaf in trunk.leaves}
        twice = [leaf for key, leaf in leaves.items() if key in trunk.reached or key in below]
        _distributed.refuse_second_gradient(
            twice,
            "a leaf would get its gradient in two backwards, and DistributedDataParallel synchronises it after the first",
            "one backward for the heads that share it; a compiled region for each head; or all of it",
            ", shared by two heads, by a head and the trunk, or by what torch.compile has made one region of, around "
            f"gk.cut() at {trunk.where}",
        )
        trunk.reached |= leaves.keys()


def _node(tensor: torch.Tensor | GradientEdge) -> Node:
    return tensor.node if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor).node


open_trunks = _OpenTrunks()
