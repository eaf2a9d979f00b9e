"""Whole lines out of gzip that may be cut off, damaged, still growing, or made to unpack to any size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphkeep._errors import DataFileError

_MOST = 2 << 30  # bytes of text that a file may unpack to: a small file can unpack to any size
_LONGEST = 64 << 20  # bytes of one line; the longest that is written are those of looks and sources, a few MiB
_BLOCK = 1 << 20


class Unpacker:
    """Takes a file in pieces.

    Attributes:
        damaged: whether something was no gzip; nothing behind it can be read.
    """

    def __init__(self, path: Path) -> None:
        self.damaged = False
        self._path = path
        self._unpack: Any = zlib.decompressobj(wbits=31)
        self._rest: list[bytes] = []  # of a line whose end has not come
        self._size = self._waiting = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that end in `data`. What has no end yet is a line that was being written.

        Raises:
            DataFileError: more than a data file can have.
        """
        while not self.damaged:
            text = self._piece(data)
            yield from self._split(text)
            data = self._unpack.unconsumed_tail
            if self._unpack.eof and self._unpack.unused_data:  # a watch that was started again has added a member
                data = self._unpack.unused_data
                self._unpack = zlib.decompressobj(wbits=31)
            elif not data and len(text) < _BLOCK:
                return

    def _piece(self, data: bytes) -> bytes:
        before = self._unpack.copy()
        try:
            return self._unpack.decompress(data, _BLOCK)
        except zlib.error:
            self.damaged = True
            return _as_far_as_it_goes(before, data)

    def _split(self, text: bytes) -> Iterator[bytes]:
        self._size += len(text)
        if self._size > _MOST:
            raise self._too_much("it unpacks to more than 2 GiB")
        first, *others = text.split(b"\n")
        self._rest.append(first)
        self._waiting += len(first)
        if self._waiting > _LONGEST:
            raise self._too_much("it has a line of more than 64 MiB")
        if others:
            yield b"".join(self._rest)
            *whole, rest = others
            yield from whole
            self._rest, self._waiting = [rest], len(rest)

    def _too_much(self, what: str) -> DataFileError:
        return DataFileError(what, where=str(self._path), instead="a file that graphkeep wrote")


def _as_far_as_it_goes(unpack: Any, data: bytes) -> bytes:
    """What lies before the damage: zlib keeps to itself what it had unpacked in the call that met it."""
    text = bytearray()
    try:
        for i in range(len(data)):
            text += unpack.decompress(data[i : i + 1])
    except zlib.error:
        pass
    return bytes(text)
