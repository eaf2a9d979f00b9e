"""What grew from one run to another.

Figures decide: the most that graphs held, what was left at the end, what a step saves, by how much more each step leaves, and
what was found. Lines only say where, since a line that was both moved and rewritten is another line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphkeep._units import format_bytes
from graphkeep._watch._finding import Finding
from graphkeep.report._figures import growth, left, saved_per_step
from graphkeep.report._plain import line_of
from graphkeep.report._ranks import missing, names
from graphkeep.report._run import Run

FLOOR = 4096  # bytes; less is no growth, whatever share of the whole it is


@dataclass(frozen=True)
class Figure:
    """One figure of both runs, in bytes.

    Attributes:
        name: what it is; of a line, ``file:line`` in the run that has it, the later one first.
        a, b: bytes; None where a line is not in that run.
        grew: whether it is larger in B by more than what is tolerated.
        code: of a line, its text.
    """

    name: str
    a: int | None
    b: int | None
    grew: bool
    code: str = ""


@dataclass
class Comparison:
    """What differs between run A and run B."""

    figures: list[Figure]
    lines: list[Figure]
    found: list[Finding]
    gone: list[Finding]
    notes: list[str] = field(default_factory=list)

    @property
    def grew(self) -> bool:
        """Whether a figure grew, or something new was found."""
        return bool(self.found) or any(figure.grew for figure in self.figures)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "grew": self.grew,
            "figures": [dataclasses.asdict(figure) for figure in self.figures],
            "lines": [dataclasses.asdict(line) for line in self.lines],
            "found": [finding.as_dict() for finding in self.found],
            "gone": [finding.as_dict() for finding in self.gone],
            "notes": self.notes,
        }


def compare(a: Sequence[Run], b: Sequence[Run], tolerance: float = 0.05) -> Comparison:
    """Compare two runs.

    Arguments:
        a, b: the ranks of each; of each figure the largest of all ranks counts.
        tolerance: the share by which a figure may be larger.
    """

    def grew(before: int, after: int, floor: int = FLOOR) -> bool:
        return after - before > max(tolerance * before, floor)

    def largest(of: Callable[[Run], int]) -> tuple[int, int]:
        return max(map(of, a)), max(map(of, b))

    stepless = not all(run.steps for run in (*a, *b))
    figures = [
        Figure("most held", *(most := largest(lambda run: run.peak)), grew(*most)),
        Figure("left at the end", *(rest := largest(left)), grew(*rest)),
    ]
    if stepless:  # of one of them a step is not known: sums can be compared, if the programs did as much
        saved = largest(lambda run: sum(site.bytes for site in run.sites.values()))
        figures.append(Figure("saved in all", *saved, grew(*saved)))
    else:
        saved = largest(saved_per_step)
        slope = largest(lambda run: max(growth(run), 0))
        # a little in each step is much in the end
        floor = FLOOR // max(run.steps_done for run in b)
        figures.append(Figure("saved in a step", *saved, grew(*saved)))
        figures.append(Figure("more left with each step", *slope, grew(*slope, floor)))
    found, gone = _findings(a, b)
    return Comparison(figures, _lines(a, b, stepless, grew), found, gone, _notes(a, b))


# lines ----------------------------------------------------------------------------------------------------------------------

_Key = tuple[str, str, str]  # file, function, text


def _lines(a: Sequence[Run], b: Sequence[Run], stepless: bool, grew: Callable[[int, int], bool]) -> list[Figure]:
    """By how much each line's bytes changed, in a step on average; the largest change first, and what stayed left out."""
    before, after = _by_line(a, stepless), _by_line(b, stepless)
    rewritten = {(key[:2], place): key for key, (_, place) in before.items() if key not in after}
    for key, (_, place) in after.items():
        if key not in before and (old_key := rewritten.pop((key[:2], place), None)) is not None:
            before[key] = before.pop(old_key)
    found = []
    for key in {**after, **before}:
        was, now = before.get(key), after.get(key)
        old, new = (0 if one is None else one[0] for one in (was, now))
        if grew(old, new) or grew(new, old):
            place = (now or was or (0, "?"))[1]
            sizes = (None if was is None else old, None if now is None else new)
            found.append(Figure(place, *sizes, grew(old, new), key[2]))
    return sorted(found, key=lambda line: (-abs((line.b or 0) - (line.a or 0)), line.name))


