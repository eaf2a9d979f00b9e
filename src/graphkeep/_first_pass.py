"""The first pass of `infer`: every chunk forward, the values kept, the graphs let go of, and what a replay will need noted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from graphkeep import _distributed, _graph, _modules, _replay, _tree
from graphkeep._batch import Arguments, Call, Outputs
from graphkeep._distributed import Plain
from graphkeep._errors import ArgumentError, ChangedGraphError
from graphkeep._plan import Plan
from graphkeep._replay import World
from graphkeep._saved import slot_storages, slots
from graphkeep._storage import StorageSet


class Kept:
    """The graph of a chunk that is still there: its outputs, and the stand-ins of its arguments."""

    def __init__(self, outputs: list[torch.Tensor], call: Call, size: int) -> None:
        self.outputs = outputs
        self.stand_ins = call.stand_ins
        self.size = size


class FirstPass:
    """One whole batch, run forward.

    Arguments:
        wrapper: how to run the model.
        arguments: of the whole batch.
        chunk_size: samples that run forward together; None for all.
        limit: bytes of graph that may be kept; None for no limit.
        plan: where to say what was done.
        where: the line of the user's call.

    Attributes:
        tensors: the tensors among the outputs, detached, all samples.
        differentiable: for each of them, whether it had a graph.
        leaves: the leaf tensors, by identity, that some chunk's graph leads to, arguments apart.
        alone: whether rows may be computed without the rest of their chunk.
        coupled: whether the model is known to mix the samples of a batch.
    """

    def __init__(
        self, wrapper: Plain, arguments: Arguments, chunk_size: int | None, limit: int | None, plan: Plan, where: str
    ) -> None:
        self.wrapper = wrapper
        self.model = model = wrapper.forward
        self.arguments = arguments
        self.plan = plan
        self.where = where
        self.step = min(chunk_size or arguments.size, arguments.size)
        self.chunks = [slice(i, min(i + self.step, arguments.size)) for i in range(0, arguments.size, self.step)]
        plan.chunks = len(self.chunks)
        self.kept: dict[int, Kept] = {}
        self.worlds: list[World] = []
        self.leaves: dict[int, torch.Tensor] = {}
        self.differentiable: list[bool] = []
        self.alone = True
        self.coupled = False
        self._limit = limit
        self.modules = _replay.modules_of(model)
        self._ran: set[nn.Module] = set()
        self._graphs: list[list[bool]] = []
        scripted = [module for module in self.modules if isinstance(module, torch.jit.ScriptModule)]
        if scripted:
            raise ArgumentError(
                "gk.infer cannot look into a scripted module", instead="the module itself, or torch.compile of it"
            )
        if len(self.chunks) > 1:
            arguments.refuse_ambiguous()
        self._run()

    def _run(self) -> None:
        arguments = self.arguments
        outputs = Outputs(arguments.dim)
        seconds = 0.0
        for k, rows in enumerate(self.chunks):
            self.worlds.append(World(self.modules, self.worlds[-1] if self.worlds else None))
            call = arguments.take(rows)
            mark = _sequence_number()
            started = time.perf_counter()
            torch.clear_autocast_cache()  # a cast made by the chunk before carries that chunk's graph
            called = _distributed.collectives()
            with self._watch_modules(self.worlds[-1]):
                tree = self._call(call)
            _distributed.refuse_collectives(called)
            torch.clear_autocast_cache()
            seconds += time.perf_counter() - started
            tensors = outputs.add(tree, rows.stop - rows.start)
            del tree
            self._note_graphs(k, [tensor.requires_grad for tensor in tensors])
            self._refuse_coupled(k)
            size = self._read_graph(tensors, call, mark)
            if self._limit is None or (self._limit and self.plan.kept_bytes + size <= self._limit):
                self.kept[k] = Kept(tensors, call, size)
                self.plan.kept_bytes += size
                self.plan.kept_chunks += 1
            del tensors, call
        self.worlds.append(World(self.modules, self.worlds[-1]))
        self.changing = self.worlds[0].changed_by(self.worlds[-1])
        self.forward_seconds = seconds / arguments.size
        theirs = StorageSet()
        for tensor in (*(m for m in arguments.members if isinstance(m, torch.Tensor)), *self.weights()):
            theirs.add_tensor(tensor)
        self.tensors, self.values = outputs.join(theirs)
        self._handed_out = [-1 if t.is_inference() else t._version for t in self.tensors]
        self.build = outputs.build
        for tensor, version in arguments.versions:
            if tensor._version != version:
                raise ArgumentError(
                    "the model changes its argument in place, so a replay would start from other values",
                    where=f"an argument of shape {list(tensor.shape)}",
                    instead="a model that leaves its inputs alone: an op out of place, or inplace=False in its first layers",
                )
        self._versions = [(t, t._version, t.dtype) for t in self.weights() if not t.is_inference()]
        self._slots = [
            (module, name, parameter)
            for module in self.modules
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.random = any(a.drew_random(b) for a, b in zip(self.worlds, self.worlds[1:], strict=False))
        if self.random and not self.coupled:
            self.alone = False
            self.plan.say("whole chunks are replayed: the model draws random numbers, which one row alone would draw otherwise")

    def _call(self, call: Call) -> Any:
        try:
            return self.model(*call.args, **call.kwargs)
        except Exception as error:
            if len(self.chunks) > 1 and hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"gk.infer split these as one row a sample: {self.arguments.describe()}. " + _IF_NOT)
            raise

    @contextlib.contextmanager
    def _watch_modules(self, world: World) -> Iterator[None]:
        """Note which modules run, and find those that a callable reaches in ways that `modules_of` cannot see."""
        known = set(self.modules)
        if any(hasattr(module, "_orig_mod") for module in known) or hasattr(self.model, "_torchdynamo_orig_callable"):
            self._ran |= known  # a global hook would make the compiler start over
            yield
            return

        def meet(module: nn.Module, _args: object) -> None:
            self._ran.add(module)
            if module not in known:
                _distributed.refuse_wrappers([module])
                known.add(module)
                self.modules.append(module)
                world.include([module])

        handle = register_module_forward_pre_hook(meet)
        try:
            yield
        finally:
            handle.remove()

    def _note_graphs(self, k: int, has_graph: list[bool]) -> None:
        self._graphs.append(has_graph)
        self.differentiable = [any(column) for column in zip(*self._graphs, strict=True)]
        if has_graph != self._graphs[0]:
            self.alone = False
            self.plan.say("whole chunks are replayed: some have a gradient where others have none")

    def has_graph(self, k: int) -> list[bool]:
        """For each output of a chunk, whether it had a graph."""
        return self._graphs[k]

    def _refuse_coupled(self, k: int) -> None:
        """Refuse, after the first chunk that shows it, what chunks would change; buffers get their values back."""
        coupled = _replay.couples_rows(self._ran)
        if coupled and not self.coupled:
            self.alone, self.coupled = False, True
            self.plan.say(f"the whole batch is replayed: {self._names(coupled)} mixes its samples")
        if len(self.chunks) == 1:
            return
        changed = self.worlds[0].changed_by(World(self.modules, self.worlds[-1]))
        for key in changed:  # a buffer of a module that was met later, or registered in the forward, is in a later world
            next(world for world in (*self.worlds, World(self.modules)) if key in world.buffers).put_back(key)
        if coupled:
            raise ArgumentError(
                f"with chunk_size={self.step} these modules would see other statistics than in the whole batch: "
                f"{self._names(coupled)}",
                instead="chunk_size=None, or model.eval() where the running statistics are meant",
            )
        if changed:
            names = ", ".join(sorted({f"`{name}` of {self._names([module])}" for module, name in changed})[:3])
            raise ArgumentError(
                f"the model changes buffers in its forward, with chunk_size={self.step} {len(self.chunks)} times: {names}",
                instead="chunk_size=None, or model.eval()",
            )

    def _names(self, modules: list[nn.Module]) -> str:
        return ", ".join(_replay.name_of(module, self.modules) for module in modules[:3])

    def _read_graph(self, tensors: list[torch.Tensor], call: Call, mark: int) -> int:
        """Note the leaves that a chunk's graph leads to; returns the bytes that it holds, parameters apart."""
        roots = [torch.autograd.graph.get_gradient_edge(t).node for t in tensors if t.requires_grad]
        nodes = _graph.reach(roots)
        stand_ins = {id(stand_in) for stand_in in call.stand_ins.values()}
        for node in nodes:
            variable = _graph.leaf(node)
            if variable is None and node._sequence_nr() < mark:
                raise ArgumentError(
                    f"the model uses a tensor that was computed before, by {_graph.op(node)}, and is not among its arguments",
                    instead="pass that tensor as an argument of gk.infer, so that its gradient can be handed on",
                )
            if variable is not None and id(variable) not in stand_ins:
                self.leaves.setdefault(id(variable), variable)
        if not self._limit and self._limit is not None:
            return 0
        apart = StorageSet()
        for tensor in (*self.weights(), *self.arguments.differentiable.values()):
            apart.add_tensor(tensor)
        held = StorageSet(s for node in nodes for slot in slots(node) for s in slot_storages(slot) if s not in apart)
        return held.nbytes

    # --- what replays use ---------------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """Put all modules into evaluation mode; inside a restored world, which puts them back."""
        for module in self.modules:
            module.training = False

    def forward(self, rows: slice | torch.Tensor) -> tuple[list[torch.Tensor], Call]:
        """Run the model on some rows, as the world is now; returns the tensors among its outputs."""
        call = self.arguments.take(rows)
        try:
            tree = self.model(*call.args, **call.kwargs)
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note("gk.infer was running the model again, for a backward or to see whether samples mix")
            raise
        return [member for member in _tree.flatten(tree) if isinstance(member, torch.Tensor)], call

    def free(self, k: int) -> Kept:
        """Take a kept graph out of what is held."""
        kept = self.kept.pop(k)
        self.plan.kept_chunks -= 1
        self.plan.kept_bytes -= kept.size
        return kept

    def weights(self) -> Iterator[torch.Tensor]:
        """Every tensor, arguments apart, that must not change before a replay: leaves, and parameters without a gradient."""
        seen = set(self.leaves)
        yield from self.leaves.values()
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    def is_stale(self) -> bool:
        """Whether a weight has changed since the first pass."""
        return any(tensor._version != version for tensor, version, _ in self._versions)

    def refuse_changes(self, *, stale_ok: bool) -> None:
        """Raise if a weight or an argument is no longer what it was in the first pass."""
        if any(v >= 0 and t._version != v for t, v in zip(self.tensors, self._handed_out, strict=True)):
            raise ChangedGraphError(
                "out.values was changed in place, and replays are compared with it",
                where=f"gk.infer() at {self.where}",
                instead="the change on a copy, out.values.clone()",
            )
        changed = [
            t for t, version, dtype in self._versions if (t._version != version and not stale_ok) or t.dtype is not dtype
        ]
        changed += [old for module, name, old in self._slots if module._parameters.get(name) is not old]
        for tensor in changed:
            raise ChangedGraphError(
                f"a weight was changed after the first pass: {_modules.describe(tensor, self.modules)}",
                where=f"gk.infer() at {self.where}",
                instead="gk.infer again after optimizer.step(), or stale_ok=True to differentiate at the new weights",
            )
        for leaf in self.leaves.values():
            if not leaf.requires_grad:
                raise ChangedGraphError(
                    f"a weight was frozen after the first pass: {_modules.describe(leaf, self.modules)}",
                    where=f"gk.infer() at {self.where}",
                    instead="requires_grad_(False) before gk.infer, or after the last backward",
                )
        for tensor, version in self.arguments.versions:
            if tensor._version != version:
                raise ChangedGraphError(
                    f"an argument of shape {list(tensor.shape)} was changed in place after the first pass",
                    where=f"gk.infer() at {self.where}",
                    instead="gk.infer again, or the change out of place",
                )


def _sequence_number() -> int:
    """The number that autograd gives to a node made now; nodes of the graph that follows have larger ones."""
    if torch.is_inference_mode_enabled():
        return 0
    with torch.enable_grad():
        return _ONE.view(1).grad_fn._sequence_nr()  # type: ignore[union-attr]


_ONE = torch.ones(1, requires_grad=True)
_IF_NOT = "What is one for all samples goes into a closure: gk.infer(lambda x: model(x, mask), x)"
