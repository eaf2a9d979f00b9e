"""What to drop at once, byte by byte the cheapest, as the forward alone tells.

Costs are those of the ops that run again; one that runs again anyway counts less, or nothing. Each value is priced anew before
it is taken, since what was taken before it has changed its price.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from graphkeep._budget._trace import Trace

_SAME = 1 + 1e-9


def greedy(trace: Trace, limit: int, shares: Sequence[float], alone: float) -> Iterator[frozenset[int]]:
    """Sets of values to drop, so that no more than falling shares of a limit are held.

    Arguments:
        alone: what an op that runs again anyway costs, of its seconds.
    """
    choice = _Choice(trace, alone)
    for share in shares:
        if not choice.until(limit * share):
            return
        yield frozenset(choice.dropped)


class _Choice:
    def __init__(self, trace: Trace, alone: float) -> None:
        self.trace = trace
        self.alone = alone
        self.may = trace.droppable()
        self.dropped: set[int] = set()
        self.kept = trace.there(())
        self.anyway: set[int] = set()  # ops that run again
        self.readers: dict[int, list[int]] = {}
        for number, op in enumerate(trace.ops):
            for read in op.reads:
                self.readers.setdefault(read, []).append(number)

    def until(self, most: float) -> bool:
        """Drop until no more than so many bytes are held at once; whether that can be."""
        while True:
            held, full = self.trace.peak(self.dropped)
            if held <= most:
                return True
            there = (full & self.may) - self.dropped
            if not there:
                return False
            self.take(there, held - most)

    def take(self, there: set[int], over: float) -> None:
        """Drop so many bytes of what is there."""
        heap = [(self.price(v)[0], v) for v in there]
        heapq.heapify(heap)
        while over > 0 and heap:
            _, v = heapq.heappop(heap)
            if v not in there:
                continue
            price, missing = self.price(v)
            if heap and price > heap[0][0] * _SAME:
                heapq.heappush(heap, (price, v))
                continue
            there.discard(v)
            self.dropped.add(v)
            self.kept.discard(v)
            over -= self.trace.values[v].nbytes
            if self.alone < 1:  # others have become cheaper
                for number in [*(missing - self.anyway), *self.readers.get(v, ())]:
                    for made in self.trace.ops[number].makes:
                        if made in there:
                            heapq.heappush(heap, (self.price(made)[0], made))
                self.anyway |= missing

    def price(self, v: int) -> tuple[float, set[int]]:
        """Seconds for each byte, and the ops to run again."""
        missing = self.trace.missing(v, self.kept)
        seconds = sum([self.trace.ops[o].seconds * (self.alone if o in self.anyway else 1.0) for o in missing])
        return seconds / self.trace.values[v].nbytes, missing
