"""The command line. One module a command, each with `prepare_parser` and `run`, and as thin as it can be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from graphkeep import __version__
from graphkeep._errors import GraphkeepError
from graphkeep.cli import compare, demo, live, report, rule, run

_COMMANDS = {"run": run, "report": report, "compare": compare, "rule": rule, "live": live, "demo": demo}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `graphkeep` on the shell's command line.

    Arguments:
        argv: the arguments after the program's name; None for those of this process.

    Returns:
        The exit code: 0 if it went well, 1 after an error that is the user's to mend, 130 after Ctrl-C. A wrong argument
        leaves through argparse's ``SystemExit(2)``; any other exception is a bug and is not caught.
    """
    args = _parser().parse_args(argv)
    if args.command == "run":
        return run.run(args)  # what the program raises, Ctrl-C too, goes on to the interpreter
    try:
        return int(args.run(args))
    except GraphkeepError as error:
        print(f"graphkeep {args.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:  # what is printed to, such as a full disk
        print(f"graphkeep {args.command}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphkeep",
        description="Say which part of a PyTorch graph lives on, see why it lives, and set what it may cost.",
    )
    parser.add_argument("--version", action="version", version=f"graphkeep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.prepare_parser(command)
        command.set_defaults(run=module.run)
    return parser
