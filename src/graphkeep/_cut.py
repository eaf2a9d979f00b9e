"""`cut`: many heads on one trunk, each freed by its own backward, and one backward through the trunk at the end.

The stand-in for a tensor at the boundary is a tensor on the same memory, made by a node that has nothing below it and keeps
the gradient that arrives. For torch, heads and trunk are then graphs of their own: it frees each head, accumulates at its
weights and fires its hooks itself. Leaving the block runs ``torch.autograd.backward`` from the edges that the tensors had when
the cut was made, with what has arrived: hooks at the boundary and in the trunk fire once, with the whole sum.

A stand-in is no leaf, as what it stands for is none: in-place ops on it are allowed where they are on the original, and what
torch refuses for a non-leaf (an optimizer, `copy.deepcopy`, ``requires_grad_(False)``) it refuses here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch.autograd.graph import GradientEdge, Node

from graphkeep import _distributed, _graph, _modules, _saved, _tree
from graphkeep._boundary import Gate, Trunk, open_trunks
from graphkeep._eager import eager
from graphkeep._errors import (
    ArgumentError,
    ArgumentTypeError,
    BudgetError,
    ChangedGraphError,
    ClosedCutError,
    FreedGraphError,
    LostGradientWarning,
    caller,
    warn,
)

T = TypeVar("T")


class cut(Generic[T]):
    """Cut a graph at some tensors: heads above are freed one by one, the trunk below is run once.

    As a context manager it yields stand-ins of the same type and structure. Any number of ``.backward()``,
    `torch.autograd.grad` or optimizer-in-backward calls may run on what is built from them; each frees its own part at once.
    Leaving the block runs one backward through the trunk with the accumulated gradients, as if ``(y1 + y2 + …).backward()``
    had been called, hooks included. Leaving by an exception, or with no gradient arrived, frees the trunk and runs nothing.

    Between heads, a stand-in's ``.grad`` holds what the heads so far brought to the cut, and what it holds on leaving is what
    flows on; `torch.autograd.grad` of a head with respect to a stand-in gives that head's part alone, and adds nothing.

    Arguments:
        tree: a tensor or a pytree of tensors (tuple, list, dict, dataclass, ``ModelOutput``), of any shape, dtype and device.
            Members without a gradient (integers, None, detached tensors) pass through unchanged. Cuts nest.

    Attributes:
        stand_ins: what the context manager yields: tensors on the same memory, with a graph of their own. With `close` they
            allow a cut inside ``nn.Module.forward``, where no ``with`` block can span the backward.

    Raises:
        ArgumentTypeError: there is no tensor in `tree`.
        ClosedCutError: the cut was left twice, or a stand-in was used by a backward after it had closed.
        BypassedCutError: in a head's backward, if the head leads to the trunk by a path around the stand-ins.
        FreedGraphError: the trunk was freed before; on leaving, if a backward went around the stand-ins and freed it.
        ChangedGraphError: on leaving, if a parameter or a saved tensor of the trunk was changed in between.
        ArgumentError: on leaving, if a head ran with ``create_graph=True``.

    Example:
        >>> import torch, graphkeep as gk
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> trunk = w + 10
        >>> with gk.cut(trunk) as x:
        ...     (x * x).backward()  # frees this head; nothing below the cut has run
        ...     (torch.sqrt(x) / 2).backward()
        >>> w.grad
        tensor(22.0754)

    Source: the leaf at the boundary is the way of `torch.distributed.pipelining`'s stages and of GradCache (Gao et al. 2021).
    """

    stand_ins: T

    @eager
    def __init__(self, tree: T) -> None:
        members = list(_tree.flatten(tree))
        for member in members:
            _graph.refuse_hidden(member, "tree")
        if not any(isinstance(member, torch.Tensor) for member in members):
            raise ArgumentTypeError(
                f"gk.cut() got no tensor, but {type(tree).__name__}",
                instead="gk.cut(x) with a tensor, or a tuple, list, dict or dataclass of tensors",
            )
        several = _distributed.several()
        if several:
            _refuse_wrapper()
        self._entered = False
        self._number = -1
        self._trunk = trunk = Trunk(caller(), weakref.ref(self))
        self._gates: list[Gate] = []
        # one tensor in two places of the tree is one stand-in in both
        made: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in made:
                gate = Gate(trunk, tensor)
                self._check_node(gate.edge.node, _FREED_BEFORE)
                self._gates.append(gate)
                made[id(tensor)] = gate.stand_in_for(tensor)
            return made[id(tensor)]

        self.stand_ins = _tree.map_tensors(stand_in, tree)
        trunk.read([gate.edge for gate in self._gates])
        if several:
            _refuse_two_cuts(trunk)
        self._leaves = [_Leaf(leaf) for leaf in trunk.leaves]
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            # a weight's cast that autocast cached in the trunk would lead a head that uses the weight around the cut
            torch.clear_autocast_cache()
        self._number = open_trunks.add(trunk)

    @eager
    def __enter__(self) -> T:
        if self._trunk.closed or self._entered:
            self._refuse_twice()
        self._entered = True
        return self.stand_ins

    @eager
    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._trunk.closed:
            if kind is GeneratorExit:
                self._warn_if_lost("its generator was closed inside the block")
            self._abandon()

    def __del__(self) -> None:
        if getattr(self, "_number", -1) >= 0 and not self._trunk.closed:
            self._warn_if_lost("the object was dropped before it was closed")
            open_trunks.remove(self._number)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, by `copy.deepcopy` or `torch.save` of a module that holds it, is a cut that has closed."""
        return _closed, (self._trunk.where,)

    @eager
    def close(self) -> None:
        """Run the backward through the trunk; what leaving the block without an exception does.

        Raises:
            ClosedCutError: it has been closed before.
            FreedGraphError: a backward went around the stand-ins and freed the trunk.
            ChangedGraphError: a parameter or a saved tensor of the trunk was changed in between.
        """
        if self._trunk.closed:
            self._refuse_twice()
        arrived = [(gate.edge, grad) for gate in self._gates if (grad := gate.final()) is not None]
        left: list[GradientEdge] | None = None
        try:
            if arrived:
                edges = [edge for edge, _ in arrived]
                self._check(self._trunk.nodes if len(arrived) == len(self._gates) else _graph.reach(e.node for e in edges))
                torch.autograd.backward(edges, [grad for _, grad in arrived])
                # torch has freed what it ran; what leads only to stand-ins that no gradient reached is still there
                reached = {id(edge) for edge in edges}
                left = [gate.edge for gate in self._gates if id(gate.edge) not in reached]
        finally:
            self._abandon(left)

    def _abandon(self, edges: list[GradientEdge] | None = None) -> None:
        """Free what leads to the edges, all of the trunk by default, and let later backwards into the stand-ins fail."""
        edges = [gate.edge for gate in self._gates] if edges is None else edges
        open_trunks.remove(self._number)
        self._trunk.close()
        self._gates, self._leaves = [], []
        if edges:
            tombstone = _saved.Tombstone(f"the gk.cut() at {self._trunk.where}, when it was left", _INSIDE)
            _saved.release_all(_graph.reach(edge.node for edge in edges), tombstone)

    def _refuse_twice(self) -> NoReturn:
        raise ClosedCutError(
            f"this cut has been {'left' if self._trunk.closed else 'entered'} already",
            where=f"gk.cut() at {self._trunk.where}",
            instead="a new `with gk.cut(x) as x:`",
        )

    def _warn_if_lost(self, why: str) -> None:
        if any(gate.arrived is not None for gate in self._gates):
            warn(
                f"gradients arrived at the gk.cut() of {self._trunk.where} and never went through its trunk: {why}. Keep the "
                "object until its close(), or use it as a context manager",
                LostGradientWarning,
            )

    def _check(self, nodes: Iterable[Node]) -> None:
        """Refuse, before anything has run, what torch would refuse half-way or what would be wrong."""
        for leaf in self._leaves:
            change = leaf.change()
            if change:
                raise ChangedGraphError(
                    f"a leaf of the trunk of a cut {change} before the trunk's backward ran: {_modules.describe(leaf.tensor)}",
                    where=f"gk.cut() at {self._trunk.where}",
                    instead="optimizer.step() (or the change) after the `with` block has ended",
                )
        for node in nodes:
            self._check_node(node, "the trunk of a cut has been freed by another backward, which went around the stand-ins")

    def _check_node(self, node: Node, freed: str) -> None:
        try:
            _saved.check(node)
        except BudgetError:
            raise
        except RuntimeError as error:
            where = f"the {_graph.op(node)} below gk.cut() at {self._trunk.where}"
            if "modified by an inplace operation" in str(error):
                raise ChangedGraphError(
                    "a tensor that the trunk of a cut saved was changed in place before the trunk's backward ran",
                    where=where,
                    instead="the op out of place (x = x + r for x += r)",
                ) from error
            if isinstance(error, FreedGraphError):
                raise FreedGraphError(
                    "the trunk of a cut has been freed", where=f"{where}, {error.where}", instead=_ONCE
                ) from error
            raise FreedGraphError(freed, where=where, instead=_ONCE) from error


