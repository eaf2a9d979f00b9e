"""Reading the variables of the program's frames."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any


def frame_locals(frame: types.FrameType) -> list[tuple[str, Any]]:
    """A frame's variables, with nothing left behind in the frame.

    Up to Python 3.12, asking for them leaves a dict in the frame that keeps their values alive after the variables are
    rebound. It is emptied again, unless somebody else has it (``loc = locals()``) or a debugger may write it back.
    """
    optimized = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if not optimized and frame.f_code.co_name != "<module>":
        return []  # a class's body: its namespace can be of a class of the program's, and asking for it writes to it
    space: Any = frame.f_locals
    if not optimized:
        return list(dict.items(space)) if issubclass(type(space), dict) and space is not frame.f_globals else []
    found = list(space.items())
    alone = 3  # the frame, `space`, and the argument of the call
    if type(space) is dict and sys.getrefcount(space) <= alone and sys.gettrace() is None and frame.f_trace is None:
        space.clear()
    return found
