"""Where a command's text goes: a terminal with its width and colours, or plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 1 << 14  # columns of what is no terminal: nothing is wrapped there, so that it can be searched


def make_console() -> Console:
    """A console on stdout. Colours only in a terminal, and not under ``NO_COLOR``; ``COLUMNS`` sets the width."""
    from rich.console import Console

    console = Console(emoji=False, markup=False, highlight=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _WIDE
    return console


@contextlib.contextmanager
def page() -> Iterator[Console]:
    """A console whose text is put out when the block ends."""
    console = make_console()
    with console.capture() as captured:
        yield console
    text = captured.get()
    # a table pads its last column
    put(text if console.is_terminal else "".join(line.rstrip(" ") + "\n" for line in text.splitlines()))


def put(text: str) -> bool:
    """Write to stdout, whatever it can show.

    Returns:
        False if nobody reads there any more (``| head``).
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # or the interpreter, too, would find out, when it flushes at its end, and say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
