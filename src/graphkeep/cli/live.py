"""Follow a run while it writes its data file. Ctrl-C ends this command, not the run."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from graphkeep._errors import DataFileError
from graphkeep.cli._terminal import make_console, put

if TYPE_CHECKING:
    from rich.console import Console

    from graphkeep.report._follow import Follower
    from graphkeep.report._run import Run

HELP = "follow a run in the terminal"
_PAUSE = 0.5  # seconds between two looks at the file, which is flushed once a second
_LINE = 2.0  # seconds between two lines where there is no terminal
_WAIT = 10.0  # seconds for the file to appear


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="the data file; of several ranks, that of one")


def run(args: argparse.Namespace) -> int:
    """Show what is new until the run has ended."""
    from graphkeep.report._follow import Follower

    follower = Follower(args.file)
    try:
        _await(follower)
        console = make_console()
        ended = _in_terminal(follower, console) if console.is_terminal else _in_lines(follower)
    finally:
        follower.close()
    if ended:
        put(ended + "\n")
    return 0


def _await(follower: Follower) -> None:
    until = time.monotonic() + _WAIT
    while follower.run is None:
        if not follower.poll() and time.monotonic() > until:
            missing = not follower.path.exists()
            raise DataFileError(
                "there is no such file" if missing else "its first line has not been written yet",
                where=str(follower.path),
                instead="the path that `graphkeep run` has printed",
            )
        if follower.run is None:
            time.sleep(min(_PAUSE, _WAIT))


def _in_terminal(follower: Follower, console: Console) -> str:
    from rich.live import Live

    from graphkeep.report.live import frame

    others = _others(follower.path)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            run = _of(follower)
            live.update(frame(run, console, others), refresh=True)
            if ended := _ended(follower, run):
                live.update(frame(run, console, others), refresh=True)
                return ended
            time.sleep(_PAUSE)
            follower.poll()


def _in_lines(follower: Follower) -> str:
    from graphkeep.report.live import line

    last, said = "", -_LINE
    while True:
        run = _of(follower)
        ended = _ended(follower, run)
        now = time.monotonic()
        if ended or now - said >= _LINE:
            text = line(run)
            if text != last and not put(text + "\n"):
                return ""
            last, said = text, now
        if ended:
            return ended
        time.sleep(_PAUSE)
        follower.poll()


def _of(follower: Follower) -> Run:
    if follower.run is None:
        raise AssertionError("nobody shows a run before its first line is there")
    return follower.run


def _ended(follower: Follower, run: Run) -> str:
    """What there is to say if nothing more will come, else nothing."""
    from graphkeep.report._follow import is_gone
    from graphkeep.report.text import ended

    if run.how is None and is_gone(run):
        while follower.poll():  # what it wrote last
            pass
        if run.how is None and not follower.damaged:
            return f"the process {run.header.get('pid')} is gone, and no end was written: it was killed"
    if follower.damaged:
        return "the file is damaged here; nothing behind can be read"
    return ended(run) if run.how is not None else ""


def _others(path: Path) -> int:
    from graphkeep.report._read import siblings

    return sum(other.name != path.name for other in siblings(path))
