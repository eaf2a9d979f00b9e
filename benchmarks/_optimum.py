"""The least that a trace costs under a byte limit: what a plan of the budget's is measured against.

It is an integer program in the manner of Jain et al. 2020 (Checkmate), https://arxiv.org/abs/1910.02653, solved by HiGHS
(`scipy.optimize.milp`), on the accounting of `graphkeep._budget._trace`.

A *stage* ends with one use of a value. Binary unknowns say, for each stage, which values the graph holds when it begins (S in
the paper) and which ops run again in it (R). Ops run in their order, each once a stage at most. A continuous unknown for each
value and reader says whether the value is still there when its reader runs; it takes the place of the paper's FREE, needs no
products, and is 0 or 1 by itself. Bytes are counted when the forward saves and at each op that runs again: what is held, what
is there for ops to come, and all that the op makes.

**Exact** for the rules that the budget follows: it may drop what it holds at any moment, and bring back a saved value before
any use of it; what it brings back and what else was saved may stay, other results are there for that stage's ops only; what a
node has been given stays until the node's last use. So no plan is cheaper than the optimum. With `passes` > 1 the missing ops
may run through that often before a use: that is another order, and more often than once, which the budget never does.

**Relaxed**: while the forward saves, only what is still held at its end is counted; and so is what cannot be made again only
from its save to its death, not while ops that may run again still need it. An op is not run again before a value as late as it
has been saved. With `tiny`, values of up to so many bytes cost no memory and stay: fewer unknowns, and still a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from graphkeep._budget._trace import Trace

_INFEASIBLE = 2
_ONE = 0  # the unknown that is 1

Terms = dict[int, float]


@dataclass
class Optimum:
    """What was found.

    Attributes:
        seconds: of the ops that run again; None if no schedule was found.
        bound: no schedule takes less; infinite if there is none.
        stages: what they were, for reading.
    """

    seconds: float | None
    bound: float
    stages: list[Stage] = field(default_factory=list)


@dataclass
class Stage:
    """The time up to a use.

    Attributes:
        before: what happened before it: saves and deaths.
        use: the value that is used at its end; -1 if this is only another run through the ops.
        given: the values that the node that uses it has been given before.
        held: the values that are held at its beginning.
        again: the ops that run again.
    """

    before: list[tuple[str, int]]
    use: int
    given: set[int]
    held: set[int] = field(default_factory=set)
    again: list[int] = field(default_factory=list)


def optimum(trace: Trace, limit: int, seconds: float = 60.0, passes: int = 1, unsaved: bool = False, tiny: int = 0) -> Optimum:
    """The cheapest schedule.

    Arguments:
        trace: of a step.
        limit: in bytes.
        seconds: that the solver may take.
        passes: how often the missing ops may run through before a use.
        unsaved: values that were not saved may be held as well, from the forward on.
        tiny: values of up to so many bytes are free.
    """
    return _Program(trace, limit, passes, unsaved, tiny).solve(seconds)


class _Program:
    """The unknowns, all between 0 and 1, and the rows: sums of unknowns that are at most so much."""

    def __init__(self, trace: Trace, limit: int, passes: int, unsaved: bool, tiny: int) -> None:
        self.trace, self.limit, self.unsaved = trace, limit, unsaved
        self.ops, self.op = trace.ops, [made.op for made in trace.values]
        self.size = [0 if made.nbytes <= tiny else made.nbytes for made in trace.values]
        self.costs: list[float] = []
        self.binary: list[bool] = []
        self.rows: list[tuple[Terms, float]] = []
        self.fits = True
        self.new()
        self.at_most({_ONE: -1.0}, -1.0)
        self.stages = self._stages(passes)
        self.wanted = self._wanted()
        self.held: list[dict[int, int]] = []  # for each stage, the unknown of each value
        self.again: list[dict[int, int]] = []  # ... of each op
        self.fresh: list[set[int]] = []  # what the forward may leave there
        self.stay: list[set[int]] = []  # what cannot be dropped
        self._unknowns()
        for t in range(len(self.stages)):
            self._saves(t)
            self._runs(t)

    def new(self, cost: float = 0.0, binary: bool = False) -> int:
        self.costs.append(cost)
        self.binary.append(binary)
        return len(self.costs) - 1

    def at_most(self, terms: Terms, right: float) -> None:
        self.rows.append((terms, right))

    def stuck(self, v: int) -> bool:
        """Whether a saved value is held whatever is decided."""
        return self.op[v] < 0 or bool(self.trace.values[v].pinned)

    def _stages(self, passes: int) -> list[Stage]:
        stages: list[Stage] = []
        before: list[tuple[str, int]] = []
        saved: set[int] = set()
        given: set[int] = set()
        node = -1
        for (kind, v), now in zip(self.trace.events, self.trace.nodes, strict=True):
            if kind != "use":
                before.append(({"keep": "save", "free": "die"}.get(kind, kind), v))
                saved |= {v} if kind == "save" else set()
                continue
            if now != node:
                node, given = now, set()
            if self.stuck(v) or v in given or (v in saved and not self.size[v]):
                continue
            for n in range(passes):
                stages.append(Stage(before, v if n == passes - 1 else -1, set(given)))
                before = []
            given.add(v)
        return stages

    def _wanted(self) -> list[set[int]]:
        """For each stage the values that it or a later one may need."""
        wanted: set[int] = set()
        found = []
        for stage in reversed(self.stages):
            todo = [stage.use] if stage.use >= 0 else []
            while todo:
                v = todo.pop()
                if v not in wanted and self.op[v] >= 0:
                    wanted.add(v)
                    todo += self.ops[self.op[v]].reads
            found.append(set(wanted))
        return found[::-1]

    def _unknowns(self) -> None:
        waiting: set[int] = set()
        last = -1
        for t, stage in enumerate(self.stages):
            fresh: set[int] = set()
            gone: set[int] = set()
            for kind, v in stage.before:
                if kind == "save":
                    waiting.add(v)
                    fresh.add(v)
                    gone.discard(v)
                    last = max(last, self.op[v])
                else:
                    waiting.discard(v)
                    fresh.discard(v)
                    gone.add(v)
            if self.unsaved and t == 0:
                fresh |= {v for v in self.wanted[0] if self.op[v] <= last} - gone
            held = {}
            for v in self.wanted[t] | stage.given:
                if v in stage.given or (v in waiting and (self.stuck(v) or not self.size[v])):
                    held[v] = _ONE
                elif v in fresh or (
                    t
                    and v not in gone
                    and (v in waiting or self.unsaved or self.stages[t - 1].use < 0)
                    and (v in self.held[-1] or self.op[v] in self.again[-1])
                ):
                    held[v] = self.new(binary=True)
            ops = {self.op[v] for v in self.wanted[t]}
            self.again.append({o: self.new(self.ops[o].seconds, binary=True) for o in sorted(ops) if o <= last})
            self.held.append(held)
            self.fresh.append(fresh)
            self.stay.append({v for v in waiting if self.stuck(v)})
        self.held.append({})
        self.fresh.append(set())

    def _saves(self, t: int) -> None:
        """What the forward leaves there fits, whenever it has saved."""
        held, before = self.held[t], self.stages[t].before
        waiting: set[int] = set()
        for kind, v in (event for stage in self.stages[:t] for event in stage.before):
            (waiting.add if kind == "save" else waiting.discard)(v)
        last = -1
        for n, (kind, v) in enumerate(before):
            if kind == "die":
                waiting.discard(v)
                continue
            waiting.add(v)
            last = max(last, self.op[v])
            if n + 1 == len(before) or before[n + 1][0] == "die":
                stay = {u for u in waiting if self.stuck(u)}
                counted = [u for u in held if u in waiting or u not in self.fresh[t] or (self.unsaved and self.op[u] <= last)]
                self._memory([(held[u], self.size[u]) for u in counted if u not in stay], stay)

    def _runs(self, t: int) -> None:
        """One run through the ops: what they read is there, and what is there fits."""
        again, held, stage = self.again[t], self.held[t], self.stages[t]
        readers: dict[int, list[int]] = {}
        for o in again:
            for r in self.ops[o].reads:
                if self.op[r] >= 0:
                    readers.setdefault(r, []).append(o)
        values = set(held) | set(readers) | {m for o in again for m in self.ops[o].makes} | {stage.use}
        until = {v: self._until(t, v, readers.get(v, [])) for v in values - {-1}}
        for k in again:
            counted = []
            for v in values - {-1}:
                if self.op[v] == k:
                    counted.append((again[k], self.size[v]))
                if v in self.stay[t]:
                    continue
                if self.op[v] >= k:
                    counted += [(held[v], self.size[v])] if v in held else []
                else:
                    counted += [(unknown, self.size[v]) for last, unknown in until[v] if last >= k][:1]
            self._memory(counted, self.stay[t])

    def _until(self, t: int, v: int, readers: list[int]) -> list[tuple[int, int]]:
        """Until which op a value is there: ops and unknowns, in order; the unknown that holds for all ops in between."""
        again, held, stage = self.again[t], self.held[t], self.stages[t]
        end = len(self.ops)
        source = {unknown: -1.0 for unknown in (held.get(v), again.get(self.op[v])) if unknown is not None}
        if v == stage.use or v in stage.given:
            if v == stage.use:
                self.at_most(source, -1.0)
            return [(end, _ONE)]
        found: list[tuple[int, int]] = []
        if v in self.held[t + 1] and v not in self.fresh[t + 1]:
            found.append((end, self.held[t + 1][v]))
        for o in reversed(readers):
            if not found:
                found.append((o, again[o]))
                continue
            there = self.new()
            self.at_most({found[-1][1]: 1.0, there: -1.0}, 0.0)
            self.at_most({again[o]: 1.0, there: -1.0}, 0.0)
            found.append((o, there))
        if found and held.get(v) != _ONE:
            self.at_most({found[-1][1]: 1.0} | source, 0.0)
        return found[::-1]

    def _memory(self, counted: Iterable[tuple[int, int]], stay: set[int]) -> None:
        fixed = sum(self.size[v] for v in stay)
        scale = 1.0 / max(self.limit, 1)
        terms: Terms = {}
        for unknown, count in counted:
            if unknown == _ONE:
                fixed += count
            elif count:
                terms[unknown] = terms.get(unknown, 0.0) + count * scale
        self.fits = self.fits and fixed <= self.limit
        if terms:
            self.at_most(terms, (self.limit - fixed) * scale)

    def solve(self, seconds: float) -> Optimum:
        if not self.fits:
            return Optimum(None, float("inf"))
        ends = np.cumsum([0] + [len(terms) for terms, _ in self.rows])
        columns = [unknown for terms, _ in self.rows for unknown in terms]
        factors = [factor for terms, _ in self.rows for factor in terms.values()]
        matrix = csr_array((factors, columns, ends), shape=(len(self.rows), len(self.costs)))
        unit = sum(op.seconds for op in self.ops) or 1.0
        found = milp(
            np.array(self.costs) / unit,
            integrality=np.array(self.binary, dtype=int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, -np.inf, np.array([right for _, right in self.rows])),
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )
        if found.status == _INFEASIBLE:
            return Optimum(None, float("inf"))
        bound = max(0.0, found.mip_dual_bound or 0.0) * unit
        if found.x is None:
            return Optimum(None, bound)
        for t, stage in enumerate(self.stages):
            stage.held = {v for v, unknown in self.held[t].items() if found.x[unknown] > 0.5}
            stage.again = [o for o, unknown in self.again[t].items() if found.x[unknown] > 0.5]
        return Optimum(sum(self.ops[o].seconds for stage in self.stages for o in stage.again), bound, self.stages)
