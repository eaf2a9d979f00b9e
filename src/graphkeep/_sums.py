"""Gradients summed over the parts of one backward: whole for leaves, by rows for the arguments of a batch."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from graphkeep._batch import select
from graphkeep._first_pass import FirstPass

Gradients = list[torch.Tensor | None]


class Sums:
    """Gradients of leaves, whole, and of the batch's arguments, by rows, summed over the parts of one backward."""

    def __init__(self, first: FirstPass) -> None:
        self._first = first
        self._whole: dict[int, torch.Tensor] = {}  # by position in `targets`
        self._own: set[int] = set()
        self._pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def add(self, found: Gradients, positions: list[int], numbers: torch.Tensor, counts: torch.Tensor | None) -> None:
        arguments, n_leaves = self._first.arguments, len(self._first.leaves)
        order = list(arguments.differentiable)
        for i, grad in enumerate(found):
            if grad is None:
                continue
            if i < n_leaves:
                self._sum(i, grad)
                continue
            position = positions[i - n_leaves]
            if arguments.batched(position):
                if counts is not None:
                    grad = select(grad, counts, arguments.dim)
                self._pieces.setdefault(position, []).append((numbers if counts is None else numbers[counts], grad))
            else:
                self._sum(n_leaves + order.index(position), grad)

    def _sum(self, i: int, grad: torch.Tensor) -> None:
        if i not in self._whole:
            self._whole[i] = grad
        elif i in self._own and self._whole[i].layout == grad.layout:
            self._whole[i].add_(grad)
        else:  # the first one may be somebody else's memory
            self._whole[i] = self._whole[i] + grad
            self._own.add(i)

    def gradients(self, *, empty: bool) -> Gradients:
        first = self._first
        targets = [*first.leaves.values(), *first.arguments.differentiable.values()]
        found: Gradients = [self._whole.get(i) for i in range(len(targets))]
        for i, position in enumerate(first.arguments.differentiable, start=len(first.leaves)):
            if position in self._pieces:
                found[i] = _scatter(self._pieces.pop(position), targets[i], first.arguments.dim)
        if empty:  # no row was asked for: zeros, so that every parameter still takes part (in DDP's synchronisation too)
            return [torch.zeros_like(target) for target in targets]
        return found


def _scatter(pieces: list[tuple[torch.Tensor, torch.Tensor]], target: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of a whole argument from that of some rows, at a cost of these rows where that can be."""
    single = len(pieces) == 1  # sorted and unique then, and not copied
    numbers = (pieces[0][0] if single else torch.cat([numbers for numbers, _ in pieces])).to(target.device)
    grads = pieces[0][1] if single else torch.cat([grad for _, grad in pieces], dim)
    if _accumulates_sparsely(target, dim):
        if target.grad is None:
            target.grad = torch.zeros_like(target)
        return torch.sparse_coo_tensor(numbers[None], grads, target.shape, check_invariants=False, is_coalesced=single)
    return torch.zeros_like(target).index_add_(dim, numbers, grads)


def _accumulates_sparsely(target: torch.Tensor, dim: int) -> bool:
    """Whether a sparse gradient ends as rows added to a dense ``.grad``, and nobody gets to see it before."""
    if not target.is_leaf or dim not in (0, -target.dim()) or target.layout is not torch.strided:
        return False
    if target._backward_hooks or getattr(target, "_post_accumulate_grad_hooks", None):
        return False
    if target.grad is not None and (target.grad.layout is not torch.strided or target.grad.requires_grad):
        return False
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(target).node))
    except RuntimeError:  # torch.autograd.grad hands it to the user
        return False


def sum_rows(grad: torch.Tensor, place: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """Gradients of rows that may come twice, summed into sorted unique rows."""
    shape = list(grad.shape)
    shape[dim] = count
    return grad.new_zeros(shape).index_add_(dim, place.to(grad.device), grad)
