"""What happened from one moment without a graph to the next, and running through it again without tensors.

`Trace` is the stream of a step: which op made which values from which, and took how long; what was saved, asked for, and let go
of. `simulate` follows it under a limit, for a set of values that are dropped as soon as they are saved, by the very rules by
which `_holdings` brings back and makes room, and gives the bytes that are held at most and the seconds that are run again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphkeep._budget._values import Op, Value

_LONGEST = 50_000  # ops; a stream that never ends is not planned
_PARTS = 16  # the cheapest 16th of what can be dropped goes before all are looked at again
_DEARER = 1.5  # times what it was thought to cost, a victim stays for now
_DEEPEST = 128  # ops that are looked at to tell what having a value again costs


class TracedOp(NamedTuple):
    """An op of a trace: its seconds, the values that it read, those that it made, and what ran.

    Attributes:
        node: the number of the autograd node that was made last when it ran, its own if it has one.
        writes: the known values whose storages it changes.
    """

    seconds: float
    reads: tuple[int, ...]
    makes: list[int]
    func: Any = None
    node: int = 0
    writes: tuple[int, ...] = ()


@dataclass(slots=True)
class Made:
    """A value of a trace.

    Attributes:
        nbytes: of its storage.
        op: what made it; -1: it cannot be made again.
        pinned: why it must not be dropped; empty if it may be.
        nodes: the numbers of the nodes that saved it.
        apart: whether it was there before the graph.
    """

    nbytes: int
    op: int
    pinned: str
    nodes: list[int] = field(default_factory=list)
    apart: bool = False

    @property
    def last(self) -> int:
        """The node that asks for it first."""
        return max(self.nodes, default=0)


class Trace:
    """The stream of a step.

    Attributes:
        ops: those that were written down, in order.
        values: all of them.
        events: ``("save", value)``, ``("use", value)`` and ``("die", value)``, in order; ``("keep", value)`` and
            ``("free", value)`` for what is held without being saved, because ops that may run again read it.
        nodes: for each event, the number of the autograd node that it belongs to.
        first: the number of the first node that has saved something.
        hidden_changes: whether something known was changed by what is not among the ops.
    """

    def __init__(self) -> None:
        self.ops: list[TracedOp] = []
        self.values: list[Made] = []
        self.events: list[tuple[str, int]] = []
        self.nodes: list[int] = []
        self.closed = False
        self.saved_bytes = 0
        self.first = 0
        self.hidden_changes = False
        self.first_readers: dict[int, int] = {}  # of values that cannot be made again, the first op that read each

    def add_op(self, op: Op, node: int = 0, changed: Iterable[Value] = ()) -> int:
        if self.closed:
            return -1
        reads = tuple([self.number_of(value) for value in op.reads])
        for v in reads:
            if self.values[v].op < 0:
                self.first_readers.setdefault(v, len(self.ops))
        writes = tuple([self.number_of(value) for value in changed])
        self.ops.append(TracedOp(op.seconds, reads, [], op.func, node, writes))
        if len(self.ops) > _LONGEST:
            self.closed = True
            for kept in (self.ops, self.values, self.events, self.nodes, self.first_readers):
                kept.clear()
            return -1
        return len(self.ops) - 1

    def add(self, value: Value, op: int) -> int:
        value.trace, value.number = self, len(self.values)
        if not self.closed:
            self.values.append(Made(value.nbytes, op, value.pinned, [], value.apart))
            if op >= 0:
                self.ops[op].makes.append(value.number)
        return value.number

    def number_of(self, value: Value) -> int:
        """A value's number; one of before is a leaf here."""
        return value.number if value.trace is self else self.add(value, -1)

    def note(self, what: str, value: Value, node: int) -> None:
        """Something has happened to a value."""
        if self.closed:
            return
        number = self.number_of(value)
        self.note_number(what, number, node)
        if what in ("save", "keep"):
            self.values[number].pinned = value.pinned
        if what == "save":
            self.values[number].nodes.append(node)
            self.saved_bytes += value.nbytes

    def note_number(self, what: str, number: int, node: int) -> None:
        """The same, for a value that may be gone."""
        if not self.closed:
            self.events.append((what, number))
            self.nodes.append(node)

    def also(self, value: Value, node: int) -> None:
        """A value that has been saved is saved by another node, too."""
        if value.trace is self and not self.closed:
            self.values[value.number].nodes.append(node)

    def ended(self) -> Trace:
        """The same with a backward through all that is still waiting."""
        waiting: set[int] = set()
        for what, v in self.events:
            if what == "save":
                waiting.add(v)
            elif what == "die":
                waiting.discard(v)
        if not waiting:
            return self
        whole = Trace()
        whole.ops, whole.values, whole.first_readers = self.ops, self.values, self.first_readers
        whole.events, whole.nodes = list(self.events), list(self.nodes)
        asked: dict[int, list[int]] = {}
        for v in sorted(waiting):
            for node in self.values[v].nodes:
                asked.setdefault(node, []).append(v)
        for node in sorted(asked, reverse=True):
            gone = [v for v in asked[node] if min(self.values[v].nodes) == node]
            whole.events += [("use", v) for v in asked[node]] + [("die", v) for v in gone]
            whole.nodes += [node] * (len(asked[node]) + len(gone))
        return whole

    @property
    def saves(self) -> list[tuple[int, int]]:
        """What was saved, in order: numbers and bytes. Two steps that agree in it are taken for the same."""
        return [(v, self.values[v].nbytes) for kind, v in self.events if kind == "save"]

    def droppable(self) -> set[int]:
        """The saved values that can be had again."""
        made = self.values
        return {v for kind, v in self.events if kind == "save" and made[v].op >= 0 and made[v].nbytes and not made[v].pinned}

    def simulate(
        self,
        dropped: Collection[int],
        limit: int,
        power: float = 1.0,
        first: Collection[int] = (),
        stop: float = math.inf,
        until: float = math.inf,
    ) -> Simulated:
        """Run through it under a limit, with some values dropped as soon as they are saved.

        Arguments:
            power: of the time until a value is needed again, in what that counts against what it costs to have it again.
            first: what goes before anything else where room is needed.
            stop: seconds; once more are run again, the rest is left out.
            until: the time, as `time.perf_counter` tells it, after which `TookTooLongError` is raised.
        """
        run = _Run(self, dropped, limit, power, first)
        steps = {"save": run.save, "keep": run.keep, "use": run.use, "die": run.die, "free": run.free}
        for at, ((kind, v), node) in enumerate(zip(self.events, self.nodes, strict=True)):
            run.at = at
            steps[kind](v, node)
            if run.seconds > stop:
                break
            if time.perf_counter() > until:
                raise TookTooLongError
        run.remember()
        return Simulated(run.most, run.seconds, run.full, run.later, run.again)

    def peak(self, dropped: Collection[int]) -> tuple[int, set[int]]:
        """The most bytes that are held if nothing is ever had again, and by what."""
        values = self.values
        held: set[int] = set()
        live = most = 0
        full: set[int] = set()
        for kind, v in [*self.events, ("die", -1)]:
            if kind in ("save", "keep"):
                if v not in held and (v not in dropped or values[v].pinned):
                    held.add(v)
                    live += values[v].nbytes
            elif kind != "use":
                if live > most:
                    most, full = live, set(held)
                if v in held:
                    held.discard(v)
                    live -= values[v].nbytes
        return most, full

    def there(self, dropped: Collection[int]) -> set[int]:
        """What need not run again if that is dropped."""
        leaves = {v for v, made in enumerate(self.values) if made.op < 0 or made.pinned}
        return (self.droppable() - set(dropped)) | leaves

    def missing(self, value: int, there: Set[int]) -> set[int]:
        """The ops to run to have a value again, with what is not there either."""
        ops, values = self.ops, self.values
        first = values[value].op
        seen, todo = {first}, [first]
        while todo and len(seen) < _DEEPEST:
            for read in ops[todo.pop()].reads:
                if read not in there:
                    op = values[read].op
                    if op >= 0 and op not in seen:
                        seen.add(op)
                        todo.append(op)
        return seen

    def again(self, value: int, there: Set[int]) -> float:
        """Seconds to have a value again, with what is not there either."""
        ops = self.ops
        return sum([ops[o].seconds for o in self.missing(value, there)])


