"""How the program writes the way from a name to an object: ``model.layer1.cache``, ``outs[0..36]``, a hook's closure variable.

A way is walked reference by reference. Most add to an expression; some begin a new one, because no expression leads through
them: into a function's closure, a suspended generator's variables, a frame that a traceback keeps.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import FrameType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from graphkeep._watch._referrers import LRU_CACHE, SUSPENDABLE_CODE, Raw, is_table_of_hooks

_type_name: Any = type.__dict__["__name__"].__get__
_type_qualname: Any = type.__dict__["__qualname__"].__get__
_function_of_partial: Any = functools.partial.__dict__["func"].__get__
_DIGITS = 200  # bits of a number that is shown
_OUTER = "\0"  # in a text, where the expression of the outer place goes
_TABLES = ("_modules", "_parameters", "_buffers")  # of a module; the program writes their entries as attributes

Token = tuple[str, tuple[Any, ...]]  # a step of an expression: its sort, and the indices, keys or name of it


# words


def clean(text: str, longest: int = 80) -> str:
    """Text of the program's as one line."""
    if len(text) <= longest and text.isprintable():
        return text
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: longest + 1])
    return shown if len(text) <= longest else shown[: longest - 1] + "…"


def type_name(obj: object) -> str:
    return clean(_type_name(type(obj)))


def class_name(cls: type) -> str:
    return clean(_type_qualname(cls).rpartition("<locals>.")[2])


def at(file: str, line: int) -> str:
    """A place in the program's source: ``train.py:27``."""
    return f"{clean(os.path.basename(file))}:{line}"


