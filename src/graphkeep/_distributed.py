"""Models that are wrapped for several processes: what of the wrapper's forward happens once, and what its backward expects.

`DistributedDataParallel` counts one forward for one synchronised backward; several forwards before a backward leave the ranks
with different gradients, without an error, and so may several backwards. So chunks and replays of `infer` run the wrapped
module itself, the wrapper's own part of a forward (buckets, the broadcast of buffers) runs once, and its reducer is made ready
by the first node of ours that a backward runs; and where a leaf would get its gradient in several backwards,
`refuse_second_gradient` does so beforehand.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphkeep import _modules
from graphkeep._errors import ArgumentError
from graphkeep._frame import frame_locals


def several() -> bool:
    """Whether this process is one of several, or could be."""
    return dist.is_available() and dist.is_initialized()


class Plain:
    """A model of one process.

    Attributes:
        forward: what runs the model.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.forward = model

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the wrapper does once before a forward; returns the arguments for the model."""
        return args, kwargs

    def synchronises(self) -> bool:
        """Whether a forward made now would have its backward synchronised."""
        return False

    def expects(self, node: Any, leaves: Iterable[torch.Tensor]) -> None:
        """A node has been made that will bring gradients to these leaves, in a backward that is to be synchronised."""

    def before_backward(self, node: Any, leaves: Iterable[torch.Tensor]) -> None:
        """Called by each such node in a backward, before any gradient reaches the leaves."""


class DataParallel(Plain):
    """A module in `torch.nn.parallel.DistributedDataParallel`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.module)
        self._ddp = model
        self._state = _states.setdefault(model, _State())
        reason = None
        if model.static_graph:
            reason = "static_graph=True", "DistributedDataParallel without static_graph"
        elif model.mixed_precision is not None:
            reason = "mixed_precision=", "torch.autocast"
        elif model._forward_hooks or model._forward_pre_hooks:
            reason = "forward hooks on the wrapper", "the hooks on model.module"
        if reason is not None:
            raise ArgumentError(
                f"gk.infer cannot replay a DistributedDataParallel model with {reason[0]}",
                instead=f"{reason[1]}, or no gk.infer",
            )

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._ddp._pre_forward(*args, **kwargs)
        self._ddp.require_forward_param_sync = bool(self._ddp.require_backward_grad_sync and torch.is_grad_enabled())
        return tuple(args), dict(kwargs)

    def synchronises(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    def expects(self, node: Any, leaves: Iterable[torch.Tensor]) -> None:
        self._state.nodes[node] = list(leaves)

    def before_backward(self, node: Any, leaves: Iterable[torch.Tensor]) -> None:
        state, task = self._state, torch._C._current_graph_task_id()
        if task != state.task:  # else another inference of the model has, and the same backward runs through both
            state.task = task
            outputs = []
            if self._ddp.find_unused_parameters:
                # the reducer looks for the parameters that these lead to: of all nodes that this backward runs, and no others
                used = {id(leaf): leaf for leaf in leaves}
                for other, others in list(state.nodes.items()):
                    if torch._C._will_engine_execute_node(other):
                        used |= {id(leaf): leaf for leaf in others}
                with torch.enable_grad():
                    outputs = [leaf.view_as(leaf) for leaf in used.values()]
            self._ddp.reducer.prepare_for_backward(outputs)
        state.nodes.pop(node, None)


class _State:
    """Of a wrapper.

    Attributes:
        task: the engine's pass that its reducer was made ready for last.
        nodes: those that wait for a backward, and the leaves of each.
    """

    def __init__(self) -> None:
        self.task = -1
        self.nodes: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()


_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


def wrapped(model: Callable[..., Any], modules: Iterable[nn.Module]) -> Plain:
    """How to run a model that may be wrapped.

    Arguments:
        modules: that it is made of.

    Raises:
        ArgumentError: it is wrapped in a way whose backward could not be right.
    """
    if _kinds(model) & _DATA_PARALLEL:
        refuse_wrappers(modules, model)
        return DataParallel(model)
    refuse_wrappers(modules)
    return Plain(model)


def refuse_wrappers(modules: Iterable[nn.Module], but: object = None) -> None:
    """Refuse what an inference runs if a wrapper is among it that counts forwards.

    Arguments:
        but: the wrapper that it knows of.

    Raises:
        ArgumentError: there is another.
    """
    for module in modules:
        kinds = _kinds(module)
        if kinds & {"FSDPModule", "FullyShardedDataParallel"}:
            raise ArgumentError(
                "gk.infer cannot replay a module that FSDP shards", instead="DistributedDataParallel, or gk.cut"
            )
        if kinds & _DATA_PARALLEL and module is not but:
            raise ArgumentError(
                "gk.infer got a function or a module that runs a DistributedDataParallel model inside",
                instead="DistributedDataParallel around all of it (and around what torch.compile returns), and that given to "
                "gk.infer: gk.infer(ddp, x); or ddp.module, which synchronises nothing",
            )
        if "SyncBatchNorm" in kinds and module.training and several() and dist.get_world_size() > 1:
            raise ArgumentError(_TOGETHER, where="SyncBatchNorm", instead=_SAME)


_TOGETHER = "the ranks run the forward of the model together (it calls collectives), and gk.infer replays other rows on each"
_SAME = "gk.infer on what comes before the collectives; for the whole model one plain forward, or gk.cut"
_DATA_PARALLEL = {"DistributedDataParallel"}


def _kinds(module: object) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}


def collectives() -> int:
    """How many collectives this process has called."""
    if not several() or dist.get_world_size() == 1:
        return 0
    count = 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        try:
            count += group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
    return count


def refuse_collectives(before: int) -> None:
    """Refuse an inference whose forward has called some.

    Arguments:
        before: what `collectives` was then.

    Raises:
        ArgumentError: it has.
    """
    if collectives() != before:
        raise ArgumentError(_TOGETHER, instead=_SAME)


