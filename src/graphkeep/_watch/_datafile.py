"""The data file of a run, as it is written: gzip of JSON lines, flushed so that a killed process leaves a readable file.

`docs/data-file.md` has the format; `graphkeep.report` reads it. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import time
import zlib
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

    Raises:
        ArgumentError: the path cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("wb", buffering=0)
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
        self.closed = False

    def write(self, record: dict[str, Any]) -> None:
        """Add one record; it reaches the system with the next flush."""
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
        if self.closed or os.getpid() != self._process:  # a forked child has a copy of all this, and no say
            return
        if self._waiting:
            text = ("\n".join(self._waiting) + "\n").encode()
            self._waiting, self._size = [], 0
            self._put(self._pack.compress(text) + self._pack.flush(zlib.Z_SYNC_FLUSH))
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush and end the file. Closing twice does nothing."""
        if self.closed:
            return
        self.flush()
        if os.getpid() == self._process:
            self._put(self._pack.flush(zlib.Z_FINISH))
        self.closed = True
        self._file.close()

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]
