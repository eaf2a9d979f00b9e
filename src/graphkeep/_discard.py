"""`discard`: free a graph now, although names still point at its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from graphkeep import _graph, _saved
from graphkeep._eager import eager
from graphkeep._errors import caller
from graphkeep._modules import parameter_storages
from graphkeep._storage import Storage, StorageSet, storages


@dataclass(frozen=True)
class Kept:
    """Something that `discard` could not free.

    Attributes:
        what: the node and what it saved, for example ``self of sin, float32 [4, 3]``.
        why: what keeps it.
        bytes: size of its storage; None where Python cannot see it.
    """

    what: str
    why: str
    bytes: int | None


class Discarded(int):
    """The number of bytes that `discard` freed. An ``int`` that knows, besides, what is left.

    Attributes:
        kept: what could not be freed and still exists, worked out when it is read; parameters and buffers are not listed.
    """

    _candidates: list[_Candidate]
    _stuck: list[Kept]

    def __reduce__(self) -> tuple[object, ...]:
        return int, (int(self),)  # what is left is a matter of this process

    @property
    def kept(self) -> tuple[Kept, ...]:
        alive = [(c.what, storage) for c in self._candidates if (storage := c.storage()) is not None]
        if not alive:
            return tuple(self._stuck)
        apart = parameter_storages()
        shared = (
            Kept(what, "a name, a view or another graph still holds this memory", storage.nbytes())
            for what, storage in alive
            if storage not in apart
        )
        return (*self._stuck, *shared)


@dataclass(frozen=True)
class _Candidate:
    """A storage that some node held, weakly, so that its death can be told."""

    what: str
    storage: weakref.ref[Storage]
    bytes: int


@eager
def discard(*tensors: object, keep: object = None) -> Discarded:
    """Free the graph of some tensors now, although names still point at it.

    For a sample that was rejected, a loss that is not finite, a branch that is not wanted: dropping one name frees nothing
    while others (an output, a hidden state) hold the same nodes. The tensors themselves, their values and their
    ``requires_grad`` stay; a later backward through them raises `FreedGraphError` where the graph had saved something. No
    hook fires.

    Arguments:
        tensors: tensors, `torch.autograd.graph.GradientEdge`s, or pytrees of them. One without a graph is passed over.
        keep: like that of `backward`: what leads to it is not freed.

    Returns:
        Discarded: the bytes freed, an ``int``; its ``kept`` lists what could not be freed, and why.

    Raises:
        ArgumentTypeError: there is no tensor in `tensors`.

    Example:
        >>> import torch, graphkeep as gk
        >>> x = torch.ones(1000, requires_grad=True)
        >>> hidden = x.exp()
        >>> loss = hidden.sin().cos().sum()
        >>> freed = gk.discard(loss)  # sin's result, float32; exp's is `hidden`, which you still hold
        >>> int(freed), [kept.what for kept in freed.kept]
        (4000, ['result of exp, float32 [1000]'])
        >>> gk.explain(loss).freed
        True
    """
    where = caller()
    roots = [edge.node for edge in _graph.edges(tensors, "tensors", needs_graph=False)]
    trunk = _graph.reach(edge.node for edge in _graph.edges(keep, "keep")) if keep is not None else ()
    nodes = _graph.reach(roots, without=trunk)
    candidates = _candidates(nodes)
    tombstone = _saved.Tombstone(
        f"gk.discard() at {where}", "remove that gk.discard(), or give it keep=x with what is still needed"
    )
    stuck = _saved.release_all(nodes, tombstone)

    freed = Discarded(sum(c.bytes for c in candidates if c.storage() is None))
    freed._candidates = [c for c in candidates if c.storage() is not None]
    freed._stuck = [kept for node in nodes for kept in _attributes(node)] + [_describe_stuck(node) for node in stuck]
    return freed


def _candidates(nodes: Collection[Node]) -> list[_Candidate]:
    leaves = StorageSet()
    for leaf in _graph.leaves(nodes):
        leaves.add_tensor(leaf)
    # by address: nothing is freed while this runs, so an address stands for one storage
    found: dict[int, _Candidate] = {}
    for node in nodes:
        for slot in _saved.slots(node):
            if slot.state is not _saved.State.HELD:  # what others packed is told node by node
                continue
            for storage in _saved.slot_storages(slot):
                # several nodes may have saved it; the one that made it says best what it is
                if storage not in leaves and (storage._cdata not in found or slot.name.startswith("result")):
                    what = f"{slot.name} of {_graph.op(node)}"
                    if isinstance(slot.value, torch.Tensor):
                        what += f", {_short(slot.value)}"
                    found[storage._cdata] = _Candidate(what, weakref.ref(storage), storage.nbytes())
    return list(found.values())


def _attributes(node: Node) -> Iterator[Kept]:
    for name, tensor in _saved.attributes(node):
        yield Kept(
            f"attribute `{name}` of {_graph.op(node)}'s ctx, {_short(tensor)}",
            "torch frees it only with the node; use ctx.save_for_backward",
            sum(storage.nbytes() for storage in storages(tensor)),
        )


def _describe_stuck(node: Node) -> Kept:
    if _saved.hides(node):
        return Kept(_graph.op(node), "torch keeps what it holds out of Python's sight; it goes with the node", None)
    slots = [slot for slot in _saved.slots(node) if slot.state is _saved.State.PACKED]
    return Kept(
        f"{', '.join(slot.name for slot in slots)} of {_graph.op(node)}",
        "other saved-tensor hooks (save_on_cpu, checkpoint) packed it; it goes with the node",
        sum(storage.nbytes() for slot in slots for storage in _saved.slot_storages(slot)),
    )


def _short(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    # strided nested tensors have no shape
    return f"{kind} {list(tensor.shape)}" if not (tensor.is_nested and tensor.layout is torch.strided) else f"{kind}, nested"
