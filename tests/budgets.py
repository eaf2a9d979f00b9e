"""Running a program under budgets that fit it, and measuring what it holds without asking the budget."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from outcomes import Outcome, compared, run
from torch.profiler import ProfilerActivity, profile

import graphkeep as gk
from graphkeep._budget._source import Source
from graphkeep._budget._values import Kept, Op, Value
from graphkeep._ledger import Entry

WIDE = 2**40
HOLD = (torch.UntypedStorage, Entry, Kept, Op, Source, Value)
TRIES = 60  # a step that nobody has seen fails at the first place that does not fit: the next is found with the next limit


@dataclass
class Fit:
    """A run under a budget that it fits in."""

    outcome: Outcome
    limit: int
    peak: int
    live: int
    smallest: int | None
    recomputed: int
    tries: int


class Noted:
    """The budget, and its peak and bytes on leaving it."""

    def __init__(self, budget: Any) -> None:
        self.budget = budget

    def __enter__(self) -> None:
        self.budget.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.budget.peak_inside = self.budget.peak
        self.budget.__exit__(*error)


def warm_up() -> None:
    """What torch does once, as soon as a dispatch mode has seen an op: it imports its compiler, which patches torch."""
    with gk.budget(WIDE):
        torch.ones(2, requires_grad=True).sin().sum().backward()


def under(body: Callable[[], object], limit: Any, of: str = "limit", **options: Any) -> tuple[Outcome, Any, list[int]]:
    """The program under a budget: what came of it, the budget, and the limit that a `BudgetError` stated."""
    stated: list[int] = []
    budget = gk.budget(**{of: limit}, **options)

    def watched() -> object:
        try:
            return body()
        except gk.BudgetError as error:
            stated.append(error.smallest)
            raise

    outcome = run(watched, lambda: Noted(budget))
    return outcome, budget, stated


def fitted(body: Callable[[], object], limit: int, **options: Any) -> Fit:
    """The program under the first limit that works, from this one on: each error states the next."""
    for tries in range(1, TRIES + 1):
        outcome, budget, stated = under(body, limit, **options)
        if not stated:
            return Fit(outcome, limit, budget.peak_inside, budget.live, budget.smallest, budget.recomputed_ops, tries)
        assert type(stated[0]) is int
        assert stated[0] > limit, "a limit that was refused is stated as one that works"
        limit = stated[0]
        # nodes that a failed backward has not come to wait in the engine's queue, in eager torch as well, for the next one
        torch.ones(1, requires_grad=True).sum().backward()
    raise AssertionError(f"{TRIES} limits that were stated as ones that work did not, the last one {limit}")


def faults(plain: Outcome, fit: Fit) -> list[str]:
    """What is not as in eager, or above the limit."""
    found = compared(plain, fit.outcome)
    if fit.peak > fit.limit:
        found.append(f"held {fit.peak} of {fit.limit}")
    if fit.live:
        found.append(f"{fit.live} bytes are counted still")
    return found


@contextmanager
def nothing_of_a_budget_left() -> Iterator[None]:
    """By reference counting: neither storages nor objects of the budget's."""
    known = _ours()
    gc.disable()
    try:
        yield
        left = _ours() - known
    finally:
        gc.enable()
    assert left == Counter(), left


def _ours() -> Counter[str]:
    objects = [(o, type(o)) for o in gc.get_objects()]
    tensors = [o for o, kind in objects if kind in (torch.Tensor, torch.nn.Parameter) and o.layout is torch.strided]
    known = {id(t.untyped_storage()) for t in tensors if not t.is_nested}
    return Counter(kind.__qualname__ for o, kind in objects if kind in HOLD and id(o) not in known)


def allocated(body: Callable[[], object]) -> int:
    """The most bytes that the program had of torch's allocator at any moment, above what it had when it began."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as measured:
        body()
    results: Any = measured.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most
