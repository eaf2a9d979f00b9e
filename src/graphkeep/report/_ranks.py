"""Several processes of one launch: what they share, and which of them differs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from graphkeep._units import format_bytes
from graphkeep._watch._finding import SEVERITIES, Finding
from graphkeep.report._plain import count, safe
from graphkeep.report._run import Run

_LIKE = 0.1  # peaks of ranks that differ by less than this share are alike


def launches(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that belong together, sorted by rank; one that ran alone is alone."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        world = run.header.get("world_size")
        alone = not isinstance(world, int) or world < 2  # noqa: PLR2004  a world of one
        key = (str(run.path),) if alone else (run.header.get("group"), world, run.header.get("program"))
        groups.setdefault(key, []).append(run)
    return [sorted(group, key=lambda run: run.rank) for group in groups.values()]


def missing(runs: Sequence[Run]) -> list[int]:
    """The ranks of the launch of which there is no file."""
    world = runs[0].header.get("world_size")
    there = {run.rank for run in runs}
    # no list of a world that is too large to be true
    return [rank for rank in range(min(world, 1 << 16)) if rank not in there] if isinstance(world, int) and world > 1 else []


def key_of(finding: Finding) -> tuple[str, str]:
    """By what findings of several ranks are the same one."""
    return finding.id, finding.where or finding.what


def shared(runs: Sequence[Run]) -> list[tuple[Finding, list[int]]]:
    """Each finding once, the gravest first, with the ranks that have it."""
    found: dict[tuple[str, str], tuple[Finding, list[int]]] = {}
    for run in runs:
        for finding in run.findings:
            found.setdefault(key_of(finding), (finding, []))[1].append(run.rank)
    return sorted(found.values(), key=lambda one: SEVERITIES.index(one[0].severity) if one[0].severity in SEVERITIES else 0)


def on_ranks(ranks: Sequence[int], runs: Sequence[Run]) -> str:
    """``on all 4 ranks``, ``on rank 2 of 4``; nothing where one process ran alone."""
    if len(runs) == 1 and not missing(runs):
        return ""
    if len(set(ranks)) == len(runs) > 1:
        return f"on all {len(runs)} ranks"
    return f"on {names(ranks)} of {len(runs) + len(missing(runs))}"


def names(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0, 3``."""
    return ("rank " if len(set(ranks)) == 1 else "ranks ") + ", ".join(map(str, sorted(set(ranks))))


def ids(run: Run) -> str:
    """The ids of a run's findings and notes: ``GK101, 2 x GK301``."""
    counts = Counter([finding.id for finding in run.findings] + [note.id for note in run.notes])
    return ", ".join(f"{n} x {safe(one)}" if n > 1 else safe(one) for one, n in counts.items()) or "none"


def differences(runs: Sequence[Run], ended: Callable[[Run], str]) -> list[str]:
    """What sets a rank apart from the others, a sentence each; nothing where all are alike."""
    if len(runs) == 1:
        return []
    said = []
    for says in (lambda run: count(run.steps_done, "step"), lambda run: f"findings: {ids(run)}", ended):
        values = [says(run) for run in runs]
        said += _odd(runs, values, Counter(values).most_common(1)[0])
    middle = statistics.median_low([run.peak for run in runs])
    apart = [run for run in runs if abs(run.peak - middle) > _LIKE * max(middle, 1)]
    said += [
        f"rank {run.rank} differs: {format_bytes(run.peak)} at most, the median is {format_bytes(middle)}" for run in apart
    ]
    return said


def _odd(runs: Sequence[Run], values: Sequence[str], usual: tuple[str, int]) -> list[str]:
    value, times = usual
    if times == len(runs):
        return []
    if 2 * times <= len(runs):
        return ["the ranks differ: " + "; ".join(f"rank {run.rank}: {one}" for run, one in zip(runs, values, strict=True))]
    odd: dict[str, list[int]] = {}
    for run, one in zip(runs, values, strict=True):
        if one != value:
            odd.setdefault(one, []).append(run.rank)
    return [
        f"{names(ranks)} {'differs' if len(ranks) == 1 else 'differ'}: {one}; the others: {value}" for one, ranks in odd.items()
    ]
