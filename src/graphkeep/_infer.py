"""`infer`: forward every sample, then backward only for the rows that are picked, in any order.

One batched forward is one graph, and torch can neither free a part of it nor run backward on a part at the part's cost. So the
first pass keeps no graph (or only those that `keep` allows), and the rows that are handed out carry one node whose backward
*replays*: it runs the model again on just these rows, or on their whole chunk where rows cannot be computed alone, compares
the values with those that were handed out, and delivers the gradients of inputs and parameters through that node. The
parameters' own `AccumulateGrad` nodes run once for each backward of the user's, so hooks, DDP and optimizer-in-backward see
what they see in plain PyTorch.

Related: gradient checkpointing (Chen et al. 2016), GradCache (Gao et al. 2021), selective backprop (Jiang et al. 2019).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from graphkeep._batch import Arguments, row_numbers, select
from graphkeep._distributed import wrapped
from graphkeep._eager import eager
from graphkeep._errors import ArgumentError, ArgumentTypeError, FreedGraphError, caller
from graphkeep._first_pass import FirstPass
from graphkeep._independence import refuse_rows_that_mix
from graphkeep._plan import Plan, history_of, parse_keep
from graphkeep._replay import modules_of
from graphkeep._rows import Replays


@eager
def infer(
    model: Callable[..., Any],
    *args: Any,
    chunk_size: int | None = None,
    keep: int | str = "nothing",
    budget: int | str | None = None,
    batch_dim: int = 0,
    stale_ok: bool = False,
    **kwargs: Any,
) -> Inference:
    """Run a whole batch forward, keep no graph, and hand out differentiable rows of the outputs afterwards.

    Arguments:
        model: a module or any other callable. Its outputs must have one row a sample along `batch_dim`, in a tensor or any
            pytree (tuple, dict, dataclass, ``ModelOutput``) with None, numbers and integer tensors among them.
        args, kwargs: its arguments, pytrees of tensors and anything else. Tensors whose size along `batch_dim` is that of the
            first one are split into chunks; all others, parameters among them, are passed on as they are.
        chunk_size: how many samples run forward together; None for all at once, which is exactly the plain forward. With
            smaller chunks, modules that mix the samples of a batch are refused.
        keep: ``"nothing"`` replays what is asked for; ``"everything"`` keeps each chunk's graph until its rows have been used;
            a number of bytes (``2**30`` or ``"1GiB"``) keeps as many chunks as fit; ``"auto"`` keeps what `budget` allows and
            then does what is cheaper for the rows that were asked for, going by the times it has seen.
        budget: with ``keep="auto"``, bytes that kept graphs may hold (an int or ``"1GiB"``); None for no limit.
        batch_dim: the batch dimension of arguments and outputs.
        stale_ok: allow weights to change between the first pass and a backward. The replay then uses the new weights and is not
            compared.

    Returns:
        Inference: ``out.values`` are all outputs, detached; ``out[rows]`` are differentiable outputs of some rows.

    Raises:
        ArgumentError: an empty batch; an output without one row a sample; a module that mixes rows, with `chunk_size`.
        ArgumentTypeError: no argument has the batch dimension.

    Example:
        >>> import torch, graphkeep as gk
        >>> net = torch.nn.Linear(3, 2)
        >>> inputs = torch.ones(5, 3, requires_grad=True)
        >>> out = gk.infer(net, inputs, chunk_size=2)
        >>> out.values.shape
        torch.Size([5, 2])
        >>> for rows in ([4, 0], [1]):  # decided by outside logic, after seeing the values
        ...     out[rows].sum().backward()
        >>> (inputs.grad.abs().sum(1) > 0).tolist()
        [True, True, False, False, True]
    """
    return Inference(model, args, kwargs, chunk_size, keep, budget, batch_dim, stale_ok)


class Inference:
    """What `infer` returns: the values of all samples, and rows of them that can be differentiated.

    It works as a context manager, which discards it on leaving.

    Attributes:
        values: the outputs of all samples, detached, in the type and structure that the model returns.
        plan: what was done and why, a `Plan`.
    """

    values: Any
    plan: Plan

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chunk_size: int | None,
        keep: int | str,
        budget: int | str | None,
        batch_dim: int,
        stale_ok: bool,
    ) -> None:
        if not callable(model):
            raise ArgumentTypeError(f"the model is of type {type(model).__name__}", instead="a module or another callable")
        if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
            raise ArgumentError(f"chunk_size={chunk_size!r}", instead="a number of samples, or None for all at once")
        limit = parse_keep(keep, budget)
        self._stale_ok = stale_ok
        self._where = caller()
        wrapper = wrapped(model, modules_of(model))
        arguments = Arguments(*wrapper.begin(args, kwargs), batch_dim)
        self.plan = Plan(arguments.size, 1, str(keep))
        history = history_of(wrapper.forward, modules_of(wrapper.forward))
        if keep == "auto" and history.replays_are_cheaper:
            limit = 0
            self.plan.say(f"no graph kept: going by the last time ({history.share:.0%} of the rows), replays are cheaper")
        self._first: FirstPass | None = FirstPass(wrapper, arguments, chunk_size, limit, self.plan, self._where)
        mixed = refuse_rows_that_mix(self._first) if len(self._first.chunks) > 1 else None
        if mixed is not None:
            raise ArgumentError(
                f"{mixed}, so chunk_size would change the results",
                where="a module that mixes the samples, an LSTM or attention with the batch in another dimension, for example; "
                "or state that the forward keeps outside modules and torch's generators",
                instead="chunk_size=None; or batch_dim= (batch_first=True in torch's modules) if dimension "
                f"{batch_dim} is not the batch",
            )
        self.values = self._first.values
        self._replays = Replays(self._first, history, stale_ok=stale_ok, choose=keep == "auto")

    def __len__(self) -> int:
        return self.plan.samples

    @eager
    def __getitem__(self, rows: Any) -> Any:
        """Differentiable outputs of some rows.

        Arguments:
            rows: an int (which takes the batch dimension away), a slice, a list, an index tensor, or a boolean mask. A row may
                come twice, and every row may be asked for any number of times.

        Returns:
            The type and structure that the model returns. What has no gradient in it is passed through.

        Raises:
            ArgumentError: a row out of range, or a mask of another length.
            ChangedGraphError: a weight was changed since the first pass, and not ``stale_ok``.
            FreedGraphError: it has been discarded.
        """
        first = self._require()
        first.refuse_changes(stale_ok=self._stale_ok)
        numbers, single = row_numbers(rows, self.plan.samples)
        picked = self._replays.rows(numbers)
        return first.build([tensor.select(first.arguments.dim, 0) for tensor in picked] if single else picked)

    def batches(self, index_lists: Iterable[Any], *, progress: bool = False) -> Iterator[Any]:
        """``out[rows]`` for one index after the other.

        Arguments:
            index_lists: indices as `__getitem__` takes them.
            progress: show a progress bar on stderr.
        """
        if progress:
            from rich.progress import track  # noqa: PLC0415  importing graphkeep does not import rich

            index_lists = track(list(index_lists), description="backward")
        for rows in index_lists:
            yield self[rows]

    def input_grad(self, rows: Any) -> Any:
        """The gradients of some rows of the arguments that require one: those rows of their ``.grad``.

        Returns:
            A tensor if one argument requires a gradient, else a tuple in the order of the arguments; None where there is no
            gradient yet.
        """
        arguments = self._require().arguments
        numbers, single = row_numbers(rows, self.plan.samples)
        found = []
        for i, tensor in arguments.differentiable.items():
            if not arguments.batched(i):
                continue
            grad = None if tensor.grad is None else select(tensor.grad, numbers, arguments.dim)
            found.append(grad.select(arguments.dim, 0) if single and grad is not None else grad)
        if not found:
            raise ArgumentError(
                "no argument of the batch requires a gradient", instead="inputs.requires_grad_() before gk.infer"
            )
        return found[0] if len(found) == 1 else tuple(found)

    def discard(self) -> None:
        """Let go of everything but `values` and `plan`: kept graphs, arguments, what replays need."""
        if self._first is not None:
            self._first = None
            self._replays.close()
        self.plan.kept_chunks = self.plan.kept_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy, by `copy.deepcopy` or `torch.save` of a module that holds it, is discarded: it has `values` and `plan`."""
        plan = copy.copy(self.plan)
        plan.kept_chunks = plan.kept_bytes = 0
        return {"values": self.values, "plan": plan, "_first": None, "_where": self._where, "_stale_ok": self._stale_ok}

    def __enter__(self) -> Inference:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.discard()

    def _require(self) -> FirstPass:
        if self._first is None:
            raise FreedGraphError(
                "this inference has been discarded", where=f"gk.infer() at {self._where}", instead="gk.infer again"
            )
        return self._first
