"""Jupyter and IPython: the cell magic ``%%graph``, and how findings are shown. ``%load_ext graphkeep`` loads it.

https://ipython.readthedocs.io/en/stable/config/custommagics.html
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import os
import tempfile
from pathlib import Path
from types import CodeType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from graphkeep._errors import ArgumentError
from graphkeep._watch._datafile import DataFile, header
from graphkeep.report import _notebook

_SHOWN = (
    ("graphkeep._watch._finding", "Finding", _notebook.finding),
    ("graphkeep._explain", "Postmortem", _notebook.postmortem),
)


def load(ipython: Any) -> None:
    """Register the magic and the formatters; what `%load_ext graphkeep` does.

    Arguments:
        ipython: the `IPython.core.interactiveshell.InteractiveShell`.
    """
    ipython.register_magics(GraphMagics)
    formatter = ipython.display_formatter.formatters["text/html"]
    for module, name, shown in _SHOWN:
        formatter.for_type_by_name(module, name, shown)  # by name, so that torch is imported only by who uses it


@magics_class
class GraphMagics(Magics):  # type: ignore[misc] # IPython is not looked into
    """The magics of graphkeep."""

    @magic_arguments()  # type: ignore[untyped-decorator]
    @argument("-o", "--output", metavar="FILE", help="keep the data file there, for `graphkeep report FILE`")  # type: ignore[untyped-decorator]
    @cell_magic  # type: ignore[untyped-decorator]
    def graph(self, line: str, cell: str) -> None:
        """Run the cell under `graphkeep.watch`, then show what its graphs held, who keeps them, and why.

        The cell runs as without the magic: its variables stay, its last expression is shown, and what it raises is raised.
        """
        __tracebackhide__ = True  # for IPython: this frame is no part of the user's traceback
        from graphkeep._watch._watch import watch

        options = parse_argstring(self.graph, line)
        with tempfile.TemporaryDirectory(prefix="graphkeep") as folder:
            path = Path(os.path.expanduser(options.output) if options.output else os.path.join(folder, "cell.graphkeep"))
            codes = self._compiled(cell)
            if any(map(_awaits, codes)) and _in_event_loop():
                raise UsageError(
                    "%%graph cannot await here: its cell runs inside the kernel's event loop\n"
                    "  write instead: `with graphkeep.watch(file=...):` around the lines that await"
                )
            try:
                file = DataFile(path)
            except ArgumentError as error:
                raise UsageError(str(error)) from None
            file.write(header(f"In [{self.shell.displayhook.prompt_count}]", ["%%graph", *line.split()]))
            seen = watch(file=file)
            seen.start()
            try:
                for code in codes:
                    self._run(code)
            except BaseException as error:
                seen._end("raised", error)
                _show(path)
                raise
            seen.stop()
            _show(path)

    def _compiled(self, cell: str) -> list[CodeType]:
        """The cell's code, with the line numbers that it has below the magic; apart from it the expression at its end."""
        compiler = self.shell.compile
        empty = next((i for i, line in enumerate(cell.splitlines()) if line.strip()), 0)  # IPython takes them away
        text = "\n" * (1 + empty) + self.shell.transform_cell(cell)
        name = compiler.cache(text, self.shell.displayhook.prompt_count, raw_code=cell)
        tree = self.shell.transform_ast(compiler.ast_parse(text, filename=name))
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not DisplayHook.semicolon_at_end_of_expression(text):
            # a statement in interactive mode hands its value to the display hook, which shows it and keeps it in `_`
            last = ast.Interactive([tree.body.pop()])
        with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.shell.autoawait else 0):
            codes = [compiler(tree, name, "exec")]
            return codes if last is None else [*codes, compiler(last, name, "single")]

    def _run(self, code: CodeType) -> None:
        __tracebackhide__ = True
        if _awaits(code):
            self.shell.loop_runner(eval(code, self.shell.user_global_ns, self.shell.user_ns))
        else:
            exec(code, self.shell.user_global_ns, self.shell.user_ns)


def _awaits(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _show(path: Path) -> None:
    """Show a data file's page; in a terminal its three lines."""
    from graphkeep.report._read import read
    from graphkeep.report._verdict import verdict
    from graphkeep.report.html import render_fragment

    try:
        run = read(path)
        display({"text/plain": str(verdict(run)), "text/html": render_fragment([run])}, raw=True)
    except Exception:  # the cell has run; what it did and raised is not ours to change
        logging.getLogger("graphkeep").exception("the page of this cell could not be shown")
