"""`watch`: the context under which a program is seen."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from graphkeep._eager import eager
from graphkeep._errors import ArgumentError, ArgumentTypeError, WatchFailedWarning, programs_own
from graphkeep._ledger import LEDGER, Call, Entry
from graphkeep._units import format_bytes
from graphkeep._watch import _census, _export, _findings, _postmortem, _tables
from graphkeep._watch._datafile import DataFile, header
from graphkeep._watch._finding import Finding, verdict
from graphkeep._watch._frames import Site
from graphkeep._watch._recorder import Recorder
from graphkeep._watch._timeline import Life, Moment, Timeline

_log = logging.getLogger("graphkeep")
Schedule: TypeAlias = Callable[[int], torch.profiler.ProfilerAction]
# What ends a step: the last of these that the program has shown. A loop that only runs forward comes to its first line again.
_BOUNDARIES = ("forward", "backward", "optimizer", "own")
_FORWARD, _BACKWARD, _OPTIMIZER, _OWN = range(4)
_MOST_NEW = 4  # optimizers that step for the first time, while the one that ended steps does not
_FIRST_LOOK = 8  # steps; others follow, for what a local variable holds is gone when a run has ended
_AGAIN = 1.25  # the next look after so many times the steps (twice as many while looks are few), if they have not taken more
_FREE, _SHARE = 1.5, 0.1  # than so many seconds, or this share of the time


class watch:
    """See when each graph of a program is born, what it holds, what frees it, and what still holds it.

    The program runs as before: the same results, the same exceptions (with more said in their notes, where a backward fails
    because its graph was freed or changed in place). Everything that autograd saves in the block is seen, in every thread that
    starts in it; what other saved-tensor hooks (`save_on_cpu`, `checkpoint`) save is theirs and stays hidden.

    Arguments:
        schedule: as `torch.profiler.schedule` makes it: a function from the number of the step to a
            `torch.profiler.ProfilerAction`; nothing is recorded in a step for which it says ``NONE``. None records all.
        file: a path; what is seen is written there while the program runs, for `graphkeep report`. Then holders are looked at
            from time to time, too: 1.5 s of looks, and at most a tenth of the time of a long run.

    Attributes:
        timeline: the record itself.

    Raises:
        ArgumentTypeError: `schedule` cannot be called.
        ArgumentError: when it starts: `file` cannot be written.

    Warns:
        WatchFailedWarning: a fault inside graphkeep; the watch ends there, and the program goes on.

    Example:
        >>> import torch, graphkeep as gk
        >>> w = torch.ones(1000, requires_grad=True)
        >>> optimizer = torch.optim.SGD([w], lr=0.1)
        >>> total = 0.0
        >>> with gk.watch() as seen:
        ...     for _ in range(12):
        ...         loss = w.exp().sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         total = total + loss  # keeps a chain of nodes
        >>> [finding.id for finding in seen.findings]
        ['GK102']

    Source: `torch.autograd.graph.saved_tensors_hooks`, `torch.profiler.profile` for the shape of the interface.
    """

    def __init__(self, *, schedule: Schedule | None = None, file: str | os.PathLike[str] | DataFile | None = None) -> None:
        if schedule is not None and not callable(schedule):
            raise ArgumentTypeError(
                f"`schedule` is of type {type(schedule).__name__}",
                instead="torch.profiler.schedule(wait=..., warmup=..., active=...), or None to record every step",
            )
        self.timeline = Timeline()
        self._schedule = schedule
        self._file = file
        self._running = self._recording = False
        self._error: BaseException | None = None  # by which the program ends
        self._last_step: int | None = None
        self._level = -1  # of what ends a step
        self._repeats: Site | None = None  # the line that a loop came to again
        self._ended: Moment | None = None
        self._look_at, self._looked = _FIRST_LOOK, 0.0
        self._begun = time.monotonic()
        self._handles: list[Any] = []
        self._boundary: Any = None
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._new, self._most_new = 0, _MOST_NEW  # optimizers met since the boundary last stepped
        self._findings: list[Finding] | None = None
        self._held: list[dict[str, Any]] = []
        self._failed = False
        self._seen: tuple[int, int, int] | None = None  # how far the program was when it was last looked at
        self.saved: Callable[[Entry], None]  # for the ledger
        self.died: Callable[[Entry, Call | None], None]
        self.used: Callable[[Entry], None]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, by `copy.deepcopy` or `torch.save` of a module that holds it, is one that has not begun, and has no file."""
        return _fresh, (type(self), self._schedule)

    # running --------------------------------------------------------------------------------------------------------------

    @eager
    def __enter__(self) -> watch:
        self.start()
        return self

    @eager
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to watch.

        Raises:
            ArgumentError: it is running.
        """
        if self._running:
            raise ArgumentError("this watch is running already", instead="w.stop() first, or another gk.watch()")
        if self._file is not None:
            self._open(self._file)
        self._running = True
        self._findings = None
        self._handles = [register_optimizer_step_post_hook(self._optimizer_stepped)]
        self._record(self._wanted(0))

    def stop(self) -> None:
        """End: look at what is alive, and take every hook off. Stopping twice does nothing."""
        self._end("stopped")

    def _end(self, how: str, error: BaseException | None = None) -> None:
        if not self._running:
            return
        recorder, self._error = self.timeline.recorder, error
        try:
            with self._guarded():
                LEDGER.deliver()
                self.timeline.close()
                # else the last look saw all there is
                if recorder is not None or self._seen != self._state() or not self.timeline.step:
                    self._look(final=True)
            with self._guarded():
                if recorder is not None:
                    recorder.end(how, error)
                    self._warn_of(recorder.file.fault)
        finally:  # Ctrl-C, too, while it looks
            self._leave()
            self._running, self._error = False, None

    def _warn_of(self, fault: OSError | None) -> None:
        if fault is not None and not isinstance(self._file, DataFile):
            warnings.warn(f"the data file ends early: {fault.strerror}", WatchFailedWarning, stacklevel=4)

    def step(self) -> None:
        """The end of a step. With the first call nothing else ends one any more."""
        self._rise(_OWN)
        self._next_step()

    def _open(self, file: str | os.PathLike[str] | DataFile) -> None:
        again = self.timeline.recorder is not None
        if not isinstance(file, DataFile):
            file = DataFile(file, again)
            file.write(header(sys.argv[0] or "python", sys.argv))
        if again:
            self.timeline.recorder.file = file
        else:
            self.timeline.recorder = Recorder(file, self.timeline)

    def _leave(self) -> None:
        self._record(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._boundary = None

    def _record(self, wanted: bool) -> None:
        if wanted and not self._recording:
            # bound anew, so that one call less lies on the way of every saved tensor
            self.saved, self.died, self.used = self.timeline.saved, self.timeline.died, self.timeline.used
            if self._level < _BACKWARD and self._schedule is None:
                self.saved = self._saved_in_loop
            LEDGER.join(self)
        elif not wanted:
            LEDGER.leave(self)
            self.saved = self.timeline.saved  # a method of its own would be a cycle
        self._recording = wanted

    def _wanted(self, step: int) -> bool:
        return self._schedule is None or self._schedule(step) is not torch.profiler.ProfilerAction.NONE

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        LEDGER.push()
        ends = False
        with self._guarded():
            self._rise(_OPTIMIZER)
            self.timeline.optimizer_stepped(optimizer)
            # several optimizers step in one step (GAN): the first one that is still there ends it
            boundary = self._boundary() if self._boundary is not None else None
            if boundary is not optimizer and optimizer not in self._stepped:
                self._new += 1
            self._stepped.add(optimizer)
            # a program that makes an optimizer for each trial may leave the first one behind, alive
            if boundary is None or self._new >= self._most_new:
                self._most_new = _MOST_NEW if boundary is None else 1
                self._new, boundary = 0, optimizer
                self._boundary = self.timeline.optimizer_steps[-1].optimizer
            ends = boundary is optimizer and self._level == _OPTIMIZER
            self._new = 0 if boundary is optimizer else self._new
        if ends:
            self._next_step()

    def _saved_in_loop(self, entry: Entry) -> None:
        """Before any backward: the first line that is come to again ends a step, each time."""
        now = self.timeline.moment()
        self.timeline.saved(entry)
        site = entry.mark[0]
        if site is self._repeats or (self._repeats is None and site.tensors > 1):
            self._repeats = site
            self._rise(_FORWARD, unrolls=True)
            self._next_step(now._replace(built=now.built - 1))  # the node that saves it has its number already

    def _begins_step(self, line: Site, unrolls: bool) -> None:
        """Before any optimizer's step: when the first backward's line comes again, a step had ended with its last return."""
        if self._level < _BACKWARD or (self.timeline.unrolls and not unrolls):
            self._level = _FORWARD
            self._rise(_BACKWARD, unrolls)
            self._repeats, self._ended = line, None
        elif line is self._repeats and self._ended is not None:
            self._next_step(self._ended)
            self._ended = None

    def _rise(self, level: int, unrolls: bool = False) -> None:
        """The program has shown something that says better where its steps end: they are counted anew."""
        if level <= self._level:
            return
        self._level = level
        self.timeline.restart(_BOUNDARIES[level], unrolls)
        self._look_at = _FIRST_LOOK
        if level >= _BACKWARD and self._recording:
            self.saved = self.timeline.saved

    def _next_step(self, now: Moment | None = None) -> None:
        with self._guarded():
            self.timeline.next_step(now)
        wanted = self._wanted(self.timeline.step)  # the program's own function: what it raises is the program's
        if self._running:
            self._record(wanted)
            with self._guarded():
                self._look_now_and_then()
            # a loop over layers is no step of a training
            if self._last_step is not None and self.timeline.step >= self._last_step and not self.timeline.unrolls:
                self._end("steps")

    def _look_now_and_then(self) -> None:
        if self.timeline.recorder is None or self.timeline.step < self._look_at:
            return
        few = self._looked < _FREE
        if few or self._looked < _SHARE * (time.monotonic() - self._begun):
            self._look()
            self._look_at = 2 * self.timeline.step if few else max(self.timeline.step + 1, int(_AGAIN * self.timeline.step))

    def _abandon(self) -> None:
        """In a forked child: it runs as without a watch, and writes nothing."""
        self._running = False
        self._leave()

    # what the ledger says ---------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """For the ledger."""
        self._fail(error)

    def begins(self, call: Call) -> None:
        """For the ledger."""
        with self._guarded():
            # a schedule is the program's, and counts what the program says are steps
            if self._level <= _BACKWARD and self._schedule is None:
                self._begins_step(self.timeline.sites.line(3), call.create_graph)
            self.timeline.begins(call)

    def ends(self, call: Call, error: BaseException | None) -> None:
        """For the ledger."""
        with self._guarded():
            backward = self.timeline.ends(call, error)
            if backward is not None and backward.site is self._repeats and self._level == _BACKWARD:
                self._ended = self.timeline.moment()
        if isinstance(error, RuntimeError):
            with self._guarded():
                note = _postmortem.annotate(error, call.outputs, self.timeline, LEDGER.mismatch)
                if note is not None and self.timeline.recorder is not None:
                    self.timeline.recorder.note(note, error)

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        """For the ledger."""
        self.timeline.reused(entry, earlier, call)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if programs_own(error):
                raise
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed, self._running = True, False
        self._leave()
        _log.error("the watch ended with an internal fault", exc_info=error)
        # where warnings are errors, the log has to do
        with contextlib.suppress(WatchFailedWarning):
            warnings.warn(
                f"gk.watch() ended here by a fault inside graphkeep ({type(error).__name__}: {error}); the program goes on",
                WatchFailedWarning,
                stacklevel=2,
            )

    # what was seen ----------------------------------------------------------------------------------------------------------

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, the gravest first; empty if nothing is. While the watch runs, what is alive now is looked at."""
        if self._running:
            with self._guarded():
                self._look()
        return list(self._findings or ())

    @property
    def lives(self) -> list[Life]:
        """The last few thousand graphs that died: where each was built, what freed it, and where."""
        return list(self.timeline.lives)

    def summary(self) -> str:
        """Verdict, why and next; then what was saved and freed."""
        findings = self.findings
        return verdict(findings) + "\n\n" + _tables.overview(self.timeline)

    def __str__(self) -> str:
        return self.summary()

    def table(self, group_by: str = "line", sort_by: str = "bytes", row_limit: int = 20) -> str:
        """A table for people.

        Arguments:
            group_by: ``line``, ``module``, ``op`` or ``holder``.
            sort_by: ``bytes`` (saved), ``live`` (held now), ``tensors`` or ``name``.
            row_limit: at most so many rows.

        Raises:
            ArgumentError: another value.
        """
        if self._running and group_by == "holder":
            with self._guarded():
                self._look()
        return _tables.table(self.timeline, self._held, group_by, sort_by, row_limit)

    def export_json(self, path: Any) -> None:
        """Write everything that was recorded, with its ``schema_version``, as JSON."""
        _export.write_json(path, self.timeline, self.findings, self._held)

    def export_trace(self, path: Any) -> None:
        """Write the timeline as Chrome trace events (https://ui.perfetto.dev opens them). One unit of time is one step."""
        _export.write_trace(path, self.timeline)

    def _look(self, final: bool = False) -> None:
        begun = time.monotonic()
        collecting = gc.isenabled()
        gc.disable()  # a collection in the middle would free what is being looked at
        try:
            held = _census.take(self.timeline, ended=self._error)
            self._findings = _findings.find(self.timeline, held, final)
            self._held = [
                {
                    "holder": one.holder.what if one.holder else "nothing in Python: alive though unreachable",
                    "nodes": one.nodes,
                    "bytes": one.bytes,
                    "steps": sorted(one.parts)[:1] + sorted(one.parts)[-1:],
                }
                for one in held
            ]
            if self.timeline.recorder is not None:
                self.timeline.recorder.look(held, self._findings, final)
        finally:
            if collecting:
                gc.enable()
        self._seen = self._state()
        self._looked += time.monotonic() - begun

    def _state(self) -> tuple[int, int, int]:
        return self.timeline.number, self.timeline.calls_made, self.timeline.step

    def __repr__(self) -> str:
        state = "running" if self._running else "stopped"
        return f"<gk.watch {state}: {self.timeline.step} steps, {format_bytes(self.timeline.live)} held>"


def _fresh(kind: type[watch], schedule: Schedule | None) -> watch:
    return kind(schedule=schedule)
