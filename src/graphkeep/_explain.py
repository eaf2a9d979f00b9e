"""`explain`: what a graph consists of, what it holds, who keeps it alive, and when it will be freed.

Given an error that a backward raised, it says instead why that backward failed.
"""

from __future__ import annotations

import functools
import html
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, overload

import torch
from torch.autograd.graph import Node

from graphkeep import _graph, _saved, _tree
from graphkeep._eager import eager
from graphkeep._errors import ArgumentError, library_file
from graphkeep._modules import parameter_storages
from graphkeep._saved import State
from graphkeep._storage import StorageSet
from graphkeep._units import format_bytes
from graphkeep._watch import _census, _changed, _postmortem, _source
from graphkeep._watch._frames import Place


@dataclass(frozen=True)
class KeptBy:
    """Somebody who keeps a graph alive, and how much of it.

    Attributes:
        what: who, as the program names it: ``local `loss` in train() at train.py:27``.
        nodes: how many of the graph's nodes it keeps.
        saved_bytes: bytes of what these hold, parameters apart.
        all: whether that is the whole graph.
    """

    what: str
    nodes: int
    saved_bytes: int
    all: bool


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. ``str()`` is for people; Jupyter shows it as a table.

    Attributes:
        nodes: number of nodes in the graph, those of the leaves (`AccumulateGrad`) included.
        saved_bytes: bytes of the unique storages that the nodes hold for their backward, and of tensors that custom functions
            keep on their ``ctx``; parameters and buffers apart.
        saved_tensors: number of saved tensors that are still held.
        parameter_bytes: bytes of the held storages that belong to a leaf of the graph, or to a parameter or a buffer of a
            live module. Freeing the graph does not free them.
        leaves: the leaf tensors that the graph leads to.
        freed_tensors: number of saved tensors that have been freed.
        ops: how many nodes each forward op has, the commonest first.
        hidden_nodes: nodes that may hold tensors which Python cannot see (in-place ops on views, C++ custom functions).
        packed_tensors: number of saved tensors that other saved-tensor hooks (`save_on_cpu`, `checkpoint`) hide.
        name: how the program calls what was explained, where that can be read off its source.
    """

    nodes: int
    saved_bytes: int
    saved_tensors: int
    parameter_bytes: int
    leaves: tuple[torch.Tensor, ...] = field(repr=False)
    freed_tensors: int
    ops: dict[str, int] = field(repr=False)
    hidden_nodes: int
    packed_tensors: int = 0
    name: str | None = None
    _tensors: tuple[weakref.ref[torch.Tensor], ...] = field(default=(), repr=False, compare=False)

    @functools.cached_property
    def holders(self) -> tuple[KeptBy, ...]:
        """Who keeps the graph alive: looked for when first asked, in up to two seconds; the graph itself is not kept."""
        return _holders([tensor for ref in self._tensors if (tensor := ref()) is not None])

    @property
    def freed(self) -> bool:
        """Whether the graph has been freed: it saved something once, and holds nothing any more."""
        return self.freed_tensors > 0 and self.saved_tensors == 0

    @property
    def state(self) -> str:
        """``no graph``, ``alive``, ``partly freed`` or ``freed``."""
        if not self.nodes:
            return "no graph"
        if self.freed:
            return "freed"
        return "partly freed" if self.freed_tensors else "alive"

    def _headline(self) -> str:
        graph = f"graph of `{self.name}`" if self.name else "graph"
        apart = f" ({format_bytes(self.parameter_bytes)} of parameters apart)" if self.parameter_bytes else ""
        freed = f", {self.freed_tensors:,} freed" if self.freed_tensors else ""
        return (
            f"{graph}: {_count_of(self.nodes, 'node')}, {format_bytes(self.saved_bytes)} saved in "
            f"{_count_of(self.saved_tensors, 'tensor')}{apart}{freed}"
        )

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("state", self.state), ("leaves", f"{len(self.leaves):,}")]
        most = ", ".join(f"{name} x{count}" for name, count in list(self.ops.items())[:6])
        if most:
            rows.append(("ops", most))
        if self.packed_tensors:
            rows.append(
                ("hidden", f"{self.packed_tensors:,} saved tensors are with other saved-tensor hooks (save_on_cpu, checkpoint)")
            )
        if self.hidden_nodes:
            rows.append(("hidden", f"{_count_of(self.hidden_nodes, 'node')} whose contents Python cannot see"))
        rows += [("kept alive by", line) for line in self._kept_by()]
        rows.append(("freed", self._when()))
        return rows

    def _kept_by(self) -> list[str]:
        if not self.holders:
            return ["no name: it goes when this expression ends"]
        widest = max(len(one.what) for one in self.holders)
        shares = [
            "all of it" if h.all else f"{_count_of(h.nodes, 'node')}, {format_bytes(h.saved_bytes)}" for h in self.holders
        ]
        return [f"{one.what.ljust(widest)} → {share}" for one, share in zip(self.holders, shares, strict=True)]

    def _when(self) -> str:
        name = self.name if self.name and self.name.isidentifier() else None
        call = f"{name}.backward() runs" if name else "a backward without retain_graph runs through it"
        count = len(self.holders)
        go = "this holder lets go" if count == 1 else f"these {count} holders let go"
        whole = f"all of it when {go}" if count else "all of it at once"
        if self.freed:
            return (
                f"its saved tensors have been freed; the nodes go when {go}" if count else "its saved tensors have been freed"
            )
        if not self.saved_tensors and not self.hidden_nodes:
            return f"it holds no saved tensor; {whole}"
        return f"its saved tensors when {call}; {whole}"

    def __str__(self) -> str:
        if not self.nodes:
            return "no graph: nothing here requires a gradient"
        lines, before = [self._headline()], ""
        for name, value in self._rows():
            lines.append(f"{'' if name == before else name:<15} {value}")
            before = name
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not self.nodes:
            return f"<p>{html.escape(str(self))}</p>"
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self._rows()
        )
        return f"<table><caption>{html.escape(self._headline())}</caption>{rows}</table>"


@dataclass(frozen=True)
class Postmortem:
    """Why a backward failed.

    Attributes:
        note: what `explain` has to say about the error; the same as the note that `watch` adds, with less detail.
    """

    note: str

    def __str__(self) -> str:
        return self.note


@overload
def explain(x: BaseException) -> Postmortem: ...  # type: ignore[overload-overlap] # an error is an object, too
@overload
def explain(x: object) -> Explanation: ...
@eager
def explain(x: object) -> Explanation | Postmortem:
    """Say what the graph behind ``x`` consists of, what it holds, who keeps it alive and when it will be freed.

    Runs no hook and changes nothing. The holders are looked for when they are asked for, by ``holders`` or ``print``.

    Arguments:
        x: a tensor, a `torch.autograd.graph.GradientEdge`, or a pytree of them, whose graphs are taken as one: a storage that
            two of them hold is counted once. A tensor without a graph gives an explanation with ``nodes == 0``. Or the error
            that a backward has raised: then the answer is why it failed.

    Returns:
        Explanation: counts, and bytes as integers; for an error a `Postmortem`.

    Raises:
        ArgumentTypeError: there is no tensor in ``x``.
        ArgumentError: an error that no backward of torch's raised, or one that graphkeep knows nothing about.

    Example:
        >>> import torch, graphkeep as gk
        >>> x = torch.ones(1000, requires_grad=True)
        >>> y = x.exp().sum()
        >>> gk.explain(y).saved_bytes  # the result of exp, float32
        4000
        >>> y.backward()
        >>> gk.explain(y).freed, gk.explain(y).saved_bytes
        (True, 0)
    """
    if isinstance(x, BaseException):
        return _explain_error(x)
    empty = isinstance(x, (tuple, list, dict)) and not x  # nothing is being watched, which is no mistake
    roots = [] if empty else [edge.node for edge in _graph.edges(x, "x", needs_graph=False)]
    nodes = _graph.reach(roots)
    # one variable can have several accumulators over its life, hence by identity
    leaves = tuple({id(leaf): leaf for leaf in _graph.leaves(nodes)}.values())
    apart = parameter_storages(leaves)
    saved, parameters = StorageSet(), StorageSet()
    held = freed = packed = 0
    for node in nodes:
        for slot in _saved.slots(node):
            held += slot.state in (State.HELD, State.PACKED, State.DROPPED)
            packed += slot.state is State.PACKED
            freed += slot.state is State.FREED
            for storage in _saved.slot_storages(slot):
                (parameters if storage in apart else saved).add(storage)
        for _, tensor in _saved.attributes(node):
            saved.add_tensor(tensor)
    return Explanation(
        nodes=len(nodes),
        saved_bytes=saved.nbytes,
        saved_tensors=held,
        parameter_bytes=parameters.nbytes,
        leaves=leaves,
        freed_tensors=freed,
        ops=_count(_graph.op(node) for node in nodes if _graph.leaf(node) is None),
        hidden_nodes=sum(map(_saved.hides, nodes)),
        packed_tensors=packed,
        name=_name(sys._getframe(1)) if isinstance(x, torch.Tensor) else None,
        _tensors=tuple(weakref.ref(member) for member in _tree.flatten(x) if isinstance(member, torch.Tensor)),
    )


def _count(ops: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(ops).items(), key=lambda item: (-item[1], item[0])))


def _count_of(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _name(frame: FrameType) -> str | None:
    """What stands between the brackets of ``gk.explain(...)`` in the program."""
    return _source.argument(frame.f_code.co_filename, frame.f_lineno, "explain")


def _holders(tensors: Sequence[torch.Tensor]) -> tuple[KeptBy, ...]:
    nodes = _graph.reach(edge.node for edge in _graph.edges(list(tensors), "x", needs_graph=False)) if tensors else set[Node]()
    apart = parameter_storages(_graph.leaves(nodes))
    found = []
    for holder, part in _census.keepers(nodes):
        saved = StorageSet(
            storage
            for node in part
            for slot in _saved.slots(node)
            for storage in _saved.slot_storages(slot)
            if storage not in apart
        )
        found.append(KeptBy(holder.what, len(part), saved.nbytes, len(part) == len(nodes)))
    return tuple(sorted(found, key=lambda one: (-one.nodes, one.what)))


def _explain_error(error: BaseException) -> Postmortem:
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, str) and note.startswith("graphkeep GK"):
            return Postmortem(note)
    outputs, places = _failed_call(error)
    text = str(error)
    note = None
    if outputs is not None and _postmortem.SECOND in text:
        note = _postmortem.second(_postmortem.nodes_of(outputs), places)
    elif outputs is not None and _changed.CHANGED in text:
        note = _changed.changed_unwatched(_postmortem.nodes_of(outputs), places)
    if note is None:
        raise ArgumentError(
            f"this {type(error).__name__} is not one that graphkeep can explain: {text[:80]}",
            instead="the error of a backward that met a freed graph or a tensor changed in place, with its traceback",
        )
    return Postmortem(note)


def _failed_call(error: BaseException) -> tuple[Any, list[Place]]:
    """What the failing backward started from, and the program's frames around it, the innermost first."""
    outputs: Any = None
    places: list[Place] = []
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if library_file(frame.f_code.co_filename, frame):
            if outputs is None and frame.f_code.co_name in ("backward", "grad", "_engine_run_backward"):
                variables = frame.f_locals
                outputs = next((variables[name] for name in ("tensors", "outputs", "t_outputs") if name in variables), None)
        elif outputs is None:
            places.insert(0, _postmortem.place(frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return outputs, places
