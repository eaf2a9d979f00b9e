"""Reading foreign objects, and going up from them to what refers to them, without running a line of the program's code.

``repr``, ``==``, ``hash``, ``len``, ``isinstance`` and attribute access can all be the program's own functions, a class's too
by its metaclass. So an object is read only by what CPython's collector sees (`gc.get_referents`) and through the descriptors of
the built-in types, and classes are compared by ``is`` and `issubclass` alone.
"""

from __future__ import annotations

import functools
import gc
import heapq
import inspect
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import compress
from typing import Any

import torch
from torch.autograd.graph import Node

from graphkeep._frame import frame_locals

mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
class_dict: Callable[[type], Any] = type.__dict__["__dict__"].__get__
_class_module: Callable[[type], Any] = type.__dict__["__module__"].__get__
module_dict: Callable[[types.ModuleType], dict[str, Any]] = vars(types.ModuleType)["__dict__"].__get__
LRU_CACHE: type = functools._lru_cache_wrapper
SUSPENDABLE = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
SUSPENDABLE_CODE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_EXCEPTION_LINKS = [(name, getattr(BaseException, name).__get__) for name in ("__traceback__", "__context__", "__cause__")]
_is_leaf, _retains_grad, _grad = (torch._C.TensorBase.__dict__[name].__get__ for name in ("is_leaf", "retains_grad", "grad"))

Raw = tuple[str, Any]  # how an object refers to another: the sort of reference, and the index, key or name

# an object's parts


def class_module(cls: Any) -> str:
    """The name of the module that a class says it is from."""
    found = _class_module(cls)
    return found if type(found) is str else ""


def attributes(obj: object) -> dict[str, Any] | None:
    """An instance's own dict."""
    for cls in mro(type(obj)):
        getter = class_dict(cls).get("__dict__")
        if type(getter) is types.GetSetDescriptorType or type(getter) is types.MemberDescriptorType:
            found = getter.__get__(obj)
            return found if issubclass(type(found), dict) else None
    return None


def _members(cls: type) -> list[tuple[str, Any]]:
    """Slots, and what C types show of theirs: ``__self__`` of a bound method, ``args`` of a partial."""
    return [
        (name, member)
        for base in mro(cls)
        for name, member in list(class_dict(base).items())
        if type(member) is types.MemberDescriptorType and type(name) is str and name != "__dict__"
    ]


def _fields(cls: type) -> tuple[Any, ...]:
    """The names of a namedtuple's fields; empty for any other class."""
    found = (class_dict(base).get("_fields") for base in mro(cls))
    return next((names for names in found if type(names) is tuple), ())


def frame_of(obj: object) -> types.FrameType | None:
    """The frame of a suspended generator or coroutine, or the frame itself if it is one's."""
    if type(obj) is types.GeneratorType:
        return obj.gi_frame
    if type(obj) is types.CoroutineType:
        return obj.cr_frame
    if type(obj) is types.AsyncGeneratorType:
        return obj.ag_frame
    return obj if type(obj) is types.FrameType and obj.f_code.co_flags & SUSPENDABLE_CODE else None


def references(holder: object, wanted: Collection[int]) -> dict[int, list[Raw]]:
    """How an object refers to some others, by their ids."""
    found: dict[int, list[Raw]] = {}
    for attempt in range(5):
        found.clear()
        try:
            for part in (_structure, _attributes):
                for sort, key, value in part(holder, attempt > 1):
                    if id(value) in wanted:
                        found.setdefault(id(value), []).append((sort, key))
                if len(found) == len(wanted):
                    break
            break
        except RuntimeError:  # another thread changed it; on the third try it is copied first
            continue
    return {i: found.get(i, [("gap", None)]) for i in wanted}


def _structure(holder: Any, copy: bool) -> Iterator[tuple[str, Any, object]]:
    cls = type(holder)
    if issubclass(cls, dict):
        for key, value in list(dict.items(holder)) if copy else dict.items(holder):
            yield "key", key, value
            yield "in", "a key of", key
    elif issubclass(cls, tuple):
        names = _fields(cls) if cls is not tuple else ()
        for i, value in enumerate(tuple.__iter__(holder)):
            yield ("attr", names[i], value) if i < len(names) else ("item", i, value)
    elif issubclass(cls, (list, deque)):
        members: Any = list.__iter__(holder) if issubclass(cls, list) else deque.__iter__(holder)
        for i, value in enumerate(list(members) if copy else members):
            yield "item", i, value
    elif issubclass(cls, (set, frozenset)):
        for value in gc.get_referents(holder):
            yield "in", "an element of", value
    elif cls is types.FunctionType:
        yield "closure", None, holder.__closure__
        yield "defaults", None, holder.__defaults__
        yield "kwdefaults", None, holder.__kwdefaults__
    elif cls is types.CellType or cls is LRU_CACHE:
        for value in gc.get_referents(holder):
            yield ("cell" if cls is types.CellType else "entry"), None, value
    elif cls is types.TracebackType:
        yield "frame", None, holder.tb_frame
        yield "traceback", None, holder.tb_next
    elif issubclass(cls, (types.FrameType, *SUSPENDABLE)):
        yield from _variables(holder)
    elif issubclass(cls, threading.local):
        for value in gc.get_referents(holder):
            yield "threads", None, value
    elif issubclass(cls, type):
        yield "own", None, gc.get_referents(class_dict(holder))[0]
    elif issubclass(cls, BaseException):
        for name, link in _EXCEPTION_LINKS:
            yield ("traceback" if name == "__traceback__" else "attr"), name, link(holder)
    elif issubclass(cls, torch.Tensor):
        for value in gc.get_referents(holder):
            if issubclass(type(value), Node):
                yield "attr", "grad_fn", value


