"""The integer program of the benchmark, beside a search through all that could be done."""

import heapq
import itertools
import random
from typing import NamedTuple

import pytest

from benchmarks._optimum import optimum
from graphkeep._budget._plan import plan
from graphkeep._budget._trace import Made, Trace, TracedOp


class State(NamedTuple):
    """Between two actions.

    Attributes:
        event: the next one.
        op: the last that has run again before it; -1: none.
        held: by the graph.
        there: results that are there until the event only.
        given: to the node that runs.
    """

    event: int
    op: int
    held: frozenset[int]
    there: frozenset[int]
    given: frozenset[int]


def least(trace: Trace, limit: int, in_order: bool) -> float | None:
    """The cheapest way through a trace, by Dijkstra's algorithm: every value may be dropped, and every op run, at any moment.

    Arguments:
        in_order: before a use, ops run again in their order only.
    """
    tick = itertools.count()
    todo = [(0.0, next(tick), State(0, -1, frozenset(), frozenset(), frozenset()))]
    done = set()

    def size(values: frozenset[int] | list[int]) -> int:
        return sum(trace.values[v].nbytes for v in values)

    while todo:
        cost, _, state = heapq.heappop(todo)
        if state in done:
            continue
        done.add(state)
        if state.event == len(trace.events):
            return cost

        def reach(new: State, more: float = 0.0, cost: float = cost) -> None:
            heapq.heappush(todo, (cost + more, next(tick), new))

        event, last, held, there, given = state
        for v in held | there:
            if v not in given and trace.values[v].op >= 0:
                reach(state._replace(held=held - {v}, there=there - {v}))
        (kind, v), node = trace.events[event], trace.nodes[event]
        state = State(event + 1, -1, held, frozenset(), given)
        if kind == "save":
            if trace.values[v].op >= 0:
                reach(state)
            if size(held | {v}) <= limit:
                reach(state._replace(held=held | {v}))
        elif kind == "die":
            reach(state._replace(held=held - {v}, given=given - {v}))
        else:
            before = [n for (k, _), n in zip(trace.events[:event], trace.nodes, strict=False) if k == "use"]
            if not before or before[-1] != node:
                given = frozenset()
                if state.given:
                    reach(State(event, last, held, there, given))
            if v in held:
                reach(state._replace(given=given | {v}))
            waiting = saved(trace, event)
            newest = max(trace.values[w].op for k, w in trace.events[:event] if k == "save")
            for o, (seconds, reads, makes, *_) in enumerate(trace.ops[: newest + 1]):
                missing = [r for r in reads if trace.values[r].op >= 0 and r not in held | there]
                if missing or (in_order and o <= last) or size(held) + size(there - held) + size(makes) > limit:
                    continue
                reach(State(event, o, held | (waiting & set(makes)), there | (set(makes) - waiting), given), seconds)
    return None


def saved(trace: Trace, event: int) -> frozenset[int]:
    """What has been saved and has not died before an event."""
    waiting: set[int] = set()
    for kind, v in trace.events[:event]:
        waiting = waiting | {v} if kind == "save" else waiting - {v} if kind == "die" else waiting
    return frozenset(waiting)


def some_trace(seed: int) -> Trace:
    """Up to six ops of one or two results; nodes that have saved one to three values and come in the opposite order."""
    rng = random.Random(seed)
    trace = Trace()
    trace.values = [Made(1, -1, "")]
    for o in range(rng.randint(3, 6)):
        reads = tuple(rng.sample(range(len(trace.values)), min(len(trace.values), rng.choice((1, 1, 2)))))
        makes = list(range(len(trace.values), len(trace.values) + rng.choice((1, 1, 1, 2))))
        trace.values += [Made(rng.randint(1, 4), o, "") for _ in makes]
        trace.ops.append(TracedOp(float(rng.randint(1, 9)), reads, makes))
    if rng.random() < 0.3:
        trace.values.append(Made(1, -1, ""))  # saved, and not to be had again
    nodes: list[list[int]] = [[] for _ in range(rng.randint(2, 4))]
    made = range(1, len(trace.values))
    for node in nodes:
        node += rng.sample(made, rng.choice((1, 1, 2)))
        node.sort()
    nodes.sort(key=max)
    there: set[int] = set()
    for n, node in enumerate(nodes):
        trace.events += [("save", v) for v in node if v not in there]
        there |= set(node)
        trace.nodes += [n] * (len(trace.events) - len(trace.nodes))
    for n, node in reversed(list(enumerate(nodes))):
        trace.events += [("use", v) for v in node]
        trace.events += [("die", v) for v in node if not any(v in other for other in nodes[:n])]
        trace.nodes += [n] * (len(trace.events) - len(trace.nodes))
    return trace


def limits(trace: Trace) -> list[int]:
    most = trace.simulate(set(), 1 << 40).most
    return sorted({most * percent // 100 for percent in (95, 75, 60, 45)})


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_is_that_of_an_exhaustive_search_and_no_plan_is_cheaper(seed: int) -> None:
    trace = some_trace(seed)
    for limit in limits(trace):
        found = optimum(trace, limit)
        assert found.seconds == least(trace, limit, in_order=True)
        made = plan(trace, limit, patience=0.02)
        if found.seconds is None:
            assert not made.fits
        elif made.fits:
            assert made.seconds >= found.seconds


@pytest.mark.parametrize("seed", range(60))
def test_ops_that_may_run_through_often_are_those_of_a_search_in_any_order(seed: int) -> None:
    trace = some_trace(seed)
    for limit in limits(trace):
        assert optimum(trace, limit, passes=3).seconds == least(trace, limit, in_order=False)