# wrappers that are alive ----------------------------------------------------------------------------------------------------


class _Wrappers:
    """Every `DistributedDataParallel` module of this process, found by looking through all objects when there may be a new one.

    torch keeps no list of them, and a leaf does not show the reducer that waits for it. That there is another reducer, its type
    tells: each object holds a reference to it.
    """

    def __init__(self) -> None:
        self._count: list[int] = []
        self._others = -1  # references to the reducers' type beyond those of the modules that were found
        self._found: list[weakref.ref[Any]] = []

    def alive(self) -> list[Any]:
        if not several():
            return []
        from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415  not every torch has it

        kinds = {DistributedDataParallel, *_subclasses(DistributedDataParallel)}
        reducer: Any = getattr(dist, "Reducer")  # noqa: B009  it is no public name
        found = [ref() for ref in self._found]
        if [sys.getrefcount(kind) for kind in (reducer, *kinds)] != self._count or None in found:
            known = {id(module): module for module in found if module is not None}
            with warnings.catch_warnings():  # some objects warn when their type is asked for
                warnings.simplefilter("ignore")
                known |= _of(kinds, gc.get_objects())
                others = sys.getrefcount(reducer) - len(known)
                if gc.get_freeze_count() and others > self._others:
                    seen = len(known)
                    known |= _of(kinds, _frozen())
                    others -= len(known) - seen
                self._others = others
            found = list(known.values())
            self._found = [weakref.ref(module) for module in found]
            del known
            self._count = [sys.getrefcount(kind) for kind in (reducer, *kinds)]
        return found


def _of(kinds: set[type], objects: Iterable[Any]) -> dict[int, Any]:
    return {id(obj): obj for obj in objects if type(obj) in kinds and hasattr(obj, "reducer")}


def _frozen() -> Iterable[Any]:
    """What `gc.freeze` hides from the collector: looked for from the frames and modules on, which takes seconds."""
    todo: list[Any] = [*gc.get_objects(), *sys.modules.values()]
    for frame in sys._current_frames().values():
        outer: Any = frame
        while outer is not None:
            todo += [value for _, value in frame_locals(outer)]
            outer = outer.f_back
    seen = {id(obj): obj for obj in todo if gc.is_tracked(obj)}
    while todo:
        for obj in gc.get_referents(todo.pop()):
            if id(obj) not in seen and gc.is_tracked(obj):
                seen[id(obj)] = obj
                todo.append(obj)
    return list(seen.values())


def _subclasses(kind: type) -> Iterable[type]:
    sub: type
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


_wrappers = _Wrappers()


def waiting() -> list[Any]:
    """The `DistributedDataParallel` modules of which a forward may wait to be synchronised by one backward.

    Not those whose last forward was under `no_sync`, if they still are: what came before the last forward nobody can tell.
    """
    return [ddp for ddp in _wrappers.alive() if ddp.require_forward_param_sync or ddp.require_backward_grad_sync]


def refuse_second_gradient(leaves: Iterable[torch.Tensor], what: str, instead: str, around: str = "") -> None:
    """Refuse what would bring a second gradient to one of some leaves, if a module waits for one.

    Arguments:
        what, instead: of the error.
        around: of its place, after the leaf's name.

    Raises:
        ArgumentError: a module does.
    """
    modules = waiting()
    known = {id(leaf) for leaf in leaves} if modules else set()
    for ddp in modules if known else ():
        for parameter in ddp.module.parameters():
            if id(parameter) in known:
                raise ArgumentError(
                    what,
                    where=_modules.describe(parameter, [ddp.module]) + around,
                    instead=f"{instead} under `with model.no_sync():`",
                )


def running() -> Any:
    """The `DistributedDataParallel` module whose forward runs now; None if none does."""
    if not several():
        return None
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    return DistributedDataParallel._active_ddp_module


def _fsdp_states() -> Iterable[Any]:
    """Those of the modules that FSDP2 (`torch.distributed.fsdp.fully_shard`) shards."""
    if not several():
        return []
    from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415

    return [state for ref in list(_module_state_mapping.values()) if (state := ref()) is not None]


def _fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def gathered_for_now(leaves: Iterable[torch.Tensor]) -> str | None:
    """Names a leaf that FSDP2 holds whole while the forward that runs now goes on, and until the first backward has ended."""
    states = list(_fsdp_states())
    if not any(getattr(getattr(state, "_training_state", None), "name", "") == "FORWARD" for state in states):
        return None
    known = {id(leaf) for leaf in leaves}
    for group in [group for state in states for group in _fsdp_groups(state)]:
        for parameter in group.fsdp_params if getattr(group, "is_unsharded", False) else ():
            if id(getattr(parameter, "_unsharded_param", None)) in known:
                return str(getattr(parameter, "_param_fqn", None) or "a weight")
    return None


class Gathered:
    """The storages of whole parameters that FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers for a moment.

    Between a module's forward and its backward they are empty, so nothing can be computed from them.
    """

    def __init__(self) -> None:
        self._modules = -1
        self._known: set[int] = set()

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        if not several():
            return False
        from torch.distributed._composable_state import _module_state_mapping  # noqa: PLC0415

        if len(_module_state_mapping) != self._modules:
            self._modules, self._known = len(_module_state_mapping), set()
            for state in _fsdp_states():
                for parameter in [parameter for group in _fsdp_groups(state) for parameter in group.fsdp_params]:
                    whole = getattr(parameter, "_unsharded_param", None)
                    if whole is None:  # there is none before the first forward: look again
                        self._modules = -1
                    else:
                        self._known.add(whole.untyped_storage()._cdata)
        return storage._cdata in self._known
