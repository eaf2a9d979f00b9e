"""A data file that is still being written: read as it grows, never twice."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import BinaryIO

from graphkeep._errors import DataFileError
from graphkeep.report._read import Builder, unreadable
from graphkeep.report._run import Run

_BLOCK = 1 << 20


class Follower:
    """Follow one file. It need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._builder = Builder(self.path)
        self._file: BinaryIO | None = None
        self._read = 0

    @property
    def run(self) -> Run | None:
        """What has been read so far; None until the first line is there."""
        return self._builder.run

    @property
    def damaged(self) -> bool:
        """Whether nothing behind what was read can be read."""
        return self._builder.damaged

    def poll(self) -> bool:
        """Read what is new, and say whether there was any.

        Raises:
            DataFileError: this is no data file, it cannot be read, or another run writes it anew.
        """
        try:
            return self._poll()
        except OSError as error:
            raise unreadable(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _poll(self) -> bool:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return False
        new = False
        if os.fstat(self._file.fileno()).st_size < self._read:
            raise DataFileError(
                "it has been emptied: another run writes it", where=str(self.path), instead="the same command again"
            )
        while not self.damaged and (block := self._file.read(_BLOCK)):
            self._read += len(block)
            self._builder.feed(block)
            new = True
        return new


def is_gone(run: Run) -> bool:
    """Whether the process that writes the file is known to run no more: it ran on this machine, and is not there."""
    pid = run.header.get("pid")
    if os.name != "posix" or not pid or pid < 0 or run.header.get("host") != socket.gethostname():
        return False  # elsewhere than on POSIX, signal 0 is no question
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's: it is there
        return False
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """It has ended, and its parent has not asked how: on Linux, where ``/proc`` says so."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2]
    except OSError:
        return False
    return after_name.split()[:1] == [b"Z"]
