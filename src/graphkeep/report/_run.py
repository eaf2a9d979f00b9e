"""A data file in memory. `docs/data-file.md` says what the records are; `_read.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphkeep._watch._finding import SEVERITIES, Finding


@dataclass
class Site:
    """A place in the program; the counts are those of the last totals."""

    id: int
    file: str = "?"
    line: int = 0
    function: str = "?"
    module: str | None = None
    op: str | None = None
    tensors: int = 0
    bytes: int = 0
    live_tensors: int = 0
    live_bytes: int = 0
    by_backward: int = 0
    by_count: int = 0

    @property
    def where(self) -> str:
        """``train.py:12``."""
        return f"{self.file}:{self.line}"


@dataclass
class Step:
    """One step, or several neighbours that were merged."""

    first: int
    count: int = 1
    at: int = 0
    s: float = 0.0
    tensors: int = 0
    bytes: int = 0
    peak: int = 0
    left: int = 0
    backwards: int = 0


@dataclass
class Sample:
    """Bytes held, by site."""

    step: int
    at: int
    s: float
    bytes: int
    sites: list[tuple[int, int]]


@dataclass
class Life:
    """A graph that died."""

    born: int | None
    died: int | None
    born_first: int
    born_last: int
    died_at: int
    died_step: int
    tensors: int
    bytes: int
    backward: int | None


@dataclass
class Backward:
    """One call of the engine."""

    number: int
    site: int | None
    step: int
    at: int
    retain_graph: bool = False
    create_graph: bool = False
    failed: bool = False
    reused: bool = False
    kept_bytes: int = 0


@dataclass
class Holder:
    """Who holds a graph that is alive."""

    holder: str
    kind: str
    name: str
    file: str | None
    line: int | None
    nodes: int
    bytes: int
    parts: list[tuple[int, int, int]]
    sites: list[int]


@dataclass
class Look:
    """What was alive at one moment."""

    step: int
    at: int
    s: float
    final: bool
    holders: list[Holder]
    findings: list[Finding]


@dataclass
class Note:
    """A backward that failed, explained."""

    id: str
    text: str
    error: str


@dataclass
class Run:
    """What one process has written.

    Attributes:
        path: the file.
        header: as written; ``{}`` is impossible, a file without one is refused.
        sites, sources: by id, by file name.
        deaths: ``(born, died, by_backward, lives, tensors, bytes)``.
        calls: ``(site, calls, retain_graph, reused, create_graph, most_kept)``.
        error: what the program raised, or None.
        how: how it ended; None if the file was cut off.
        torch: whether the program imported it.
        unread: how many lines could not be read; 0 in a sound file.
    """

    path: Path
    header: dict[str, Any]
    boundary: str | None = None
    begun_at: int = 0
    sites: dict[int, Site] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    optimizer_steps: list[dict[str, Any]] = field(default_factory=list)
    mutations: list[dict[str, Any]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    deaths: list[tuple[int, int, bool, int, int, int]] = field(default_factory=list)
    calls: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    peak: int = 0
    how: str | None = None
    torch: bool = True
    error: str | None = None
    seconds: float = 0.0
    unread: int = 0

    @property
    def rank(self) -> int:
        """The rank among the processes of one launch; 0 alone."""
        rank = self.header.get("rank")
        return rank if type(rank) is int else 0

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, the gravest first: of the last look while the program ran, and of that at its end."""
        found: dict[tuple[str, str], Finding] = {}
        said: set[tuple[str, str]] = set()  # the same growth by another name: what a local variable held, a global one may
        for look in self.shown_looks:
            new = [finding for finding in look.findings if (finding.id, _growth(finding)) not in said]
            said |= {(finding.id, _growth(finding)) for finding in new}
            for finding in new:
                found.setdefault((finding.id, finding.where or finding.what), finding)
        return sorted(found.values(), key=lambda f: SEVERITIES.index(f.severity) if f.severity in SEVERITIES else 0)

    @property
    def shown_looks(self) -> list[Look]:
        """The final look, and the last one before it: a local variable that held graphs is gone when the program has ended.

        What was true early in a long run need not have stayed so. Such a look counts only as far as the bytes that were left
        went on to grow.
        """
        final = [look for look in self.looks if look.final][-1:]
        during = [look for look in self.looks if not look.final][-1:]
        if final and during and 2 * during[0].step < self.steps_done:
            grown = [f for f in during[0].findings if f.severity == "bytes grow"] if growth(self.steps) > 0 else []
            during = [replace(during[0], findings=grown)]
        return final + during

    @property
    def steps_done(self) -> int:
        """How many steps have ended."""
        return self.steps[-1].first + self.steps[-1].count if self.steps else 0

    def position(self, at: int) -> float:
        """Where on an axis of steps the saving of a tensor stands; below 0 before the first step."""
        low, high = 0, len(self.steps)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.steps[middle].at < at else (low, middle)
        if not low:
            return -1 + at / max(self.steps[0].at, 1) if self.steps else float(bool(at))
        step = self.steps[low - 1]
        return step.first + step.count * min((at - step.at) / max(step.tensors, 1), 1.0)


def _growth(finding: Finding) -> str:
    """What grows by how much, without the name of the holder."""
    return finding.what.rpartition(") ")[2]


_WINDOWED = 8  # steps, from which on growth over them means something


def growth(steps: list[Step]) -> int:
    """By how many bytes more is left from step to step, after a warm-up.

    The most that was left in the last quarter of the steps, less the most in the second quarter: a state that is carried over a
    few steps and then detached rises and falls, and its tops stay where they are.
    """
    if len(steps) < _WINDOWED:
        return 0
    quarter = len(steps) // 4
    early, late = steps[quarter : 2 * quarter], steps[-quarter:]
    apart = late[0].first - early[0].first
    return (max(step.left for step in late) - max(step.left for step in early)) // apart if apart > 0 else 0
