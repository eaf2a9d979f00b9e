"""The pages: tables of rows for each group of benchmarks, and an index that says what fell short."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._measure import ROOT, Row
from benchmarks._pictures import PICTURES


@dataclass(frozen=True)
class Page:
    """A group of benchmarks.

    Attributes:
        title: in Markdown.
        beside: what it is compared with, for the index.
        benchmarks: the files, and the heading of each.
    """

    title: str
    beside: str
    benchmarks: dict[str, str]


PAGES = {
    "keep": Page(
        "`cut` and `backward(keep=)`",
        "one joint backward, `retain_graph=True`, TorchJD",
        {
            "heads": "Eight heads on one trunk, over one joint backward",
            "keep": "`backward(keep=)`, over the same loop with `retain_graph=True`",
            "overhead": "Fixed costs, on scalars",
        },
    ),
    "infer": Page(
        "`infer`",
        "one backward of the whole batch, `retain_graph=True`, rows forward again by hand, masking, GradCache, "
        "sentence-transformers' cached loss",
        {
            "infer": "Batch by batch, over two forwards and one backward of the whole batch",
            "infer_some": "Backward for some of the samples",
            "infer_contrastive": "A contrastive step",
            "infer_peaks": "What is there at once, whatever the number of samples",
        },
    ),
    "watch": Page(
        "`watch`",
        "plain torch, identity hooks, torch.profiler, memray",
        {
            "watch": "Time of a training step",
            "watch_memory": "Memory",
            "watch_look": "Looking at everything that is alive",
        },
    ),
    "budget": Page(
        "`budget`",
        "plain torch, checkpoints, the compiler's, torch-remat",
        {
            "budget": "Over plain torch, at ever smaller limits",
            "budget_peers": "Beside other ways to save memory",
        },
    ),
    "optimum": Page(
        "Plans of `budget`",
        "the optimum of an integer program",
        {"budget_optimum": "Beside the optimum of an integer program"},
    ),
    "run": Page("`graphkeep run`", "the program by itself", {"run_command": "Over the program by itself"}),
}
VERDICTS = ("met", "within noise", "MISSED")
Machine = Mapping[str, object]


def page(name: str, machine: Machine, rows: Sequence[Row]) -> str:
    """The text of one page."""
    group = PAGES[name]
    picture = [f"![{PICTURES[name].alt}](../images/{name}.svg)", ""] if name in PICTURES else []
    lines = [
        f"# Benchmarks: {group.title}",
        "",
        "Written by `make bench`. Every figure compares within one run, and smaller is better. Times are ratios of medians",
        "over alternating rounds on one thread; in brackets the middle 90 % of a bootstrap over rounds. *Live bytes* are",
        "unique storages alive, apart from parameters, their gradients and the batch. *Within noise*: over what is wanted,",
        "by less than the bracket.",
        "",
        _said(machine),
        "",
        *picture,
    ]
    for benchmark, heading in group.benchmarks.items():
        lines += [f"## {heading}", "", *_about(benchmark)]
        lines += ["| model | figure | wanted | measured | | made of |", "|---|---|---|---|---|---|"]
        lines += [_line(row) for row in rows if row.benchmark == benchmark]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def index(known: Mapping[str, tuple[Machine, Sequence[Row]]]) -> str:
    """The text of the page about all of them.

    Arguments:
        known: by name of a page, what its JSON file says; the others are left out.
    """
    lines = [
        "# Benchmarks",
        "",
        "`make bench` runs all of them, in 20 to 25 minutes on two cores, and writes these pages, their figures as JSON",
        "and their pictures. `python -m benchmarks.run NAME` runs one page. Peers that are not installed are left out.",
        "",
        "| page | beside | met | within noise | missed | for comparison |",
        "|---|---|---|---|---|---|",
    ]
    for name, (_, rows) in known.items():
        verdicts = [row.verdict for row in rows]
        counts = " | ".join(str(verdicts.count(verdict)) for verdict in (*VERDICTS, ""))
        lines.append(f"| [{PAGES[name].title}]({name}.md) | {PAGES[name].beside} | {counts} |")
    lines += ["", "## What fell short", "", "Every figure that is over what was wanted, by more than its bracket."]
    for name, (machine, rows) in known.items():
        missed = [row for row in rows if row.verdict == "MISSED"]
        lines += ["", f"### {PAGES[name].title}", "", _said(machine), ""]
        if missed:
            lines += ["| model | figure | wanted | measured | made of |", "|---|---|---|---|---|"]
            lines += [f"| {row.model} | {row.figure} | {_wanted(row)} | {_measured(row)} | {row.note} |" for row in missed]
        else:
            lines.append("Nothing.")
    return "\n".join(lines) + "\n"


def _said(machine: Machine) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items()) + "."


def _about(benchmark: str) -> list[str]:
    """What the benchmark's own file says that it measures, but for its first paragraph."""
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{benchmark}.py").read_text())) or ""
    _, *paragraphs = text.split("\n\n")
    return [line for paragraph in paragraphs for line in (*paragraph.splitlines(), "")]


def _line(row: Row) -> str:
    verdict = f"**{row.verdict}**" if row.verdict == "MISSED" else row.verdict
    return f"| {row.model} | {row.figure} | {_wanted(row)} | {_measured(row)} | {verdict} | {row.note} |"


def _wanted(row: Row) -> str:
    return "" if row.wanted is None else f"≤ {_value(row, row.wanted)}"


def _measured(row: Row) -> str:
    bracket = "" if row.low is None or row.high is None else f" [{row.low:.3f}, {row.high:.3f}]"
    return _value(row, row.measured) + bracket


def _value(row: Row, value: float) -> str:
    if row.unit == "x":
        return f"{value:.3f}x"
    return f"{value:.1f} {row.unit}" if row.unit else f"{value:.1e}" if value else "0"


def rows_of(figures: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of a JSON file."""
    return [Row(**{key: value for key, value in each.items() if key != "verdict"}) for each in figures]
