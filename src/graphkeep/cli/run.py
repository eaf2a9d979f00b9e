"""Run a program under `watch`, without a change to it, and write what was seen to a data file."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from graphkeep._errors import ArgumentError, GraphkeepError
from graphkeep._watch._datafile import DataFile, header
from graphkeep.cli import _program
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
    parser.add_argument("--steps", type=_count, metavar="N", help="watch the first N steps; the program goes on")
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


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is less than 1")
    return count


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
        return 2  # python's own, for a file that it cannot open
    except BaseException:
        session.drop()
        raise
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
        self.rank, several = first["rank"], first["world_size"] > 1
        self.file = DataFile(_path(args, self.rank if several else None))
        self.file.write(first)
        self.file.flush()
        self._process = os.getpid()
        self._watch: watch | None = None
        self._how, self._error = "finished", None
        self._code: object = 0
        # registered first, so it runs last: after the program's own, and after its threads have ended
        atexit.register(self.finish)
        os.register_at_fork(after_in_child=self._forked)
        self._waits = AfterImport("torch", self._torch_is_here)

    def drop(self) -> None:
        """There is no such program: nothing is left behind."""
        atexit.unregister(self.finish)
        self._waits.remove()
        self.file.close()
        self.file.path.unlink(missing_ok=True)

    def _torch_is_here(self) -> None:
        try:
            from graphkeep._watch._watch import watch

            seen = watch(file=self.file)
            seen._last_step = self._args.steps
            seen.start()
            self._watch = seen
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
        else:
            self._how, self._error, self._code = "raised", error, 1
        if self._watch is not None and self._how != "finished":
            with contextlib.suppress(Exception):
                self._watch.findings  # noqa: B018 asking is looking

    def finish(self) -> None:
        """After everything else."""
        if os.getpid() != self._process:
            return
        error, self._error = self._error, None
        try:
            if self._watch is not None:
                self._watch._end(self._how, error)
            else:
                self.file.write({"type": "end", "how": self._how, "error": error and type(error).__name__, "s": 0.0})
            self.file.close()
            self._say()
        except (OSError, GraphkeepError) as fault:  # the disk is full, stderr is closed: the program has ended well
            logging.getLogger("graphkeep").error("the end of the data file could not be written", exc_info=fault)

    def _say(self) -> None:
        if self._args.quiet and not self._args.fail_on and not self._args.open:
            return
        from graphkeep.report._read import read

        seen = read(self.file.path)
        fails = self._fails(seen)
        if not self._args.quiet and self.rank == 0:
            from graphkeep.report._verdict import verdict

            sys.stdout.flush()
            print(f"{verdict(seen)}\n         graphkeep report {_shell(self.file.path)}", file=sys.stderr, flush=True)
        if self._args.open and self.rank == 0:
            from graphkeep.cli import report

            report.show(self.file.path)
        if fails and self._code in (None, 0):
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(FAILED)  # an exit code cannot be changed any more by other means

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


def _shell(path: Any) -> str:
    import shlex

    return shlex.quote(os.fspath(path))
