"""A plan: which values of a step to drop, decided from the step before.

The stream of a step that has ended is known: which op made what from what, and took how long; what was saved; in which order a
backward asked for it. `Trace.cost` runs through it without tensors, for a set of values that are dropped as soon as they are
saved, and gives the bytes that are held at most and the seconds that are run again. `choose` drops the cheapest bytes until
that fits, and takes back what was dropped too much.

Which bytes are cheap: Kirisame et al. 2021 (Dynamic Tensor Rematerialization), https://arxiv.org/abs/2006.09616, with the whole
step known as in Jain et al. 2020 (Checkmate), https://arxiv.org/abs/1910.02653.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from graphkeep._budget._values import Value

_PATIENCE = 0.5  # seconds that taking back may take


@dataclass
class Made:
    """A value of a trace: its bytes, the op that made it (-1: it cannot be made again), and whether it is ever saved."""

    nbytes: int
    op: int


@dataclass
class Trace:
    """What happened from one moment without a graph to the next.

    Attributes:
        ops: for each op its seconds, the values that it read, and those that it made.
        values: all of them.
        events: ``("save", value)``, ``("use", value)`` and ``("die", value)``, in order.
    """

    ops: list[tuple[float, tuple[int, ...], list[int]]] = field(default_factory=list)
    values: list[Made] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)

    def add_op(self, seconds: float, reads: tuple[int, ...]) -> int:
        self.ops.append((seconds, reads, []))
        return len(self.ops) - 1

    def add(self, value: Value, op: int) -> int:
        value.trace, value.number = self, len(self.values)
        self.values.append(Made(value.nbytes, op))
        if op >= 0:
            self.ops[op][2].append(value.number)
        return value.number

    def number_of(self, value: Value) -> int:
        """A value's number; one of before is a leaf here."""
        return value.number if value.trace is self else self.add(value, -1)

    @property
    def saves(self) -> list[tuple[int, int]]:
        """What was saved, in order: numbers and bytes. Two steps that agree in it are taken for the same."""
        return [(v, self.values[v].nbytes) for kind, v in self.events if kind == "save"]

    def simulate(self, dropped: Collection[int], limit: int) -> tuple[int, float, set[int]]:
        """Run through it.

        Returns:
            The most bytes held, the seconds run again, and what was held at the fullest moment.
        """
        values, ops = self.values, self.ops
        held: set[int] = set()
        waiting: set[int] = set()  # saved, and not dead yet
        live = most = 0
        seconds = 0.0
        full: set[int] = set()
        for kind, v in self.events:
            if kind == "save":
                waiting.add(v)
                if v not in dropped and v not in held:
                    held.add(v)
                    live += values[v].nbytes
                    if live > most:
                        most, full = live, set(held)
            elif kind == "die":
                waiting.discard(v)
                if v in held:
                    held.discard(v)
                    live -= values[v].nbytes
            elif v not in held and values[v].op >= 0:
                stack, own = [values[v].op], set()
                while stack:
                    cost, reads, makes = ops[stack[-1]]
                    missing = [r for r in reads if values[r].op >= 0 and r not in held and r not in own]
                    if missing:
                        stack.append(values[missing[0]].op)
                        continue
                    stack.pop()
                    seconds += cost
                    for m in makes:
                        if m in held or m in own:
                            continue
                        if m in waiting and live + values[m].nbytes <= limit:
                            held.add(m)
                        else:
                            own.add(m)
                        live += values[m].nbytes
                        if live > most:
                            most, full = live, held | own
                    for r in reads:  # what only this call needs goes as soon as nothing on the stack reads it
                        if r in own and not any(r in ops[o][1] for o in stack):
                            own.discard(r)
                            live -= values[r].nbytes
                for m in own:
                    if m == v and v in waiting:
                        held.add(m)
                    else:
                        live -= values[m].nbytes
        return most, seconds, full

    def again(self, value: int, dropped: Collection[int], saved: Collection[int]) -> float:
        """Seconds to have a value again, with what is not there either."""
        total, seen, todo = 0.0, set(), [self.values[value].op]
        while todo:
            op = todo.pop()
            if op < 0 or op in seen:
                continue
            seen.add(op)
            total += self.ops[op][0]
            todo += [self.values[r].op for r in self.ops[op][1] if r not in saved or r in dropped]
        return total


@dataclass
class Plan:
    """What to drop, and the stream that it was made for."""

    saves: list[tuple[int, int]]
    dropped: set[int]
    most: int
    seconds: float
    fits: bool


def plan(trace: Trace, limit: int) -> Plan:
    """Decide."""
    dropped = choose(trace, limit)
    most, seconds, _ = trace.simulate(dropped, limit)
    return Plan(trace.saves, dropped, most, seconds, most <= limit)


def choose(trace: Trace, limit: int) -> set[int]:
    """The values to drop as soon as they are saved; all that can be, if nothing else fits."""
    saved = {v for kind, v in trace.events if kind == "save"}
    may = {v for v in saved if trace.values[v].op >= 0 and trace.values[v].nbytes}
    dropped: set[int] = set()
    most, seconds, full = trace.simulate(dropped, limit)
    while most > limit:
        there = [v for v in may - dropped if v in full] or list(may - dropped)
        if not there:
            return dropped
        there.sort(key=lambda v: trace.again(v, dropped, saved) / trace.values[v].nbytes)
        excess = most - limit
        for v in there:
            dropped.add(v)
            excess -= trace.values[v].nbytes
            if excess <= 0:
                break
        most, seconds, full = trace.simulate(dropped, limit)
    return _take_back(trace, limit, dropped, seconds)


def _take_back(trace: Trace, limit: int, dropped: set[int], seconds: float) -> set[int]:
    """Keep what fits after all, the dearest first."""
    until = time.perf_counter() + _PATIENCE
    saved = {v for kind, v in trace.events if kind == "save"}
    for v in sorted(dropped, key=lambda v: -trace.again(v, dropped, saved)):
        if time.perf_counter() > until:
            break
        fewer = dropped - {v}
        most, cost, _ = trace.simulate(fewer, limit)
        if most <= limit and cost <= seconds:
            dropped, seconds = fewer, cost
    return dropped
