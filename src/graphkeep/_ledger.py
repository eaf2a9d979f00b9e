"""The ledger: the one pair of saved-tensor hooks, and what becomes of each saved tensor.

While somebody listens, every tensor that autograd saves becomes an `Entry`, and the node holds only the entry. A backward asks
the entry for the tensor; when the node lets go (a backward without ``retain_graph`` has run it, or its last reference went),
the entry dies, and that death is an event.

What torch does no more under saved-tensor hooks is done here, so that the program runs as before:

* *Versions.* torch skips its check that a saved tensor was not changed in place; `_unpack` makes it, in torch's own words.
* *Cycles.* An entry that held a saved output itself would close a cycle through C++ that no collector sees, hence ``detach()``.
  Inputs are held themselves, as torch does, so that they live as long, and ``p.data = ...`` reaches a waiting backward.
* *Custom functions* find in ``ctx.saved_tensors`` the very objects that they saved (Megatron reads ``weight.main_grad`` off
  them). Under hooks they would not, so hooks are taken off while such a function runs.
* *Threads.* Hooks belong to one thread; threads that the program starts get them as well.
* *Others' hooks.* torch runs only the innermost pair. One that is active already stays the innermost (`save_on_cpu` goes on
  saving on the CPU), and what it packs is hidden from the ledger. Contexts may be left in any order.
* *torch.func*, which refuses to run under hooks, finds none: they are taken off and come back after it.

https://docs.pytorch.org/tutorials/intermediate/autograd_saved_tensors_hooks_tutorial.html
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import _C
from torch._C import _autograd as _hooks

from graphkeep import _engine, _graph, _saved
from graphkeep._eager import eager
from graphkeep._errors import BudgetError, programs_own
from graphkeep._patch import Patch

_new: Callable[[type[Entry]], Entry] = object.__new__
_numbers = itertools.count(1)
_sequence_number: Callable[[], int] = _hooks._get_sequence_nr
_trace, _profile = sys.gettrace, sys.getprofile
_is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = getattr(_C, "_is_alias_of")  # noqa: B009 not in the stubs
_hooks_enabled: Callable[[], bool] = getattr(_hooks, "_saved_tensors_hooks_is_enabled")  # noqa: B009
_running: Callable[[], int] = _C._current_graph_task_id
_function_modes: Callable[[], int] = _C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
_HAS_TOP = hasattr(_hooks, "_top_saved_tensors_default_hooks")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Entry(_saved.Packed):
    """One saved tensor: what a node holds instead of it.

    Attributes:
        tensor: the tensor (a leaf) or its `detach()`; None once released.
        version: its version when it was saved.
        source: whoever can bring the tensor back once it was dropped.
        number: entries are numbered in the order in which they are made, over all threads; 0 for a view of a parameter.
        node: the sequence number of the node that saved it.
        mark: whatever the listener puts there.
        used: the number of the last call of the engine that asked for it.
        view: whether it is a view with a history.
    """

    __slots__ = ("mark", "node", "number", "source", "used", "version", "view")
    source: Any
    version: int
    number: int
    node: int
    used: int
    view: bool
    mark: Any

    def released(self) -> None:
        if self.number:
            _died(self)
        self.source = None

    def __del__(self) -> None:
        if self.number and self.tombstone is None and LEDGER.listeners:
            try:
                _died(self)
            except RecursionError as error:  # no room for a call on the stack: whoever listens has lost count
                LEDGER.faults += [(listener, error) for listener in LEDGER.listeners]
                LEDGER.listeners = ()


class Call:
    """One call of the engine: a backward or a grad.

    Attributes:
        number: calls are numbered from 1.
        retain_graph, create_graph: as they were given.
    """

    __slots__ = ("create_graph", "mark", "number", "outputs", "retain_graph")

    def __init__(self, number: int, outputs: Any, retain_graph: bool, create_graph: bool) -> None:
        self.number = number
        self.outputs = outputs
        self.retain_graph = retain_graph
        self.create_graph = create_graph
        self.mark: Any = None


class Listener(Protocol):
    """Who joins the ledger. Every method is called in the thread in which the thing happens.

    Those that run for saved tensors may raise, and ``failed`` is told; `BudgetError` reaches the program. ``begins``, ``ends``,
    ``enter`` and ``exit`` must not raise.
    """

    def saved(self, entry: Entry) -> None:
        """An entry has been made, for something else than a view of a parameter."""

    def died(self, entry: Entry, call: Call | None) -> None:
        """A node let go of an entry: inside a call of the engine, or by reference count."""

    def failed(self, error: Exception) -> None:
        """A method that runs for saved tensors raised. Called soon after, and only once."""

    def begins(self, call: Call) -> None:
        """The engine is about to run."""

    def ends(self, call: Call, error: BaseException | None) -> None:
        """It has run, or raised."""

    def used(self, entry: Entry) -> None:
        """A node that runs has asked for its entry for the first time."""

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        """An entry was asked for that an earlier call had asked for, too."""


class Companion:
    """A listener that is told more."""

    def applied(self, args: Any, outputs: Any) -> None:
        """A custom `Function` has run; what it saved made no entries."""

    def enter(self) -> None:
        """A thread begins."""

    def exit(self) -> None:
        """It ends."""


class Mismatch:
    """What the last version error in a thread was about; for the post-mortem."""

    __slots__ = ("entry", "op", "version")

    def __init__(self, entry: Entry, op: str | None, version: int) -> None:
        self.entry = entry
        self.op = op
        self.version = version


class _Thread(threading.local):
    pushed = False  # our pair is somewhere on this thread's stack
    aside = False  # it was taken off for torch.func
    modes = 0  # dispatch modes of listeners
    mismatch: Mismatch | None = None

    def __init__(self) -> None:
        # torch 2.6 does not tell what is on its stack, so it is written down here (what was there before: unknown hooks)
        self.stack: list[Any] = [] if _HAS_TOP or not _packs() else [(None, None)]


def _packs() -> bool:
    """Whether saved-tensor hooks are active in this thread."""
    with torch.enable_grad():
        probe: Any = torch.zeros((), requires_grad=True).sin().grad_fn
    try:
        probe._raw_saved_self.register_hooks(lambda tensor: tensor, lambda tensor: tensor)
    except RuntimeError:
        return True
    return False


class Ledger:
    """The saved tensors of every graph that is built while somebody listens."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self.active: list[Call] = []
        self._thread = _Thread()
        self._patched: list[tuple[Patch, int]] = []
        self._holding = 0  # threads that have our pair
        self.faults: list[tuple[Listener, Exception]] = []
        self._call_numbers = itertools.count(1)
        self._lock = threading.RLock()

    # listeners ------------------------------------------------------------------------------------------------------------

    def join(self, listener: Listener) -> None:
        """Start to listen. The first listener installs the hooks."""
        with self._lock:
            self.listeners = (*self.listeners, listener)
            if not self._patched:
                if _top() is None:
                    _words()
                    _measure_fresh()
                self._patched = [
                    (_engine.calls, _engine.calls.add(self._around)),
                    *((patch, patch.add(None)) for patch in (_disable, _enable, _push, _pop, _start, _apply)),
                ]
        self.push()

    def leave(self, listener: Listener) -> Exception | None:
        """Stop to listen. With the last listener hooks and patches go; leaving twice does nothing.

        Returns:
            What the listener raised, if it has not been told.
        """
        with self._lock:
            self.listeners = tuple(other for other in self.listeners if other is not listener)
            untold = [error for other, error in self.faults if other is listener]
            self.faults = [fault for fault in self.faults if fault[0] is not listener]
            self.settle()
        return untold[0] if untold else None

    def settle(self) -> None:
        """Take off what is left when nobody listens: hooks in this thread now, and the patches once no thread has any."""
        if not self.listeners:
            self.pull()
            if not self._holding and self._patched:
                patched, self._patched = self._patched, []
                for patch, number in patched:
                    patch.remove(number)

    @property
    def mismatch(self) -> Mismatch | None:
        return self._thread.mismatch

    # hooks of this thread -------------------------------------------------------------------------------------------------

    def push(self) -> None:
        """Put our pair on this thread's stack, unless somebody's is active or hooks are disabled."""
        # the stack is asked and not a flag: what is done to it in a hook of a backward is undone when the engine returns
        if self.listeners and _top() is None and _hooks_enabled():
            _push.original(_pack, _unpack)
            self._thread.stack.append((_pack, _unpack))
            self._hold(True)

    def pull(self) -> bool:
        """Take it off, if it is the innermost. In another place it takes itself off as soon as it can."""
        if _is_ours(_top()):
            _pop_one()
            self._hold(False)
            return True
        return False

    def has_mode(self, more: int) -> None:
        """A listener has put a dispatch mode of its own on this thread's stack (1), or taken it off (-1)."""
        self._thread.modes += more

    def _hold(self, pushed: bool) -> None:
        self._holding += pushed - self._thread.pushed
        self._thread.pushed = pushed

    # events ---------------------------------------------------------------------------------------------------------------

    def _around(
        self,
        proceed: Callable[..., Any],
        outputs: Any,
        grads: Any = None,
        keep: Any = False,
        create: Any = False,
        *args: Any,
        **kw: Any,
    ) -> Any:
        self.deliver()
        self.push()
        call = Call(next(self._call_numbers), outputs, bool(keep), bool(create))
        listeners = self.listeners
        self._thread.mismatch = None
        for listener in listeners:
            listener.begins(call)
        self.active.append(call)
        error: BaseException | None = None
        try:
            return proceed(outputs, grads, keep, create, *args, **kw)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.active.remove(call)
            for listener in listeners:
                listener.ends(call, error)
            call.outputs = self._thread.mismatch = error = None
            self.deliver()
            self.push()
            self.settle()

    def fault(self, listener: Listener, error: Exception) -> None:
        """A listener raised on the way of a saved tensor: it hears of no more of them, and is told when there is room to."""
        self.listeners = tuple([other for other in self.listeners if other is not listener])
        self.faults.append((listener, error))

    def deliver(self) -> None:
        """Tell listeners of their own faults, from a place that is neither in a forward nor in a destructor."""
        while self.faults:
            listener, error = self.faults.pop()
            listener.failed(error)


