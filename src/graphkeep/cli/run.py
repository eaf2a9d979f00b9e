"""Run a program under `watch`, without a change to it, and write what was seen to a data file."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import logging
import os
import shlex
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from graphkeep._errors import ArgumentError, GraphkeepError
from graphkeep._watch._datafile import DataFile, header, said
from graphkeep.cli import _program
from graphkeep.cli._arguments import count
from graphkeep.cli._on_import import AfterImport

if TYPE_CHECKING:
    from graphkeep._watch._watch import watch
    from graphkeep.report._run import Run

HELP = "run a program, and see which graphs live, why, and what to change"
FAILED = 3  # the exit code of --fail-on, where the program's own is 0
_GROWS = ("bytes grow", "nodes grow")


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "graphkeep run [options] (script.py | -m module) [arguments of the program ...]"
    parser.add_argument("-o", "--output", metavar="FILE", help="the data file (default: <script>.<pid>.graphkeep)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing at the end")
    parser.add_argument("--open", action="store_true", help="write the page beside the data file and open it at the end")
    parser.add_argument("--steps", type=count, metavar="N", help="watch the first N steps; the program goes on")
    parser.add_argument(
        "--fail-on",
        action="append",
        choices=("leak", "error"),
        default=[],
        help=f"exit with {FAILED} where the program would with 0: leak, if graphs grow; error, if a backward failed or will",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("program", help="a script, a folder or zip file with a __main__.py, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")


def run(args: argparse.Namespace) -> int:
    """Run the program; what it raises goes on, and its exit code is its own."""
    try:
        session = Session(args)
    except ArgumentError as error:
        print(f"graphkeep run: {error}", file=sys.stderr)
        return 1
    try:
        find = _program.module if args.module else _program.script
        program = find(args.program, args.arguments)
    except ArgumentError as error:
        session.drop()
        print(f"graphkeep run: {error}", file=sys.stderr)
        return 1 if args.module else 2  # as python
    except BaseException:
        session.drop()
        raise
    session.file.flush()
    _program.run(program, session.raised)
    return 0


class Session:
    """One run: from before the program's first line to after its last `atexit` function.

    Arguments:
        args: of the command.

    Raises:
        ArgumentError: the data file cannot be written.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        name = f"-m {args.program}" if args.module else args.program
        first = header(name, [args.program, *args.arguments])
        self.rank, self.ranks = first["rank"], first["world_size"]
        path = _path(args, self.rank if self.ranks > 1 else None)
        self.file = DataFile(os.path.abspath(path))  # the program may change its folder
        self._command = f"graphkeep report {shlex.quote(path)}"
        self.file.write(first)
        self._process = os.getpid()
        self._watch: watch | None = None
        self._how = "finished"
        self._error: BaseException | None = None
        self._code: object = 0
        # registered first, so it runs last: after the program's own, and after its threads have ended
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forked)
        self._waits = AfterImport("torch", self._torch_is_here)

    def drop(self) -> None:
        """There is no such program: nothing is left behind."""
        atexit.unregister(self.finish)
        self._waits.remove()
        self.file.drop()

    def _torch_is_here(self) -> None:
        try:
            from graphkeep._watch._watch import watch

            seen = watch(file=self.file)
            seen._last_step = self._args.steps
            seen.start()
            self._watch = seen
        except ImportError:  # a module of that name that is not torch
            logging.getLogger("graphkeep").debug("this torch cannot be watched", exc_info=True)
        except Exception:  # whatever is wrong with us, the program has nothing to do with it
            logging.getLogger("graphkeep").exception("the watch could not be started; the program goes on")

    def _forked(self) -> None:
        if self._watch is not None:
            self._watch._abandon()

    def raised(self, error: BaseException) -> None:
        """The program ends by an exception: what its frames hold is looked at while they are there."""
        if isinstance(error, SystemExit):
            self._code = error.code
            self._how = "finished" if error.code in (None, 0) else "exit"
            return
        self._how, self._error, self._code = "raised", error, 1
        if self._watch is not None:
            self._watch._end(self._how, error)

    def finish(self) -> None:
        """After everything else."""
        if os.getpid() != self._process:
            return
        error, self._error = self._error, None
        try:
            if self._watch is not None:
                if gc.isenabled():  # what only waits for the collector is no leak of a program that has ended
                    gc.collect()
                self._watch._end(self._how, error)
            else:
                self.file.write({"type": "end", "how": self._how, "error": said(error), "s": 0.0, "torch": False})
            self.file.close()
            self._say()
            if isinstance(error, KeyboardInterrupt):
                _die()
        except (OSError, GraphkeepError) as fault:  # the disk is full, stderr is closed: the program has ended well
            logging.getLogger("graphkeep").error("the end of the data file could not be written", exc_info=fault)

    def _say(self) -> None:
        if self._args.quiet and not self._args.fail_on and not self._args.open:
            return
        if self.file.fault is not None and not self._args.quiet:
            text = f"the data file ends early, and the verdict with it: {self.file.fault.strerror}"
            print(f"graphkeep run: {text}", file=sys.stderr, flush=True)
        if not self.file.path.is_file():
            print(f"graphkeep run: {self.file.path} cannot be read again, so there is no verdict", file=sys.stderr, flush=True)
            return
        from graphkeep.report._read import read

        seen = read(self.file.path)
        fails = self._fails(seen)
        if not self._args.quiet and self.rank == 0:
            from graphkeep.report._verdict import verdict

            others = f"  # this was rank 0, the report has all {self.ranks}" if self.ranks > 1 else ""
            _flush()
            print(f"{verdict(seen)}\n         {self._command}{others}", file=sys.stderr, flush=True)
        if self._args.open and self.rank == 0:
            from graphkeep.cli import report

            report.show(self.file.path)
        if fails and self._code in (None, 0):
            _leave(FAILED)

    def _fails(self, seen: Run) -> bool:
        leaks = any(finding.severity in _GROWS for finding in seen.findings)
        errors = bool(seen.notes) or any(finding.severity == "will raise" for finding in seen.findings)
        return ("leak" in self._args.fail_on and leaks) or ("error" in self._args.fail_on and errors)


def _path(args: argparse.Namespace, rank: int | None) -> str:
    mark = "" if rank is None else f".rank{rank}"
    if args.output:
        stem, ending = os.path.splitext(args.output)
        return f"{stem}{mark}{ending}" if ending else f"{args.output}{mark}"
    name = os.path.basename(os.path.normpath(args.program))
    return f"{name}.{os.getpid() if rank is None else os.getppid()}{mark}.graphkeep"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have closed it, or put something else in its place
            stream.flush()


def _leave(code: int) -> NoReturn:
    """Exit with a code of ours: an `atexit` function cannot change it by other means."""
    logging.shutdown()
    _flush()
    os._exit(code)


def _die() -> None:
    """As `python` ends after Ctrl-C, so that the shell sees it and stops, too."""
    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
