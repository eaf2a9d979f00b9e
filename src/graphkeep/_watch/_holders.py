"""Who holds some objects in the program, as the program names it.

First everything that refers to the objects is found, then what leads to that, up to the names a program has: the variables of
running functions, the globals of modules, classes (`_referrers`). Each way is then written down (`_names`).
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
from typing import Any

import torch
from torch import nn

from graphkeep._frame import frame_locals
from graphkeep._watch import _referrers
from graphkeep._watch._names import At, Place, at, cache_place, class_name, clean, is_library, merged, step, type_name
from graphkeep._watch._referrers import LRU_CACHE, SUSPENDABLE, Climb, Raw, attributes, class_module

_LIBRARY = 4  # cost of a name in a library
_BORROWED = 1_000  # of a name that is not where a thing lives: `self` in a method that runs
_NAMELESS = 2_000
_UNHELD = "held only by an expression being evaluated, or by C code"
_FAR = "far from any name"
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PLAIN = (dict, list, tuple, CellType, FunctionType, MethodType)
_PARTS = ("own", "closure", "defaults", "kwdefaults", "hooks", "table")  # what is no container for the program
_NUMBERED = re.compile(r"_+\d*")  # what IPython calls the last outputs
_OWN = __name__.partition(".")[0]
_Found = list[tuple[int, Place, set[int]]]  # cost, place, and the indices of the targets there


@dataclass(frozen=True)
class Holder:
    """What in the program keeps an object alive.

    Attributes:
        what: all of it, for people: "local `total_loss` in train() at train.py:27".
        name: the expression alone, as the program writes it: ``total_loss``, ``outs[0..36]``. Where none leads all the way (to
            what a closure, a generator, a traceback has), that of the last part.
        kind: local, global, attribute, element, closure, default, cache, generator, traceback, hook, grad, optimizer, cycle,
            unknown.
        file, line: where the name lives, as far as is known; of a local, where its frame is.
        targets: which of the given objects it keeps, as indices.
        detail: for what no expression leads to, the way to it.
    """

    what: str
    name: str
    kind: str
    file: str | None
    line: int | None
    targets: tuple[int, ...]
    detail: str | None = None


def find(
    targets: Sequence[object], *, ignore: Container[int] = (), seconds: float = 2.0, ended: BaseException | None = None
) -> list[Holder]:
    """Who holds some objects, other than weakly and other than graphkeep and its callers.

    Runs no code of the program's, and leaves nothing behind. An object that nothing in Python refers to has no holder here.

    Arguments:
        targets: tensors, nodes, modules. What one container holds of them is one holder.
        ignore: ids of objects that never count as holders.
        seconds: when to stop looking. The last holder then says so; its kind is ``unknown``.
        ended: an exception that ends the program: the functions it came through count as running.
    """
    collecting = gc.isenabled()
    gc.disable()  # it would run again and again for what is looked at here, and run the program's finalizers
    try:
        return _Search(targets, ignore, seconds, ended).holders()
    finally:
        if collecting:
            gc.enable()


# names that the program has


class _Names:
    """The globals of modules, and the variables of the functions that run in any thread."""

    def __init__(self, ended: BaseException | None) -> None:
        self.spaces: dict[int, Place] = {}  # by the dict's id; the base is what stands before a global's name
        self.locals: dict[int, list[Place]] = {}  # by the value's id, the outermost frame first
        self.borrowed: dict[int, Place] = {}  # `self`, and what a function has from the function around it
        self._own: set[int] = set()  # ids of graphkeep's namespaces
        self._held_by_own: set[int] = set()
        self._frames: dict[int, FrameType] = {}
        for name, module in list(dict.items(sys.modules)):
            if type(name) is str and issubclass(type(module), ModuleType):
                self._add_space(_referrers.module_dict(module), name)
        handled = [sys.exc_info()[1], *sys._current_exceptions().values()]
        self._handled = {id(error[1] if type(error) is tuple else error) for error in handled if error is not None}
        innermost = sys._current_frames()
        del innermost[threading.get_ident()]  # a variable that leads to its own frame is a cycle
        for frame in (sys._getframe(1), *innermost.values()):
            self._add_frames(_up(frame))
        traceback = ended.__traceback__ if ended is not None else None
        self._add_frames([one.tb_frame for one in _along(traceback)][::-1])

    def _add_space(self, space: Any, name: str | None, file: str | None = None) -> None:
        if id(space) in self.spaces or not issubclass(type(space), dict):
            return
        told, called = dict.get(space, "__file__"), dict.get(space, "__name__")
        file = told if type(told) is str else file
        name = name or (called if type(called) is str else "a namespace")
        if name.partition(".")[0] == _OWN:
            self._own.add(id(space))
        if name != "__main__" and is_library(file):
            self.spaces[id(space)] = Place(f"{clean(name)}.", "global", "", "global", file=file)
        else:
            short = os.path.basename(file) if file else name
            rest = f"of {clean(name if short == '__init__.py' else short)}"
            self.spaces[id(space)] = Place("", "global", rest, "global", file=file)

    def _add_frames(self, frames: Iterable[FrameType]) -> None:
        """Take in frames of one thread, the innermost first."""
        stack = []
        for frame in frames:
            if id(frame.f_globals) in self._own:
                self._held_by_own.update(id(value) for _, value in frame_locals(frame))
            else:
                stack.append(frame)
        for frame in reversed(stack):
            self._frames[id(frame)] = frame
            code = frame.f_code
            self._add_space(frame.f_globals, None, code.co_filename)
            rest = f"in {clean(code.co_name)}() at {at(code.co_filename, frame.f_lineno)}"
            for name, value in frame_locals(frame):
                if type(name) is str and name.isidentifier():
                    place = Place(clean(name), "local", rest, "local", file=code.co_filename, line=frame.f_lineno)
                    if name in ("self", "cls") or name in code.co_freevars:
                        self.borrowed.setdefault(id(value), place)
                    else:
                        self.locals.setdefault(id(value), []).append(place)

    def is_space(self, obj: object) -> bool:
        """Whether an object is the globals of some module, also of one that sys.modules has no more."""
        if id(obj) not in self.spaces and type(obj) is dict and "__builtins__" in obj and "__name__" in obj:
            self._add_space(obj, None)
        return id(obj) in self.spaces

    def named(self, obj: object) -> bool:
        return id(obj) in self.locals or self.is_root(obj)

    def is_root(self, obj: object) -> bool:
        """Whether an object is called something by itself, whatever refers to it."""
        return issubclass(type(obj), type) or type(obj) is LRU_CACHE or self.is_space(obj)

    def skipped(self, obj: object) -> bool:
        """Whether an object is graphkeep's own, or a frame that runs: its variables are looked at apart."""
        if type(obj) is FunctionType:
            return id(obj.__globals__) in self._own
        if issubclass(type(obj), type):
            return class_module(obj).partition(".")[0] == _OWN
        frame = obj if type(obj) is FrameType else _referrers.frame_of(obj)
        return id(obj) in self._own or id(obj) in self._frames or (frame is not None and id(frame.f_globals) in self._own)

    def source(self, obj: object, top: str | None) -> tuple[int, At] | None:
        """What the program calls an object by itself, and at what cost; None if only by what refers to it, unless at a top."""
        cls, i = type(obj), id(obj)
        if self.is_space(obj):
            return _LIBRARY * bool(self.spaces[i].base), At(self.spaces[i], "namespace", obj)
        if cls is LRU_CACHE:
            return 0, At(cache_place(obj))
        if issubclass(cls, type):
            return self._class_source(obj)
        if i in self.locals:
            place = self.locals[i][0]
            return 1 + _LIBRARY * is_library(place.file) + Climb.FUNCTION * (cls is FunctionType), At(place)
        if i in self.borrowed:
            return _BORROWED, At(self.borrowed[i])
        if issubclass(cls, SUSPENDABLE) or i in self._handled:
            return _BORROWED, At(Place("sys.exc_info()[1]" if i in self._handled else ""))
        if issubclass(cls, torch.autograd.function.BackwardCFunction):
            return _BORROWED, At(Place("ctx", "ctx", f"of custom function {type_name(obj).removesuffix('Backward')}", "ctx"))
        if top and _referrers.is_table_of_hooks(obj):
            return _BORROWED, At(Place(""), "hooks", None, "hook")
        if top and i not in self._held_by_own:
            if issubclass(cls, (FunctionType, FrameType, BaseException)):
                return _NAMELESS, At(Place(""))
            return _NAMELESS, At(Place("…", "", top, "unknown"))
        return None

    def _class_source(self, cls: Any) -> tuple[int, At]:
        name, module = class_name(cls), class_module(cls)
        space = self.spaces.get(id(attributes(sys.modules.get(module))))
        if space is not None and not space.base:
            rest = space.rest.replace("of ", "in ", 1)
            return 0, At(Place(name, "class attribute", rest, "class", file=space.file))
        return _LIBRARY, At(Place(f"{module}.{name}" if module else name, "class attribute", "", "class"))


