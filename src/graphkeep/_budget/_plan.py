"""A plan: which values of a step to drop, decided from the step before.

The stream of a step that has ended is known (`_trace`). `choose` drops the cheapest bytes until the simulated peak, backward
included, fits, and takes back what was dropped too much.

Which bytes are cheap: Kirisame et al. 2021 (Dynamic Tensor Rematerialization), https://arxiv.org/abs/2006.09616, with the whole
step known as in Jain et al. 2020 (Checkmate), https://arxiv.org/abs/1910.02653.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from graphkeep._budget._trace import Trace

_PATIENCE = 0.5  # seconds that taking back may take


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
    dropped: set[int]
    later: dict[tuple[int, int], list[int]]
    most: int
    seconds: float
    fits: bool
    limit: int
    trace: Trace


def plan(trace: Trace, limit: int) -> Plan:
    """Decide."""
    dropped = choose(trace, limit)
    found = trace.simulate(dropped, limit)
    return Plan(trace.saves, dropped, found.later, found.most, found.seconds, found.most <= limit, limit, trace)


def smallest(trace: Trace) -> int:
    """The smallest limit, in bytes, that a step with this stream can have; a backward still to come is guessed."""
    whole = trace.ended()
    return whole.simulate(whole.droppable(), 0).most


def choose(trace: Trace, limit: int) -> set[int]:
    """The values to drop as soon as they are saved; all that can be, if nothing else fits."""
    may = trace.droppable()
    leaves = {v for v, made in enumerate(trace.values) if made.op < 0}
    dropped: set[int] = set()
    most, _, full, _ = trace.simulate(dropped, limit, evict=False)
    while most > limit and may - dropped:
        there = [v for v in may - dropped if v in full] or list(may - dropped)
        kept = (may - dropped) | leaves
        there.sort(key=lambda v: trace.again(v, kept) / trace.values[v].nbytes)
        excess = most - limit
        for v in there:
            dropped.add(v)
            excess -= trace.values[v].nbytes
            if excess <= 0:
                break
        most, _, full, _ = trace.simulate(dropped, limit, evict=False)
    seconds = trace.simulate(dropped, limit).seconds
    return _take_back(trace, limit, dropped, seconds)


def _take_back(trace: Trace, limit: int, dropped: set[int], seconds: float) -> set[int]:
    """Keep what fits after all, the dearest first."""
    until = time.perf_counter() + _PATIENCE
    kept = trace.droppable() - dropped
    for v in sorted(dropped, key=lambda v: -trace.again(v, kept)):
        if time.perf_counter() > until:
            break
        fewer = dropped - {v}
        found = trace.simulate(fewer, limit)
        if found.most <= limit and found.seconds <= seconds:
            dropped, seconds = fewer, found.seconds
    return dropped
