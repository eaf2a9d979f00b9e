"""What happened to the saved tensors of a program: where they were saved, which step it was, and what freed them.

The timeline listens to the ledger. What it keeps is bounded by the size of the program and not by the length of its run: sums
for each site, each line that frees and each line that calls backward; the last few thousand lives and calls; and the steps,
neighbours merged into one record as they grow many.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch

from graphkeep import _graph
from graphkeep._ledger import Call, Entry, last_number
from graphkeep._storage import storages
from graphkeep._watch._frames import Site, Sites

_STEPS = 1024  # records of steps, at most
_LIVES = 4096
_CALLS = 1024
_FREED = 100_000  # nodes of which it is remembered what freed them


_NONE: tuple[Record, ...] = ()


class Record:
    """A live storage that entries stand on."""

    __slots__ = ("bytes", "key", "refs", "site", "version")
    key: int
    bytes: int
    refs: int
    site: Site
    version: int


class Life:
    """Saved tensors that died together: the graph of one root, from birth to death.

    Attributes:
        born: the site of the last tensor that was saved, near the root.
        born_first, born_last: the numbers of the first and the last of its saved tensors.
        tensors, bytes: what was freed: saved tensors, and bytes of storages that nothing else held.
        backward: the number of the call that freed it; None where the last reference went.
        died: the line where that happened.
        died_step: the step.
        died_at: the number of the last tensor that had been saved by then, over the whole program.
    """

    __slots__ = (
        "backward", "born", "born_first", "born_last", "bytes", "died", "died_at", "died_step", "tensors",
    )  # fmt: skip

    def __init__(self, site: Site, number: int, died: Site, died_step: int, died_at: int, backward: int | None) -> None:
        self.born = site
        self.born_first = self.born_last = number
        self.tensors = self.bytes = 0
        self.backward = backward
        self.died = died
        self.died_step = died_step
        self.died_at = died_at


class Backward:
    """One call of the engine, from a line of the program's.

    Attributes:
        number: calls are numbered from 1; `call` is the ledger's own number for it.
        site: its line.
        step: the step in which it was made.
        at: the number of the last tensor that had been saved by then.
        built: the sequence number that the next node would have had, in the calling thread.
        retain_graph, create_graph: as given.
        kept: bytes that were still held when it returned.
        reused: whether a later call asked for what this one kept.
        failed: whether it raised.
        life: what it freed; None if nothing.
        freed: sequence numbers of the nodes that it freed, with the site of each.
    """

    __slots__ = (
        "at", "built", "call", "create_graph", "failed", "freed", "kept", "life", "number", "retain_graph", "reused", "site",
        "step",
    )  # fmt: skip

    def __init__(self, number: int, call: Call, site: Site, step: int, at: int, built: int) -> None:
        self.number = number
        self.call = call.number
        self.site = site
        self.step = step
        self.at = at
        self.built = built
        self.retain_graph = call.retain_graph
        self.create_graph = call.create_graph
        self.kept = 0
        self.reused = self.failed = False
        self.life: Life | None = None
        self.freed: dict[int, Site] = {}


class Step:
    """One step, or several neighbours that were merged.

    Attributes:
        first, count: the steps it stands for.
        at, built: the number of the last saved tensor, and the next node's sequence number, when it began.
        tensors, bytes: what was saved in it.
        peak, left: the most bytes held in it, and the bytes held when it ended.
        backwards: calls of the engine.
    """

    __slots__ = ("at", "backwards", "built", "bytes", "count", "first", "left", "peak", "tensors")

    def __init__(self, first: int, at: int, built: int, peak: int) -> None:
        self.first = first
        self.count = 1
        self.at = at
        self.built = built
        self.tensors = self.bytes = self.left = self.backwards = 0
        self.peak = peak

    def merge(self, later: Step) -> None:
        self.count += later.count
        self.tensors += later.tensors
        self.bytes += later.bytes
        self.backwards += later.backwards
        self.peak = max(self.peak, later.peak)
        self.left = later.left


class OptimizerStep:
    """A step of an optimizer: which one, from which line, and when."""

    __slots__ = ("at", "built", "kind", "optimizer", "site", "step")

    def __init__(self, optimizer: torch.optim.Optimizer, site: Site, step: int, at: int) -> None:
        self.built = _built()
        self.optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.site = site
        self.step = step
        self.at = at


class Mutation:
    """A change in place of memory that waits for a backward, seen when that memory was saved anew."""

    __slots__ = ("at", "saved", "seen", "step")

    def __init__(self, saved: Site, seen: Site, step: int, at: int) -> None:
        self.saved = saved
        self.seen = seen
        self.step = step
        self.at = at


class Moment(NamedTuple):
    """How far a program had come: saved tensors, the next node's sequence number, bytes held, bytes saved."""

    at: int
    built: int
    live: int
    saved_bytes: int


