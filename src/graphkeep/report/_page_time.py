"""The page's charts: bytes over steps, the lives of graphs, and the graphs that never died, thinned to what can be drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from graphkeep.report._page_source import shorten
from graphkeep.report._run import Holder, Life, Look, Run, Sample, Site, Step

NO_MODULE = "(no module)"
_BANDS = 11
_OTHERS = "others"
_HOLDERS, _PARTS = 8, 16  # of graphs that are alive: holders drawn, and bars for each
_NAME = 160

T = TypeVar("T")


class Axis:
    """The axis that both charts share, in steps; a run without a step has one from 0 to 1."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.last = float(run.steps_done or 1)
        ats = [sample.at for sample in run.samples] + [life.died_at for life in run.lives]
        self._most = max(ats, default=0) or 1
        self.first = min((self.x(at) for at in ats), default=0.0)
        self.first = min(self.first, *(self.x(life.born_first) for life in run.lives)) if run.lives else self.first
        self.first = -1.0 if self.first < 0 else 0.0

    def x(self, at: int) -> float:
        """Where the saving of a tensor stands."""
        x = self._run.position(at) if self._run.steps else at / self._most
        return round(min(max(x, -1.0), self.last), 3)


def buckets(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Neighbours together, in so many parts of like size."""
    count = min(count, len(items))
    return [items[i * len(items) // count : (i + 1) * len(items) // count] for i in range(count)]


def spread(items: Sequence[T], count: int, size: Callable[[T], int]) -> list[T]:
    """At most so many, from the whole length; of neighbours the largest."""
    return list(items) if len(items) <= count else [max(part, key=size) for part in buckets(items, count)]


def thin(samples: Sequence[Sample], count: int) -> tuple[list[Sample], int, int]:
    """At most so many samples, and from and up to which of them some were left out.

    The first and the last ones stay as they are, so that some steps can be seen whole. From the others, each of many
    buckets gives its highest and its lowest: no peak is lost.
    """
    if len(samples) <= count:
        return list(samples), 0, 0
    ends = count // 8
    middle = samples[ends : len(samples) - 2 * ends]
    chosen: list[Sample] = []
    for part in buckets(middle, max((count - 3 * ends) // 2, 1)):
        high, low = (which(range(len(part)), key=lambda i: part[i].bytes) for which in (max, min))
        chosen.extend(part[i] for i in sorted({high, low}))
    return [*samples[:ends], *chosen, *samples[len(samples) - 2 * ends :]], ends, ends + len(chosen)


def bands(run: Run, axis: Axis, points: int, short: Callable[[str], str]) -> dict[str, Any]:
    """Bytes held by line and by module at each chosen sample, and which sites stand behind a band."""
    samples, first, last = thin(run.samples, points)
    if samples:  # before the first tensor was saved, nothing was held
        samples, first, last = [Sample(0, 0, 0.0, 0, []), *samples], first + 1, last + 1
    return {
        "thinned": [first, last],
        "x": [axis.x(sample.at) if i else axis.first for i, sample in enumerate(samples)],
        "total": [sample.bytes for sample in samples],
        "line": _stack(run, samples, lambda site: f"{short(site.file)}:{site.line}"),
        "module": _stack(run, samples, lambda site: shorten(site.module or NO_MODULE, _NAME)),
    }


def _stack(run: Run, samples: list[Sample], key: Callable[[Site], str]) -> list[dict[str, Any]]:
    """The largest bands, and all others as one; what grows lies below, so that its shape can be seen."""
    held: dict[str, list[int]] = defaultdict(lambda: [0] * len(samples))
    sites: dict[str, set[int]] = defaultdict(set)
    for i, sample in enumerate(samples):
        for number, size in sample.sites:
            name = key(run.sites.get(number) or Site(number))
            held[name][i] += size
            sites[name].add(number)
    names = sorted(held, key=lambda name: max(held[name]), reverse=True)
    shown, rest = names[:_BANDS], names[_BANDS:]
    # what grows holds something after each step, too
    shown.sort(key=lambda name: (min(held[name][-8:], default=0), max(held[name])), reverse=True)
    found: list[dict[str, Any]] = [{"name": name, "sites": sorted(sites[name]), "v": held[name]} for name in shown]
    above = [max(sample.bytes - sum(held[name][i] for name in shown), 0) for i, sample in enumerate(samples)]
    if any(above):
        others = sorted({number for name in rest for number in sites[name]})
        found.append({"name": f"{len(rest)} others" if rest else _OTHERS, "sites": others, "v": above, "others": True})
    return found


def steps(run: Run, count: int) -> list[list[float]]:
    """``[first, count, peak, left]``, neighbours merged."""
    return [_merged(part) for part in buckets(run.steps, count)]


def _merged(part: Sequence[Step]) -> list[float]:
    last = part[-1]
    return [part[0].first, last.first + last.count - part[0].first, max(step.peak for step in part), last.left]


def lives(run: Run, axis: Axis, count: int) -> dict[str, Any]:
    """``[born, died, from, to, tensors, bytes, backward]`` of each, in the order of their deaths."""
    chosen = spread(run.lives, count, lambda life: life.bytes)
    died = sum(row[3] for row in run.deaths)
    return {"bars": [_bar(life, axis) for life in chosen], "died": max(died, len(run.lives))}


def _bar(life: Life, axis: Axis) -> list[float | int | None]:
    ends = axis.x(life.born_first), axis.x(life.died_at)
    return [life.born, life.died, min(ends), max(ends), life.tensors, life.bytes, life.backward]


def held(run: Run) -> list[tuple[Look, Holder]]:
    """Who held a graph at the end, and who did in the last look before it and no more at the end; the largest first."""
    found: dict[tuple[object, ...], tuple[Look, Holder]] = {}
    for look in run.shown_looks:
        for holder in look.holders:  # its words may count: `outs[0..36]`
            found.setdefault((holder.kind, holder.name.partition("[")[0], holder.file, holder.line), (look, holder))
    return sorted(found.values(), key=lambda pair: (not pair[0].final, -pair[1].bytes, -pair[1].nodes))


def alive(run: Run, axis: Axis) -> dict[str, Any]:
    """The graphs that never died, by holder; parts of neighbouring steps share a bar where there are many."""
    pairs = held(run)
    rows = []
    for look, holder in pairs[:_HOLDERS]:
        parts = [_part(part, axis) for part in buckets(sorted(holder.parts), _PARTS)]
        rows.append(
            {
                "holder": shorten(holder.holder, _NAME),
                "file": holder.file,
                "line": holder.line,
                "nodes": holder.nodes,
                "bytes": holder.bytes,
                "final": look.final,
                "to": axis.x(look.at),
                "steps": len(holder.parts),
                "parts": parts,
                "sites": holder.sites[:40],
            }
        )
    return {"holders": rows, "more": max(len(pairs) - _HOLDERS, 0)}


def _part(part: Iterable[tuple[int, int, int]], axis: Axis) -> list[float]:
    """``[first step, last step, parts, nodes, bytes]``."""
    part = list(part)
    first, last = min(part[0][0], axis.last), min(part[-1][0], axis.last)
    return [max(first, -1), max(last, -1), len(part), sum(p[1] for p in part), sum(p[2] for p in part)]
