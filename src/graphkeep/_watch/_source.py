"""The program's source, read and never run: where a name is stored, what a loop carries, what changes a name in place.

Every question may go unanswered: the file may be gone, changed since, or never have been one (``python -c``, a notebook keeps
its cells in `linecache`).
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

_ADDERS = {"append", "appendleft", "add", "insert", "extend", "update", "setdefault", "put", "push", "store"}
_MAX_LINES = 20_000


class Store(NamedTuple):
    """A statement that stores something under a name.

    Attributes:
        line: its line.
        text: as it stands there.
        detached: the same with ``.detach()`` where it belongs; None where that cannot be said.
    """

    line: int
    text: str
    detached: str | None


def line_text(file: str, line: int) -> str:
    """A source line without its indentation; empty where there is none."""
    return linecache.getline(file, line).strip()


def stores(file: str, name: str, within: tuple[int, int] | None = None) -> list[Store]:
    """The statements that assign to, add to, or append to a name such as ``total`` or ``self.memory``.

    Arguments:
        file: the source file.
        name: as the program writes it; of an attribute path only the last part has to agree.
        within: only these lines.
    """
    wanted, key, container = _plain(name), _key(name), ".." in name
    found = []
    for node in _statements(file):
        if within is not None and not within[0] <= node.lineno <= within[1]:
            continue
        if container and _creates(node, wanted):
            continue
        store = _store(node, wanted)
        if store is not None:
            found.append(store)
    # where the name has a key, the statements that name it say more than those about its neighbours
    keyed = [store for store in found if key is not None and key in store.text.replace("'", '"')]
    return keyed or found


def _creates(node: ast.stmt, wanted: str) -> bool:
    """Whether a statement makes a container and puts nothing into it: ``outs = []``, ``outs = defaultdict(list)``."""
    if not isinstance(node, ast.Assign) or any(isinstance(target, ast.Subscript) for target in node.targets):
        return False
    if not any(_last(target) == wanted for target in node.targets):
        return False
    return isinstance(node.value, ast.Call) or not any(isinstance(part, ast.Name) for part in ast.walk(node.value))


def _plain(name: str) -> str:
    """``outs`` for ``outs[0..36]``, ``memory`` for ``self.agent.memory``."""
    return name.partition("[")[0].rpartition(".")[2].strip("`() ")


def _key(name: str) -> str | None:
    """``"loss"`` of ``stats["loss"]``."""
    found = re.search(r'\["([^"]*)"\]', name)
    return f'"{found[1]}"' if found else None


def _store(node: ast.stmt, wanted: str) -> Store | None:
    text = _unparse(node)
    if isinstance(node, ast.AugAssign) and _last(node.target) == wanted:
        detached = _detached(node.value)
        op = _OPS.get(type(node.op), "+")
        return Store(node.lineno, text, detached and f"{_unparse(node.target)} {op}= {detached}")
    if isinstance(node, ast.Assign) and any(_last(target) == wanted for target in node.targets):
        detached = _detached(node.value)
        return Store(node.lineno, text, detached and f"{' = '.join(map(_unparse, node.targets))} = {detached}")
    if isinstance(node, ast.AnnAssign) and node.value is not None and _last(node.target) == wanted:
        return None
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _ADDERS:  # noqa: SIM102
        if _last(call.func.value) == wanted:
            return Store(node.lineno, text, _detached_call(call))
    changed = call
    while isinstance(changed, ast.Call) and isinstance(changed.func, ast.Attribute) and changed.func.attr.endswith("_"):
        if _last(changed.func.value) == wanted:  # x.mul_(0.9).add_(loss)
            return Store(node.lineno, text, _detached_call(call) if isinstance(call, ast.Call) else None)
        changed = changed.func.value
    return None


_OPS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def _last(node: ast.expr) -> str | None:
    """The last part of a name: ``memory`` of ``self.memory[i]``."""
    while isinstance(node, (ast.Subscript, ast.Starred)):
        node = node.value
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _detached(value: ast.expr) -> str | None:
    """An expression with ``.detach()``; None where it is no tensor, as far as one can see."""
    if isinstance(value, _NO_TENSOR) or (isinstance(value, ast.Call) and not _makes_tensor(value)):
        return None
    text = _unparse(value)
    return f"{text}.detach()" if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) else f"({text}).detach()"


_NO_TENSOR = (
    ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.Constant, ast.Lambda,
    ast.JoinedStr, ast.BoolOp, ast.Compare,
)  # fmt: skip
_MAKE_NONE = {
    "list",
    "dict",
    "set",
    "tuple",
    "deque",
    "defaultdict",
    "partial",
    "unbind",
    "chunk",
    "split",
    "zip",
    "map",
    "item",
}


def _makes_tensor(call: ast.Call) -> bool:
    """Not a container, and not an object of a class."""
    name = _last(call.func) or ""
    return name not in _MAKE_NONE and not name[:1].isupper()


def _detached_call(call: ast.Call) -> str | None:
    if not call.args:
        return None
    *others, value = call.args
    detached = _detached(value)
    if detached is None:
        return None
    arguments = ", ".join([*map(_unparse, others), detached])
    return f"{_unparse(call.func)}({arguments})"


def carried(file: str, line: int) -> list[tuple[str, int]]:
    """The names that the innermost loop around a line carries from one turn to the next.

    Returns:
        Names that its body reads before it assigns them, with the line of that first read, in source order.
    """
    loop = _innermost(file, line, (ast.For, ast.AsyncFor, ast.While))
    if loop is None:
        return []
    body: list[ast.stmt] = loop.body  # type: ignore[attr-defined]
    assigned_later = {
        name.id for stmt in body for name in ast.walk(stmt) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
    }
    first: dict[str, int] = {}
    assigned: set[str] = set()
    for stmt in body:
        names = [node for node in ast.walk(stmt) if isinstance(node, ast.Name)]
        for name in names:
            if isinstance(name.ctx, ast.Load) and name.id in assigned_later and name.id not in assigned:
                first.setdefault(name.id, name.lineno)
        if isinstance(stmt, ast.AugAssign) and isinstance(stmt.target, ast.Name) and stmt.target.id not in assigned:
            first.setdefault(stmt.target.id, stmt.lineno)
        assigned |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return list(first.items())


def made_before_loop(file: str, line: int, name: str, built: int) -> bool:
    """Whether a line stands in a loop that reads a plain name, and the name was assigned before the loop, at `built`, only."""
    loop = _innermost(file, line, (ast.For, ast.AsyncFor, ast.While))
    if loop is None or not name.isidentifier() or built >= loop.lineno:
        return False
    names = [node for node in ast.walk(loop) if isinstance(node, ast.Name) and node.id == name]
    return bool(names) and not any(isinstance(node.ctx, ast.Store) for node in names)


def assigned_names(file: str, line: int) -> list[str]:
    """The names that the statement on a line assigns."""
    names = []
    for node in _statements(file):
        if node.lineno <= line <= (node.end_lineno or node.lineno) and isinstance(
            node, (ast.Assign, ast.AugAssign, ast.AnnAssign)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                members = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
                names += [_unparse(member) for member in members]
    return names


def used_names(file: str, line: int) -> list[str]:
    """The names and attributes that the statement on a line reads."""
    names: list[str] = []
    for node in _statements(file):
        if node.lineno <= line <= (node.end_lineno or node.lineno) and not hasattr(node, "body"):
            for part in ast.walk(node):
                if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Load):
                    names.append(_unparse(part))
    return names


def changes_in_place(file: str, first: int, last: int) -> Iterator[tuple[int, str, str, str | None]]:
    """Statements between two lines that change a tensor in place.

    Yields:
        The line, the statement, the name that is changed, and what to write instead where that can be said.
    """
    for node in _statements(file):
        if not first <= node.lineno <= last:
            continue
        if isinstance(node, ast.AugAssign):
            target, op = _unparse(node.target), _OPS.get(type(node.op))
            root = node.target.value if isinstance(node.target, ast.Subscript) else node.target
            instead = f"{target} = {target} {op} {_unparse(node.value)}" if op and root is node.target else None
            yield node.lineno, _unparse(node), _unparse(root), instead
            continue
        if isinstance(node, ast.Assign):
            for target_node in node.targets:
                if isinstance(target_node, ast.Subscript):
                    yield node.lineno, _unparse(node), _unparse(target_node.value), None
        if hasattr(node, "body"):  # its own statements come by themselves
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                method = call.func.attr
                if method.endswith("_") and not method.endswith("__"):
                    if _unparse(call.func.value) in ("torch", "F", "nn.init", "init", "torch.nn.init"):
                        changed = _unparse(call.args[0]) if call.args else ""
                        instead = None
                    else:
                        changed = _unparse(call.func.value)
                        arguments = ", ".join(map(_unparse, call.args))
                        plain = method.rstrip("_")
                        # `copy_` and `zero_` have no form that makes a new tensor
                        instead = f"{changed} = {changed}.{plain}({arguments})" if hasattr(torch.Tensor, plain) else None
                    yield node.lineno, _unparse(node), changed, instead


def function_lines(file: str, line: int) -> tuple[int, int] | None:
    """The first and last line of the innermost function around a line."""
    function = _innermost(file, line, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    return None if function is None else (function.lineno, function.end_lineno or function.lineno)


def outermost_function_lines(file: str, line: int) -> tuple[int, int] | None:
    """The same of the outermost function, where functions nest."""
    around = [
        node
        for node in _statements(file)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    first = min(around, key=lambda node: node.lineno, default=None)
    return None if first is None else (first.lineno, first.end_lineno or first.lineno)


def _innermost(file: str, line: int, kinds: tuple[type[ast.AST], ...]) -> ast.stmt | None:
    best: ast.stmt | None = None
    for node in _statements(file):
        around = isinstance(node, kinds) and node.lineno <= line <= (node.end_lineno or node.lineno)
        if around and (best is None or node.lineno >= best.lineno):
            best = node
    return best


def _statements(file: str) -> list[ast.stmt]:
    # the text is part of the key, so that a notebook's cell or an edited file is read anew
    lines = linecache.getlines(file)
    return _parse("".join(lines)) if 0 < len(lines) < _MAX_LINES else []


@lru_cache(maxsize=32)
def _parse(text: str) -> list[ast.stmt]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def _unparse(node: ast.AST) -> str:
    try:
        text = ast.unparse(node)
    except (RecursionError, ValueError):
        return "…"
    first, _, rest = text.partition("\n")
    return first if not rest else first + " …"


def call_with(file: str, first: int, last: int, name: str) -> str | None:
    """The last call between two lines that is given a name, with ``.detach()`` on it: ``D(fake.detach())``."""
    found = None
    for node in _statements(file):
        if first <= node.lineno <= last and not hasattr(node, "body"):
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and any(_same(argument, name) for argument in call.args):
                    if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDERS:
                        continue
                    inner = ", ".join(f"{_unparse(a)}.detach()" if _same(a, name) else _unparse(a) for a in call.args)
                    found = f"{_unparse(call.func)}({inner})"
                    break
    return found


def argument(file: str, line: int, function: str) -> str | None:
    """The first argument of a call of a function on a line, as it is written there."""
    for node in _statements(file):
        if node.lineno <= line <= (node.end_lineno or node.lineno) and not hasattr(node, "body"):
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and _last(call.func) == function and call.args:
                    return _unparse(call.args[0])
    return None


def _same(argument: ast.expr, name: str) -> bool:
    """Whether an argument is a name, or the same attribute of the object by another name (`self.fake`, `model.fake`)."""
    return _unparse(argument) == name or (isinstance(argument, ast.Attribute) and "." in name and argument.attr == _plain(name))


def registered(file: str, hook: str) -> int | None:
    """The line that registers a hook."""
    for node in _statements(file):
        for call in ast.walk(node) if not hasattr(node, "body") else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and "hook" in call.func.attr:
                names = [part.id if isinstance(part, ast.Name) else getattr(part, "attr", None) for part in ast.walk(call)]
                if hook in names:
                    return node.lineno
    return None