class Timeline:
    """Listens to the ledger and keeps account."""

    def __init__(self) -> None:
        self.sites = Sites()
        self.number = last_number()  # of the last entry
        self.steps: list[Step] = [Step(0, self.number, _built(), 0)]
        self.step = 0
        self.calls_made = 0
        self.live = 0
        self.saved_bytes = 0
        self.lives: deque[Life] = deque(maxlen=_LIVES)
        self.deaths: dict[tuple[Site, Site, bool], list[int]] = {}  # born, died, by a backward: lives, tensors, bytes
        self.backwards: deque[Backward] = deque(maxlen=_CALLS)
        self.calls: dict[Site, list[int]] = {}  # calls, with retain_graph, of these reused, with create_graph, most kept
        self.optimizer_steps: deque[OptimizerStep] = deque(maxlen=_CALLS)
        self.mutations: deque[Mutation] = deque(maxlen=_CALLS)
        self.unrolls = False  # steps are those of a loop that may build one graph: no backward that frees has ended one
        self.recorder: Any = None  # a `Recorder` that writes all this to a file
        self._records: dict[int, Record] = {}
        self._here = self.steps[0]
        self._saved_before = 0
        self._life: Life | None = None
        self._freed = 0

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        return max(step.peak for step in self.steps)

    # the ledger's events --------------------------------------------------------------------------------------------------

    def saved(self, entry: Entry) -> None:
        site = self.sites.here(3)
        number = self.number = entry.number
        if self._life is not None:
            self._close_life()
        site.tensors += 1
        held: Any = entry.tensor
        if held.requires_grad and held.is_leaf:  # a parameter: freeing the graph does not free it
            entry.mark = (site, _NONE, self, entry.mark)
            return
        if type(held) is not torch.Tensor or held.layout is not torch.strided:
            entry.mark = (site, self._add_all(held, site, entry.version), self, entry.mark)
            return
        storage = held.untyped_storage()
        record = self._records.get(storage._cdata)
        if record is None:
            record = self._add(storage, site, entry.version)
        else:
            record.refs += 1
            if record.version != entry.version:
                self._mutated(Mutation(record.site, site, self.step, number))
                record.version = entry.version
        entry.mark = (site, record, self, entry.mark)

    def _mutated(self, change: Mutation) -> None:
        self.mutations.append(change)
        if self.recorder is not None:
            self.recorder.mutation(change)

    def _add(self, storage: torch.UntypedStorage, site: Site, version: int) -> Record:
        record = Record()
        record.key = storage._cdata
        record.bytes = size = storage.nbytes()
        record.refs = 1
        record.site = site
        record.version = version
        self._records[record.key] = record
        site.bytes += size
        site.live_bytes += size
        self.live += size
        self.saved_bytes += size
        if self.live > self._here.peak:  # noqa: PLR1730 ten times as fast as max(), on the way of every saved tensor
            self._here.peak = self.live
        if self.recorder is not None and not self.number & 255:
            self.recorder.tick()  # a program may have no steps and no backwards
        return record

    def _add_all(self, held: torch.Tensor, site: Site, version: int) -> list[Record]:
        """For tensors of several parts: sparse, nested, wrapper subclasses."""
        records = []
        with torch._C.DisableTorchFunction():
            for storage in storages(held):
                record = self._records.get(storage._cdata)
                if record is None:
                    record = self._add(storage, site, version)
                else:
                    record.refs += 1
                records.append(record)
        return records

    def died(self, entry: Entry, call: Call | None) -> None:
        mark = entry.mark
        while mark is not None and mark[2] is not self:  # several watches may run at once
            mark = mark[3]
        if mark is None:  # saved before this one began
            return
        site, records, _, _ = mark
        backward = self._backward(call) if call is not None else None
        life = self._life if backward is None else backward.life
        if life is None:
            life = self._begin_life(entry, site, backward)
        freed = 0
        for record in records if type(records) is not Record else (records,):
            record.refs -= 1
            if not record.refs:
                self._records.pop(record.key, None)
                freed += record.bytes
                record.site.live_bytes -= record.bytes
        number = entry.number
        if number > life.born_last:
            life.born_last, life.born = number, site
        elif number < life.born_first:
            life.born_first = number
        life.tensors += 1
        life.bytes += freed
        self.live -= freed
        if backward is None:
            site.by_count += 1
        else:
            site.by_backward += 1
            if self._freed < _FREED:
                backward.freed[entry.node] = site
                self._freed += 1

    def _begin_life(self, entry: Entry, site: Site, backward: Backward | None) -> Life:
        if backward is not None:
            self._close_life()
            life = backward.life = Life(site, entry.number, backward.site, self.step, self.number, backward.number)
        else:
            died = self.sites.line(4)
            life = self._life = Life(site, entry.number, died, self.step, self.number, None)
        self.lives.append(life)
        return life

    def close(self) -> None:
        """The watch ends, or somebody looks."""
        self._close_life()

    def _close_life(self) -> None:
        """Something else happened: what dies next is another graph."""
        life, self._life = self._life, None
        if life is not None:
            self._sum(life)

    def _sum(self, life: Life) -> None:
        sums = self.deaths.setdefault((life.born, life.died, life.backward is not None), [0, 0, 0])
        sums[0] += 1
        sums[1] += life.tensors
        sums[2] += life.bytes
        if self.recorder is not None:
            self.recorder.life(life)

    def begins(self, call: Call) -> None:
        self._close_life()
        self.calls_made += 1
        backward = Backward(self.calls_made, call, self.sites.line(4), self.step, self.number, _built())
        call.mark = (backward, self, call.mark)
        self._here.backwards += 1
        if self.recorder is not None:
            self.recorder.begins()

    def _backward(self, call: Call) -> Backward | None:
        mark = call.mark
        while mark is not None and mark[1] is not self:
            mark = mark[2]
        return None if mark is None else mark[0]

    def ends(self, call: Call, error: BaseException | None) -> Backward | None:
        backward = self._backward(call)
        if backward is None:  # it began before this one did
            return None
        self._close_life()
        if backward.life is not None:
            self._sum(backward.life)
        backward.failed = error is not None
        backward.kept = self.live
        if len(self.backwards) == _CALLS:
            self._freed -= len(self.backwards[0].freed)
        self.backwards.append(backward)
        while self._freed >= _FREED:
            for old in self.backwards:
                if old.freed:
                    self._freed -= len(old.freed)
                    old.freed = {}
                    break
            else:
                break
        sums = self.calls.setdefault(backward.site, [0, 0, 0, 0, 0])
        sums[0] += 1
        sums[1] += backward.retain_graph and not backward.create_graph
        sums[3] += backward.create_graph
        if backward.retain_graph:
            sums[4] = max(sums[4], backward.kept)
        if self.recorder is not None:
            self.recorder.ends(backward)
        return backward

    def used(self, entry: Entry) -> None:
        mark = entry.mark
        # only the node knows its op; to look at every node would change how long they live
        if mark is not None and mark[0].op is None:
            node: Any = torch._C._current_autograd_node()
            mark[0].op = None if node is None else _graph.op(node)

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        for backward in reversed(self.backwards):
            if backward.call == earlier:
                if not backward.reused:
                    backward.reused = True
                    self.calls[backward.site][2] += 1
                    if self.recorder is not None:
                        self.recorder.reused(backward)
                return

    # steps ----------------------------------------------------------------------------------------------------------------

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer_steps.append(OptimizerStep(optimizer, self.sites.line(4), self.step, self.number))
        if self.recorder is not None:
            self.recorder.optimizer_step(self.optimizer_steps[-1])

    def next_step(self, now: Moment | None = None) -> None:
        """The step ends here, or ended at a moment before."""
        self._close_life()
        now = now or self.moment()
        here = self._here
        here.left = now.live
        here.tensors, here.bytes = now.at - here.at, now.saved_bytes - self._saved_before
        self._saved_before = now.saved_bytes
        if self.recorder is not None:
            self.recorder.step(here)
        self.step += 1
        if len(self.steps) >= _STEPS:
            self.steps = _halve(self.steps)
        self._here = Step(self.step, now.at, now.built, self.live)
        self.steps.append(self._here)

    def moment(self) -> Moment:
        """Now, for a step that may turn out to have ended here."""
        return Moment(self.number, _built(), self.live, self.saved_bytes)

    def restart(self, boundary: str, unrolls: bool = False) -> None:
        """Something else ends a step from here on, as if it had from the beginning: all so far was step 0, and it goes on."""
        self.unrolls = unrolls
        first, *others = self.steps
        for step in others:
            first.merge(step)
        first.first, first.count = 0, 1
        self.steps, self._here, self.step, self._saved_before = [first], first, 0, 0
        events: list[Any] = [*self.backwards, *self.optimizer_steps, *self.mutations]
        for event in events:
            event.step = 0
        for life in self.lives:
            life.died_step = 0
        if self.recorder is not None:
            self.recorder.steps_begin(boundary)

    def step_of(self, number: int) -> int:
        """The step in which a tensor was saved, of merged steps the first; -1 before the watch."""
        if number <= self.steps[0].at:
            return -1
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high) // 2
            if self.steps[middle].at < number:
                low = middle + 1
            else:
                high = middle
        return self.steps[max(low - 1, 0)].first

    def step_of_node(self, sequence_number: int) -> int:
        """The step in which a node of the main thread was built, of merged steps the first; -1 before the watch."""
        if sequence_number < self.steps[0].built:
            return -1
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high) // 2
            if self.steps[middle].built <= sequence_number:
                low = middle + 1
            else:
                high = middle
        return self.steps[max(low - 1, 0)].first


def _halve(steps: list[Step]) -> list[Step]:
    """Merge the older half in pairs."""
    middle = len(steps) // 2
    merged = []
    for i in range(0, middle, 2):
        if i + 1 < middle:
            steps[i].merge(steps[i + 1])
        merged.append(steps[i])
    return merged + steps[middle:]


def _built() -> int:
    number: int = torch._C._autograd._get_sequence_nr()
    return number
