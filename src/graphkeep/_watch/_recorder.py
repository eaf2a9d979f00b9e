"""What a watch sees, written to a data file as it happens. `docs/data-file.md` has the records."""

from __future__ import annotations

import itertools
import linecache
import time
from collections.abc import Sequence
from typing import Any

from graphkeep._watch._census import Held
from graphkeep._watch._datafile import DataFile, said
from graphkeep._watch._finding import Finding
from graphkeep._watch._frames import Site, short
from graphkeep._watch._timeline import Backward, Life, Mutation, OptimizerStep, Step, Timeline

_SOURCE = 256 << 10  # characters of one source file, and of all
_SOURCES = 4 << 20
_DETAILED = 512  # steps that have all details; of the next so many every second one, and so on
_MERGED = 4096  # steps, until neighbours are merged
_LIVES = 1000  # of one step
_PARTS = 2000  # of one holder
_FEW = 16  # steps that are always sampled
_SHARE = 0.02  # of the time that a run took, the most that samples and sums may take


class Recorder:
    """Writes the events of one timeline."""

    def __init__(self, file: DataFile, timeline: Timeline) -> None:
        self.file = file
        self._timeline = timeline
        self._begun = time.monotonic()
        self._ids: dict[Site, int] = {}
        self._sources: set[str] = set()
        self._room = _SOURCES
        self._every = self._merge = 1
        self._step: Step | None = None
        self._lives = 0
        self._cost = 0.0
        self._summed, self._pause = self._begun, 1.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return round(time.monotonic() - self._begun, 4)

    @property
    def _detailed(self) -> bool:
        return self._timeline.step % self._every == 0

    def _affordable(self) -> bool:
        return self._timeline.step < _FEW or self._cost < _SHARE * (time.monotonic() - self._begun)

    # what happens ---------------------------------------------------------------------------------------------------------

    def life(self, life: Life) -> None:
        """A graph has died."""
        self._lives += 1
        if self._detailed and self._lives <= _LIVES:
            self._write(
                "life", born=self._site(life.born), died=self._site(life.died), born_first=life.born_first,
                born_last=life.born_last, died_at=life.died_at, died_step=life.died_step, tensors=life.tensors,
                bytes=life.bytes, backward=life.backward,
            )  # fmt: skip

    def begins(self) -> None:
        """A backward begins: mostly the moment at which most is held."""
        self._sample()
        self.tick()

    def ends(self, backward: Backward) -> None:
        """It has returned, or raised."""
        if self._detailed:
            self._write(
                "backward", number=backward.number, site=self._site(backward.site), step=backward.step, at=backward.at,
                retain_graph=backward.retain_graph, create_graph=backward.create_graph, failed=backward.failed,
                reused=backward.reused, kept_bytes=backward.kept,
            )  # fmt: skip
        self.tick()

    def reused(self, backward: Backward) -> None:
        """A later backward has asked for what this one kept."""
        self._write("reused", number=backward.number)

    def optimizer_step(self, step: OptimizerStep) -> None:
        """An optimizer has stepped."""
        if self._detailed:
            self._write("optimizer_step", optimizer=step.kind, site=self._site(step.site), step=step.step, at=step.at)

    def mutation(self, change: Mutation) -> None:
        """A saved tensor was changed in place."""
        if self._detailed:
            self._write(
                "mutation", saved=self._site(change.saved), seen=self._site(change.seen), step=change.step, at=change.at
            )

    def step(self, step: Step) -> None:
        """A step has ended."""
        self._sample()
        if self._step is None:
            self._step = Step(step.first, step.at, step.built, step.peak)
            self._step.tensors, self._step.bytes = step.tensors, step.bytes
            self._step.backwards, self._step.left = step.backwards, step.left
        else:
            self._step.merge(step)
        if self._step.count >= self._merge:
            self._write_step()
        self._lives = 0
        while step.first >= _DETAILED * self._every:
            self._every *= 2
            self._write("thinned", at=self._timeline.number, every=self._every)
        while step.first >= _MERGED * self._merge:
            self._merge *= 2
        self.tick()

    def steps_begin(self, boundary: str) -> None:
        """Steps are counted anew."""
        self._step, self._every, self._merge = None, 1, 1
        self._write("steps_begin", at=self._timeline.steps[0].at, boundary=boundary)

    def note(self, text: str, error: BaseException) -> None:
        """A backward that failed was explained."""
        first = text.split(":", maxsplit=1)[0].split()
        self._write("note", id=first[-1] if first else "", text=text, error=said(error))

    def look(self, held: Sequence[Held], findings: Sequence[Finding], final: bool) -> None:
        """Somebody has looked at what is alive."""
        self._write(
            "look", step=self._timeline.step, at=self._timeline.number, s=self.seconds, final=final,
            holders=[self._holder(one) for one in held[:200]], findings=[finding.as_dict() for finding in findings],
        )  # fmt: skip
        self.file.flush()

    def end(self, how: str, error: BaseException | None = None) -> None:
        """The watch ends."""
        self._write_step()
        self._write_totals()
        self._write("end", how=how, error=said(error), s=self.seconds)
        self.file.close()

    # writing ----------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Now and then: bring it to disk."""
        now = time.monotonic()
        if now - self._summed > self._pause and self._affordable():
            self._write_totals()
            self._summed, self._pause = now, min(2 * self._pause, 30.0)
            self._cost += time.monotonic() - now
        self.file.flush_if_due()

    def _write(self, kind: str, **record: Any) -> None:
        self.file.write({"type": kind, **record})

    def _write_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._write(
                "step", first=step.first, count=step.count, at=step.at, s=self.seconds, tensors=step.tensors, bytes=step.bytes,
                peak=step.peak, left=step.left, backwards=step.backwards,
            )  # fmt: skip

    def _sample(self) -> None:
        if not self._detailed or not self._affordable():
            return
        begun = time.monotonic()
        held = [[self._site(site), site.live_bytes] for site in self._timeline.sites if site.live_bytes]
        timeline = self._timeline
        self._write("sample", step=timeline.step, at=timeline.number, s=self.seconds, bytes=timeline.live, sites=held)
        self._cost += time.monotonic() - begun

    def _write_totals(self) -> None:
        timeline = self._timeline
        self._write(
            "totals",
            sites=[
                [self._site(s), s.op, s.tensors, s.bytes, s.live_tensors, s.live_bytes, s.by_backward, s.by_count]
                for s in timeline.sites
                if s.tensors
            ],
            deaths=[
                [self._site(born), self._site(died), by_backward, *sums]
                for (born, died, by_backward), sums in list(timeline.deaths.items())
            ],
            calls=[[self._site(site), *sums] for site, sums in list(timeline.calls.items())],
            peak=timeline.peak,
        )

    def _holder(self, one: Held) -> dict[str, Any]:
        holder = one.holder
        parts = sorted(one.parts.items())
        return {
            "holder": holder.what if holder is not None else "nothing in Python: alive though unreachable",
            "kind": holder.kind if holder is not None else "unreachable",
            "name": holder.name if holder is not None else "",
            "file": short(holder.file) if holder is not None and holder.file else None,
            "line": holder.line if holder is not None else None,
            "nodes": one.nodes,
            "bytes": one.bytes,
            "parts": [[step, part.nodes, part.bytes] for step, part in itertools.islice(parts, _PARTS)],
            "sites": [self._site(site) for site in itertools.islice(one.sites, 100)],
        }

    def _site(self, site: Site) -> int:
        number = self._ids.get(site)
        if number is None:
            number = self._ids[site] = len(self._ids) + 1
            file = short(site.file)
            self._source(site.file, file)
            self._write("site", id=number, file=file, line=site.line, function=site.function, module=site.module_type)
        return number

    def _source(self, filename: str, file: str) -> None:
        if filename in self._sources:
            return
        self._sources.add(filename)
        text = "".join(linecache.getlines(filename))
        if text and len(text) <= min(_SOURCE, self._room):
            self._room -= len(text)
            self._write("source", file=file, text=text)
