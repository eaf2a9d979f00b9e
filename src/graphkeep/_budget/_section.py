"""A lock whose holder is not interrupted by the collector.

Python's collector may run wherever an object is made, in the thread that holds the lock, and what it frees mourns its entries
there and then. Such news waits until the lock is given back: nothing changes under the hands of who looks through it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Section:
    """A lock that its thread may take again; what is put off while it is held runs when it is given back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._later: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        try:
            while self._depth == 1 and self._later:
                self._later.pop(0)()
        finally:
            self._depth -= 1
            self._lock.release()

    def call(self, function: Callable[[], None]) -> None:
        """Call it with the lock held, at once or, within a section of this thread, at its end."""
        with self._lock:
            if self._depth:
                self._later.append(function)
                return
        with self:
            function()