class TookTooLongError(Exception):
    """A simulation ran out of time."""


class Simulated(NamedTuple):
    """What a simulation has found.

    Attributes:
        most: bytes that were held at most.
        seconds: that were run again.
        full: what was held at the fullest moment.
        later: what was dropped later than at once: at which event, before which op of those that run again for it.
        again: the ops that run again.
    """

    most: int
    seconds: float
    full: frozenset[int]
    later: dict[tuple[int, int], list[int]]
    again: set[int]


class _Run:
    """The rules of `_holdings.Holdings`, on numbers."""

    def __init__(self, trace: Trace, dropped: Collection[int], limit: int, power: float, first: Collection[int]) -> None:
        self.trace = trace
        self.power = power
        self.first = first
        self.dropped = dropped
        self.limit = limit
        self.held: set[int] = set()
        self.orphans: set[int] = set()
        self.victims: list[tuple[float, int]] = []  # the first to go are the last
        self.waiting: set[int] = set()
        self.in_use: set[int] = set()
        self.node = -1
        self.at = 0
        self.later: dict[tuple[int, int], list[int]] = {}
        self.live = self.most = 0
        self.seconds = 0.0
        self.full: frozenset[int] = frozenset()
        self.fuller = False  # than it says
        self.again: set[int] = set()

    def peak(self, live: int) -> None:
        if live > self.most:
            self.most, self.fuller = live, True

    def remember(self) -> None:
        """Something is about to go: what is held now may be the most so far."""
        if self.fuller:
            self.full, self.fuller = frozenset(self.held), False

    def hold(self, v: int) -> None:
        self.held.add(v)
        self.live += self.trace.values[v].nbytes
        self.peak(self.live)

    def save(self, v: int, node: int) -> None:
        self.node = node
        self.waiting.add(v)
        made = self.trace.values[v]
        pinned = made.op < 0 or bool(made.pinned)
        self.orphans.discard(v)
        if v in self.held or (not pinned and v in self.dropped):
            return
        if self.room(made.nbytes, (), 0) or pinned:
            self.hold(v)

    keep = save

    def die(self, v: int, _node: int) -> None:
        self.waiting.discard(v)
        self.in_use.discard(v)
        if v in self.held:
            if self.trace.values[v].op < 0 and self.needed(v):
                self.orphans.add(v)
            else:
                self.let_go(v)
        if self.orphans:
            for orphan in [orphan for orphan in self.orphans if not self.needed(orphan)]:
                self.orphans.discard(orphan)
                self.let_go(orphan)

    free = die

    def let_go(self, v: int) -> None:
        self.remember()
        self.held.discard(v)
        self.live -= self.trace.values[v].nbytes

    def needed(self, v: int) -> bool:
        ops, values = self.trace.ops, self.trace.values
        first = self.trace.first_readers.get(v)
        if first is None:
            return False
        todo = [values[w].op for w in self.waiting if values[w].op >= first]
        seen = set(todo)
        while todo:
            for read in ops[todo.pop()].reads:
                if read == v:
                    return True
                op = values[read].op
                if op >= first and op not in seen:
                    seen.add(op)
                    todo.append(op)
        return False

    def use(self, v: int, node: int) -> None:
        if node != self.node:
            self.node = node
            self.in_use.clear()
        if v not in self.held and self.trace.values[v].op >= 0 and not self.bring(v, strict=False):
            for other in [
                h for h in self.held - self.in_use if self.trace.values[h].op >= 0 and not self.trace.values[h].pinned
            ]:
                self.let_go(other)
            self.bring(v, strict=True)
        self.in_use.add(v)

    def bring(self, wanted: int, strict: bool) -> bool:
        ops, values, held = self.trace.ops, self.trace.values, self.held
        closure: set[int] = set()
        todo = [values[wanted].op]
        readers: dict[int, int] = {}
        while todo:
            number = todo.pop()
            if number in closure:
                continue
            closure.add(number)
            for read in ops[number].reads:
                readers[read] = readers.get(read, 0) + 1
                if values[read].op >= 0 and read not in held:
                    todo.append(values[read].op)
        readers[wanted] = 1
        self.again |= closure
        own: set[int] = set()
        for k, number in enumerate(sorted(closure)):
            seconds, reads, makes, *_ = ops[number]
            need = sum([values[m].nbytes for m in makes])
            if not strict and not self.room(need, readers, 2 * k):
                self.live -= sum(values[m].nbytes for m in own)
                return False
            self.peak(self.live + need)
            self.seconds += seconds
            for m in makes:
                if m in held or m in own:
                    continue
                nbytes = values[m].nbytes
                if m == wanted or (not strict and m in self.waiting and self.worth(m, nbytes, readers, 2 * k + 1)):
                    held.add(m)
                    self.live += nbytes
                elif m in readers:
                    own.add(m)
                    self.live += nbytes
            for read in reads:
                readers[read] -= 1
                if not readers[read]:
                    del readers[read]
                    if read in own:
                        own.discard(read)
                        self.live -= values[read].nbytes
        return True

    def worth(self, m: int, nbytes: int, spare: Collection[int], k: int) -> bool:
        """Whether what was run again is kept: it fits, or more than others it deserves to."""
        return self.live + nbytes <= self.limit or self.room(nbytes, spare, k, self.score(m))

    def room(self, need: int, spare: Collection[int], k: int, below: float = math.inf) -> bool:
        """Drop until so many bytes fit; nothing that is not cheaper than ``below``. Whether they do."""
        over = self.live + need - self.limit
        if over <= 0:
            return True
        gone: dict[int, float] = {}
        put_back: list[tuple[float, int]] = []
        while over > 0:
            if not self.victims:
                self.victims = self.cheapest(spare, gone)
                if not self.victims:
                    break
            score, v = self.victims.pop()
            if v not in self.held or v in gone:
                continue
            if v in spare or v in self.in_use:
                put_back.append((score, v))
                continue
            now = self.score(v)
            if now > _DEARER * score and self.victims:
                continue
            if now >= below:
                put_back.append((score, v))
                break
            gone[v] = now
            over -= self.trace.values[v].nbytes
        self.victims += reversed(put_back)
        if over > 0 and below < math.inf:
            self.victims += [(score, v) for v, score in reversed(gone.items())]
            return False
        if gone:
            self.later.setdefault((self.at, k), []).extend(gone)
            for v in gone:
                self.let_go(v)
        return over <= 0

    def cheapest(self, spare: Collection[int], gone: Collection[int]) -> list[tuple[float, int]]:
        """Of what can be dropped, the first to go; the very first last."""
        may = [v for v in self.held if self.may_go(v) and v not in spare and v not in self.in_use and v not in gone]
        scored = sorted([(self.score(v), v) for v in may])
        return scored[: max(len(scored) // _PARTS, 1)][::-1]

    def may_go(self, v: int) -> bool:
        made = self.trace.values[v]
        return made.op >= 0 and not made.pinned

    def score(self, v: int) -> float:
        made = self.trace.values[v]
        if v in self.first:
            return -1.0 / (abs(self.node - made.last) + 1)
        return self.trace.again(v, self.held) / ((made.nbytes or 1) * (abs(self.node - made.last) + 1) ** self.power)
