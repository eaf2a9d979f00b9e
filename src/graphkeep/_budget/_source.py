"""What stands in the place of a saved tensor: the value that it is on, and how."""

from __future__ import annotations

from typing import Protocol

import torch

from graphkeep._budget._rerun import aside
from graphkeep._budget._values import Geometry, Value
from graphkeep._ledger import Entry


class Holder(Protocol):
    """Whoever holds the values."""

    def bring(self, entry: Entry) -> torch.Tensor:
        """The tensor of an entry again."""


class Source:
    """Where an entry's tensor comes from.

    Attributes:
        counter: once the entry has parted with its tensor, an empty one that counts changes with it.
        version: what it counted when the tensor was saved.
        latest: the value on the same storage after changes that the tensor may not count.
    """

    __slots__ = ("counter", "geometry", "holdings", "latest", "value", "version")

    def __init__(self, holdings: Holder, value: Value, geometry: Geometry) -> None:
        self.holdings = holdings
        self.value = value
        self.geometry = geometry
        self.counter: torch.Tensor | None = None
        self.version = 0
        self.latest: Value | None = None

    def part_with(self, entry: Entry) -> None:
        """The entry is about to let go of its tensor: go on counting whether the program changes that in place."""
        tensor = entry.tensor
        if tensor is not None and self.counter is None and not tensor.is_inference():
            # below `ADInplaceOrView`, where a dispatch mode runs, the two would not count together
            with aside(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                counter = tensor.detach()
                counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.counter, self.version = counter, entry.version

    @property
    def held(self) -> bool:
        """Whether the graph holds the storage."""
        return self.value.held is not None or self.value.kept is not None

    def bring(self, entry: Entry) -> torch.Tensor:
        """The tensor again."""
        return self.holdings.bring(entry)
