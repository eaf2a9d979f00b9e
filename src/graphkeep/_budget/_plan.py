"""A plan: which values of a step to drop, and when, decided from the step before.

The stream of a step that has ended is known (`_trace`), so what a way of dropping costs can be found out without running
anything. `plan` tries several: dropping under way by the rule of Kirisame et al. 2021 (Dynamic Tensor Rematerialization,
https://arxiv.org/abs/2006.09616), with more or less weight on how soon a value is needed, and dropping at once the cheapest
bytes until the fullest moment fits. From the best of them it searches on, value by value, as long as its time lasts.

What the best could be: Jain et al. 2020 (Checkmate), https://arxiv.org/abs/1910.02653; `benchmarks/budget_optimum.py` compares.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graphkeep._budget._trace import Simulated, TookTooLongError, Trace

PATIENCE = 1.0  # seconds that a plan may take
_POWERS = (1.0, 0.5, 0.0, 2.0)


@dataclass
class Plan:
    """What to drop, and the stream that it was made for.

    Attributes:
        saves: the stream: what was saved, in order.
        dropped: the values to drop as soon as they are saved, by their numbers.
        later: the values to drop later: at which event, before which op of those that run again for it.
        most: bytes that are then held at most.
        seconds: that are run again.
        fits: whether that is within the limit.
        limit: in bytes.
        trace: what it was made from.
    """

    saves: list[tuple[int, int]]
    dropped: frozenset[int]
    later: dict[tuple[int, int], list[int]]
    most: int
    seconds: float
    fits: bool
    limit: int
    trace: Trace


def plan(trace: Trace, limit: int, patience: float = PATIENCE) -> Plan:
    """Decide within so many seconds."""
    search = _Search(trace, limit, time.perf_counter() + patience)
    with contextlib.suppress(TookTooLongError):
        search.run()
    found = search.best
    if found is None:
        return Plan(trace.saves, frozenset(), {}, 0, 0.0, False, limit, trace)
    return Plan(trace.saves, search.dropped, found.later, found.most, found.seconds, True, limit, trace)


def smallest(trace: Trace) -> int:
    """The smallest limit, in bytes, that a step with this stream can have; a backward still to come is guessed."""
    whole = trace.ended()
    # running again takes room as well: with little to drop it may take more than to keep all
    return min(whole.simulate(whole.droppable(), 0).most, whole.simulate((), 1 << 62).most)


class _Search:
    def __init__(self, trace: Trace, limit: int, until: float) -> None:
        self.trace = trace
        self.limit = limit
        self.until = until
        self.best: Simulated | None = None
        self.dropped: frozenset[int] = frozenset()
        self.power = _POWERS[0]

    def run(self) -> None:
        """Look for the best until time is over."""
        for power in _POWERS:
            self.consider(frozenset(), power)
        dropped = self.at_once()
        if dropped is not None:
            self.consider(dropped, self.power)
        if self.best is not None and self.best.seconds:
            for value in self.flips():
                self.consider(self.dropped ^ {value}, self.power)

    def consider(self, dropped: frozenset[int], power: float) -> None:
        """Take it if it is better."""
        found = self.trace.simulate(dropped, self.limit, power=power, until=self.until)
        if found.most <= self.limit and (self.best is None or found.seconds < self.best.seconds):
            self.best, self.dropped, self.power = found, dropped, power

    def flips(self) -> Iterator[int]:
        """Values to be kept that were to be dropped, the dearest first; then any, to be dropped or not."""
        kept = self.there(self.dropped)
        yield from sorted(self.dropped, key=lambda v: -self.trace.again(v, kept))
        values = sorted(self.trace.droppable())
        draw = random.Random(0)
        while values:
            yield draw.choice(values)

    def there(self, dropped: Collection[int]) -> set[int]:
        """What need not run again."""
        leaves = {v for v, made in enumerate(self.trace.values) if made.op < 0}
        return (self.trace.droppable() - set(dropped)) | leaves

    def at_once(self) -> frozenset[int] | None:
        """The cheapest bytes until the fullest moment fits; None if none do."""
        trace, may = self.trace, self.trace.droppable()
        dropped: set[int] = set()
        while True:
            most, _, full, _ = trace.simulate(dropped, self.limit, evict=False, until=self.until)
            if most <= self.limit:
                return frozenset(dropped)
            left = may - dropped
            if not left:
                return None
            kept = self.there(dropped)
            there = sorted(left & full or left, key=lambda v: trace.again(v, kept) / trace.values[v].nbytes)
            excess = most - self.limit
            for v in there:
                dropped.add(v)
                excess -= trace.values[v].nbytes
                if excess <= 0:
                    break