def _variables(holder: Any) -> Iterator[tuple[str, Any, object]]:
    """The variables of a frame or of a generator, which refers to a frame's values as its own."""
    frame = holder if type(holder) is types.FrameType else frame_of(holder)
    if frame is not holder:
        yield "frame", None, frame
    known = frame_locals(frame) if frame is not None else []
    for name, value in known:
        yield "local", (name, frame), value
    for part in gc.get_referents(holder):
        if type(part) is types.CellType:
            inside = gc.get_referents(part)
            for name, value in known:
                if inside and value is inside[0]:
                    yield "local", (name, frame), part
        elif type(part) is dict and not any(part is value for _, value in known):
            yield "snapshot", None, part  # what somebody's asking for the variables has left


def _attributes(holder: Any, copy: bool) -> Iterator[tuple[str, Any, object]]:
    own = attributes(holder)
    if own is not None:
        yield "own", None, own
        if issubclass(type(holder), torch.Tensor):
            for value in gc.get_referents(holder):
                if issubclass(type(value), dict) and value is not own:
                    yield "hooks", None, value
        for key, value in list(dict.items(own)) if copy else dict.items(own):
            yield "attr", key, value
    for name, member in _members(type(holder)):
        try:
            yield "attr", name, member.__get__(holder)
        except (AttributeError, TypeError):  # a slot that is not set
            continue


def alive(base: type) -> list[Any]:
    """Everything of a class that is alive."""
    classes: dict[int, type] = {id(base): base}
    stack = [base]
    cls: type
    while stack:
        for cls in type.__subclasses__(stack.pop()):
            if id(cls) not in classes:
                classes[id(cls)] = cls
                stack.append(cls)
    heap = gc.get_objects()
    return list(compress(heap, map(classes.__contains__, map(id, map(type, heap)))))


def is_table_of_hooks(obj: Any) -> bool:
    """Whether an object is what `torch.utils.hooks.RemovableHandle` removes hooks from."""
    if not issubclass(type(obj), OrderedDict):
        return False
    return all(type(key) is int and callable(value) for key, value in list(dict.items(obj)))


def gradients(among: Collection[int]) -> list[tuple[torch.Tensor, int]]:
    """The tensors of which some objects, by id, are the gradient, which the collector does not see."""
    found = []
    with torch._C.DisableTorchFunction():
        for tensor in alive(torch.Tensor):
            try:
                gradient = _grad(tensor) if _is_leaf(tensor) or _retains_grad(tensor) else None
            except RuntimeError:  # some wrappers refuse to be asked
                continue
            if gradient is not None and id(gradient) in among:
                found.append((tensor, id(gradient)))
    return found


def state_keys(optimizer: object, among: Collection[int]) -> list[Any]:
    """The parameters under which an optimizer has some objects, by id, in its state."""
    state: Any = (attributes(optimizer) or {}).get("state")
    items = list(dict.items(state)) if issubclass(type(state), dict) else ()
    return [key for key, value in items if id(value) in among and issubclass(type(key), torch.Tensor)]


# going up


