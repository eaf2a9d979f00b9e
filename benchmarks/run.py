"""Run every benchmark, and write a page and its figures as JSON for each group of them into ``docs/benchmarks/``.

``python -m benchmarks.run infer`` runs one group.

Each benchmark has a process of its own, with an allocator that keeps what is freed: else the cost of fetching memory from the
system again comes and goes with the layout of the heap.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import sys
import time
from collections.abc import Iterable

import torch

from benchmarks import _budget_picture
from benchmarks._measure import ROOT, Row, in_child

PAGES = {
    "keep": (
        "`cut` and `backward(keep=)`",
        {
            "heads": "Eight heads on one trunk, over one joint backward",
            "keep": "`backward(keep=)`, over the same loop with `retain_graph=True`",
            "overhead": "Fixed costs, on scalars",
        },
    ),
    "infer": (
        "`infer`",
        {
            "infer": "Batch by batch, over two forwards and one backward of the whole batch",
            "infer_some": "Backward for some of the samples",
            "infer_contrastive": "A contrastive step",
            "infer_peaks": "What is there at once, whatever the number of samples",
        },
    ),
    "watch": (
        "`watch`",
        {
            "watch": "Time of a training step",
            "watch_memory": "Memory",
            "watch_look": "Looking at everything that is alive",
        },
    ),
    "budget": (
        "`budget`",
        {
            "budget": "Over plain torch, at ever smaller limits",
            "budget_peers": "Beside other ways to save memory",
        },
    ),
    "optimum": ("Plans of `budget`", {"budget_optimum": "Beside the optimum of an integer program"}),
    "run": ("`graphkeep run`", {"run_command": "Over the program by itself"}),
}
PICTURES = {"budget": _budget_picture}  # modules with `draw`, by page
FOLDER = ROOT / "docs" / "benchmarks"


def main(pages: Iterable[str]) -> None:
    for page in pages:
        title, benchmarks = PAGES[page]
        start = time.monotonic()
        rows = []
        for name in benchmarks:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows += [Row(**row) for row in in_child(f"benchmarks.{name}", steady=True)]
        machine = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "threads": 1,
            "seconds": round(time.monotonic() - start),
        }
        picture = PICTURES.get(page)
        table = markdown(title, benchmarks, rows, machine, f"![{picture.ALT}](../images/{page}.svg)" if picture else "")
        FOLDER.mkdir(parents=True, exist_ok=True)
        if picture:
            picture.draw(rows, FOLDER.parent / "images" / f"{page}.svg")
        figures = [vars(row) | {"verdict": row.verdict} for row in rows]
        (FOLDER / f"{page}.json").write_text(json.dumps({"machine": machine, "rows": figures}, indent=1) + "\n")
        (FOLDER / f"{page}.md").write_text(table)
        print(table)


def markdown(title: str, benchmarks: dict[str, str], rows: list[Row], machine: dict[str, object], picture: str) -> str:
    lines = [
        f"# Benchmarks: {title}",
        "",
        "Written by `make bench`. Every figure compares within one run, and smaller is better. Times are ratios of medians",
        "over alternating rounds on one thread; in brackets the middle 90 % of a bootstrap over rounds. *Live bytes* are",
        "unique storages alive, apart from parameters, their gradients and the batch. *Within noise*: over what is wanted,",
        "by less than the bracket.",
        "",
        ", ".join(f"{key} {value}" for key, value in machine.items()) + ".",
        *(["", picture] if picture else []),
    ]
    for benchmark, heading in benchmarks.items():
        lines += ["", f"## {heading}", "", *_about(benchmark)]
        lines += ["| model | figure | wanted | measured | | made of |", "|---|---|---|---|---|---|"]
        lines += [_line(row) for row in rows if row.benchmark == benchmark]
    return "\n".join(lines) + "\n"


def _about(benchmark: str) -> list[str]:
    """What the benchmark's own file says that it measures, but for its first paragraph."""
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{benchmark}.py").read_text())) or ""
    _, *paragraphs = text.split("\n\n")
    return [line for paragraph in paragraphs for line in (*paragraph.splitlines(), "")]


def _line(row: Row) -> str:
    wanted = "" if row.wanted is None else f"≤ {_value(row, row.wanted)}"
    measured = _value(row, row.measured)
    if row.low is not None and row.high is not None:
        measured += f" [{row.low:.3f}, {row.high:.3f}]"
    verdict = f"**{row.verdict}**" if row.verdict == "MISSED" else row.verdict
    return f"| {row.model} | {row.figure} | {wanted} | {measured} | {verdict} | {row.note} |"


def _value(row: Row, value: float) -> str:
    if row.unit == "x":
        return f"{value:.3f}x"
    return f"{value:.1f} {row.unit}" if row.unit else f"{value:.1e}" if value else "0"


if __name__ == "__main__":
    main(sys.argv[1:] or PAGES)
