"""Runs as text: verdict, why, next; then what was found, who holds what, where it was saved, and what freed it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from graphkeep._units import format_bytes
from graphkeep._watch._finding import Finding
from graphkeep.report import _ranks
from graphkeep.report._figures import fullest, growth, sums
from graphkeep.report._plain import code, count, safe, spark, where
from graphkeep.report._run import Holder, Run
from graphkeep.report._verdict import Verdict, verdict

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

GROUPS = ("line", "module", "op")
_ROWS = 20
_ENDS = {"optimizer": "optimizer.step()", "backward": "a backward", "forward": "the next forward", "own": "w.step()"}
_STYLES = {"will raise": "bold red", "bytes grow": "bold red", "nodes grow": "bold yellow", "costs": "bold cyan"}


def write(runs: Sequence[Run], console: Console, group_by: str = "line") -> None:
    """Print a report of runs.

    Arguments:
        runs: those of one launch are reported together.
        console: what is printed is as wide as it is.
        group_by: what the table of saved tensors has a row for: ``line``, ``module`` or ``op``.
    """
    for number, launch in enumerate(_ranks.launches(runs)):
        if number:
            console.print()
        _launch(launch, console, group_by)


def _launch(runs: list[Run], console: Console, group_by: str) -> None:
    for line in verdict_of(runs).splitlines():
        head, _, rest = line.partition(":")
        _say(console, (head + ":", "bold"), rest)
    console.print()
    _header(runs, console)
    _found(runs, console)
    if len(runs) > 1:
        _table_of_ranks(runs, console)
    # one report for all ranks that have the same findings
    shown = {frozenset(map(_ranks.key_of, run.findings)): run for run in reversed(runs)}
    for run in sorted(shown.values(), key=lambda run: run.rank):
        if len(shown) > 1:
            console.print()
            _say(console, (f"rank {run.rank}", "bold underline"))
        _steps(run, console)
        _holders(run, console)
        _saved(run, console, group_by)
        _lives(run, console)


# the first lines ------------------------------------------------------------------------------------------------------------


def verdict_of(runs: Sequence[Run]) -> str:
    """Three lines: verdict, why, next; of the rank that is worst off."""
    found = _ranks.shared(runs)
    of_found = [run for run in runs if found and run.rank == found[0][1][0]]
    noted = [run for run in runs if run.notes]
    raised = [run for run in runs if run.error is not None]
    worst = next(iter([run for run in noted if run.error is not None] + of_found + noted + raised + list(runs)))
    if not found and worst.error is None and not worst.notes:
        worst = max(runs, key=lambda run: (bool(run.sites), not run.looks and growth(run)))
    said = verdict(worst)
    if worst.unread and not found:
        said = said._replace(verdict=f"{said.verdict}, as far as the file can be read")
    return str(Verdict(*map(safe, said)))


def _clean(finding: Finding) -> Finding:
    texts = {key: safe(value) for key, value in finding.as_dict().items() if value is not None}
    return replace(finding, **texts)


def ended(run: Run) -> str:
    """How a run ended, in words."""
    how = {
        None: "cut off here: no end was written",
        "finished": "ran to its end",
        "exit": "left by an exit",
        "raised": "raised",
        "stopped": "the watch was stopped",
    }.get(run.how, safe(run.how))
    return f"{how} {safe(run.error)}" if run.error else how


def _header(runs: Sequence[Run], console: Console) -> None:
    run, header = runs[0], runs[0].header
    program = safe(" ".join([str(header.get("program", "?")), shlex.join(header.get("argv", [])[1:])]).strip())
    absent = _ranks.missing(runs)
    ranks = f"{len(runs) + len(absent)} ranks, " if len(runs) > 1 or absent else ""
    ends = f" (ended by {_ENDS.get(run.boundary, safe(run.boundary))})" if run.boundary and run.steps else ""
    hows = dict.fromkeys(map(ended, runs))
    how = next(iter(hows)) if len(hows) == 1 else "not all ended alike"
    _say(console, (program, "bold"), f": {ranks}{count(run.steps_done, 'step')}{ends}, {run.seconds:,.1f} s, {how}")
    versions = [f"{name} {safe(header[key])}" for key, name in _VERSIONS.items() if header.get(key)]
    begun = [f"{word} {safe(header[key])}" for key, word in (("started", "started"), ("host", "on")) if header.get(key)]
    if versions or begun:
        _say(console, ("; ".join(filter(None, (", ".join(versions), " ".join(begun)))), "dim"))
    if absent:
        _say(console, f"no file that can be read of {_ranks.names(absent)}")
    for run in runs:
        if run.unread:
            _say(
                console,
                (f"{safe(run.path.name)} is damaged: {count(run.unread, 'line')} or more could not be read", "bold red"),
            )


_VERSIONS = {"torch": "torch", "python": "Python", "graphkeep": "graphkeep"}


def _found(runs: Sequence[Run], console: Console) -> None:
    for finding, ranks in _ranks.shared(runs):
        console.print()
        first, *others = str(_clean(finding)).splitlines()
        on = _ranks.on_ranks(ranks, runs)
        head = f"{safe(finding.id)} {safe(finding.severity)}"
        _say(console, (head, _STYLES.get(finding.severity, "bold")), first.removeprefix(head) + (f", {on}" if on else ""))
        for line in others:
            _say(console, line)
    noted: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        for note in run.notes:
            noted.setdefault((note.text, note.error), []).append(run.rank)
    for (text, error), ranks in noted.items():
        console.print()
        on = _ranks.on_ranks(ranks, runs)
        _say(console, (f"a backward failed{', ' + on if on else ''}: ", "bold red"), safe(error))
        _say(console, safe(text, "\n"))


def _table_of_ranks(runs: Sequence[Run], console: Console) -> None:
    apart = _ranks.differences(runs, ended)
    if not apart:
        return
    console.print()
    table = new_table(console, "rank", "steps", "most held", "left")
    table.add_column("findings")
    table.add_column("ended")
    for run in runs:
        left = run.steps[-1].left if run.steps else 0
        figures = (f"{run.steps_done:,}", format_bytes(run.peak), format_bytes(left))
        _row(table, str(run.rank), *figures, _ranks.ids(run), ended(run))
    console.print(table)
    for sentence in apart:
        _say(console, (sentence, "bold yellow"))


# tables ---------------------------------------------------------------------------------------------------------------------


def _steps(run: Run, console: Console) -> None:
    most = max(run.steps, key=lambda step: step.peak, default=None)
    console.print()
    if most is None:
        _say(console, f"bytes that graphs held: {format_bytes(run.peak)} at most; no step has ended")
        return
    _say(console, f"bytes that graphs held, over {count(run.steps_done, 'step')}:")
    width = min(console.width - 40, 60)
    fancy = console.encoding.startswith("utf")
    last = run.steps[-1]
    in_step = f"step {most.first}" if most.count == 1 else f"steps {most.first} to {most.first + most.count - 1}"
    for what, row, says in (
        ("most", [step.peak for step in run.steps], f"{format_bytes(run.peak)}, in {in_step}"),
        ("left", [step.left for step in run.steps], f"{format_bytes(last.left)} after the last step"),
    ):
        _say(console, f"  {what}  {spark(row, width, fancy)}  {says}")


def _holders(run: Run, console: Console) -> None:
    found: dict[tuple[object, ...], Holder] = {}
    for look in run.shown_looks:
        for holder in look.holders:
            # the list that had 32 graphs then, and has 60 now: `losses[0..31]`, `losses[0..59]`
            found.setdefault((holder.kind, holder.name.partition("[")[0], holder.file, holder.line), holder)
    if not found:
        return
    console.print()
    table = new_table(console, "who holds a graph", "held", "nodes", "built in steps")
    ordered = sorted(found.values(), key=lambda holder: (-holder.bytes, -holder.nodes))
    for holder in ordered[:_ROWS]:
        _row(table, safe(holder.holder), format_bytes(holder.bytes), f"{holder.nodes:,}", _built(holder))
    console.print(table)
    _more(console, len(ordered))


def _built(holder: Holder) -> str:
    steps = [step for step, _, _ in holder.parts]
    if not steps:
        return "-"
    low, high = ("before" if step < 0 else str(step) for step in (min(steps), max(steps)))
    return low if low == high else f"{low} to {high}"


def _saved(run: Run, console: Console, group_by: str) -> None:
    rows = sums(run, group_by)
    if not rows:
        return
    console.print()
    peak = fullest(run)
    columns = {"saved": 0, "at peak": 60 if peak else _NEVER, "left": 0, "tensors": 80, "by backward": 100, "by count": 100}
    shown = [name for name, wide in columns.items() if console.width >= wide]
    with_code = group_by == "line" and run.sources and console.width >= _CODE
    table = new_table(console, group_by, *shown, code="code" if with_code else None)
    by_place = {site.where: site for site in run.sites.values()}
    for name, row in list(rows.items())[:_ROWS]:
        figures = {
            "saved": format_bytes(row.bytes), "at peak": format_bytes(row.at_peak), "left": format_bytes(row.live),
            "tensors": f"{row.tensors:,}", "by backward": f"{row.by_backward:,}", "by count": f"{row.by_count:,}",
        }  # fmt: skip
        text = [safe(code(run, by_place[name]))] if with_code else []
        _row(table, safe(name), *(figures[column] for column in shown), *text)
    console.print(table)
    _more(console, len(rows))


_CODE, _NEVER = 120, 1 << 30  # columns of a terminal


def _lives(run: Run, console: Console) -> None:
    if not run.deaths:
        return
    console.print()
    table = new_table(console, "graphs built at", "lives", "tensors", "bytes")
    table.add_column("freed by", overflow="fold")
    for born, died, by_backward, lives, tensors, size in sorted(run.deaths, key=lambda death: -death[3])[:_ROWS]:
        freed = "the backward at " if by_backward else "reference count at "
        _row(table, where(run, born), f"{lives:,}", f"{tensors:,}", format_bytes(size), freed + where(run, died))
    console.print(table)
    _more(console, len(run.deaths))


def new_table(console: Console, first: str, *figures: str, code: str | None = None) -> Table:
    """A table with a first column of names, then figures, then a line of code if there is one.

    Arguments:
        console: where it will be shown.
        first: the head of the column of names.
        figures: those of the columns of figures.
        code: that of a last column, which is cut where there is no room.
    """
    from rich import box
    from rich.table import Table

    """A table with a first column of names, then figures, then a line of code if there is one.

    Arguments:
        console: where it will be shown.
        first: the head of the column of names.
        figures: those of the columns of figures.
        code: that of a last column, which is cut where there is no room.
    """
    lines = box.Box("    \n    \n -- \n" + "    \n" * 5, ascii=True)  # dashes, which every font and every log has
    table = Table(box=lines, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=min(12, console.width // 4))
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    if code is not None:
        table.add_column(code, no_wrap=True, overflow="ellipsis")
    return table


def _row(table: Table, *cells: str) -> None:
    from rich.text import Text

    table.add_row(*map(Text, cells))


def _more(console: Console, rows: int) -> None:
    if rows > _ROWS:
        _say(console, f"and {rows - _ROWS:,} more")


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    """A line, with styles and without markup: what a program calls its things is no markup of ours."""
    console.print(styled(parts), highlight=False)


def styled(parts: Iterable[str | tuple[str, str]]) -> Text:
    """Text of parts, some with a style."""
    from rich.text import Text

    return Text.assemble(*parts, overflow="fold")
