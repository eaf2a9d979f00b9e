"""The rows that `infer` hands out, and the backward that replays them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphkeep import _replay
from graphkeep._batch import Call, select
from graphkeep._eager import eager
from graphkeep._errors import ArgumentError, FreedGraphError, ReplayError
from graphkeep._first_pass import FirstPass
from graphkeep._independence import Trust, fingerprint, trust
from graphkeep._plan import History
from graphkeep._sums import Gradients, Sums, sum_rows


class Rows(torch.autograd.Function):
    """One node for some rows: forward hands out their values, backward replays them.

    Its inputs are the leaves and arguments that the rows depend on, so that the engine itself accumulates their gradients.
    """

    @staticmethod
    @eager
    def forward(ctx: Any, replays: Replays, numbers: torch.Tensor, *_targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.replays = replays
        ctx.synchronises = replays.synchronises(ctx)
        ctx.set_materialize_grads(False)
        # torch frees it with the graph, so that a second backward is refused as everywhere
        ctx.save_for_backward(numbers)
        picked = replays.values(numbers)
        ctx.mark_non_differentiable(
            *(tensor for tensor, has_graph in zip(picked, replays.differentiable, strict=True) if not has_graph)
        )
        return tuple(picked)

    @staticmethod
    @eager
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                "second derivatives through out[rows] are not available: its backward replays the model",
                instead="model(inputs[rows]) and torch.autograd.grad(..., create_graph=True) on what it returns",
            )
        (numbers,) = ctx.saved_tensors
        if ctx.synchronises:
            ctx.replays.prepare(ctx)
        return None, None, *ctx.replays.backward(numbers, grads)


class Replays:
    """Runs backward for rows of a first pass: by a kept graph, by the rows alone, or by their whole chunk.

    Arguments:
        first: the first pass.
        history: where to note what was seen, for the next call.
        stale_ok: do not compare with the values that were handed out.
        choose: where a graph was kept, use it only if that is the cheaper way.
    """

    def __init__(self, first: FirstPass, history: History, *, stale_ok: bool, choose: bool) -> None:
        self._first: FirstPass | None = first
        self._stale_ok = stale_ok
        self._choose = choose
        self._substitute = not first.coupled
        self._history = history
        self._backward_seconds = history.backward_seconds or 2 * first.forward_seconds  # a sample, until one has been seen
        self._settled = False
        self.differentiable = first.differentiable

    def close(self) -> None:
        self._first = None

    def _source(self) -> FirstPass:
        if self._first is None:
            raise FreedGraphError(
                "the rows of an inference that has been discarded", instead="out.discard() after the last backward"
            )
        return self._first

    def values(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        first = self._source()
        # copies: what is done to them in place must not reach the values that replays are compared with
        return [select(tensor, numbers, first.arguments.dim) for tensor in first.tensors]

    def rows(self, numbers: torch.Tensor) -> list[torch.Tensor]:
        """The outputs of some rows, with a graph if the model gave them one."""
        first = self._source()
        if not (torch.is_grad_enabled() and any(first.differentiable)):
            return self.values(numbers)
        apply: Any = Rows.apply
        return list(apply(self, numbers, *first.leaves.values(), *first.arguments.differentiable.values()))

    def synchronises(self, node: Any) -> bool:
        """Whether the backward of a node is to be synchronised; the wrapper then waits for it."""
        first = self._source()
        if not first.wrapper.synchronises():
            return False
        first.wrapper.expects(node, first.leaves.values())
        return True

    def prepare(self, node: Any) -> None:
        """Make the wrapper ready for the backward that runs now, of which this node is a part."""
        first = self._source()
        first.wrapper.before_backward(node, first.leaves.values())

    # --- backward -----------------------------------------------------------------------------------------------------------

    def backward(self, numbers: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> Gradients:
        """Gradients of the leaves and of the arguments, in that order, for gradients of the outputs of some rows."""
        first = self._source()
        first.refuse_changes(stale_ok=self._stale_ok)
        dim = first.arguments.dim
        rows, place = numbers.unique(return_inverse=True)
        wanted = [
            None if grad is None else sum_rows(grad, place, len(rows), dim) if has_graph else None
            for grad, has_graph in zip(grads, first.differentiable, strict=True)
        ]
        first.plan.rows_asked += len(rows)
        sums = Sums(first)
        with _silenced(first.leaves.values()):
            for part in self._parts(rows):
                self._run(part, rows, wanted, sums)
        self._note()
        return sums.gradients(empty=len(rows) == 0)

    def _note(self) -> None:
        first, history = self._source(), self._history
        history.share = min(1.0, first.plan.rows_asked / first.plan.samples)
        history.forward_seconds, history.backward_seconds = first.forward_seconds, self._backward_seconds
        history.alone = first.alone

    def _parts(self, rows: torch.Tensor) -> Iterator[tuple[int | None, torch.Tensor]]:
        """Split rows into what is run together: (chunk, its rows), or (None, rows that are computed alone)."""
        first = self._source()
        alone: list[torch.Tensor] = []
        if self._choose:  # between a kept graph and the rows alone
            self._settle()
        for k in (rows // first.step).unique().tolist():
            mine = rows[(rows // first.step) == k]
            size = first.chunks[k].stop - first.chunks[k].start
            if k in first.kept and self._use_kept(k, mine, size):
                yield k, mine
                continue
            if len(mine) < size:
                self._settle()
            if len(mine) == size or not first.alone:
                yield k, mine
            else:
                alone.append(mine)
        if alone:
            for group in torch.cat(alone).split(first.step):
                yield None, group

    def _settle(self) -> None:
        """Find out, once for a model, its modes and the kind of its arguments, what may be done with rows."""
        if self._settled:
            return
        self._settled = True
        first = self._source()
        modes = (
            tuple(module.training for module, _ in first.worlds[0].training),
            first.random,
            first.step == 1,
            self._stale_ok,
            fingerprint(first),
        )
        trusted = self._history.trusted.get(modes)
        if not isinstance(trusted, Trust):
            trusted = self._history.trusted[modes] = trust(first)
        if first.alone and not trusted.alone:
            first.plan.say(
                "whole chunks are replayed: a few samples by themselves had other gradients than in company, or did not run"
            )
        first.alone = first.alone and trusted.alone
        self._substitute = self._substitute and trusted.substitute

    def _use_kept(self, k: int, rows: torch.Tensor, size: int) -> bool:
        first = self._source()
        if self._stale_ok and first.is_stale():
            first.plan.say("a kept graph was replayed: the weights have changed since")
            first.free(k)
            return False
        rejected = _others(first.chunks[k], rows)
        dim = first.arguments.dim
        if len(rejected) and not all(
            bool(torch.isfinite(select(t, rejected, dim)).all()) for t in first.tensors if t.is_floating_point()
        ):
            first.plan.say("a kept graph was replayed: a rejected sample in it is not finite, and 0 · NaN is NaN")
            first.free(k)
            return False
        cheaper = len(rows) * (first.forward_seconds + self._backward_seconds) < size * self._backward_seconds
        if self._choose and first.alone and cheaper:
            first.plan.say("rows were replayed alone where that is cheaper than backward through their kept chunk")
            first.free(k)
            return False
        return True

    def _run(
        self, part: tuple[int | None, torch.Tensor], rows: torch.Tensor, wanted: Sequence[torch.Tensor | None], sums: Sums
    ) -> None:
        """Backward for one part; `wanted` are the gradients of the outputs of all `rows`."""
        first = self._source()
        k, mine = part
        own = torch.searchsorted(rows, mine)
        grads = [None if grad is None else select(grad, own, first.arguments.dim) for grad in wanted]
        if k is None:
            again = self._alone(mine)
            if again is not None:
                with self._as_it_was(int(mine[0]) // first.step):
                    self._differentiate(*again, grads, mine, sums)
                return
            for chunk in (mine // first.step).unique().tolist():
                self._run((chunk, mine[(mine // first.step) == chunk]), rows, wanted, sums)
            return
        chunk = first.chunks[k]
        inside = mine - chunk.start
        size = chunk.stop - chunk.start
        if k in first.kept:
            kept = first.free(k)
            spread = [_spread(grad, inside, size, first.arguments.dim) for grad in grads]
            numbers = torch.arange(chunk.start, chunk.stop)
            call = Call((), {}, kept.stand_ins)
            if self._differentiate(kept.outputs, call, spread, numbers, sums, must_be_finite=len(mine) < size):
                return
            first.plan.say("a kept graph was replayed: a rejected sample in it brought NaN or inf to a gradient")
        outputs, call, replaced = self._whole(k, mine)
        spread = [_spread(grad, inside, size, first.arguments.dim) for grad in grads]
        numbers = torch.arange(chunk.start, chunk.stop)
        with self._as_it_was(k):
            self._differentiate(outputs, call, spread, numbers, sums, counts=inside if replaced else None)

    def _as_it_was(self, k: int) -> contextlib.AbstractContextManager[None]:
        """The world of a chunk for a backward too: a `checkpoint` in the model runs its part of the forward again there."""
        first = self._source()
        world = first.worlds[k]
        return world.restored(first.changing) if world.buffers else contextlib.nullcontext()

    def _alone(self, rows: torch.Tensor) -> tuple[list[torch.Tensor], Call] | None:
        """The rows by themselves; None if that gives other values than they had in their chunk."""
        first = self._source()
        k = int(rows[0]) // first.step
        reason = "gave other values"
        try:
            with first.worlds[k].restored(first.changing):
                outputs, call = self._forward(rows)
            if self._stale_ok or self._as_before(outputs, rows):
                return outputs, call
        except Exception as error:  # a mask for all that was taken for one row a sample, for example
            reason = f"raised {type(error).__name__}: {error}"
        first.alone = False
        first.plan.say(f"whole chunks are replayed: rows by themselves {reason}")
        return None

    def _whole(self, k: int, rows: torch.Tensor) -> tuple[list[torch.Tensor], Call, bool]:
        """A whole chunk again. Samples that were not asked for are replaced by one that was, so that what is wrong with them
        (NaN) reaches no gradient; where samples depend on each other, which the values show, they stay.

        Returns:
            The outputs, the call, and whether samples were replaced.
        """
        first = self._source()
        chunk = first.chunks[k]
        if len(rows) < chunk.stop - chunk.start:
            self._settle()
        if self._substitute and len(rows) < chunk.stop - chunk.start:
            numbers = torch.full((chunk.stop - chunk.start,), int(rows[0]))
            numbers[rows - chunk.start] = rows
            with first.worlds[k].restored(first.changing):
                outputs, call = self._forward(numbers)
            if self._stale_ok or self._as_before(outputs, rows, rows - chunk.start):
                return outputs, call, True
            self._substitute = False
            first.plan.say("chunks are replayed with all their samples, since these depend on each other")
        with first.worlds[k].restored(first.changing):
            outputs, call = self._forward(chunk)
        if not self._stale_ok and not self._as_before(outputs, torch.arange(chunk.start, chunk.stop)):
            self._refuse(k)
        return outputs, call, False

    def _forward(self, rows: slice | torch.Tensor) -> tuple[list[torch.Tensor], Call]:
        first = self._source()
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        first.plan.replays += 1
        first.plan.rows_replayed += count
        return first.forward(rows)

    def _as_before(self, outputs: list[torch.Tensor], rows: torch.Tensor, inside: torch.Tensor | None = None) -> bool:
        """Whether outputs, or their rows `inside`, are what was handed out for the given rows."""
        first = self._source()
        graphs = first.has_graph(int(rows[0]) // first.step)
        dim = first.arguments.dim
        if len(outputs) != len(first.tensors):
            return False
        for output, value, has_graph in zip(outputs, first.tensors, graphs, strict=True):
            values = output.detach() if inside is None else select(output.detach(), inside, dim)
            if output.requires_grad != has_graph or not _replay.near_values(values, select(value, rows, dim)):
                return False
        return True

    def _refuse(self, k: int) -> None:
        first = self._source()

        def again() -> None:
            with first.worlds[k].restored(first.changing):
                first.forward(first.chunks[k])

        module = _replay.first_difference(again, first.modules)
        cause = (
            f"likely {_replay.name_of(module, first.modules)}: it gives other values each time it runs"
            if module is not None
            else "something outside parameters, buffers and torch's generators has changed since: a Python attribute, a "
            "cache, a list, numpy's or Python's generator"
        )
        raise ReplayError(
            "running the model again did not give the values that were handed out, so their gradients would be wrong",
            where=f"{cause} (gk.infer() at {first.where})",
            instead='keep="everything", which runs nothing again if a chunk is asked for only once; or a model whose outputs '
            "depend on its arguments, parameters, buffers and torch's generators only",
        )

    def _differentiate(
        self,
        outputs: list[torch.Tensor],
        call: Call,
        grads: Sequence[torch.Tensor | None],
        numbers: torch.Tensor,
        sums: Sums,
        *,
        must_be_finite: bool = False,
        counts: torch.Tensor | None = None,
    ) -> bool:
        """Backward through one graph, into the sums.

        Arguments:
            numbers: the rows that the graph has.
            must_be_finite: add nothing and return False if a gradient is not finite; the graph has rows that were not asked
                for, and it may come from these.
            counts: positions of the rows whose input gradients count; None for all.
        """
        first = self._source()
        # in some chunks an output may have no graph that it has in others
        pairs = [(o, grad) for o, grad in zip(outputs, grads, strict=True) if grad is not None and o.requires_grad]
        started = time.perf_counter()
        targets = [*first.leaves.values(), *call.stand_ins.values()]
        found: Gradients = [None] * len(targets)
        if pairs:
            found = list(torch.autograd.grad([o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True))
        # by the sum, which reads a gradient once; that it may overflow for finite values costs a replay
        if must_be_finite and not all(bool(torch.isfinite(_dense(grad).sum())) for grad in found if grad is not None):
            return False
        first.plan.rows_backward += len(numbers)
        self._backward_seconds = (self._backward_seconds + (time.perf_counter() - started) / len(numbers)) / 2
        sums.add(found, list(call.stand_ins), numbers, counts)
        return True


def _spread(grad: torch.Tensor | None, inside: torch.Tensor, size: int, dim: int) -> torch.Tensor | None:
    """Gradients of some rows, with zeros for the others of their chunk."""
    if grad is None or len(inside) == size:
        return grad
    return sum_rows(grad, inside, size, dim)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.layout is torch.sparse_coo else grad


def _others(chunk: slice, rows: torch.Tensor) -> torch.Tensor:
    everyone = torch.arange(chunk.start, chunk.stop)
    return everyone[~torch.isin(everyone, rows)]


@contextlib.contextmanager
def _silenced(leaves: Any) -> Iterator[None]:
    """Take the tensor hooks off the leaves for a while: they fire when the engine reaches the leaf, with the whole sum."""
    hooks = [leaf._backward_hooks for leaf in leaves if leaf._backward_hooks]
    saved = [dict(table) for table in hooks]
    try:
        for table in hooks:
            table.clear()
        yield
    finally:
        for table, before in zip(hooks, saved, strict=True):
            table.update(before)
