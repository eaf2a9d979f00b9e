"""Whether the samples of a batch are computed independently, found out by running a few of them in other company.

Two questions are asked of a model that is to be run in pieces. May it be split into chunks at all: do three samples from two
chunks, run together, give the values that they had? (In evaluation mode, where it draws random numbers.) And may some rows be
run without the others: do they have the same *gradients* then? Values alone do not tell: a branch behind a gate that is zero at
initialisation, a table of zeros indexed by the position in the batch, an auxiliary loss whose value cancels, all leave them as
they are. Both run on a handful of samples; the second is asked once for each model and mode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from graphkeep import _replay
from graphkeep._batch import select
from graphkeep._first_pass import FirstPass

_GROUP = 8  # samples


def refuse_rows_that_mix(first: FirstPass) -> str | None:
    """Why a model cannot run in chunks: an exception it raised, or that samples mix; None if it can."""
    step, size, dim = first.step, first.arguments.size, first.arguments.dim
    # from two chunks, and none where it stood in its own
    rows = torch.tensor(list(dict.fromkeys([min(step + 1, size - 1), 0, step, 1]))[:3])
    with first.worlds[0].restored(first.changing):
        if not first.random:
            wanted = [select(tensor, rows, dim) for tensor in first.tensors]
            return _differ(first, rows, wanted)
        before = _replay.generator_states()
        first.evaluate()
        company = torch.tensor(list(dict.fromkeys([0, *range(step, min(step + 3, size)), *range(min(step, 3))])))
        wanted = [select(tensor, torch.searchsorted(company.sort().values, rows), dim) for tensor in _sorted(first, company)]
        if not all(map(torch.equal, before, _replay.generator_states())):
            return None  # random in evaluation mode too: no two runs could be compared
        return _differ(first, rows, wanted)


def _sorted(first: FirstPass, company: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in first.forward(company.sort().values)[0]]


def _differ(first: FirstPass, rows: torch.Tensor, wanted: list[torch.Tensor]) -> str | None:
    got = first.forward(rows)[0]
    if len(got) != len(wanted):
        return "samples run together return another structure"
    pairs = [(a.detach(), b) for a, b in zip(got, wanted, strict=True) if b.is_floating_point() or b.is_complex()]
    return None if all(_replay.near_values(a, b, factor=30) for a, b in pairs) else "samples give other values in other company"


@dataclass(frozen=True)
class Trust:
    """What may be done with rows: run them alone; replace the rest of their chunk."""

    alone: bool
    substitute: bool


def trust(first: FirstPass) -> Trust:
    """Compare the gradients of a few samples in a group, alone, and with the rest of the group replaced."""
    group = _finite_rows(first)
    if first.coupled or len(group) == 0:
        return Trust(alone=False, substitute=not first.coupled)
    if len(group) == 1:
        return Trust(alone=first.alone, substitute=True)
    places = torch.tensor([len(group) - 1, len(group) // 2][: len(group) - 1])
    mine = group[places]
    try:
        reference, inputs = _gradients(first, group, places)
    except Exception:  # it runs only on as many samples as the batch has
        return Trust(alone=False, substitute=False)
    others = torch.ones(len(group), dtype=torch.bool)
    others[places] = False
    independent = all(_nothing(select(grad, others.nonzero()[:, 0], first.arguments.dim), grad) for grad in inputs)
    replaced = mine[:1].repeat(len(group))
    replaced[places] = mine
    return Trust(
        alone=independent and first.alone and _agree(first, mine, None, reference),
        substitute=independent and _agree(first, replaced, places, reference),
    )


_PLAIN = (bool, int, float, str, type(None))


def fingerprint(first: FirstPass) -> tuple[object, ...]:
    """What of a call may switch a model to another computation: plain arguments, and plain attributes of its modules.

    An argument that is neither a tensor nor plain counts by identity, so that another one is looked at anew.
    """
    members = [
        (str(m.dtype), m.dim(), m.requires_grad) if isinstance(m, torch.Tensor) else m if isinstance(m, _PLAIN) else id(m)
        for m in first.arguments.members
    ]
    attributes = [
        (name, value) for module in first.modules for name, value in vars(module).items() if isinstance(value, _PLAIN)
    ]
    return first.arguments.dim, tuple(members), tuple(attributes)


def _agree(first: FirstPass, rows: torch.Tensor, places: torch.Tensor | None, reference: list[torch.Tensor | None]) -> bool:
    try:
        found, _ = _gradients(first, rows, places)
    except Exception:  # these rows cannot be run that way, which is the answer
        return False
    for ours, theirs in zip(found, reference, strict=True):
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and theirs is not None and not _replay.near_values(ours.to_dense(), theirs.to_dense(), factor=30):
            return False
    return True


def _gradients(
    first: FirstPass, rows: torch.Tensor, places: torch.Tensor | None
) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
    """Gradients of the leaves, and of the batch's arguments, for a fixed gradient at some places among the rows."""
    dim = first.arguments.dim
    with first.worlds[0].restored(first.changing):
        outputs, call = first.forward(rows)
        pairs = []
        for output in outputs:
            if output.requires_grad:
                count = len(rows) if places is None else len(places)
                shape = list(output.shape)
                shape[dim] = count
                pattern = torch.arange(math.prod(shape), dtype=torch.float64).cos().reshape(shape).to(output)
                if places is not None:
                    pattern = torch.zeros_like(output).index_copy_(dim, places.to(output.device), pattern)
                pairs.append((output, pattern))
        if not pairs:
            return [], []
        leaves = list(first.leaves.values())
        targets = [*leaves, *call.stand_ins.values()]
        found = torch.autograd.grad([o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True)
    inputs = zip(call.stand_ins, found[len(leaves) :], strict=True)
    return list(found[: len(leaves)]), [g for i, g in inputs if g is not None and first.arguments.batched(i)]


def _finite_rows(first: FirstPass) -> torch.Tensor:
    """Up to eight samples of one chunk whose outputs are finite."""
    dim = first.arguments.dim
    for chunk in first.chunks:
        finite = torch.ones(chunk.stop - chunk.start, dtype=torch.bool)
        for tensor in first.tensors:
            if tensor.is_floating_point():
                rows = torch.isfinite(select(tensor, chunk, dim)).movedim(dim, 0)
                rows = rows.reshape(len(rows), -1).all(1)
                finite &= rows.cpu()
        found = finite.nonzero()[:_GROUP, 0] + chunk.start
        if len(found) > 1 or chunk.stop - chunk.start == 1:
            return found
    return torch.empty(0, dtype=torch.int64)


def _nothing(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.numel() == 0 or bool(part.abs().max() <= 1e-6 * whole.abs().max())
