"""What the page says, worked out from runs: texts for the template, and numbers for the charts. No HTML is made here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphkeep._units import format_bytes
from graphkeep._watch._finding import Finding
from graphkeep.report._page_ranks import ended
from graphkeep.report._page_source import Line, Sources, shorten
from graphkeep.report._page_time import Axis, alive, bands, held, lives, steps
from graphkeep.report._run import Holder, Note, Run
from graphkeep.report._verdict import Verdict, verdict

_ENDS = {
    "optimizer": "optimizer.step()",
    "backward": "a backward",
    "forward": "a forward of the outermost module",
    "own": "the program's own w.step()",
}
_TONES = {"will raise": "bad", "bytes grow": "bad", "nodes grow": "warn", "costs": "cost"}
_TEXT, _NAME = 2_000, 200  # characters
_ROWS = 30  # of a table that is there without the script


@dataclass(frozen=True)
class Limits:
    """How much of a run goes into the page; less of each where there are many, so that the page opens."""

    points: int
    lives: int
    sites: int
    holders: int
    source: int

    @classmethod
    def of(cls, runs: int) -> Limits:
        runs = max(runs, 1)
        return cls(
            points=max(100, min(600, 2_400 // runs)),
            lives=max(200, min(4_000, 10_000 // runs)),
            sites=max(60, min(1_200, 4_000 // runs)),
            holders=max(12, min(100, 400 // runs)),
            source=max(10_000, min(250_000, 800_000 // runs)),
        )


@dataclass(frozen=True)
class Article:
    """One finding, or a backward that failed."""

    id: str
    severity: str
    tone: str
    what: str
    where: str | None
    why: str
    instead: str
    source: list[Line]
    note: str | None = None


@dataclass
class RunPage:
    """One run, for the template.

    Attributes:
        facts: ``(name, value)``.
        remarks: what is not as usual with the file itself.
        verdict: ``(name, text)``, three of them.
        data: for the charts and the table; JSON.
    """

    index: int
    rank: int
    program: str
    command: str
    facts: list[tuple[str, str]]
    remarks: list[str]
    tone: str
    verdict: list[tuple[str, str]]
    articles: list[Article]
    holders: list[dict[str, Any]]
    deaths: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    data: dict[str, Any]


def page(runs: Sequence[Run]) -> list[RunPage]:
    """All runs, in their order."""
    limits = Limits.of(len(runs))
    return [_run(i, run, limits) for i, run in enumerate(runs)]


def _run(index: int, run: Run, limits: Limits) -> RunPage:
    sources = Sources(run, limits.source)
    axis = Axis(run)
    data = _data(run, axis, sources, limits)
    articles = [_note(note) for note in run.notes[:20]] + [_article(finding, sources) for finding in run.findings[:50]]
    said = verdict(run)
    program = shorten(str(run.header.get("program") or run.path.name), _NAME)
    return RunPage(
        index=index,
        rank=run.rank,
        program=program,
        command=shorten(_command(run, program), _TEXT),
        facts=_facts(run),
        remarks=_remarks(run),
        tone=_tone(run, said),
        verdict=[(name, shorten(text, _TEXT)) for name, text in said._asdict().items()],
        articles=articles,
        holders=[_holder(run, look.final, look.step, holder, sources) for look, holder in held(run)[: limits.holders]],
        deaths=_deaths(run, sources),
        lines=_lines(run, sources),
        data=data,
    )


def _command(run: Run, program: str) -> str:
    argv = run.header.get("argv")
    rest = [str(word) for word in argv[1:]] if isinstance(argv, list) else []
    return " ".join([program, *rest])


def _facts(run: Run) -> list[tuple[str, str]]:
    def said(key: str) -> str:
        value = run.header.get(key)
        return shorten(str(value), _NAME) if isinstance(value, str | int) and not isinstance(value, bool) else "?"

    ends = _ENDS.get(run.boundary or "", run.boundary or "")
    facts = [
        ("ended", ended(run) + (f" after {run.seconds:,.1f} s" if run.seconds else "")),
        ("steps", f"{run.steps_done:,}" + (f", each ends with {shorten(ends, _NAME)}" if ends else "")),
        ("peak", f"{format_bytes(run.peak)} of saved tensors"),
        ("versions", f"graphkeep {said('graphkeep')}, torch {said('torch')}, Python {said('python')}"),
        ("where", f"{said('cwd')} on {said('host')}, process {said('pid')}"),
        ("started", said("started").replace("T", " ").replace("Z", " UTC").replace("+00:00", " UTC")),
    ]
    if isinstance(size := run.header.get("world_size"), int) and size > 1:
        facts.insert(0, ("rank", f"{run.rank} of {size:,} ranks"))
    return facts


def _remarks(run: Run) -> list[str]:
    remarks = []
    if run.error:
        remarks.append(f"The program raised {shorten(run.error, _TEXT)}")
    if run.how is None:
        remarks.append("The file was cut off. What had been written before is here; the last look at holders may be missing.")
    if run.samples and not any(site.tensors for site in run.sites.values()):
        remarks.append("The file ends before its first sums, so tables show what was held at the peak, and zeros.")
    if run.unread:
        remarks.append(f"{run.unread:,} lines of the file could not be read and are left out.")
    if run.sites and not run.steps:
        remarks.append("No step has ended, so the charts show the saving of tensors from first to last instead of steps.")
    return remarks


def _tone(run: Run, said: Verdict) -> str:
    """The colour of a verdict; green only where somebody looked and found nothing."""
    if said.verdict[:5] in {note.id for note in run.notes}:
        return "bad"
    if run.findings:
        return _TONES.get(run.findings[0].severity, "bad")
    if run.error is not None:
        return "bad"
    return "good" if run.sites and run.looks else "none"


def _article(finding: Finding, sources: Sources) -> Article:
    return Article(
        id=shorten(finding.id, 20),
        severity=shorten(finding.severity, 40),
        tone=_TONES.get(finding.severity, "bad"),
        what=shorten(finding.what, _TEXT),
        where=finding.where and shorten(finding.where, _NAME),
        why=shorten(finding.why, _TEXT),
        instead=shorten(finding.instead, _TEXT),
        source=sources.around(finding.where),
    )


def _note(note: Note) -> Article:
    """``graphkeep GK201: what``, and below it lines such as ``write instead: ...``."""
    first, *rest = note.text.split("\n")
    instead = [line.partition("write instead:")[2].strip() for line in rest if "write instead:" in line]
    return Article(
        id=shorten(note.id, 20),
        severity="the backward failed",
        tone="bad",
        what=shorten(re.sub(r"^graphkeep GK\d+: ", "", first), _TEXT),
        where=None,
        why=shorten(note.error.split("\n")[0], _TEXT),
        instead=shorten(instead[0] if instead else "see the note", _TEXT),
        source=[],
        note=shorten("\n".join(line for line in rest if "write instead:" not in line), 4 * _TEXT),
    )


def _holder(run: Run, final: bool, step: int, holder: Holder, sources: Sources) -> dict[str, Any]:
    spans = [part[0] for part in holder.parts]
    where = None if holder.file is None else f"{sources.short(holder.file)}:{holder.line or '?'}"
    return {
        "holder": shorten(holder.holder, 2 * _NAME),
        "kind": shorten(holder.kind, 60),
        "where": where,
        "nodes": holder.nodes,
        "bytes": holder.bytes,
        "steps": len(holder.parts),
        "built": _span(min(spans), max(spans)) if spans else "",
        "when": "at the end" if final else f"in step {step:,}",
        "source": sources.around(f"{holder.file}:{holder.line}") if holder.file and holder.line else [],
    }


def _span(first: int, last: int) -> str:
    low, high = ("before the first" if step < 0 else f"{step:,}" for step in (first, last))
    return low if low == high else f"{low} to {high}"


def _deaths(run: Run, sources: Sources) -> list[dict[str, Any]]:
    """Sums by the lines of birth and death, the largest first."""

    def where(number: int) -> str:
        site = run.sites.get(number)
        return "unknown" if site is None else f"{sources.short(site.file)}:{site.line}"

    rows = sorted(run.deaths, key=lambda row: row[5], reverse=True)[:_ROWS]
    return [
        {"born": where(born), "died": where(died), "backward": by, "lives": n, "tensors": tensors, "bytes": size}
        for born, died, by, n, tensors, size in rows
    ]


def _lines(run: Run, sources: Sources) -> list[dict[str, Any]]:
    """The table by line, as it is without the script."""
    sums: dict[tuple[str, int], list[int]] = {}
    for site in run.sites.values():
        row = sums.setdefault((site.file, site.line), [0] * 5)
        for i, value in enumerate((site.tensors, site.bytes, site.live_bytes, site.by_backward, site.by_count)):
            row[i] += value
    found = sorted(((row, place) for place, row in sums.items() if any(row)), key=lambda pair: pair[0][1], reverse=True)
    keys = ("tensors", "bytes", "live", "by_backward", "by_count")
    return [
        {**dict(zip(keys, row, strict=True)), "where": f"{sources.short(file)}:{line}"} for row, (file, line) in found[:_ROWS]
    ]


def _data(run: Run, axis: Axis, sources: Sources, limits: Limits) -> dict[str, Any]:
    """What the script draws from."""
    peak = dict(max(run.samples, key=lambda sample: sample.bytes).sites) if run.samples else {}
    end = dict(run.samples[-1].sites) if run.samples else {}
    graph_alive = alive(run, axis)
    called = Counter(number for life in run.lives[-1_000:] for number in (life.born, life.died) if number is not None)
    weight = {n: (peak.get(n, 0) + end.get(n, 0) + site.bytes, called[n]) for n, site in run.sites.items()}
    chosen = sorted(run.sites.values(), key=lambda site: weight[site.id], reverse=True)[: limits.sites]
    for holder in graph_alive["holders"]:
        if holder["file"] and holder["line"]:
            sources.take(holder["file"], holder["line"])
            holder["where"] = f"{sources.short(holder['file'])}:{holder['line']}"
    for site in sorted(chosen, key=lambda site: called[site.id] > 0, reverse=True):
        sources.take(site.file, site.line)
    return {
        "first": axis.first,
        "last": axis.last,
        "steps": run.steps_done,
        "sites": [
            [
                *(site.id, site.file, site.line, shorten(site.function, _NAME), site.module and shorten(site.module, _NAME)),
                *(site.op and shorten(site.op, _NAME), site.tensors, site.bytes, site.live_bytes, site.by_backward),
                *(site.by_count, peak.get(site.id, 0), end.get(site.id, 0)),
            ]
            for site in chosen
        ],
        "sites_left": len(run.sites) - len(chosen),
        "short": {file: sources.short(file) for file in {*(site.file for site in chosen)}},
        "source": sources.taken,
        "bands": bands(run, axis, limits.points, sources.short),
        "peaks": steps(run, limits.points // 2),
        "lives": lives(run, axis, limits.lives),
        "alive": graph_alive,
    }
