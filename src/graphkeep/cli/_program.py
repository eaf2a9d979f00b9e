"""Running a program in this process as `python` would run it: a script, a folder or zip file with a `__main__.py`, or a module.

`runpy` is not enough: it takes the program's `__main__` away when the program's last line has run, and threads, `atexit`
functions and pickles need it after that.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from graphkeep._errors import ArgumentError


@dataclass
class Program:
    """What is to run.

    Attributes:
        name: as it was typed.
        argv: what it will find in `sys.argv`.
        path: what it will find in `sys.path[0]`.
        compile: gives its code, and raises what the compiler raises.
        spec: of a module, else None.
        file: its ``__file__``.
    """

    name: str
    argv: list[str]
    path: str
    compile: Callable[[], CodeType]
    spec: importlib.machinery.ModuleSpec | None
    file: str


def script(path: str, arguments: Sequence[str]) -> Program:
    """A script, or a folder or zip file with a ``__main__.py``.

    Raises:
        ArgumentError: there is no such file, or it cannot be read.
    """
    spec = None if _is_source(path) else importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is not None:
        return Program(path, [path, *arguments], os.path.abspath(path), lambda: _code(spec), spec, str(spec.origin))
    instead = "the path of a Python script, or -m and the name of a module"
    if os.path.isdir(path):
        raise ArgumentError("this folder has no __main__.py", where=path, instead=instead)
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(f"the script cannot be read: {error.strerror or error}", where=path, instead=instead) from error
    if b"\0" in source:
        raise ArgumentError("this is no Python source: it has null bytes", where=path, instead=instead)
    folder, file = os.path.dirname(os.path.realpath(path)), os.path.abspath(path)
    return Program(path, [path, *arguments], folder, lambda: compile(source, file, "exec", dont_inherit=True), None, file)


def module(name: str, arguments: Sequence[str]) -> Program:
    """A module, or a package with a ``__main__`` module, as ``python -m`` finds it.

    Raises:
        ArgumentError: there is no such module.
    """
    sys.path[0:0] = [os.getcwd()]
    try:
        spec = _find(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name, spec = f"{name}.__main__", _find(f"{name}.__main__")
    finally:
        del sys.path[0]
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ArgumentError(
            f"there is no module {name} that can be run", instead="a module that `python -m` runs, or the path of a script"
        )
    return Program(f"-m {name}", [str(spec.origin), *arguments], os.getcwd(), lambda: _code(spec), spec, str(spec.origin))


def _is_source(path: str) -> bool:
    return os.path.isfile(path) and path.endswith((".py", ".pyw"))


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent is missing or is no package
        return None


def _code(spec: importlib.machinery.ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"no code object available for {spec.name}")
    return code


def run(program: Program, raised: Callable[[BaseException], None]) -> None:
    """Run it as ``__main__``; what it raises goes on as if it had been started by ``python``.

    Arguments:
        program: what to run.
        raised: is told of an exception that ends the program, while its frames are there.
    """
    main = ModuleType("__main__")
    main.__dict__.update(__file__=program.file, __spec__=program.spec, __builtins__=builtins)
    if program.spec is not None:
        main.__dict__.update(__loader__=program.spec.loader, __package__=program.spec.parent, __cached__=program.spec.cached)
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", program.file)
        main.__dict__.update(__loader__=loader, __package__=None, __cached__=None)
    if sys.version_info < (3, 14):
        main.__dict__.update(__annotations__={})
    sys.modules["__main__"] = main
    sys.argv[:] = program.argv
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = program.path
    try:
        exec(program.compile(), main.__dict__)
    except SystemExit as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        raised(error)
        raise
    except BaseException as error:
        error.__traceback__ = _without_ours(error.__traceback__)
        raised(error)
        _print(error)
        raise


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """The frames of the program's: the first one is ours, in `run`."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return traceback


def _print(error: BaseException) -> None:
    """What the interpreter does with it, but without our frames; after that, it need not do it again."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook = _nothing


def _nothing(*_error: object) -> None:
    pass