LEDGER = Ledger()


def _died(entry: Entry) -> None:
    call = LEDGER.active[-1] if LEDGER.active and _running() != -1 else None
    for listener in LEDGER.listeners:
        try:
            listener.died(entry, call)
        except Exception as error:  # a listener's fault is not the program's
            LEDGER.fault(listener, error)


def last_number() -> int:
    """The number of the last entry that was made; the next one has a higher one."""
    return next(_numbers)


@eager
def _pack(tensor: torch.Tensor) -> Entry:
    modes = _dispatch_modes()
    if (
        type(tensor) not in _PLAIN
        or _function_modes()
        or (modes and modes > LEDGER._thread.modes)
        or _trace() is not None
        or _profile() is not None
    ):
        # function modes and subclasses of the program's must not see what is done here. Dispatch modes see the `detach` of an
        # output, as they do in torch
        with _C.DisableTorchFunction():
            node: Any = tensor.grad_fn
            return _enter(tensor, node is not None and node._sequence_nr() + 1 == _sequence_number())
    return _enter(tensor)


def _enter(tensor: torch.Tensor, is_output: bool | None = None) -> Entry:
    # no __init__: this runs once for every tensor that is saved, and a call costs as much as all these lines
    entry = _new(Entry)
    entry.number = 0  # first of all: until then it must not be mourned
    entry.tombstone = None
    entry.used = 0
    entry.view = False
    entry.source = None
    entry.version = tensor._version
    entry.node = _sequence_number() - 1
    entry.mark = None
    if tensor.is_leaf:
        entry.tensor = tensor
    else:
        # torch holds an input itself and of an output the data alone. An output that is being saved is new, so that nobody but
        # C++ and this call holds its Python object; one that an in-place op made is not, and has another version than 0. To ask
        # the tensor for its node would tell as well, but a node that has been looked at is freed recursively (see `_deep`). In
        # doubt it counts as an output
        if is_output is None:
            is_output = entry.version != 0 or sys.getrefcount(tensor) < _fresh + 2
        entry.tensor = _detach(tensor) if is_output else tensor
        base = tensor._base
        entry.view = base is not None
        if base is not None and base.is_leaf and base.requires_grad:
            return entry  # `Linear` saves ``W.t()``, and its input besides: one of them is enough to hear of
    entry.number = next(_numbers)
    refused: BudgetError | None = None
    for listener in LEDGER.listeners:
        try:
            listener.saved(entry)
        except BudgetError as error:
            refused = error
        except Exception as error:  # a listener's fault is not the program's
            if programs_own(error):
                raise
            LEDGER.fault(listener, error)
    if refused is not None:
        raise refused
    if entry.source is not None and not entry.source.held:  # now that everybody has seen the tensor
        entry.tensor = None
    if not LEDGER.listeners:  # everybody has left, from another thread or under somebody else's hooks
        LEDGER.settle()
    return entry


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    modes = _dispatch_modes()
    if modes and modes <= LEDGER._thread.modes and type(tensor) in _PLAIN:  # a listener's own need not see it
        with _C._ExcludeDispatchKeyGuard(_BY_MODES):
            return tensor.detach()
    return tensor.detach()


