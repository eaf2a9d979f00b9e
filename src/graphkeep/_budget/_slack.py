"""Steps that need not be written down: like the last, which fitted with nothing dropped.

What they save is compared with what the last one saved, in order and bytes. As soon as it is something else, the step is
written down from there on. What it had saved before cannot be made again; if it has to make room, it goes to the host.
"""

from __future__ import annotations


class Slack:
    """Where in such a step we are.

    Attributes:
        expected: what the step will save, as in `Plan.calls`; empty where steps are written down.
        mixed: whether a step was not written down and then was.
    """

    def __init__(self) -> None:
        self.expected: tuple[int, ...] = ()
        self.mixed = False

    @property
    def unwritten(self) -> bool:
        """Whether something of this step was not written down."""
        return bool(self.expected) or self.mixed

    def counts(self, place: int, nbytes: int) -> bool | None:
        """Whether what is saved counts; None if it is not what was expected."""
        if place < len(self.expected) and self.expected[place] >> 1 == nbytes:
            return bool(self.expected[place] & 1)
        self.expected, self.mixed = (), True
        return None

    def end(self, calls: int) -> bool | None:
        """A step has ended that saved so often. Whether it went as expected; None if it was written down."""
        if not self.expected and not self.mixed:
            return None
        whole = bool(self.expected) and calls == len(self.expected)
        if not whole:
            self.expected = ()
        self.mixed = False
        return whole
