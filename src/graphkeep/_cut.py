"""`cut`: many heads on one trunk, each freed by its own backward, and one backward through the trunk at the end.

The stand-in for a tensor at the boundary is a real leaf on the same memory (``x.detach().requires_grad_()``). That makes the
two graphs independent for torch itself: heads are freed by torch, hooks at the boundary fire once, tied weights, optimizer-in-
backward and DDP work as they are. Leaving the block runs ``torch.autograd.backward`` from the edges that the tensors had when
the cut was made, with what has arrived in the stand-ins' ``.grad``.
"""

from __future__ import annotations

from types import TracebackType
from typing import Generic, NoReturn, TypeVar

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from graphkeep import _graph, _modules, _saved, _tree
from graphkeep._errors import (
    ArgumentError,
    ArgumentTypeError,
    BypassedCutError,
    ChangedGraphError,
    ClosedCutError,
    FreedGraphError,
    caller,
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
        stand_ins: what the context manager yields. With `close` this allows a cut inside ``nn.Module.forward``, where no
            ``with`` block can span the backward.

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

    def __init__(self, tree: T) -> None:
        self._where = caller()
        self._edges: list[GradientEdge] = []
        self._leaves: list[torch.Tensor] = []
        self._sentry = _Sentry(self._where)
        # one tensor in two places of the tree is one stand-in in both
        made: dict[int, torch.Tensor] = {}

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            if id(tensor) not in made:
                made[id(tensor)] = self._add(tensor)
            return made[id(tensor)]

        members = list(_tree.flatten(tree))
        for member in members:
            _graph.refuse_hidden(member, "tree")
        if not any(isinstance(member, torch.Tensor) for member in members):
            raise ArgumentTypeError(
                f"gk.cut() got no tensor, but {type(tree).__name__}",
                instead="gk.cut(x) with a tensor, or a tuple, list, dict or dataclass of tensors",
            )
        self.stand_ins = _tree.map_tensors(stand_in, tree)
        for edge in self._edges:  # the rest of the trunk is looked at on leaving
            self._check_node(edge.node, "the graph below the tensor given to gk.cut() has been freed by an earlier backward")
        self._trunk = _graph.reach(edge.node for edge in self._edges)
        self._versions = [(leaf, leaf._version) for leaf in _graph.leaves(self._trunk)]
        self._sentry.guard(self._edges, self._trunk)

    def _add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._edges.append(get_gradient_edge(tensor))
        leaf = tensor.detach()
        if issubclass(type(tensor), torch.nn.Parameter):  # isinstance() of a Parameter runs Python code
            leaf = torch.nn.Parameter(leaf)
        self._leaves.append(leaf.requires_grad_())
        leaf.register_hook(self._sentry)
        return leaf

    def __enter__(self) -> T:
        if self._sentry.closed:
            self._refuse_twice()
        return self.stand_ins

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._sentry.closed:
            self._abandon()

    def close(self) -> None:
        """Run the backward through the trunk; what leaving the block without an exception does.

        Raises:
            ClosedCutError: it has been closed before.
            FreedGraphError: a backward went around the stand-ins and freed the trunk.
            ChangedGraphError: a parameter or a saved tensor of the trunk was changed in between.
            ArgumentError: a head ran with ``create_graph=True``.
        """
        if self._sentry.closed:
            self._refuse_twice()
        pairs = list(zip(self._edges, self._leaves, strict=True))
        arrived = [(edge, leaf.grad) for edge, leaf in pairs if leaf.grad is not None]
        try:
            if arrived:
                self._check(arrived, self._trunk if len(arrived) == len(pairs) else None)
                torch.autograd.backward([edge for edge, _ in arrived], [grad for _, grad in arrived])
                # torch has freed what it ran; what leads only to stand-ins that no gradient reached is still there
                self._edges = [edge for edge, leaf in pairs if leaf.grad is None]
        finally:
            self._abandon()

    def _abandon(self) -> None:
        """Free the trunk, and let later backwards into the stand-ins fail instead of losing their gradients."""
        edges, leaves = self._edges, self._leaves
        self._edges, self._leaves, self._versions, self._trunk = [], [], [], set()
        self._sentry.close()
        if edges:
            tombstone = _saved.Tombstone(f"the gk.cut() at {self._where}, when it was left", _INSIDE)
            _saved.release_all(_graph.reach(edge.node for edge in edges), tombstone)
        for leaf in leaves:
            if leaf.grad is not None and leaf.grad.requires_grad:  # create_graph=True made a cycle: grad, its graph, leaf
                leaf.grad = leaf.grad.detach()

    def _refuse_twice(self) -> NoReturn:
        raise ClosedCutError(
            "this cut has been left already", where=f"gk.cut() at {self._where}", instead="a new `with gk.cut(x) as x:`"
        )

    def _check(self, arrived: list[tuple[GradientEdge, torch.Tensor]], trunk: set[Node] | None) -> None:
        """Refuse, before anything has run, what torch would refuse half-way or what would be wrong."""
        for _, grad in arrived:
            if grad.requires_grad:
                raise ArgumentError(
                    "a head ran backward(create_graph=True); second derivatives cannot pass a cut",
                    where=f"gk.cut() at {self._where}",
                    instead="torch.autograd.grad(y, x, create_graph=True) on the stand-in inside the block, and backward() of "
                    "what you make of it; or no cut there",
                )
        for leaf, version in self._versions:
            if leaf._version != version:
                raise ChangedGraphError(
                    f"a leaf of the trunk of a cut was changed before the trunk's backward ran: {_modules.describe(leaf)}",
                    where=f"gk.cut() at {self._where}",
                    instead="optimizer.step() (or the in-place change) after the `with` block has ended",
                )
        for node in _graph.reach(edge.node for edge, _ in arrived) if trunk is None else trunk:
            self._check_node(node, "the trunk of a cut has been freed by another backward, which went around the stand-ins")

    def _check_node(self, node: Node, freed: str) -> None:
        try:
            _saved.check(node)
        except RuntimeError as error:
            where = f"the {_graph.op(node)} below gk.cut() at {self._where}"
            if "modified by an inplace operation" in str(error):
                raise ChangedGraphError(
                    "a tensor that the trunk of a cut saved was changed in place before the trunk's backward ran",
                    where=where,
                    instead="the op out of place (x = x + r for x += r)",
                ) from error
            raise FreedGraphError(freed, where=where, instead=_ONCE) from error


_INSIDE = "every backward on what was built from the stand-ins inside the `with gk.cut(x) as x:` block"
_ONCE = "one cut for each forward, and inside its block every head from the stand-ins, not from the tensor that was cut"


class _Sentry:
    """The hook on the stand-ins of a cut. It lets no backward through that would lose a gradient or run a hook twice.

    While the cut is open, that is a backward which reaches a stand-in and, by a path around it, the trunk as well: what is
    below would run now and again on leaving, each time with a part of the gradient. Afterwards it is every backward.
    """

    def __init__(self, where: str) -> None:
        self.closed = False
        self._where = where
        self._edges: list[GradientEdge] = []
        self._bottom: list[Node] = []

    def guard(self, edges: list[GradientEdge], trunk: set[Node]) -> None:
        self._edges = edges
        # whatever enters the trunk runs one of the nodes that have only leaves below them
        self._bottom = []
        for node in trunk:
            children = node.next_functions
            if children and not any(child is not None and child.next_functions for child, _ in children):
                self._bottom.append(node)

    def close(self) -> None:
        self.closed = True
        self._edges, self._bottom = [], []

    def __call__(self, _grad: torch.Tensor) -> None:
        if self.closed:
            raise ClosedCutError(
                "a backward reached a stand-in of a cut that has closed", where=f"gk.cut() at {self._where}", instead=_INSIDE
            )
        if any(map(_runs, self._bottom)):
            raise self._bypassed()

    def _bypassed(self) -> BypassedCutError:
        running = {node for node in _graph.reach(edge.node for edge in self._edges) if node.next_functions and _runs(node)}
        entered = running - {child for node in running for child, _ in node.next_functions}
        return BypassedCutError(
            "a head leads to the trunk of its cut by a path around the stand-ins",
            where=f"the result of {', '.join(sorted(map(_graph.op, entered)))}, below gk.cut() at {self._where}",
            instead="cut that tensor too, `with gk.cut((x, skip)) as (x, skip):`, and use its stand-in in the head",
        )


def _runs(node: Node) -> bool:
    """Whether the backward that is running now will run this node (what `register_multi_grad_hook` asks as well)."""
    return bool(torch._C._will_engine_execute_node(node))
