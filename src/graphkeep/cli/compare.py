"""Compare two runs: what grew from A to B. The exit code is 0 if nothing grew, 3 if something did, 1 after an error."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from graphkeep.cli._terminal import page, put

if TYPE_CHECKING:
    from rich.console import Console

    from graphkeep.report.compare import Comparison, Figure

HELP = "compare two runs: what grew, with an exit code"
GREW = 3  # 1 is an error's, 2 is argparse's
_ROWS = 20
_CODE = 100  # columns of a terminal that has room for a line of code


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("a", metavar="A", help="the data file of the earlier run")
    parser.add_argument("b", metavar="B", help="the data file of the later run")
    parser.add_argument(
        "--tolerance", type=_share, default=0.05, metavar="SHARE", help="by what share a figure may be larger (default: 0.05)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")


def _share(text: str) -> float:
    share = float(text)
    if not (share >= 0 and math.isfinite(share)):
        raise argparse.ArgumentTypeError(f"{text} is no share: 0.05 is 5%")
    return share


def run(args: argparse.Namespace) -> int:
    """Read both runs, then print what differs."""
    from graphkeep.report._read import read_all
    from graphkeep.report.compare import compare

    comparison = compare(read_all([args.a]), read_all([args.b]), args.tolerance)
    if args.json:
        import json

        put(json.dumps({"schema_version": 1, "a": args.a, "b": args.b, **comparison.as_dict()}) + "\n")
    else:
        with page() as console:
            _show(comparison, console, args)
    return GREW if comparison.grew else 0


def _show(comparison: Comparison, console: Console, args: argparse.Namespace) -> None:
    from rich.text import Text

    from graphkeep.report._plain import safe

    def say(text: str, style: str = "") -> None:
        console.print(Text(safe(text), style, overflow="fold"))

    say(_verdict(comparison), "bold")
    say(f"A: {args.a}")
    say(f"B: {args.b}")
    for note in comparison.notes:
        say(f"note: {note}")
    console.print()
    _table(console, "in bytes", comparison.figures)
    if comparison.lines:
        console.print()
        _table(console, "saved by line", comparison.lines[:_ROWS], code=console.width >= _CODE)
        if len(comparison.lines) > _ROWS:
            say(f"and {len(comparison.lines) - _ROWS:,} more")
    for title, findings in (("found in B and not in A:", comparison.found), ("found in A and gone in B:", comparison.gone)):
        if findings:
            console.print()
            say(title, "bold")
        for finding in findings:
            for line in str(finding).splitlines():
                say(line)


def _verdict(comparison: Comparison) -> str:
    from graphkeep.report.compare import change

    grown = [f"{figure.name} {change(figure.a, figure.b)}" for figure in comparison.figures if figure.grew]
    new = sorted({finding.id for finding in comparison.found})
    if new:
        grown.append("new: " + ", ".join(new))
    return "grew: " + "; ".join(grown) if grown else "nothing grew"


def _table(console: Console, title: str, figures: list[Figure], code: bool = False) -> None:
    from rich.text import Text

    from graphkeep._units import format_bytes
    from graphkeep.report._plain import safe
    from graphkeep.report.compare import change
    from graphkeep.report.text import new_table

    table = new_table(console, title, "A", "B", "change", code="code" if code else None)
    for figure in figures:
        sizes = ["-" if size is None else format_bytes(size) for size in (figure.a, figure.b)]
        cells = [figure.name, *sizes, change(figure.a, figure.b), *([figure.code] if code else [])]
        table.add_row(*(Text(safe(cell)) for cell in cells), style="bold red" if figure.grew else None)
    console.print(table)