@functools.cache
def _library_paths() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return ("<frozen", *{paths[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_library(file: str | None) -> bool:
    return file is None or file.startswith(_library_paths()) or f"{os.sep}site-packages{os.sep}" in file


def key_text(key: object, labels: Mapping[int, str] | None = None, depth: int = 0) -> str:
    """A key of a dict; the program's own ``__repr__`` never runs."""
    kind = type(key)
    if kind is str:
        escaped = clean(str(key), 40).replace("\\", "\\\\") if str(key).isprintable() else clean(str(key), 40)
        return '"' + escaped.replace('"', '\\"') + '"'
    if key is None or kind is bool or kind is float:
        return repr(key)
    if kind is int:
        number: int = key  # type: ignore[assignment]
        return repr(number) if number.bit_length() < _DIGITS else "<int>"
    if kind is tuple and depth < 3:  # noqa: PLR2004
        members: tuple[object, ...] = key  # type: ignore[assignment]
        inside = ", ".join(key_text(member, labels, depth + 1) for member in members[:8])
        return f"({inside}{', …' if len(members) > 8 else ',' if len(members) == 1 else ''})"  # noqa: PLR2004
    return (labels or {}).get(id(key)) or f"<{type_name(key)}>"


def function_name(hook: object) -> str:
    """What a callable is called."""
    if type(hook) is MethodType:
        hook = hook.__func__
    elif issubclass(type(hook), functools.partial):
        hook = _function_of_partial(hook)
    if type(hook) is FunctionType:
        return clean(hook.__code__.co_name)
    return type_name(hook)


def _hook_noun(name: str, table: object) -> str | None:
    """What hooks are called by the attribute they are in: ``forward pre-hook``; None if it is another attribute."""
    if not name.endswith("_hooks") or not is_table_of_hooks(table):
        return None
    stem = name.strip("_").removesuffix("_hooks").replace("global_", "global ", 1)
    for word in ("pre", "post"):
        if stem.endswith(f"_{word}"):
            return f"{stem.removesuffix(f'_{word}')} {word}-hook"
    return f"{stem} hook"


def _token_text(token: Token, last: bool) -> str:
    sort, values = token
    if sort == "attr":
        return f".{values[0]}"
    if sort == "item":
        return f"[{indices(values)}]"
    if sort == "key":
        shown = ", ".join(values[:3])
        return f"[{shown}, … ({len(values)} of them)]" if len(values) > 3 else f"[{shown}]"  # noqa: PLR2004
    return "" if last and sort == "in" else "…"


def indices(numbers: Iterable[int]) -> str:
    """Indices for people: ``0..36``, or ``0, 3, 7, … (12 of them)``."""
    ordered = sorted(set(numbers))
    first, last, count = ordered[0], ordered[-1], len(ordered)
    if count > 1 and last - first + 1 == count:
        return f"{first}..{last}"
    shown = ", ".join(map(str, ordered[:3]))
    return f"{shown}, … ({count} of them)" if count > 3 else shown  # noqa: PLR2004


# places


@dataclass(frozen=True)
class Place:
    """Where the program has something: an expression, and what it begins with.

    Attributes:
        base, tokens: the expression.
        noun, rest: what the base is: a ``global`` that is ``of train.py``.
        kind: what the whole is told as.
        container: the type of what the last token looks into; empty after an attribute.
        outer: where the thing is that `rest` speaks of, by a NUL in it.
        detail: more about it, in a sentence of its own.
    """

    base: str
    noun: str = ""
    rest: str = ""
    kind: str = ""
    tokens: tuple[Token, ...] = ()
    container: str = ""
    file: str | None = None
    line: int | None = None
    outer: Place | None = None
    detail: str | None = None

    def to(self, sort: str, value: Any, container: str = "") -> Place:
        return replace(self, tokens=(*self.tokens, (sort, (value,))), container=container)

    @property
    def name(self) -> str:
        base = self.base
        if self.kind == "cache" and self.tokens:
            base += "(…)"
        text = base + "".join(_token_text(token, i == len(self.tokens)) for i, token in enumerate(self.tokens, 1))
        return re.sub("…+", "…", text)

    def _filled(self, text: str) -> str:
        return text.replace(_OUTER, self.outer.name if self.outer is not None else "")

    @property
    def what(self) -> str:
        rest = self._filled(self.rest)
        if self.kind in ("cache", "generator") or not self.tokens:
            return f"{self.noun} `{self.name}` {rest}".strip()
        inside = ", ".join(part for part in (self.container, f"{self.noun} {rest}".strip()) if part)
        member = f"{self.tokens[-1][1][0]} " if self.tokens[-1][0] == "in" else ""
        return f"{member}`{self.name}`" + (f" ({inside})" if inside else "")

    @property
    def called(self) -> str:
        return f"{self.noun} `{self.base}` {self.rest}".rstrip()

    @property
    def written(self) -> list[str]:
        return [f"`{self.name[len(self.base) :]}`"] if self.tokens else []

    @property
    def full_detail(self) -> str | None:
        return None if self.detail is None else self._filled(self.detail)

    @property
    def full_kind(self) -> str:
        if self.kind in ("local", "global", "class", "ctx") and self.tokens:
            return "attribute" if self.tokens[-1][0] == "attr" else "element"
        return {"class": "attribute", "ctx": "attribute"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class At:
    """Where a walk is: the place of the object it has come to, and what of it decides how the next reference is written."""

    place: Place
    inside: str = ""  # "own": the dict of `of`; a module's table; a function's closure; ...
    of: Any = None
    text: str = ""
    hook: Place | None = None  # the hook that the object is


def step(here: At, holder: object, obj: object, raw: Raw, labels: Mapping[int, str]) -> At:
    """Go on from a holder to an object that it refers to in a certain way."""
    sort, key = raw
    place = here.place
    if sort in ("own", "closure", "defaults", "kwdefaults", "snapshot", "threads"):
        return At(place, sort, holder, hook=here.hook)
    if here.inside == "threads":  # a thread's dict of a threading.local
        return At(place, "own", here.of)
    if sort == "hooks":
        kind = "post-accumulate hook" if obj is _post_accumulate_hooks(holder) else "tensor hook"
        return At(place, "hooks", holder, kind)
    if sort == "cell":
        return At(place)
    if sort == "entry":
        return At(place, "entry")
    if sort in ("traceback", "frame"):
        return _into_traceback(here, holder, obj, sort)
    if sort == "local":
        return At(_variable(here, *key))
    if here.inside == "closure":
        return At(_of_function(here, "closure variable", "closure", here.of.__code__.co_freevars[key]))
    if here.inside == "defaults":
        code, count = here.of.__code__, len(here.of.__defaults__ or ())
        names = ("?",) * count + code.co_varnames[: code.co_argcount]  # there can be more defaults than arguments
        return At(_of_function(here, "default argument", "default", names[min(key - count, -1)]))
    if here.inside == "kwdefaults":
        return At(_of_function(here, "default argument", "default", key))
    if here.hook is not None:
        owner, outer = here.hook.called, here.hook.outer
        if sort == "attr" and type(key) is str and key == "__self__":
            return At(Place("self", "bound object", f"of {owner}", "hook", outer=outer, detail=f"`self` of {owner}"))
        place = replace(here.hook, noun="", rest=owner)
    if sort == "attr" or (sort == "key" and here.inside == "own" and type(key) is str):
        return _attribute(place, holder if sort == "attr" else here.of, obj, key)
    if sort == "key":
        return _entry(place, here, holder, obj, key, labels)
    return At(place.to(sort, key, type_name(holder)))


def _attribute(place: Place, owner: object, obj: object, name: object) -> At:
    if type(name) is not str:
        return At(place.to("key", key_text(name)))
    if name in _TABLES and issubclass(type(owner), nn.Module):
        return At(place, "table", owner)
    noun = _hook_noun(name, obj)
    if noun is not None:
        return At(place, "hooks", owner, noun)
    if name == "state" and issubclass(type(owner), torch.optim.Optimizer):
        place = replace(place, kind="optimizer")
    return At(place.to("attr", clean(name)) if name.isidentifier() else place.to("key", key_text(name)))


def _entry(place: Place, here: At, holder: object, obj: object, key: object, labels: Mapping[int, str]) -> At:
    """Into a dict: most are written as such, but for those that stand for something else."""
    name = key if type(key) is str else None
    if here.inside == "entry":
        return At(place)
    if here.inside == "hooks":
        return _hook(place, here, obj)
    if here.inside == "namespace":
        noun = _hook_noun(name, obj) if name is not None else None
        if noun is not None:
            return At(replace(place, base=""), "hooks", holder, noun)
        return At(replace(place, base=place.base + (clean(name) if name is not None else key_text(key))))
    table = here.inside == "table"
    if table and name is not None and not issubclass(type(here.of), nn.ModuleDict):
        if name.isdecimal():
            return At(place.to("item", int(name)))
        if name.isidentifier():
            return At(place.to("attr", name))
    if type(key) is int and key.bit_length() < _DIGITS:
        return At(place.to("item", key, type_name(holder)))
    return At(place.to("key", key_text(key, labels), "" if table else type_name(holder)))


def _hook(owner: Place, here: At, hook: object) -> At:
    """A hook of a module, a tensor or a node."""
    name = function_name(hook)
    outer = owner if owner.base or owner.tokens else None
    rest = f"on {_OUTER}" if outer is not None else "on an autograd node" if here.of is None else ""
    place = Place(name, here.text, rest, "hook", outer=outer)
    place = replace(place, detail=place.called)
    if type(hook) is FunctionType:
        place = replace(place, file=hook.__code__.co_filename, line=hook.__code__.co_firstlineno)
    return At(place, hook=place)


def _of_function(here: At, noun: str, kind: str, name: str) -> Place:
    """A variable that a function holds, or a hook if the function is one."""
    code, held = here.of.__code__, here.place
    place = Place(clean(name), noun, kind=kind, file=code.co_filename, line=code.co_firstlineno)
    if here.hook is not None:
        place = replace(place, rest=f"of {here.hook.called}", kind="hook", outer=here.hook.outer)
        return replace(place, detail=place.called)
    called = function_name(here.of)
    place = replace(place, rest=f"of function {called} at {at(code.co_filename, code.co_firstlineno)}")
    if held.base and held.name != called:
        place = replace(place, outer=held, detail=f"the function is `{_OUTER}`")
    return place


def _into_traceback(here: At, holder: Any, obj: Any, sort: str) -> At:
    """From an exception to its traceback, along it, and to a frame; from a generator to its frame."""
    if sort == "traceback":
        of = holder if issubclass(type(holder), BaseException) else here.of
        return At(here.place, "traceback", of)
    if type(holder) is not TracebackType:
        return At(here.place)
    return At(here.place, "frame", (here.of, holder.tb_lineno))


def _variable(here: At, name: str, frame: FrameType) -> Place:
    """A variable of a frame that does not run."""
    code, outer = frame.f_code, here.place if here.place.base else None
    called = f"{clean(code.co_name)}()"
    place = Place(clean(name), "local", file=code.co_filename, line=frame.f_lineno, outer=outer)
    if here.inside != "frame" and code.co_flags & SUSPENDABLE_CODE:
        sort = "coroutine" if code.co_flags & inspect.CO_COROUTINE else "generator"
        noun = f"suspended {sort} {called} at {at(code.co_filename, frame.f_lineno)}, local"
        return replace(place, kind="generator", noun=noun, detail=f"held by `{_OUTER}`" if outer else None)
    if here.inside != "frame":
        return replace(place, rest=f"of {called}, whose frame is kept", kind="traceback")
    error, line = here.of
    chain = [f"local `{place.base}` of frame {called}", "traceback"] + [type_name(error)] * (error is not None)
    rest = f"of {called} at {at(code.co_filename, line)}, kept by the traceback"
    rest += (f" of {type_name(error)}" if error is not None else "") + (f" in `{_OUTER}`" if outer else "")
    detail = " < ".join([*chain, _OUTER] if outer else chain)
    return replace(place, rest=rest, kind="traceback", detail=detail, line=line)


def cache_place(wrapper: Any) -> Place:
    """The place of what a `functools.lru_cache` holds."""
    count = LRU_CACHE.cache_info(wrapper).currsize  # type: ignore[attr-defined]
    rest = f"functools.lru_cache, {count} {'entry' if count == 1 else 'entries'}"
    for function in gc.get_referents(wrapper):
        if type(function) is FunctionType:
            file, line = function.__code__.co_filename, function.__code__.co_firstlineno
            name = clean(function.__qualname__.rpartition("<locals>.")[2])
            return Place(name, "cache of", f"({rest}, {at(file, line)})", "cache", file=file, line=line)
    return Place("a function", "cache of", f"({rest})", "cache")


def _post_accumulate_hooks(tensor: Any) -> object:
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.__dict__["_post_accumulate_grad_hooks"].__get__(tensor)


# many places


def merged(found: Iterable[tuple[Place, set[int]]]) -> list[tuple[Place, set[int]]]:
    """Places that differ in one index or key are one: ``outs[0..36]``, ``records[0..9]["loss"]``."""
    bare: dict[Place, int] = {}  # places without their tokens
    together: dict[tuple[Any, ...], set[int]] = {}
    for place, targets in found:
        without, tokens = _split(place)
        together.setdefault((bare.setdefault(without, len(bare)), *tokens), set()).update(targets)
    for position in reversed(range(1, max(map(len, together), default=1))):
        groups: dict[Any, list[tuple[Any, ...]]] = {}
        for key in together:
            one = position < len(key) and key[position] is not None and key[position][0] in ("item", "key")
            alike = (*key[:position], key[position][0], *key[position + 1 :]) if one else key
            groups.setdefault(alike, []).append(key)
        again: dict[tuple[Any, ...], set[int]] = {}
        for keys in groups.values():
            key = keys[0]
            if len(keys) > 1:
                values = dict.fromkeys(value for other in keys for value in other[position][1])
                key = (*key[:position], (key[position][0], tuple(values)), *key[position + 1 :])
            again[key] = set().union(*map(together.__getitem__, keys))
        together = again
    places = list(bare)
    return [(_join(places[key[0]], list(key[1:])), targets) for key, targets in together.items()]


def _split(place: Place) -> tuple[Place, tuple[Token | None, ...]]:
    """A place without its tokens, and the tokens: its own, None, those of the place outside it."""
    if place.outer is None:
        return replace(place, tokens=()), place.tokens
    outer, tokens = _split(place.outer)
    return replace(place, tokens=(), outer=outer), (*place.tokens, None, *tokens)


def _join(place: Place, tokens: list[Any]) -> Place:
    end = tokens.index(None) if None in tokens else len(tokens)
    outer = _join(place.outer, tokens[end + 1 :]) if place.outer is not None else None
    return replace(place, tokens=tuple(tokens[:end]), outer=outer)