_BY_MODES: Any = _C.DispatchKeySet(_C.DispatchKey.Python) | _C.DispatchKeySet(_C.DispatchKey.PythonTLSSnapshot)
_fresh = 1 << 30  # the reference count that `_enter` sees of a tensor that nobody else holds; none is an input until measured


def _measure_fresh() -> None:
    """Find it out: it depends on the versions of Python and torch."""
    global _fresh  # noqa: PLW0603
    if _fresh == 1 << 30:
        counts: list[int] = []
        pack = _counting(counts)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
            torch.zeros((), requires_grad=True).exp()
        _fresh = counts[0]


def _counting(counts: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    # as deep in calls as `_pack` and `_enter`, since every call counts
    def enter(tensor: torch.Tensor) -> torch.Tensor:
        counts.append(sys.getrefcount(tensor))
        return tensor.detach()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return enter(tensor)

    return pack


@eager
def _unpack(entry: Entry) -> torch.Tensor:
    if _saved.probe is not None:  # only who the entry is was asked
        _saved.probe.append(entry)
    tensor: Any = entry.tensor
    if type(tensor) not in _PLAIN or _function_modes():
        if entry.tombstone is not None:
            raise entry.tombstone.error()
        if tensor is None:
            tensor = entry.source.bring(entry)
            entry.version = tensor._version
        with _C.DisableTorchFunction():
            _check(entry, tensor)
    elif tensor._version != entry.version:
        raise _changed(entry, tensor)
    active = LEDGER.active
    if active:
        number = active[-1].number
        if entry.used != number:
            for listener in LEDGER.listeners:
                try:
                    if entry.used:
                        listener.reused(entry, entry.used, active[-1])
                    else:
                        listener.used(entry)
                except Exception as error:  # a listener's fault is not the program's
                    if programs_own(error):
                        raise
                    LEDGER.fault(listener, error)
            entry.used = number
    return tensor


def _check(entry: Entry, tensor: torch.Tensor) -> None:
    if tensor._version != entry.version:
        raise _changed(entry, tensor)


def _changed(entry: Entry, tensor: torch.Tensor, version: int | None = None) -> RuntimeError:
    """Make the error that torch raises here, in the words of `SavedVariable::unpack`."""
    version = tensor._version if version is None else version
    running: Any = _C._current_autograd_node()
    original = _look_alike(tensor)
    made_by, number = (None, 0) if original is None else (original.grad_fn, original.output_nr)
    if made_by is not None and _leads_to(made_by, running, version - entry.version):
        made_by = running  # a saved output: torch names the node that holds it
    shape = tensor._nested_tensor_size() if tensor.is_nested else list(tensor.shape)
    text = "one of the variables needed for gradient computation has been modified by an inplace operation: "
    text += f"[{tensor.type()} {shape}]"
    strip, hint = _words()
    if made_by is not None:
        text += _output_of(made_by.name(), number, strip)
    elif entry.view:
        text += _output_of("AsStridedBackward0", 0, strip)  # a view that no name holds, ``W.t()``: torch makes its node anew
    text += f" is at version {version}; expected version {entry.version} instead."
    if not torch.is_anomaly_enabled():
        text += hint
    elif made_by is not None:
        text += (
            " Hint: the backtrace further above shows the operation that failed to compute its gradient. The variable in "
            "question was changed in there or anywhere later. Good luck!"
        )
    if LEDGER.active:
        LEDGER._thread.mismatch = Mismatch(entry, None if running is None else _graph.op(running), version)
    return RuntimeError(text)


def changed_error(entry: Entry, tensor: torch.Tensor, version: int) -> RuntimeError:
    """Make torch's error for a saved tensor that has been changed in place.

    Arguments:
        tensor: one like it.
        version: that it has now.
    """
    return _changed(entry, tensor, version)


def _look_alike(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of the program's that was saved: the same memory seen in the same way, with a history."""
    for other in gc.get_objects():
        if (
            type(other) in _PLAIN
            and other.grad_fn is not None
            and other.layout is tensor.layout
            and _is_alias_of(other, tensor)
            and other.storage_offset() == tensor.storage_offset()
            and other.shape == tensor.shape
            and other.stride() == tensor.stride()
        ):
            return other
    return None


def _output_of(name: str, number: int, strip: bool) -> str:
    return f", which is output {number} of {name.rstrip('0123456789').removesuffix('Backward') if strip else name},"


def _leads_to(node: Any, wanted: Any, steps: int) -> bool:
    """Whether in-place ops alone lead from one node to another: the tensor that they change is their first input."""
    for _ in range(steps):
        if not node.next_functions or node.next_functions[0][0] is None:
            return False
        node = node.next_functions[0][0]
        if node is wanted:
            return True
    return False


@functools.cache
def _words() -> tuple[bool, str]:
    """How this torch words its version error: whether it says ``Exp`` for ``ExpBackward0``, and its hint."""
    with torch.enable_grad():
        changed = torch.zeros((), requires_grad=True).exp()
        changed.detach().add_(1)
    try:
        getattr(changed.grad_fn, "_saved_result")  # noqa: B009 it is torch that works here
    except RuntimeError as error:
        text = str(error)
        return "ExpBackward0" not in text, text.partition(" instead.")[2]
    return False, ""


def _is_ours(pair: Any) -> bool:
    return pair is not None and pair[1] is _unpack


def _top() -> Any:
    """The innermost pair of hooks in this thread, or None."""
    if _HAS_TOP:
        return _hooks._top_saved_tensors_default_hooks(True)
    return LEDGER._thread.stack[-1] if LEDGER._thread.stack else None


# torch.func and whoever else disables hooks would be refused under ours --------------------------------------------------


def _wrap_disable(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def disable(*args: Any, **kwargs: Any) -> Any:
        if not LEDGER.pull():
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            LEDGER.push()
            raise
        LEDGER._thread.aside = bool(LEDGER.listeners)
        LEDGER.settle()
        return result

    return disable


def _wrap_enable(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enable(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if LEDGER._thread.aside:
            LEDGER._thread.aside = False
            LEDGER.push()
        return result

    return enable


def _wrap_pop(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pop(*args: Any, **kwargs: Any) -> Any:
        # a context of the program's that is left: not ours, which may lie above it
        LEDGER.pull()
        result = original(*args, **kwargs)
        del LEDGER._thread.stack[-1:]
        LEDGER.push()
        return result

    return pop


def _wrap_push(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def push(pack: Any, unpack: Any) -> Any:
        result = original(pack, unpack)
        LEDGER._thread.stack.append((pack, unpack))
        return result

    return push


def _pop_one() -> None:
    _pop.original()
    del LEDGER._thread.stack[-1:]


def _wrap_start(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bootstrap(thread: threading.Thread) -> None:
        listeners = [listener for listener in LEDGER.listeners if isinstance(listener, Companion)]
        LEDGER.push()
        for listener in listeners:
            listener.enter()
        try:
            original(thread)
        finally:
            for listener in listeners:
                listener.exit()
            LEDGER.pull()
            LEDGER.settle()

    return bootstrap


def _wrap_apply(_inherited: Callable[..., Any]) -> Any:
    @eager
    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        pulled = LEDGER.pull()
        try:
            outputs = super(_FUNCTION, function).apply(*args, **kwargs)
        finally:
            if pulled:
                LEDGER.push()
        for listener in LEDGER.listeners:
            if not isinstance(listener, Companion):
                continue
            try:
                listener.applied(args, outputs)
            except BudgetError:
                raise
            except Exception as error:  # a listener's fault is not the program's
                if programs_own(error):
                    raise
                LEDGER.fault(listener, error)
        return outputs

    return classmethod(apply)


# `Function.apply`, which programs keep bound under other names, calls ``super().apply``: found here if it is here
_FUNCTION: Any = torch.autograd.function._SingleLevelFunction

_disable = Patch(_hooks, "_saved_tensors_hooks_disable", _wrap_disable)
_enable = Patch(_hooks, "_saved_tensors_hooks_enable", _wrap_enable)
_push = Patch(_hooks, "_push_saved_tensors_default_hooks", _wrap_push)
_pop = Patch(_hooks, "_pop_saved_tensors_default_hooks", _wrap_pop)
_apply = Patch(_FUNCTION, "apply", _wrap_apply, inherited=True)
_start = Patch(threading.Thread, "_bootstrap_inner", _wrap_start)
