"""Say what a finding means, with a program that shows it and the program mended; without an id, list all of them."""

from __future__ import annotations

import argparse

from graphkeep._errors import ArgumentError
from graphkeep.cli._terminal import page, put

HELP = "say what a finding means, with an example and its fix"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("id", nargs="?", metavar="ID", help="of a finding, such as GK101; without it, all are listed")


def run(args: argparse.Namespace) -> int:
    """Print one page, or the list."""
    from graphkeep.report import rules

    known = rules.ids()
    if args.id is None:
        put("".join(f"{one}  {rules.title(one)}\n" for one in known))
        return 0
    wanted = args.id.upper()
    if wanted not in known:
        import difflib

        close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
        raise ArgumentError(
            f"there is no finding {args.id!r}",
            instead=" or ".join(f"graphkeep rule {one}" for one in close) or "graphkeep rule",
        )
    text = rules.text(wanted)
    with page() as console:
        if console.is_terminal:
            from rich.markdown import Markdown

            console.print(Markdown(text, code_theme="ansi_dark"))
        else:
            console.print(text, end="", soft_wrap=True)
    return 0