def _closed(where: str) -> cut[Any]:
    copy = cut.__new__(cut)
    copy.stand_ins = None
    copy._entered, copy._number, copy._gates, copy._leaves = True, -1, [], []
    copy._trunk = Trunk(where, lambda: None)
    copy._trunk.close()
    return copy


def _refuse_wrapper() -> None:
    """In the forward of a DDP model that learns from the graph which parameters take part: it would not see the trunk's."""
    ddp = _distributed.running()
    option = ddp and ("static_graph" if ddp.static_graph else "find_unused_parameters" if ddp.find_unused_parameters else "")
    if option:
        raise ArgumentError(
            f"gk.cut() in the forward of a DistributedDataParallel model with {option}=True: it takes the trunk's parameters "
            "for unused, or synchronises them after the first head",
            instead=f"DistributedDataParallel without {option}, or the heads outside of it, on a gk.cut() of what it returns",
        )


def _refuse_two_cuts(trunk: Trunk) -> None:
    """Trunks that another backward reaches as well, or whose weights are not there when the block is left."""
    known = {id(leaf) for other in open_trunks.trunks.values() for leaf in other.leaves}
    twice = [leaf for leaf in trunk.leaves if id(leaf) in known]
    _distributed.refuse_second_gradient(
        twice,
        "two cuts on one DistributedDataParallel model: each trunk has a backward of its own, and the gradients are "
        "synchronised after the first",
        "one cut of both, `with gk.cut((x, y)) as (x, y):`; or all of it",
    )
    gathered = _distributed.gathered_for_now(trunk.leaves)
    if gathered is not None:
        raise ArgumentError(
            "FSDP2 (fully_shard) lets go of the trunk's weights with the first head's backward, before the trunk has its own",
            where=gathered,
            instead="a module of its own for the trunk, with fully_shard(trunk, reshard_after_forward=True) before that of the "
            "whole; or the heads outside of the sharded model",
        )


_FREED_BEFORE = "the graph below the tensor given to gk.cut() has been freed by an earlier backward"
_INSIDE = "every backward on what was built from the stand-ins inside the `with gk.cut(x) as x:` block"
_ONCE = "one cut for each forward, and inside its block every head from the stand-ins, not from the tensor that was cut"


class _Leaf:
    """A leaf of the trunk, as it was when the cut was made."""

    __slots__ = ("_before", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._before = self._state()

    def _state(self) -> tuple[Any, ...]:
        tensor = self.tensor
        place = tensor.data_ptr() if tensor.layout is torch.strided and type(tensor) in _PLAIN else 0
        return tensor._version, place, tensor.dtype, tensor.requires_grad

    def change(self) -> str:
        """What happened to it since, in words; empty if nothing did. (In-place changes of ``.data`` leave no trace.)"""
        now = self._state()
        if now == self._before:
            return ""
        return "was frozen or unfrozen" if now[:3] == self._before[:3] else "was changed"


_PLAIN = (torch.Tensor, torch.nn.Parameter)
