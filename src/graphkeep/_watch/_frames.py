"""Where the program is: the innermost line that is neither torch's nor graphkeep's, and the module whose forward runs.

Read off the stack of frames, so that nothing is hooked or wrapped in the program's modules.
"""

from __future__ import annotations

import os
import sys
import weakref
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from graphkeep._errors import library_file, library_files

# `_call_impl` has a cell for `self`, which makes reading its locals ten times as dear
_CALL: CodeType = torch.nn.Module._wrapped_call_impl.__code__
_FAR = 12  # frames above the user's line in which the module is looked for
_MANY, _TOO_MANY = 5_000, 20_000  # sites; a program that makes code or modules in a loop must not grow the watch


class Site:
    """A place in the program where tensors are saved: an expression, in the forward of one module.

    Attributes:
        code, lasti: the code object and the instruction in it; ``line`` is worked out when asked.
        module: weakly, the innermost module whose forward ran; None outside any.
        module_type: its class's name.
        training: whether that module was in training mode when the site was first met.
        op: the forward op, once somebody has asked the graph.
        tensors, bytes: how much has been saved here: saved tensors, and bytes of storages first saved here.
        live_tensors, live_bytes: what of it is held now.
        by_backward, by_count: how many saved tensors a backward freed, and how many the last reference.
    """

    __slots__ = (
        "by_backward", "by_count", "bytes", "code", "lasti", "live_bytes", "module", "module_type", "op",
        "tensors", "training",
    )  # fmt: skip

    def __init__(self, code: CodeType | None, lasti: int, module: torch.nn.Module | None) -> None:
        self.code = code
        self.lasti = lasti
        self.module = None if module is None else weakref.ref(module)
        self.module_type = None if module is None else type(module).__name__
        self.training = None if module is None else module.__dict__.get("training")
        self.op: str | None = None
        self.tensors = self.bytes = self.live_bytes = 0
        self.by_backward = self.by_count = 0

    @property
    def live_tensors(self) -> int:
        return self.tensors - self.by_backward - self.by_count

    @property
    def file(self) -> str:
        return self.code.co_filename if self.code is not None else "?"

    @property
    def function(self) -> str:
        return self.code.co_name if self.code is not None else "?"

    @property
    def line(self) -> int:
        return line_of(self.code, self.lasti) if self.code is not None else 0

    @property
    def where(self) -> str:
        return f"{short(self.file)}:{self.line}"


class Place(NamedTuple):
    """A frame of the program.

    Attributes:
        file, line, function: where it is.
        histories: the names of its variables that hold a tensor with a history, or a container of some.
    """

    file: str
    line: int
    function: str
    histories: frozenset[str] = frozenset()


class Sites:
    """Every site of a program, found from the stack."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], Site] = {}
        self._modules: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        self._rest = Site(None, 0, None)

    def __iter__(self) -> Any:
        return iter([*self._found.values(), *([self._rest] if self._rest.tensors else [])])

    def __len__(self) -> int:
        return len(self._found)

    def here(self, depth: int) -> Site:
        """The site of the program's line that led here, `depth` frames below the first that may be the program's."""
        frame: FrameType | None = sys._getframe(depth)
        module: Any = None
        known = library_files
        while frame is not None:
            code = frame.f_code
            if code is _CALL:
                if module is None:
                    module = frame.f_locals["self"]
            elif not (known.get(code.co_filename) or library_file(code.co_filename, frame)):
                break
            frame = frame.f_back
        else:
            return self._rest
        lasti = frame.f_lasti
        if module is None:
            module = _module_above(frame)
        number = 0
        if module is not None:
            seen = self._modules.get(id(module))
            number = seen[1] if seen is not None and seen[0]() is module else self._number(module)
        key = (id(code), lasti, number)
        site = self._found.get(key)
        return self._add(key, code, lasti, module) if site is None else site

    def line(self, depth: int) -> Site:
        """The same without the module: where something else than a save happened."""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None:
            if not library_file(frame.f_code.co_filename, frame):
                key = (id(frame.f_code), frame.f_lasti, 0)
                return self._found.get(key) or self._add(key, frame.f_code, frame.f_lasti, None)
            frame = frame.f_back
        return self._rest

    def _number(self, module: torch.nn.Module) -> int:
        number = len(self._found) + len(self._modules) + 1
        if len(self._modules) > _MANY:
            return 0
        self._modules[id(module)] = (weakref.ref(module), number)
        return number

    def _add(self, key: tuple[int, int, int], code: CodeType, lasti: int, module: torch.nn.Module | None) -> Site:
        if len(self._found) > _TOO_MANY:
            return self._rest
        site = self._found[key] = Site(code, lasti, module)
        return site


def _module_above(frame: FrameType) -> Any:
    """The module in whose forward a frame of the program runs."""
    above = frame.f_back
    for _ in range(_FAR):
        if above is None:
            break
        if above.f_code is _CALL:
            return above.f_locals["self"]
        above = above.f_back
    return None


def line_of(code: CodeType, lasti: int) -> int:
    """The source line of an instruction."""
    for start, end, line in code.co_lines():
        if start <= lasti < end and line is not None:
            return line
    return code.co_firstlineno


def short(filename: str) -> str:
    """A path as a person would write it: relative to the working directory where it lies below it."""
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):  # another drive, or the working directory has gone
        return filename
    return filename if relative.startswith("..") or filename.startswith("<") else relative