def _up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _along(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


# the search


class _Search:
    def __init__(self, targets: Sequence[object], ignore: Container[int], seconds: float, ended: BaseException | None) -> None:
        self._targets = list(targets)
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._names = names = _Names(ended)
        mine = (id(targets), id(self._targets))
        skipped = lambda obj: id(obj) in ignore or id(obj) in mine or names.skipped(obj)  # noqa: E731
        self._climb = Climb(names.named, skipped, self._until)
        self._index: dict[int, list[int]] = {}
        for n, target in enumerate(self._targets):
            self._index.setdefault(self._climb.meet(target), []).append(n)
        self._tables: set[int] = set()  # of modules' parameters
        self._labels: dict[int, str] = {}  # of keys that are parameters
        self._cost: dict[int, int] = {}
        self._before: dict[int, int | None] = {}
        self._at: dict[int, At] = {}
        self._refers: dict[int, dict[int, list[Raw]]] = {}

    def holders(self) -> list[Holder]:
        climb = self._climb
        climb.expand(self._index)
        starts = list(dict.fromkeys(parent for i in self._index for parent in climb.parents.get(i, ())))
        climb.up([i for i in starts if not self._names.is_root(climb.objects[i])])
        hooks = climb.up_to_hooks()
        tensors = not climb.late and any(issubclass(type(target), torch.Tensor) for target in self._targets)
        grads = {climb.meet(tensor): i for tensor, i in (_referrers.gradients(self._index) if tensors else ())}
        optimizers = [obj for obj in climb.objects.values() if issubclass(type(obj), torch.optim.Optimizer)]
        parameters = [climb.meet(key) for obj in optimizers for key in _referrers.state_keys(obj, climb.objects)]
        self._climb_to_parameters([*grads, *parameters])
        self._weigh(hooks)
        for i in parameters:
            place = self._parameter(i)
            self._labels[i] = "<Parameter>" if place is None else place.name
        found = [*self._variables(), *self._grad_places(grads)]
        until = max(self._until, time.monotonic() + self._seconds / 4)
        for i in starts:
            if time.monotonic() > until:
                climb.late = True
                break
            found += self._held_by(i)
        named = set().union(*(held for cost, _, held in found if cost < _NAMELESS))
        found = [(cost, place, held) for cost, place, held in found if cost < _NAMELESS or not held <= named]
        found.sort(key=lambda entry: (entry[0], min(entry[2])))
        holders = [
            Holder(place.what, place.name, place.full_kind, place.file, place.line, tuple(sorted(held)), place.full_detail)
            for place, held in merged((place, held) for _, place, held in found)
        ]
        if climb.late:
            missing = set(range(len(self._targets))).difference(*(holder.targets for holder in holders))
            text = f"the search was stopped after {self._seconds:g} s"
            holders.append(Holder(text, "", "unknown", None, None, tuple(sorted(missing))))
        return holders

    def _weigh(self, hooks: set[int]) -> None:
        """The best way from a name to every object that was met."""
        climb, sources = self._climb, {}
        for i, obj in climb.objects.items():
            above = climb.parents.get(i)
            top = _UNHELD if above == [] else _FAR if above is None and not climb.late else None
            source = self._names.source(obj, top)
            if source is not None:
                sources[i] = source
        self._cost, self._before = climb.cheapest({i: cost for i, (cost, _) in sources.items()}, hooks)
        self._at = {i: here for i, (_, here) in sources.items() if self._before[i] is None}

    # where an object is

    def _place_of(self, i: int) -> At:
        """Where the program has an object, by the best way."""
        way = [i]
        while way[-1] not in self._at:
            before = self._before[way[-1]]
            assert before is not None
            way.append(before)
        while len(way) > 1:
            holder = way.pop()
            self._at[way[-1]] = self._step(self._at[holder], holder, way[-1])
        return self._at[i]

    def _step(self, here: At, holder: int, child: int, raw: Raw | None = None) -> At:
        raw = raw or min(self._raws(holder, child), key=_preference)
        return step(here, self._climb.objects[holder], self._climb.objects[child], raw, self._labels)

    def _raws(self, holder: int, child: int) -> list[Raw]:
        """How an object refers to another. Asked once for all, since finding an index means going through a list."""
        if holder not in self._refers:
            self._refers[holder] = _referrers.references(self._climb.objects[holder], set(self._climb.children[holder]))
        return self._refers[holder][child]

    def _ways(self, i: int) -> list[tuple[int, At]]:
        """The one or two best ways to what holds targets, with their costs."""
        here = self._place_of(i)
        if here.inside == "snapshot":
            return []
        ways = [(self._cost[i], here)]
        plain = issubclass(type(self._climb.objects[i]), _CONTAINERS) and here.inside not in _PARTS
        if plain and self._cost[i] < _BORROWED and here.place.base != "Out":
            others = [p for p in self._climb.parents.get(i, ()) if p != self._before[i] and self._leads(p, i)]
            for parent in sorted(others, key=self._cost.__getitem__)[:1]:
                ways.append((self._cost[parent] + 1, self._step(self._place_of(parent), parent, i)))
        return ways

    def _leads(self, parent: int, i: int) -> bool:
        """Whether an object has a name of its own, not by way of what it refers to."""
        if self._cost.get(parent, _BORROWED) >= _BORROWED:
            return False
        node: int | None = parent
        while node is not None and node != i:
            node = self._before[node]
        return node is None and self._place_of(parent).inside != "snapshot"

    # what is held

    def _variables(self) -> _Found:
        found: _Found = []
        for i, held in self._index.items():
            places = self._names.locals.get(i, [])
            if not places and not self._climb.parents.get(i) and i in self._names.borrowed:
                places = [self._names.borrowed[i]]
            found += [(0, place, set(held)) for place in places]
        return found

    def _held_by(self, i: int) -> _Found:
        """Places of the targets that an object refers to."""
        ways = self._ways(i) if i in self._cost else self._cycle(i)
        repeated = self._in_out(i)
        return [
            (cost, self._step(here, i, child, raw).place, set(self._index[child]))
            for child in (dict.fromkeys(self._climb.children[i]) if ways else ())
            if child in self._index
            for raw in self._raws(i, child)
            if not (child in repeated and type(raw[1]) is str and _NUMBERED.fullmatch(raw[1]))
            for cost, here in ways
        ]

    def _in_out(self, i: int) -> set[int]:
        """Ids of what IPython's ``Out`` has, whose names ``_`` and ``_3`` in the same globals say nothing more."""
        space: Any = self._climb.objects[i]
        out = dict.get(space, "Out") if i in self._names.spaces else None
        return set(map(id, dict.values(out))) if type(out) is dict else set()

    def _cycle(self, i: int) -> list[tuple[int, At]]:
        """The way to an object from a cycle that keeps itself alive; empty if there is none."""
        parents, objects = self._climb.parents, self._climb.objects
        below = _referrers.search_up(i, parents)
        for top in sorted(below, key=lambda n: issubclass(type(objects[n]), _PLAIN))[:100]:  # stable: else the nearest first
            around = _referrers.search_up(top, parents, to=top)
            if top not in around:
                continue
            place = Place(type_name(objects[top]), kind="cycle")
            here, node, pieces = At(place), top, [place.base]
            while True:
                here, node = self._step(here, node, around[node]), around[node]
                if (here.place.base, here.place.noun) != (place.base, place.noun):
                    pieces += [*place.written, f"{here.place.noun} `{here.place.base}`"]
                place = here.place
                if node == top:
                    break
            text = " → ".join([*pieces, *place.written, pieces[0]])
            here = At(Place(pieces[0], "cycle:", text, "cycle", detail=f"cycle: {text}"))
            while node != i:
                here, node = self._step(here, node, below[node]), below[node]
            return [(_BORROWED, here)]
        return []

    # parameters

    def _climb_to_parameters(self, ids: list[int]) -> None:
        """Find what leads to some parameters: modules' tables, which give the best names, or else anything."""
        if ids:
            self._tables = {id((attributes(module) or {}).get("_parameters")) for module in _referrers.alive(nn.Module)}
            climb = self._climb
            climb.expand(ids)
            parents = {p for i in ids for p in climb.parents.get(i, ()) if not self._names.is_root(climb.objects[p])}
            climb.up((parents & self._tables) or parents)

    def _parameter(self, i: int) -> Place | None:
        tables = [p for p in self._climb.parents.get(i, ()) if p in self._tables and p in self._cost]
        if tables:
            table = min(tables, key=self._cost.__getitem__)
            return self._step(self._place_of(table), table, i).place
        return self._place_of(i).place if i in self._cost else None

    def _grad_places(self, grads: dict[int, int]) -> _Found:
        found: _Found = []
        for i, gradient in grads.items():
            place = self._parameter(i)
            known = place is not None and place.kind != "unknown"
            place = place.to("attr", "grad") if place and known else Place(".grad", "", "of a tensor that no name leads to")
            found.append((0, replace(place, kind="grad"), set(self._index[gradient])))
        return found


def _preference(raw: Raw) -> tuple[bool, bool]:
    return raw[0] in ("in", "gap"), type(raw[1]) is str and raw[1].startswith("_")
