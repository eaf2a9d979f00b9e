"""The data file of a run, as it is written: gzip of JSON lines, flushed so that a killed process leaves a readable file.

`docs/data-file.md` has the format; `graphkeep.report` reads it. Nothing here needs torch.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import platform
import socket
import stat
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from graphkeep._errors import ArgumentError

FORMAT = "graphkeep"
SCHEMA_VERSION = 1
_FLUSH = 1.0  # seconds; what a kill may lose
_MUCH = 1 << 20  # bytes of text that wait at most


class DataFile:
    """One file, written record by record.

    Arguments:
        path: it is opened at once, so that a path that cannot be written is told before anything ran, and emptied with the
            first flush.
        again: add to what the same program has written.

    Attributes:
        new: whether there was no such file.
        fault: why it ended early, if it did.

    Raises:
        ArgumentError: the path cannot be written, or there is something else than a data file.
    """

    def __init__(self, path: str | os.PathLike[str], again: bool = False) -> None:
        self.path = Path(path)
        self.new = not self.path.exists()
        if self.path.is_file() and not _is_ours(self.path):  # `-o train.py train.py` is typed soon
            raise ArgumentError(
                "there is a file that graphkeep has not written; it is not overwritten",
                where=str(path),
                instead="another path for the data file",
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        try:
            # a descriptor and no file object, which would close whatever has its number later
            self._descriptor = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise ArgumentError(
                f"the data file cannot be written: {error.strerror or error}",
                where=str(path),
                instead="a path in a folder that exists and can be written to",
            ) from error
        self._identity = _identity(self._descriptor)
        self._empties = not again
        self.fault: OSError | None = None
        self._process = os.getpid()
        self._pack = zlib.compressobj(wbits=31)
        self._waiting: list[str] = []
        self._size = 0
        self._flushed = time.monotonic()
        self._lock = threading.Lock()
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        """Add one record; it reaches the system with the next flush."""
        if self.closed or os.getpid() != self._process:  # a forked child has a copy of all this, and no say
            return
        line = json.dumps(record, separators=(",", ":"))
        self._waiting.append(line)
        self._size += len(line)
        if self._size > _MUCH:
            self.flush()

    def flush_if_due(self) -> None:
        """Flush, once a second."""
        if time.monotonic() - self._flushed > _FLUSH:
            self.flush()

    def flush(self) -> None:
        """Hand everything so far to the system, such that a reader can unpack it."""
        # another thread, or a destructor that runs in the middle of this, need not wait: what it wrote comes next time
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._flush(zlib.Z_SYNC_FLUSH)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Flush and end the file. Closing twice does nothing."""
        with self._lock:
            if not self.closed:
                self._flush(zlib.Z_FINISH)
                self._end()

    def drop(self) -> None:
        """Close it as if it had never been opened: what stood there before stays, and a new file goes."""
        with self._lock:
            if not self.closed and self._empties:
                self._end()
                if self.new:
                    self.path.unlink(missing_ok=True)

    def _flush(self, mode: int) -> None:
        if self.closed or os.getpid() != self._process:
            return
        self._flushed = time.monotonic()
        waiting, self._waiting, self._size = self._waiting, [], 0
        text = ("\n".join(waiting) + "\n").encode() if waiting else b""
        if text or mode == zlib.Z_FINISH:
            self._put(self._pack.compress(text) + self._pack.flush(mode))

    def _put(self, data: bytes) -> None:
        # the program may have closed all descriptors, as daemons do, and have a file of its own under this number
        if _identity(self._descriptor) != self._identity:
            self.closed, self.fault = True, OSError(errno.EBADF, "the program has closed it")
            return
        view = memoryview(data)
        try:
            if self._empties and stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                os.ftruncate(self._descriptor, 0)
            self._empties = False
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:  # the disk is full: the program goes on, and the file ends here
            self.fault = error
            self._end()

    def _end(self) -> None:
        self.closed = True
        if os.getpid() == self._process and _identity(self._descriptor) == self._identity:
            os.close(self._descriptor)


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Which file a descriptor stands for."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def header(program: str, argv: Sequence[str]) -> dict[str, Any]:
    """The first record of a data file."""
    rank, world = _environment("RANK", 0), _environment("WORLD_SIZE", 1)
    host = socket.gethostname()
    return {
        "type": "header",
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "graphkeep": _version("graphkeep"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "program": program,
        "argv": list(argv),
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "host": host,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rank": rank,
        "world_size": world,
        "group": f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('MASTER_PORT', '')}" if world > 1 else "",
    }


def _is_ours(path: Path) -> bool:
    """Whether a file may be overwritten: it is empty, or begins as a data file does."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
        return not begin or b'"format":"graphkeep"' in zlib.decompressobj(wbits=31).decompress(begin, 4096)
    except zlib.error:
        return False
    except OSError:  # what is wrong is said when it is opened for writing
        return True


def said(error: BaseException | None) -> str | None:
    """An exception's type and message."""
    if error is None:
        return None
    try:
        text = str(error)
    except Exception:  # the program's own class; there is nothing to say then
        text = ""
    return f"{type(error).__name__}: {text}".rstrip(": ")[:10_000]


def _environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def _version(package: str) -> str:
    module = sys.modules.get(package)
    try:
        return str(getattr(module, "__version__", None) or metadata.version(package))
    except metadata.PackageNotFoundError:
        return "unknown"
