"""Show what a run has recorded: as text, as JSON, as a page for a browser, or as a trace for Perfetto."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from graphkeep._errors import ArgumentError
from graphkeep.cli._terminal import page, put

if TYPE_CHECKING:
    from graphkeep.report._run import Run

HELP = "show what a run has recorded"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="data files; those of the other ranks are found by themselves")
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--text", action="store_true", help="tables in the terminal (the default)")
    formats.add_argument("--json", action="store_true", help="all that was recorded, as one JSON object")
    formats.add_argument("--html", metavar="OUT", help="write a page that any browser opens, also without a network")
    formats.add_argument("--trace", metavar="OUT", help="write Chrome trace events, which Perfetto opens")
    parser.add_argument(
        "--group-by", choices=("line", "module", "op"), default="line", help="rows of the table in text (default: line)"
    )
    parser.add_argument("--open", action="store_true", help="with --html: open the page in a browser")


def run(args: argparse.Namespace) -> int:
    """Read the files, then write them in one format."""
    from graphkeep.report._read import read_all

    if args.open and args.html is None:
        raise ArgumentError("--open opens a page, and none is written", instead="--html OUT --open")
    runs = read_all(args.files)
    if args.json:
        from graphkeep.report import json

        put(json.dumps(runs) + "\n")
    elif args.html is not None:
        from graphkeep.report import html

        _to_file(html.write, runs, args.html)
        _hint(f"wrote {args.html}: open it in a browser", args.html if args.open else None)
    elif args.trace is not None:
        from graphkeep.report import trace

        _to_file(trace.write, runs, args.trace)
        _hint(f"wrote {args.trace}: open it at https://ui.perfetto.dev", None)
    else:
        from graphkeep.report import text

        with page() as console:
            text.write(runs, console, args.group_by)
    return 0


def show(path: Path) -> None:
    """Write the page of a data file beside it, and open it in a browser."""
    from graphkeep.report import html
    from graphkeep.report._read import read_all

    out = f"{path}.html"
    _to_file(html.write, read_all([path]), out)
    _hint(f"wrote {out}", out)


def _to_file(write: Callable[[list[Run], Path], None], runs: list[Run], out: str) -> None:
    for run in runs:
        if Path(out).resolve() == run.path.resolve():
            raise ArgumentError("the report would overwrite what it is made of", where=out, instead="another name")
    try:
        write(runs, Path(out))
    except OSError as error:
        raise ArgumentError(
            f"the report cannot be written: {error.strerror or error}",
            where=out,
            instead="a path in a folder that exists and can be written to",
        ) from error


def _hint(text: str, page: str | None) -> None:
    print(text, file=sys.stderr)
    if page is None:
        return
    import webbrowser

    address = Path(page).resolve().as_uri()
    try:
        opened = webbrowser.open(address)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        print(f"no browser could be opened here; the page is {address}", file=sys.stderr)
