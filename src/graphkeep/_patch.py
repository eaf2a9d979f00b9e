"""A function of torch's that is wrapped for as long as somebody needs it, and put back when the last one is done."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

_ids = itertools.count()


class Patch:
    """A wrapper around one attribute of a module, there only while somebody uses it.

    Arguments:
        owner: the module.
        name: the attribute.
        wrap: makes the wrapper from the original; called anew each time the first user comes.
        inherited: the owner has it from a base class only, and is left without one of its own afterwards.

    Attributes:
        users: what each user has left here, in order, for the wrapper to look at.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Any], *, inherited: bool = False) -> None:
        self._owner = owner
        self._name = name
        self._wrap = wrap
        self._inherited = inherited
        self._wrapper: Any = None
        self._original: Any = None
        self.users: dict[int, Any] = {}

    @property
    def original(self) -> Callable[..., Any]:
        """The function without the wrapper, whether that is in place or not."""
        found: Callable[..., Any] = getattr(self._owner, self._name) if self._original is None else self._original
        return found

    def add(self, user: Any) -> int:
        """Put the wrapper in place if it is not; returns the number to `remove` with."""
        number = next(_ids)
        self.users[number] = user
        if self._wrapper is None:
            self._original = getattr(self._owner, self._name)
            self._wrapper = self._wrap(self._original)
            setattr(self._owner, self._name, self._wrapper)
        return number

    def remove(self, number: int) -> None:
        """Take a user out; with the last one the original comes back. Removing twice does nothing."""
        self.users.pop(number, None)
        # if somebody wrapped our wrapper meanwhile, it stays in their chain, where it passes everything on
        if not self.users and self._wrapper is not None and vars(self._owner).get(self._name) is self._wrapper:
            if self._inherited:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._original)
            self._wrapper = self._original = None
