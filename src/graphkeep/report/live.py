"""A run that goes on, as one screen and as one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphkeep._units import format_bytes
from graphkeep.report._plain import count, safe, spark, where
from graphkeep.report._run import Run

if TYPE_CHECKING:
    from rich.console import Console, Group

_RECENT = 20  # step records that the speed is taken from
_LINES = 8
_FINDINGS = 4


def line(run: Run) -> str:
    """``step 120, 18.2 steps/s, graphs hold 12.4 MiB, 15.0 MiB at most, 3.1 MiB left after the last step; GK101``."""
    parts = [f"{count(run.steps_done, 'step')} in {run.seconds:,.1f} s"]
    if speed(run):
        parts.append(f"{speed(run):,.1f} steps/s")
    parts += [f"graphs hold {format_bytes(now(run))}", f"{format_bytes(run.peak)} at most"]
    if run.steps:
        parts.append(f"{format_bytes(run.steps[-1].left)} left after the last step")
    ids = dict.fromkeys([*(finding.id for finding in run.findings), *(note.id for note in run.notes)])
    return ", ".join(parts) + (f"; found: {', '.join(map(safe, ids))}" if ids else "")


def now(run: Run) -> int:
    """Bytes that graphs held when the file was last written."""
    last = run.samples[-1] if run.samples else None
    if last is not None and (not run.steps or last.s >= run.steps[-1].s):
        return last.bytes
    return run.steps[-1].left if run.steps else 0


def speed(run: Run) -> float:
    """Steps in a second, of late, by the clock of the run."""
    recent = run.steps[-_RECENT:]
    if len(recent) < 2:  # noqa: PLR2004  two ends
        return 0.0
    seconds = recent[-1].s - recent[0].s
    return sum(step.count for step in recent[1:]) / seconds if seconds > 0 else 0.0


def frame(run: Run, console: Console, others: int) -> Group:
    """One screen: figures, what is left over the steps, what was found, and the lines that hold most now.

    Arguments:
        run: as far as it has been read.
        console: where it will be shown.
        others: how many other ranks there are.
    """
    from rich.console import Group
    from rich.text import Text

    from graphkeep.report.text import new_table

    head = safe(run.header.get("program", "?"))
    rank = f", rank {run.rank} ({count(others, 'other')})" if others else ""
    # a screen that is higher than the terminal would scroll away
    room = max(console.height - 8, 3)
    parts: list[object] = [Text(f"{head}{rank}", "bold"), Text(line(run))]
    if run.steps:
        bars = spark([step.left for step in run.steps], min(console.width - 10, 80), console.encoding.startswith("utf"))
        parts.append(Text(f"left: {bars}"))
    found = run.findings[:_FINDINGS]
    for finding in found:
        text = safe(f"{finding.id} {finding.severity}: {finding.what}")
        parts.append(Text(text, "bold red", no_wrap=True, overflow="ellipsis"))
    if run.notes:
        parts.append(Text(safe(run.notes[-1].text.splitlines()[0]), "bold red", no_wrap=True, overflow="ellipsis"))
    held = sorted(run.samples[-1].sites, key=lambda one: -one[1]) if run.samples else []
    if held:
        table = new_table(console, "lines that hold most now", "bytes")
        for site, size in held[: min(_LINES, max(room - len(found) - 2, 1))]:
            table.add_row(Text(where(run, site)), format_bytes(size))
        parts += [Text(""), table]
    return Group(*parts)  # type: ignore[arg-type]
