"""The page's comparison of the ranks of one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from graphkeep.report._page_source import shorten
from graphkeep.report._run import Run

_LIKE = 0.1  # peaks of ranks that differ by less than this share are alike
_NAME = 200  # characters


@dataclass
class Rank:
    """A row of the comparison of ranks; ``differs`` says in what."""

    index: int
    name: str
    ended: str
    steps: int
    peak: int
    findings: list[str]
    differs: list[str] = field(default_factory=list)


def ended(run: Run) -> str:
    """How the program ended, in words."""
    if run.how is None:
        return "cut off: the file has no end"
    words = {"finished": "finished", "exit": "by sys.exit", "raised": "raised an exception", "stopped": "the watch was stopped"}
    words["steps"] = "after as many steps as were asked for"
    return words.get(run.how, shorten(run.how, _NAME))


def ranks(runs: Sequence[Run]) -> list[Rank]:
    """The ranks side by side, each with what it does otherwise than most."""
    one_launch = len({run.rank for run in runs}) == len(runs)
    rows = [
        Rank(
            i,
            str(run.rank) if one_launch else run.path.name,
            ended(run),
            run.steps_done,
            run.peak,
            sorted({finding.id for finding in run.findings} | _noted(run)),
        )
        for i, run in enumerate(runs)
    ]
    if one_launch and len(rows) > 1:
        usual_steps = _usual((row.steps for row in rows), max)
        how = _usual((row.ended for row in rows), min)
        ids = _usual((tuple(row.findings) for row in rows), lambda found: min(found, key=lambda f: (len(f), f)))
        peak = median_low(row.peak for row in rows)
        for row in rows:
            row.differs = [
                *([f"{row.steps:,} steps, most have {usual_steps:,}"] if row.steps != usual_steps else []),
                *([f"peak {row.peak / max(peak, 1):.1f} × the median"] if abs(row.peak - peak) > _LIKE * max(peak, 1) else []),
                *(["ended otherwise"] if row.ended != how else []),
                *(["other findings"] if tuple(row.findings) != ids else []),
            ]
    return rows


def _noted(run: Run) -> set[str]:
    return {note.id for note in run.notes}


def _usual(values: Iterable[Hashable], best: Any) -> Any:
    """The most frequent value; of several the best."""
    counts = Counter(values)
    most = max(counts.values())
    return best([value for value, count in counts.items() if count == most])
