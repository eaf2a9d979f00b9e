"""The figures of a run that are worth a sentence, or a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from graphkeep.report import _run
from graphkeep.report._run import Run, Sample


@dataclass
class Sums:
    """What one line, module or op has saved."""

    tensors: int = 0
    bytes: int = 0
    live: int = 0
    at_peak: int = 0
    by_backward: int = 0
    by_count: int = 0


def left(run: Run) -> int:
    """Bytes that graphs held when the last step ended; in a run without steps, at its end."""
    return run.steps[-1].left if run.steps else sum(site.live_bytes for site in run.sites.values())


def saved_per_step(run: Run) -> int:
    """Bytes saved in a step, the median; in a run without steps, in all. A merged record counts as so many equal steps."""
    if not run.steps:
        return sum(site.bytes for site in run.sites.values())
    half, median = sum(step.count for step in run.steps) / 2, 0
    for size, number in sorted((step.bytes // step.count, step.count) for step in run.steps):
        if half > 0:
            median = size
        half -= number
    return median


def growth(run: Run) -> int:
    """By how many bytes more is left from step to step, after a warm-up."""
    return _run.growth(run.steps)


def fullest(run: Run) -> Sample | None:
    """The moment at which most was held, of those that were looked at."""
    return max(run.samples, key=lambda sample: sample.bytes, default=None)


def sums(run: Run, group_by: str) -> dict[str, Sums]:
    """What was saved, by ``line``, ``module`` or ``op``; first what held most when most was held."""
    found: dict[str, Sums] = {}
    peak = fullest(run)
    at_peak = dict(peak.sites) if peak is not None else {}
    last = dict(run.samples[-1].sites) if run.samples else {}
    summed = any(site.tensors for site in run.sites.values())
    for number, site in run.sites.items():
        live = site.live_bytes if summed else last.get(number, 0)  # cut off before any sums were written
        if site.tensors or live or at_peak.get(number):
            name = {"line": site.where, "module": site.module or "(no module)", "op": site.op or "(not asked)"}[group_by]
            row = found.setdefault(name, Sums())
            row.tensors += site.tensors
            row.bytes += site.bytes
            row.live += live
            row.at_peak += at_peak.get(number, 0)
            row.by_backward += site.by_backward
            row.by_count += site.by_count
    return dict(sorted(found.items(), key=lambda item: (-item[1].at_peak, -item[1].bytes, item[0])))
