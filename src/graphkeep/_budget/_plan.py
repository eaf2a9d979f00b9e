"""A plan: which values of a step to drop, and when, decided from the step before.

The stream of a step that has ended is known (`_trace`), so what a way of dropping costs can be found out without running
anything. `plan` begins with several: dropping under way by the rule of Kirisame et al. 2021 (Dynamic Tensor Rematerialization,
https://arxiv.org/abs/2006.09616), with more or less weight on how soon a value is needed; and dropping at once the cheapest
bytes (`_greedy`), until what is held fits, or until less is held, which leaves room for running again. From the best it goes on
by small changes for as long as its time lasts.

What the best could be: Jain et al. 2020 (Checkmate), https://arxiv.org/abs/1910.02653; `benchmarks/budget_optimum.py` compares.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from graphkeep._budget._greedy import greedy
from graphkeep._budget._slack import Saved
from graphkeep._budget._sparse import Schedule, schedule
from graphkeep._budget._trace import Simulated, TookTooLongError, Trace

PATIENCE = 1.0  # seconds that a plan may take
_POWERS = (1.0, 0.5, 0.0, 2.0)
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3, 0.2)  # of the limit, to be held at most
_ALONE = (1.0, 0.5, 0.0)  # whether a value is had again alone (1), or by the way, with all else that was dropped (0)
_BEGINNING = 0.5  # of the time is for finding where to begin
_EXCHANGE, _LATER = 0.35, 0.3  # shares of the changes: one value for its neighbour; to be the first to go, not at once
_SPARE = 4  # a sixteenth of the limit at most is left free
_WARM = 0.01  # share of the seconds that a change may make worse in the beginning


@dataclass
class Plan:
    """What to drop, and the stream that it was made for.

    Attributes:
        saves: the stream: what was saved, in order.
        dropped: the values to drop as soon as they are saved, by their numbers.
        later: the values to drop later: at which event, before or after which op of those that run again for it.
        most: bytes that are then held at most.
        seconds: that are run again.
        fits: whether that is within the limit.
        limit: in bytes.
        trace: what it was made from.
        calls: everything that was saved, in order, also again and what does not count.
        again: the ops of the trace that run again.
    """

    saves: list[tuple[int, int]]
    dropped: frozenset[int]
    later: dict[tuple[int, int], list[int]]
    most: int
    seconds: float
    fits: bool
    limit: int
    trace: Trace
    calls: tuple[Saved, ...] = ()
    again: frozenset[int] = frozenset()
    _schedule: Schedule | None = None
    _scheduled: bool = False

    @property
    def slack(self) -> bool:
        """Whether nothing is dropped, and would not be if all inputs had been computed: in steps like it nobody can tell."""
        nothing = not self.seconds and not self.dropped and not self.later
        return nothing and self._fits_with_inputs

    @property
    def _fits_with_inputs(self) -> bool:
        return self.fits and self.most + inputs(self.calls) <= self.limit

    @property
    def schedule(self) -> Schedule | None:
        """Which ops of a step like it need be written down; None: all."""
        if not self._scheduled:
            self._scheduled = True
            # also what made those that nobody asks for again: unwritten, they would be copied to the host
            gone = {self.trace.values[v].op for v in [*self.dropped, *(v for moment in self.later.values() for v in moment)]}
            again = self.again | {op for op in gone if op >= 0}
            self._schedule = schedule(self.trace, self.calls, again) if self._fits_with_inputs else None
        return self._schedule


def inputs(calls: Iterable[Saved]) -> int:
    """Bytes of what was saved and does not count, since it was there before, which nobody can tell in steps that are alike."""
    return sum([saved.nbytes for saved in calls if not (saved.counts or saved.grad)])


def plan(trace: Trace, limit: int, patience: float = PATIENCE, spare: int = 0) -> Plan:
    """Decide within so many seconds.

    Arguments:
        spare: bytes of the limit to leave free, if that is not much and a plan can.
    """
    found, until = None, time.perf_counter() + patience
    for most in (limit - spare, limit) if 0 < spare <= limit >> _SPARE else (limit,):
        search = _Search(trace, most, max(until - time.perf_counter(), patience / 4))
        with contextlib.suppress(TookTooLongError):
            search.run()
        found = search.best
        if found is not None:
            break
    if found is None:
        return Plan(trace.saves, frozenset(), {}, 0, 0.0, False, limit, trace)
    way, again = search.way.dropped, frozenset(found.again)
    return Plan(trace.saves, way, found.later, found.most, found.seconds, True, limit, trace, (), again)


def smallest(trace: Trace) -> int:
    """The smallest limit, in bytes, that a step with this stream can have; a backward still to come is guessed."""
    whole = trace.ended()
    # running again takes room as well: with little to drop it may take more than to keep all
    return min(whole.simulate(whole.droppable(), 0).most, whole.simulate((), 1 << 62).most)


class _Way(NamedTuple):
    """A way of dropping: what at once, what first where room is needed, and the weight of time for the rest."""

    dropped: frozenset[int] = frozenset()
    first: frozenset[int] = frozenset()
    power: float = 1.0


class _Search:
    def __init__(self, trace: Trace, limit: int, patience: float) -> None:
        self.trace = trace
        self.limit = limit
        self.begun = time.perf_counter()
        self.patience = patience
        self.best: Simulated | None = None
        self.way = _Way()

    def run(self) -> None:
        """Look for the best until time is over."""
        for power in _POWERS:
            self.consider(_Way(power=power))
            if self.best is not None and not self.best.seconds:
                return
        self.begin()
        if self.best is not None:
            self.go_on(self.best)

    def simulate(self, way: _Way, stop: float) -> Simulated | None:
        """What a way costs; None if it does not fit, or more seconds than that."""
        until = self.begun + self.patience
        found = self.trace.simulate(way.dropped, self.limit, power=way.power, first=way.first, stop=stop, until=until)
        return found if found.most <= self.limit and found.seconds <= stop else None

    def consider(self, way: _Way) -> None:
        """Take it if it is better."""
        found = self.simulate(way, math.inf if self.best is None else self.best.seconds)
        if found is not None and (self.best is None or found.seconds < self.best.seconds):
            self.best, self.way = found, way

    def begin(self) -> None:
        """Sets of values to drop at once, for falling shares of the limit."""
        sets = [greedy(self.trace, self.limit, _SHARES, alone) for alone in _ALONE]
        for _ in _SHARES:
            for dropped in [found for one in sets if (found := next(one, None)) is not None]:
                if time.perf_counter() - self.begun > _BEGINNING * self.patience and self.best is not None:
                    return
                for power in {self.way.power, _POWERS[0]}:
                    self.consider(_Way(dropped, power=power))

    def go_on(self, now: Simulated) -> None:
        """Take back, exchange, drop earlier or later, as long as it gets cheaper; in the beginning also if a little dearer."""
        draw = random.Random(0)
        order = sorted(self.trace.droppable())
        place = {v: i for i, v in enumerate(order)}
        kept = self.trace.there(self.way.dropped)
        dearest = sorted(self.way.dropped, key=lambda v: self.trace.again(v, kept))
        way = self.way
        while order and self.best is not None and self.best.seconds:
            left = 1 - (time.perf_counter() - self.begun) / self.patience
            dropped, first = way.dropped, way.first
            chance = draw.random()
            if dearest:
                dropped -= {dearest.pop()}
            elif chance < _EXCHANGE and dropped:
                v = draw.choice(sorted(dropped))
                other = place[v] + draw.choice((-3, -2, -1, 1, 2, 3))
                dropped = (dropped - {v}) ^ {order[min(max(other, 0), len(order) - 1)]}
            elif chance < _EXCHANGE + _LATER:
                first ^= {draw.choice(order)}
            else:
                dropped ^= {draw.choice(order)}
            warm = _WARM * max(left, 0) * -math.log(draw.random() + 1e-9) * self.best.seconds
            other_way = way._replace(dropped=dropped, first=first)
            found = self.simulate(other_way, now.seconds + warm)
            if found is not None:
                way, now = other_way, found
                if found.seconds < self.best.seconds:
                    self.best, self.way = found, other_way
