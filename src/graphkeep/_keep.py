"""`backward(keep=)`: run a backward, free what lies above some tensors, keep what leads to them.

How: one engine pass with ``retain_graph=True``, so that values, hooks and `AccumulateGrad` nodes behave exactly as they do
in torch, and the nodes of the head (all that is reachable from ``tensors`` and not from ``keep``) have their saved tensors
released: large ones right after the node ran, so that memory falls while the backward goes on, as it does in torch; the
others when the pass has ended.

The two-step way that the field uses (`autograd.grad` down to ``x``, then ``x.backward(g)``) is not exact: hooks on ``x`` fire
twice, post-accumulate hooks do not fire, and what bypasses ``x`` or is tied across it is lost. Here a path that bypasses
``keep`` simply stays part of the one pass, and what it enters below belongs to the trunk and is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from graphkeep import _distributed, _graph, _saved
from graphkeep._eager import eager
from graphkeep._errors import (
    ArgumentError,
    ArgumentTypeError,
    FreedGraphError,
    NotFreedWarning,
    NotInGraphError,
    caller,
    warn,
)

Root: TypeAlias = Any  # torch.Tensor | GradientEdge; torch's own signature has no sequence of both
_EARLY = 1 << 20  # bytes; a node that holds as much is released as soon as it has run
_KEEP_MORE = "gk.backward(..., keep=(x, ...)) with every tensor that a later backward goes through, or gk.cut(x)"


@eager
def backward(
    tensors: Root | Sequence[Root],
    grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    keep: object,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> None:
    """Accumulate gradients of the leaves, free the graph above ``keep``, keep what leads to it.

    Leaves' ``.grad``, above and below ``keep``, are what
    ``torch.autograd.backward(tensors, grad_tensors, retain_graph=True)`` leaves, and every hook fires as often. Afterwards
    every node between ``tensors`` and ``keep`` is freed, whatever Python names still point at it, and everything that leads
    to ``keep`` can be used again. To run the trunk only once for many heads, see `cut`.

    Arguments:
        tensors: one tensor or `torch.autograd.graph.GradientEdge`, or a sequence of them, of any shape and any
            differentiable dtype.
        grad_tensors: for each of `tensors` the gradient with respect to it, of the same shape; None stands for ones where the
            tensor has one element and a real dtype.
        keep: a tensor, a `GradientEdge` or a pytree of them. If a tensor was changed in place after `tensors` had been
            computed from it, pass the edge that it had before (`torch.autograd.graph.get_gradient_edge`).
        create_graph: refused if True: the graph of the gradients would run through the nodes that are freed.
        allow_unused: do not raise if a kept tensor is not part of the graph of `tensors`.

    Raises:
        NotInGraphError: `keep` was not used to compute `tensors`.
        FreedGraphError: a part of the graph that is needed has been freed before.
        ArgumentError: a gradient is missing or does not fit its tensor; nothing requires a gradient.
        ArgumentTypeError: an argument is neither a tensor nor a `GradientEdge`.

    Warns:
        NotFreedWarning: some nodes hold tensors that torch gives no way to release (in-place ops on views, C++ functions,
            what `save_on_cpu` or `checkpoint` packed). Gradients are right; those nodes wait for their last name to go.

    Example:
        >>> import torch, graphkeep as gk
        >>> w = torch.tensor(1.0, requires_grad=True)
        >>> x = w + 10
        >>> y1 = (x * x) ** 2
        >>> gk.backward(y1, keep=x)  # frees x..y1
        >>> y2 = torch.sqrt(x) / 2
        >>> y2.backward()
        >>> w.grad  # that of (y1 + y2).backward()
        tensor(5324.0752)

    Source: `torch.autograd.backward`; asked for as ``retain_graph=x`` in pytorch#31185, #138118 and #140516.
    """
    roots = _roots(tensors)
    grads = _grads(roots, grad_tensors)
    kept = _graph.edges(keep, "keep")
    if create_graph:
        raise ArgumentError(
            "create_graph=True cannot be used with keep=: the gradients' own graph runs through the nodes that keep= frees",
            instead="torch.autograd.backward(..., retain_graph=True, create_graph=True), or torch.autograd.grad for the "
            "second derivative first",
        )
    trunk = _graph.reach(edge.node for edge in kept)
    head = _graph.reach((_node(root) for root in roots), without=trunk)
    if not allow_unused:
        _require_reached(kept, roots, head, trunk)
    _distributed.refuse_second_gradient(_graph.leaves(head | trunk), _SYNCHRONISED, _CUT_OR)
    _refuse_donated(head | trunk)

    tombstone = _saved.Tombstone(f"gk.backward(keep=) at {caller()}", _KEEP_MORE)
    early = _release_when_run(head, tombstone)
    try:
        torch.autograd.backward(roots, grads, retain_graph=True)
    except RuntimeError as error:
        _explain_freed(error, head | trunk)
        raise
    finally:
        for handle in early:
            handle.remove()
    left = _saved.release_all(head, tombstone)
    if left:
        _warn_not_freed(left)


def _roots(tensors: Any) -> list[Root]:
    roots = [tensors] if isinstance(tensors, (torch.Tensor, GradientEdge)) else tensors
    if isinstance(roots, (str, dict)) or not hasattr(roots, "__iter__"):
        raise ArgumentTypeError(
            f"`tensors` is of type {type(tensors).__name__}", instead="a tensor, a GradientEdge, or a sequence of them"
        )
    roots = list(roots)
    for i, root in enumerate(roots):
        if not isinstance(root, (torch.Tensor, GradientEdge)):
            raise ArgumentTypeError(
                f"element {i} of `tensors` is of type {type(root).__name__}", instead="a tensor or a GradientEdge there"
            )
        if isinstance(root, torch.Tensor) and not root.requires_grad:
            raise ArgumentError(
                f"element {i} of `tensors` does not require a gradient and has no graph",
                instead="compute it, with gradients enabled, from a tensor with requires_grad=True",
            )
    if not roots:
        raise ArgumentError("`tensors` is empty", instead="at least one tensor to run backward from")
    return roots


def _grads(roots: Sequence[Root], grad_tensors: Any) -> list[torch.Tensor | None]:
    if grad_tensors is not None and not isinstance(grad_tensors, (torch.Tensor, Sequence)):
        raise ArgumentTypeError(
            f"`grad_tensors` is of type {type(grad_tensors).__name__}", instead="a tensor, or one or None for each of `tensors`"
        )
    grads = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    if grad_tensors is None:
        grads = grads * len(roots)
    if len(grads) != len(roots):
        raise ArgumentError(
            f"{len(roots)} `tensors` and {len(grads)} `grad_tensors`", instead="one gradient, or None, for each tensor"
        )
    for i, (root, grad) in enumerate(zip(roots, grads, strict=True)):
        shape, dtype = _shape_and_dtype(root)
        if grad is None:
            if shape.numel() != 1 or not dtype.is_floating_point:
                raise ArgumentError(
                    f"element {i} of `tensors` has shape {tuple(shape)} and dtype {dtype}, and no gradient was given for it",
                    instead="a real scalar such as its .sum(), or a gradient of that shape in `grad_tensors`",
                )
        elif not isinstance(grad, torch.Tensor):
            raise ArgumentTypeError(
                f"element {i} of `grad_tensors` is of type {type(grad).__name__}", instead="a tensor or None there"
            )
        elif grad.shape != shape or grad.is_complex() != dtype.is_complex:
            raise ArgumentError(
                f"element {i} of `grad_tensors` has shape {tuple(grad.shape)} and dtype {grad.dtype}, its tensor has shape "
                f"{tuple(shape)} and dtype {dtype}",
                instead="a gradient of the tensor's own shape, complex where the tensor is complex",
            )
    return grads


def _shape_and_dtype(root: Root) -> tuple[torch.Size, torch.dtype]:
    if isinstance(root, torch.Tensor):
        return root.shape, root.dtype
    metadata = root.node._input_metadata[root.output_nr]
    return torch.Size(metadata.shape), metadata.dtype


def _node(root: Root) -> Node:
    return root.node if isinstance(root, GradientEdge) else torch.autograd.graph.get_gradient_edge(root).node


def _require_reached(kept: list[GradientEdge], roots: list[Root], head: set[Node], trunk: set[Node]) -> None:
    reached = _graph.entries(head, trunk) | {node for node in map(_node, roots) if node in trunk}
    if all(edge.node in reached for edge in kept):
        return
    # a kept tensor that lies below another one is reached through the trunk
    reached = _graph.reach(reached)
    missing = [edge.node for edge in kept if edge.node not in reached]
    if missing:
        raise NotInGraphError(
            "`keep` holds a tensor that was not used to compute `tensors`",
            where=f"the result of {', '.join(_graph.op(node) for node in missing)}",
            instead="the very tensor that `tensors` were computed from. If it was changed in place since, or you made a new "
            "view of it, pass the edge from before: edge = torch.autograd.graph.get_gradient_edge(x). If it may be unused: "
            "allow_unused=True",
        )


_SYNCHRONISED = (
    "gk.backward(keep=) on a DistributedDataParallel model, which synchronises each gradient as soon as one backward has "
    "reached it, and a later backward may reach it again"
)
_CUT_OR = "`with gk.cut(x) as x:` in the forward, which reaches each leaf once; or the forward and this call"


def _refuse_donated(nodes: set[Node]) -> None:
    """What `torch.compile` has compiled may write over its saved tensors, and torch refuses ``retain_graph`` then, half-way."""
    for node in nodes:
        metadata = getattr(getattr(type(node), "_forward_cls", None), "metadata", None)
        if getattr(metadata, "bw_donated_idxs", None):
            raise ArgumentError(
                "the graph holds a compiled region whose backward may write over what it has saved: it can run only once",
                where=_graph.op(node),
                instead="torch._functorch.config.donated_buffer = False before torch.compile, or gk.cut(x)",
            )


def _release_when_run(head: set[Node], tombstone: _saved.Tombstone) -> list[RemovableHandle]:
    """Release the nodes that hold much as soon as they have run; the handles take the hooks off again."""
    handles = []
    for node in head:
        held = sum(storage.nbytes() for slot in _saved.slots(node) for storage in _saved.slot_storages(slot))
        if held >= _EARLY:

            @eager
            def after(_grad_inputs: object, _grad_outputs: object, node: Node = node) -> None:
                _saved.release(node, tombstone)

            handles.append(node.register_hook(after))
    return handles


def _explain_freed(error: RuntimeError, nodes: set[Node]) -> None:
    """Turn torch's "second time" into an error that names the node."""
    if isinstance(error, FreedGraphError) or "backward through the graph a second time" not in str(error):
        return
    freed = [node for node in nodes if any(slot.state is _saved.State.FREED for slot in _saved.slots(node))]
    raise FreedGraphError(
        "a part of the graph has been freed by an earlier backward",
        where=f"what {', '.join(sorted({_graph.op(node) for node in freed})[:5])} had saved" if freed else None,
        instead="in the earlier call: gk.backward(..., keep=x), where x is the last tensor that both have in common",
    ) from error


def _warn_not_freed(nodes: list[Node]) -> None:
    names = ", ".join(sorted({_graph.op(node) for node in nodes}))
    whys = sorted({_WHY_HIDDEN if _saved.hides(node) else _WHY_PACKED for node in nodes})
    warn(
        f"gradients are right, but what these ops may hold could not be freed: {names} ({'; '.join(whys)}). It goes with "
        "the last name of the graph. Write instead: `with gk.cut(x) as x:`, where torch itself frees every head",
        NotFreedWarning,
    )


_WHY_HIDDEN = "torch shows nobody what in-place ops on views and C++ functions saved; an out-of-place op can be freed"
_WHY_PACKED = "other saved-tensor hooks, those of save_on_cpu or checkpoint for example, own what was saved"
