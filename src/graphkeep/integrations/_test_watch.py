"""The watch of one test: it looks while the test's own variables live, and knows where most was held."""

from __future__ import annotations

import contextlib
import linecache
from typing import Any, NamedTuple

import torch

from graphkeep._ledger import Call
from graphkeep._watch._finding import SEVERITIES, Finding
from graphkeep._watch._frames import Site
from graphkeep._watch._watch import watch

_GROWTH = ("bytes grow", "nodes grow")
_LINES = 5


class Line(NamedTuple):
    """A line that saved tensors, and how many bytes of them were held."""

    where: str
    bytes: int
    module: str | None
    text: str


class TestWatch(watch):
    """A `gk.watch()` for one test.

    A test's local variables are gone when it has returned. So it looks when `steps` steps have ended, at twice as many, and so
    on, and once more at the end for what fixtures and globals hold.

    Arguments:
        steps: when to look first; None: only at the end.
        looks: whether anybody asks for findings; if not, nobody looks at the end.

    Attributes:
        steps: how many steps have ended with an optimizer's, or by `step()`.
    """

    __test__ = False  # it is no test class, whatever its name

    def __init__(self, steps: int | None, looks: bool) -> None:
        super().__init__()
        self._first_look = steps
        self._looks = looks
        self._stopping = False
        self._grown: list[Finding] = []  # in the last look while the test ran
        self._left: list[Finding] = []  # in the look at its end
        self._most = 0
        self._most_at: dict[Site, int] = {}
        self.steps = 0

    @property
    def failed_inside(self) -> bool:
        """Whether a fault of graphkeep's ended it."""
        return self._failed

    @property
    def growth(self) -> list[Finding]:
        """What grew, the gravest first: in the last look while the test ran, and in that at its end."""
        found = {(finding.id, finding.where or finding.what): finding for finding in [*self._left, *self._grown]}
        growth = [finding for finding in found.values() if finding.severity in _GROWTH]
        return sorted(growth, key=lambda finding: SEVERITIES.index(finding.severity))

    def stop(self, look: bool = True) -> None:
        """End, after a last look unless none is wanted."""
        self._looks = self._looks and look
        self._sample()
        self._stopping = True
        super().stop()
        self._stopping = False
        if look:
            self._left = self.findings

    def begins(self, call: Call) -> None:
        """For the ledger. Most is held when a backward begins."""
        self._sample()
        super().begins(call)

    def heaviest(self) -> tuple[str, list[Line]]:
        """The lines that held most when most was held; or that saved most, if that moment was missed."""
        sizes, title = self._most_at, "lines that held most of it then"
        if 2 * self._most < self.timeline.peak:
            sizes, title = {site: site.bytes for site in self.timeline.sites}, "lines that saved most, over the whole test"
        heaviest = sorted(sizes.items(), key=lambda item: -item[1])[:_LINES]
        return title, [
            Line(site.where, size, site.module_type, f"`{linecache.getline(site.file, site.line).strip()}`")
            for site, size in heaviest
            if size
        ]

    def step(self) -> None:
        """The end of a step."""
        super().step()
        self._step_ended()

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        super()._optimizer_stepped(optimizer, args, kwargs)
        self._step_ended()

    def _step_ended(self) -> None:
        self._sample()
        before, self.steps = self.steps, self.timeline.step
        if self._first_look is None or before == self.steps or not self._running:
            return
        times, beyond = divmod(self.steps, self._first_look)
        if times and not beyond and times & (times - 1) == 0:
            self._grown = self.findings

    def _look(self, *how: Any, **more: Any) -> None:
        if self._looks or not self._stopping:
            super()._look(*how, **more)

    def _sample(self) -> None:
        if self.timeline.live > self._most:
            with contextlib.suppress(RuntimeError):  # another thread saves right now
                self._most_at = {site: site.live_bytes for site in self.timeline.sites if site.live_bytes > 0}
                self._most = self.timeline.live
