"""Storages on the host: where `spill="host"` puts what a graph must not hold on its device.

From a GPU: pinned memory, on a stream of its own, so that copies run beside the kernels. Without a GPU the only other place is
the disk: a file without a name, mapped into memory, whose pages the operating system writes out when it needs the room.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch

from graphkeep._budget._values import Storage

_PCIE = 12e9  # bytes per second to and from a GPU, until somebody measures it; a copy must not be waited for
_DISK = 1e9


class Host:
    """Takes storages and gives them back.

    Attributes:
        nbytes: that it holds were written, in all.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._disk = _DISK

    def seconds(self, nbytes: int, device: torch.device) -> float:
        """What taking a storage and giving it back costs."""
        return 2 * nbytes / (_PCIE if device.type == "cuda" else self._disk) + 1e-5

    def put(self, storage: Storage) -> Storage:
        """A copy on the host."""
        self.nbytes += storage.nbytes()
        source = _bytes(storage)
        if source.device.type == "cuda":
            stream = self._stream(source.device)
            stream.wait_stream(torch.cuda.current_stream(source.device))
            with torch.cuda.stream(stream):
                host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
                host.copy_(source, non_blocking=True)
            source.record_stream(stream)  # its memory is not given to others before it was copied
            return host.untyped_storage()
        begun = time.perf_counter()
        number, path = tempfile.mkstemp(prefix="graphkeep-")
        try:
            os.ftruncate(number, storage.nbytes())
            file: Any = torch.UntypedStorage.from_file(path, True, storage.nbytes())
        finally:
            os.close(number)
            os.unlink(path)  # the mapping keeps it until the storage goes
        _bytes(file).copy_(source)
        self._disk = 0.5 * self._disk + 0.5 * storage.nbytes() / max(time.perf_counter() - begun, 1e-9)
        written: Storage = file
        return written

    def get(self, host: Storage, device: torch.device) -> Storage:
        """A copy on the device again."""
        source = _bytes(host)
        found = torch.empty(source.shape, dtype=torch.uint8, device=device)
        if device.type == "cuda":
            stream = self._stream(device)
            with torch.cuda.stream(stream):
                found.copy_(source, non_blocking=True)
            torch.cuda.current_stream(device).wait_stream(stream)
            found.record_stream(stream)
        else:
            found.copy_(source)
        return found.untyped_storage()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


def _bytes(storage: Storage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
