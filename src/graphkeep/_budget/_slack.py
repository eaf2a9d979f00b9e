"""Steps that need not be written down: like the last, which fitted with nothing dropped.

What they save is compared with what the last one saved, in order, bytes and nodes. As soon as it is something else, the step
is written down from the next op on. What it had saved before cannot be made again; if it has to make room, it goes to the host.
"""

from __future__ import annotations

from typing import NamedTuple


class Saved(NamedTuple):
    """Something that a step has saved.

    Attributes:
        nbytes: of its storage.
        counts: whether it counts, or is a parameter, an input, or counted already.
        grad: whether it requires a gradient.
        node: the number of the node that has saved it, from the first that has saved anything on.
        value: its number in the trace, if it counts.
    """

    nbytes: int
    counts: bool
    grad: bool
    node: int
    value: int = -1


class Slack:
    """Where in such a step we are.

    Attributes:
        expected: what the step will save; empty where steps are written down.
        mixed: whether a step was not written down and then was.
        first: the number of the step's first node that has saved something.
    """

    def __init__(self) -> None:
        self.expected: tuple[Saved, ...] = ()
        self.mixed = False
        self.first = -1

    @property
    def unwritten(self) -> bool:
        """Whether something of this step was not written down."""
        return bool(self.expected) or self.mixed

    def number(self, node: int) -> int:
        """That of a node, from the step's first on."""
        if self.first < 0:
            self.first = node
        return node - self.first

    def counts(self, place: int, nbytes: int, grad: bool, own: bool, node: int) -> bool | None:
        """Whether what is saved counts; None if it is not what was expected.

        Arguments:
            own: whether it may be something that was computed.
        """
        if place < len(self.expected):
            known = self.expected[place]
            if known[:4] == (nbytes, known.counts, grad, self.number(node)) and (known.counts or not own):
                return known.counts
        self.surprise()
        return None

    def surprise(self) -> None:
        """The step is another than was expected."""
        if self.expected:
            self.expected, self.mixed = (), True

    def end(self, calls: int) -> bool | None:
        """A step has ended that saved so often. Whether it went as expected; None if it was written down."""
        self.first = -1
        if not self.expected and not self.mixed:
            return None
        whole = bool(self.expected) and calls == len(self.expected)
        if not whole:
            self.expected = ()
        self.mixed = False
        return whole