class Climb:
    """What leads to some objects, found level by level until names are met.

    Arguments:
        named: whether the program has a name for an object, so that nothing above it need be looked at.
        skipped: whether an object never counts as a holder.
        until: the time of `time.monotonic` at which to stop.

    Attributes:
        objects: every object met, by id. They are held, so that an id stays one object's.
        parents, children: ids of what refers to an object, of those that were looked at; and the other way.
        late: whether time ran out.
    """

    FUNCTION = 20  # cost of a function's name: that it is a hook says more
    _DETOURS = (types.FunctionType, types.CellType, types.FrameType, types.TracebackType, *SUSPENDABLE)
    _DEPTH = 60  # a module inside a module is three references further
    _FEW = 150  # get_referrers compares each reference of the heap with every object; above this a set is faster
    _CHUNK = 64
    _FURTHER = 2  # levels in which a second name is looked for

    def __init__(self, named: Callable[[object], bool], skipped: Callable[[object], bool], until: float) -> None:
        self._named, self._skipped, self._until = named, skipped, until
        self.objects: dict[int, object] = {}
        self.parents: dict[int, list[int]] = {}
        self.children: dict[int, list[int]] = {}
        self._reached: set[int] = set()  # by a name
        self.late = False

    def meet(self, obj: object) -> int:
        """Take an object in; its id."""
        if id(obj) not in self.objects:
            self.objects[id(obj)] = obj
            if self._named(obj):
                self._reach(id(obj))
        return id(obj)

    def expand(self, ids: Iterable[int]) -> None:
        """Find what refers to some objects."""
        wanted = {i for i in ids if i not in self.parents}
        self.parents.update((i, []) for i in wanted)
        for holder in self._referrers(wanted):
            if self._is_late():
                break
            held = dict.fromkeys(i for i in map(id, gc.get_referents(holder)) if i in wanted)
            if held and not self._skipped(holder):
                parent = self.meet(holder)
                self.children.setdefault(parent, []).extend(held)
                for i in held:
                    self.parents[i].append(parent)
                if parent in self._reached:
                    self._reach(parent)

    def up(self, starts: Collection[int]) -> None:
        """Look at what is above some objects, until each is led to by a name or nothing is left."""
        reached_at: dict[int, int] = {}
        for level in range(self._DEPTH):
            for i in starts:
                if i in self._reached:
                    reached_at.setdefault(i, level)
            frontier = self._open(i for i in starts if level <= reached_at.get(i, level) + self._FURTHER)
            if not frontier or self._is_late():
                return
            self.expand(frontier)

    def up_to_hooks(self) -> set[int]:
        """Look at what the functions that were met are hooks on, also of those that have a name; ids of the tables of hooks."""
        functions = [i for i, obj in self.objects.items() if type(obj) is types.FunctionType and i in self.children]
        self.expand(functions)
        parents = {parent for i in functions for parent in self.parents.get(i, ())}
        hooks = {i for i in parents if is_table_of_hooks(self.objects[i])}
        self.up(hooks)
        return hooks

    def cheapest(self, sources: dict[int, int], hooks: Collection[int]) -> tuple[dict[int, int], dict[int, int | None]]:
        """The cheapest way to every object from some that have costs of their own: the cost, and the object before it."""
        cost: dict[int, int] = {}
        before: dict[int, int | None] = {}
        queue: list[tuple[int, int, int, int | None]] = [(c, n, i, None) for n, (i, c) in enumerate(sources.items())]
        heapq.heapify(queue)
        pushed = len(queue)  # of two ways that cost the same, the one met first
        while queue:
            so_far, _, i, previous = heapq.heappop(queue)
            if i in cost:
                continue
            cost[i], before[i] = so_far, previous
            step = 3 if issubclass(type(self.objects[i]), self._DETOURS) else 1
            for child in self.children.get(i, ()):
                if child not in cost:
                    pushed += 1
                    function = type(self.objects[child]) is types.FunctionType and i not in hooks
                    heapq.heappush(queue, (so_far + step + self.FUNCTION * function, pushed, child, i))
        return cost, before

    def _open(self, starts: Iterable[int]) -> list[int]:
        """What was not looked at yet and may lead from a name to a start."""
        seen = set(starts)
        stack = list(seen)
        frontier = []
        while stack:
            i = stack.pop()
            if i not in self.parents:
                frontier.append(i)
            above = {p for p in self.parents.get(i, ()) if p not in seen and p not in self._reached}
            seen |= above
            stack += above
        return frontier

    def _reach(self, i: int) -> None:
        self._reached.add(i)
        stack = [i]
        while stack:
            new = [child for child in self.children.get(stack.pop(), ()) if child not in self._reached]
            self._reached.update(new)
            stack += new

    def _is_late(self) -> bool:
        self.late = self.late or time.monotonic() > self._until
        return self.late

    def _referrers(self, wanted: set[int]) -> list[object]:
        """What refers to any of some objects: of everything that the collector knows, not of the frames that run."""
        if not wanted or self._is_late():
            return []
        objects = tuple(map(self.objects.__getitem__, wanted))
        ours = {id(self.objects), id(objects)}
        if len(objects) <= self._FEW:
            return [o for o in gc.get_referrers(*objects) if id(o) not in ours]
        found: list[object] = []
        heap = gc.get_objects()  # no cell may hold it: it lists that cell, and would never be freed
        refers, clear = gc.get_referents, wanted.isdisjoint
        for start in range(0, len(heap), self._CHUNK):
            chunk = heap[start : start + self._CHUNK]
            if not clear(map(id, refers(*chunk))):
                found += [o for o in chunk if not clear(map(id, refers(o)))]
            if start % (self._CHUNK * 256) == 0 and self._is_late():
                break
        ours.add(id(heap))
        return [o for o in found if id(o) not in ours]


def search_up(start: int, parents: dict[int, list[int]], to: int | None = None) -> dict[int, int]:
    """What leads to an object, the nearest first, each with what it leads there by; up to a number, or to one object."""
    found: dict[int, int] = {} if to is not None else {start: start}
    queue = deque([start])
    while queue and len(found) < 1000 and to not in found:  # noqa: PLR2004
        i = queue.popleft()
        new = {parent: i for parent in parents.get(i, ()) if parent not in found}
        found.update(new)
        queue += new
    return found