def _by_line(runs: Sequence[Run], stepless: bool) -> dict[_Key, tuple[int, str]]:
    lines: dict[_Key, tuple[int, str]] = {}
    for run in runs:
        mine: dict[_Key, tuple[int, str]] = {}
        for site in run.sites.values():
            text = line_of(run, site.file, site.line).strip()
            # the same text twice in one function is one line here; without the text, its number has to do
            key = (_below(run, site.file), site.function, text or f"line {site.line}")
            size, place = mine.get(key, (0, site.where))
            mine[key] = size + site.bytes, place
        steps = 1 if stepless else max(run.steps_done, 1)
        for key, (size, place) in mine.items():
            if size and size // steps >= lines.get(key, (0, ""))[0]:
                lines[key] = size // steps, place
    return lines


def _below(run: Run, file: str) -> str:
    """A path as it is below the working directory: the checkouts of two runs may be two folders."""
    cwd = str(run.header.get("cwd", "")).rstrip("/\\")
    return file[len(cwd) + 1 :] if cwd and file.startswith((cwd + "/", cwd + "\\")) else file


_Found = list[tuple[set[tuple[str, str]], Finding]]

# findings -------------------------------------------------------------------------------------------------------------------


def _findings(a: Sequence[Run], b: Sequence[Run]) -> tuple[list[Finding], list[Finding]]:
    before, after = _found(a), _found(b)
    return _apart(after, before), _apart(before, after)


def _apart(some: _Found, others: _Found) -> list[Finding]:
    known = {key for keys, _ in others for key in keys}
    seen: set[tuple[str, str]] = set()
    apart = []
    for keys, finding in some:
        if not keys & (known | seen):
            apart.append(finding)
        seen |= keys  # of another rank
    return apart


def _found(runs: Iterable[Run]) -> _Found:
    """With what they are known by: the place, and the text of the line there, of which an edit changes one or the other."""
    found: _Found = []
    for run in runs:
        for finding in run.findings:
            file, _, line = (finding.where or "").rpartition(":")
            text = line_of(run, file, int(line)).strip() if line.isdecimal() else ""
            places = {_below(run, finding.where or finding.what), text and f"{_below(run, file)}: {text}"}
            found.append(({(finding.id, place) for place in places if place}, finding))
        for note in run.notes:
            first, *others = note.text.splitlines()
            what = first.removeprefix(f"graphkeep {note.id}: ")
            then = next((line.partition(":")[2].strip() for line in others if "write instead:" in line), "")
            found.append(({(note.id, "")}, Finding(note.id, "will raise", what, None, note.error, then)))
    return found


# what else to know ----------------------------------------------------------------------------------------------------------


def _notes(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    said = []
    for key in ("program", "torch", "python", "graphkeep", "world_size"):
        was, now = (runs[0].header.get(key) for runs in (a, b))
        if was != now:
            said.append(f"{key} differs: {was} in A, {now} in B")
    for name, runs in (("A", a), ("B", b)):
        if any(run.how is None for run in runs):
            said.append(f"{name} was cut off: no end was written")
        if any(run.unread for run in runs):
            said.append(f"{name} is damaged: not all of it could be read")
        if absent := missing(runs):
            said.append(f"{name}: no file that can be read of {names(absent)}")
        if not all(run.steps for run in runs):
            said.append(f"{name} has no steps: sums of the whole runs are compared")
    done = [max(run.steps_done for run in runs) for runs in (a, b)]
    if all(done) and done[0] != done[1]:
        said.append(f"A ran {done[0]:,} steps, B {done[1]:,}")
    return said


def change(a: int | None, b: int | None) -> str:
    """``+1.0 MiB (+25%)``."""
    size = (b or 0) - (a or 0)
    if not size:
        return "="
    share = "" if not a or b is None else f" ({size / a:+.0%})"
    return f"{'+' if size > 0 else '-'}{format_bytes(abs(size))}{share}"
