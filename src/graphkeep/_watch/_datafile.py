"""The data file of a run, as it is written: gzip of JSON lines, flushed so that a killed process leaves a readable file.

`docs/data-file.md` has the format; `graphkeep.report` reads it. Nothing here needs torch.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import socket
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
        path: it is made, or emptied, at once, so that a path that cannot be written is told before anything ran.
        again: add to what the same program has written.

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
        try:
            self._file = self.path.open("ab" if again else "wb", buffering=0)
        except OSError as error:
            raise ArgumentError(
                f"the data file cannot be written: {error.strerror or error}",
                where=str(path),
                instead="a path in a folder that exists and can be written to",
            ) from error
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
                try:
                    self._flush(zlib.Z_FINISH)
                finally:
                    self.closed = True
                    self._file.close()

    def _flush(self, mode: int) -> None:
        if self.closed or os.getpid() != self._process:
            return
        self._flushed = time.monotonic()
        waiting, self._waiting, self._size = self._waiting, [], 0
        text = ("\n".join(waiting) + "\n").encode() if waiting else b""
        if text or mode == zlib.Z_FINISH:
            self._put(self._pack.compress(text) + self._pack.flush(mode))

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]


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
