"""Every error and warning that graphkeep raises.

Each one says three things: what happened, where, and what to write instead. They are `RuntimeError`s, since that is what
torch raises for a graph that cannot be used, so an existing ``except RuntimeError`` keeps working; a wrong argument is
besides a `ValueError` or a `TypeError`.
"""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


class GraphkeepError(RuntimeError):
    """Base of all graphkeep errors.

    Arguments:
        what: one sentence, what happened.
        where: the file and line, or the node, it is about.
        instead: what to write instead.
    """

    def __init__(self, what: str, *, where: str | None = None, instead: str | None = None) -> None:
        self.what = what
        self.where = where
        self.instead = instead
        super().__init__(what, where, instead)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.instead:
            lines.append(f"  write instead: {self.instead}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # keyword-only arguments do not survive the default pickling of exceptions, and process pools pickle them
        return _rebuild, (type(self), self.what, self.where, self.instead)


def _rebuild(kind: type[GraphkeepError], what: str, where: str | None, instead: str | None) -> GraphkeepError:
    return kind(what, where=where, instead=instead)


class ArgumentError(GraphkeepError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class ArgumentTypeError(GraphkeepError, TypeError):
    """An argument is of the wrong type."""


class NotInGraphError(ArgumentError):
    """A tensor to keep is not part of the graph that the backward runs through."""


class FreedGraphError(GraphkeepError):
    """The graph, or the part that is needed, has been freed before."""


class ChangedGraphError(GraphkeepError):
    """A tensor or parameter that a waiting backward needs was changed in between."""


class ClosedCutError(GraphkeepError):
    """A `cut` was left twice, or its stand-ins were used after it had closed."""


class BypassedCutError(GraphkeepError):
    """A backward reached a stand-in of a `cut` and, by another path, the trunk below it."""


class ReplayError(GraphkeepError):
    """Running a forward again did not give the values that it gave before."""


class BudgetError(GraphkeepError):
    """A graph cannot be held within the limit of a `budget`.

    Attributes:
        smallest: the smallest limit, in bytes, for what had run when it was raised.
    """

    smallest = 0


class DataFileError(GraphkeepError, ValueError):
    """A file that `graphkeep run` should have written cannot be read: damaged, foreign, or of a newer graphkeep."""


class LostGradientWarning(UserWarning):
    """Gradients arrived at a `cut` that was dropped before it was closed; they never went through the trunk."""


class NotFreedWarning(UserWarning):
    """Gradients are right, yet some of the graph's memory could not be freed; the message names the nodes."""


class WatchFailedWarning(UserWarning):
    """A fault inside graphkeep ended a `watch`; the program itself is not affected."""


def caller() -> str:
    """``file.py:line`` of the innermost frame that is neither graphkeep's nor torch's own."""
    frame, _ = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the user's that led here."""
    _, level = _user_frame()
    warnings.warn(message, category, stacklevel=level)


def _user_frame() -> tuple[FrameType, int]:
    """The innermost frame that is neither graphkeep's nor torch's, and its stack level seen from our caller."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and _is_library(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_library(frame: FrameType) -> bool:
    return library_file(frame.f_code.co_filename, frame)


def library_file(filename: str, frame: FrameType) -> bool:
    """Whether a frame's file is graphkeep's own or torch's."""
    found = library_files.get(filename)
    if found is None:
        name = frame.f_globals.get("__name__")
        found = filename.startswith(_PACKAGE) or (type(name) is str and name.partition(".")[0] == "torch")
        if not filename.startswith("<"):  # many share such a name
            library_files[filename] = found
    return found


library_files: dict[str, bool] = {}


_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
_PACKAGES = os.path.join(_STDLIB, "site-packages", "")


def programs_own(error: BaseException) -> bool:
    """Whether an exception that came up in graphkeep's code was raised by the program: a signal handler may run anywhere."""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        name = frame.f_code.co_filename
        ours = (
            library_file(name, frame) or name.startswith("<") or (name.startswith(_STDLIB) and not name.startswith(_PACKAGES))
        )
        if not ours:
            return True
        traceback = traceback.tb_next
    return False
