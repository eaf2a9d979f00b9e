"""What holds for each verb in each way of running: ``python -m torch.distributed.run --nproc-per-node N matrix.py WAYS``.

Each cell runs on every rank and is compared with one process that runs the joint backward over the batches of all. Printed, as
one line of JSON for each cell: ``right`` (gradients equal, as many collectives on every rank, and no gradient synchronised more
often than in the joint backward), ``right, N reductions for M`` (equal, and FSDP2 reduces in each backward), or ``refused``
(before anything ran: no gradient has changed, no collective was called, and the step after it is right). Everything else is a
fault.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk

WAYS = (
    "one process",
    "DDP",
    "DDP, static_graph",
    "DDP, find_unused_parameters",
    "DDP, accumulating",
    "FSDP2",
    "FSDP2, accumulating",
    "Accelerate",
)
PRECISIONS = ("float32", "bfloat16 autocast", "float16 autocast, GradScaler")
ROWS = ([0, 2, 5], [1], [3, 4], [])  # that a rank picks with `infer`
WARM = 4  # joint steps before anything is counted: buckets are made anew, a static graph is learned
NEAR = {PRECISIONS[0]: 1e-5, PRECISIONS[1]: 3e-2, PRECISIONS[2]: 5e-3}


class Layers(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sigmoid()
        return x


class Net(nn.Module):
    """A trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head1, self.head2 = Layers(6, 8, 8, 8), Layers(8, 8, 3), Layers(8, 2)
        self.cut: gk.cut[Tensor] | None = None

    def forward(self, x: Tensor, cutting: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        if cutting:
            self.cut = gk.cut(h)
            h = self.cut.stand_ins
        return h, self.head1(h), self.head2(h)


def losses(out: Any, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
    return out[1][rows].float().square().sum(), out[2][rows].float().sin().sum()


def batches(ranks: int) -> Tensor:
    return torch.randn(ranks, 6, 6, generator=torch.Generator().manual_seed(1))


class Way:
    """A model that is wrapped in some way, and how a step is run with it."""

    def __init__(self, name: str, compiler: str | None, precision: str) -> None:
        torch.manual_seed(0)
        self.net = net = Net()
        self.plain = copy.deepcopy(net)
        self.name, self.compiler, self.precision = name, compiler, precision
        if compiler:
            for part in (net.trunk, net.head1, net.head2):
                part.compile(backend=compiler)
        self.accelerator: Any = None
        self.model: Any = net
        if name.startswith("DDP"):
            options = {"DDP, static_graph": "static_graph", "DDP, find_unused_parameters": "find_unused_parameters"}
            self.model = DistributedDataParallel(net, **({options[name]: True} if name in options else {}))
        elif name.startswith("FSDP2"):
            fully_shard(net.trunk)
            fully_shard(net)
        elif name == "Accelerate":
            from accelerate import Accelerator
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state()
            self.accelerator = Accelerator(cpu=True, mixed_precision="no" if precision == PRECISIONS[0] else "bf16")
            self.model = self.accelerator.prepare(net)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=precision == PRECISIONS[2])
        self.nested = 0

    def autocast(self) -> Any:
        if self.precision == PRECISIONS[0]:
            return contextlib.nullcontext()
        return torch.autocast("cpu", torch.bfloat16 if self.precision == PRECISIONS[1] else torch.float16)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Gradients are not synchronised."""
        self.nested += 1
        try:
            if self.name.startswith("FSDP2"):
                self.model.set_requires_gradient_sync(False)
                yield
            elif hasattr(self.model, "no_sync"):
                with self.accelerator.no_sync(self.model) if self.accelerator else self.model.no_sync():
                    yield
            else:
                yield
        finally:
            self.nested -= 1
            if self.name.startswith("FSDP2"):
                self.model.set_requires_gradient_sync(not self.nested)

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss = self.scaler.scale(loss)
        if options:
            gk.backward(loss, **options)
        elif self.accelerator:
            self.accelerator.backward(loss)
        else:
            loss.backward()

    def gradients(self) -> list[Tensor | None]:
        found = [parameter.grad for parameter in self.net.parameters()]
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]
        return [None if grad is None else grad.detach().clone() for grad in whole]

    def zero_grad(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = None

    def expected(self, verb: str, mine: int) -> list[Tensor]:
        """What one process has after the joint backward, over the batches of all ranks; of its own where there is one."""
        twin, count = copy.deepcopy(self.plain), dist.get_world_size()
        for rank, x in enumerate(batches(count)):
            if self.name == "one process" and rank != mine:
                continue
            rows = [ROWS[rank % len(ROWS)] if verb == "infer" else slice(None)]
            if self.accumulates and verb != "joint":
                rows.append(slice(None))
            for some in rows:
                with self.autocast():
                    a, b = losses(twin(x), some)
                share = 1 if self.name == "one process" else count
                (self.scaler.scale(a + b) / share).backward()
        return [parameter.grad for parameter in twin.parameters() if parameter.grad is not None]

    @property
    def accumulates(self) -> bool:
        return self.name.endswith("accumulating")


Verb = Callable[[Way, Tensor], None]


def joint(way: Way, x: Tensor) -> None:
    with way.autocast():
        a, b = losses(way.model(x))
    way.backward(a + b)


def keep(way: Way, x: Tensor) -> None:
    with way.autocast():
        out = way.model(x)
        a, b = losses(out)
    way.backward(a, keep=out[0])
    way.backward(b)


def cut(way: Way, x: Tensor) -> None:
    with way.autocast():
        a, b = losses(way.model(x, cutting=True))
    way.backward(a)
    way.backward(b)
    assert way.net.cut is not None
    way.net.cut.close()


def infer(way: Way, x: Tensor) -> None:
    """Other rows, and chunks of another size, on each rank; the last of four keeps none."""
    with way.autocast():
        out = gk.infer(way.model, x, chunk_size=2 + dist.get_rank() % 3)
    a, b = losses(out[ROWS[dist.get_rank() % len(ROWS)]])
    way.backward(a + b)


def budget(way: Way, x: Tensor) -> None:
    """A third of what the step saves in float32; what is compiled, or sharded, is not run again."""
    again = way.compiler is None and not way.name.startswith("FSDP2")
    limit = 4_000 if not again else 1_200 if way.precision == PRECISIONS[0] else 1_000
    with gk.budget(limit) as b:
        joint(way, x)
    assert b.peak <= limit
    assert b.recomputed_ops or not again


def watch(way: Way, x: Tensor) -> None:
    with gk.watch():
        joint(way, x)


def discard(way: Way, x: Tensor) -> None:
    with way.apart(), way.autocast():
        loss = sum(losses(way.model(x)), torch.zeros(()))
    gk.discard(loss)
    joint(way, x)


VERBS: dict[str, Verb] = {
    "backward(keep=)": keep,
    "cut": cut,
    "infer": infer,
    "budget": budget,
    "watch": watch,
    "discard": discard,
}


def run(way: Way, verb: str) -> tuple[Exception | None, int, int]:
    """Run a step; what was raised, and how many collectives were called, and reductions of gradients among them."""
    x = batches(dist.get_world_size())[dist.get_rank()]
    function = joint if verb == "joint" else VERBS[verb]
    way.zero_grad()
    before, reduced = _collectives(), _Reductions.count
    raised = None
    try:
        if way.accumulates and verb != "joint":
            with way.apart():
                function(way, x)
            joint(way, x)
        else:
            function(way, x)
    except Exception as error:
        raised = error.with_traceback(None)
    calls = _collectives() - before
    return raised, calls, _Reductions.count - reduced if way.name.startswith("FSDP2") else calls


class _Reductions:
    """Counts FSDP2's; those of DDP are all the collectives that its step calls."""

    count = 0

    @classmethod
    def install(cls) -> None:
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                setattr(dist, name, cls._counted(getattr(dist, name)))

    @classmethod
    def _counted(cls, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            cls.count += 1
            return original(*args, **kwargs)

        return counted


def _collectives() -> int:
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def near(found: list[Tensor | None], expected: list[Tensor], tolerance: float) -> bool:
    scale = max(float(grad.abs().max()) for grad in expected)
    return len(found) == len(expected) and all(
        a is not None and torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale)
        for a, b in zip(found, expected, strict=True)
    )


def verdict(way: Way, verb: str, usual: int) -> str:
    """What the ranks find of one cell; `usual`: how often a joint step reduces gradients."""
    raised, calls, reduced = run(way, verb)
    mine: dict[str, Any] = {"calls": calls, "reduced": reduced, "raised": ""}
    tolerance = NEAR[way.precision]
    if raised is not None:
        mine["raised"] = type(raised).__name__
        mine["said"] = str(raised)
        mine["ran"] = any(grad is not None for grad in way.gradients())
    else:
        mine["equal"] = near(way.gradients(), way.expected(verb, dist.get_rank()), tolerance)
    after, *_ = run(way, "joint")
    mine["after"] = after is None and near(way.gradients(), way.expected("joint", dist.get_rank()), tolerance)
    everybody: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    same = len({(found["calls"], found["raised"]) for found in everybody}) == 1
    if not same or not all(found["after"] for found in everybody):
        return f"FAULT {everybody}"
    if mine["raised"]:
        forward_only = not calls or way.name.startswith("FSDP2")  # which gathers its parameters in each forward
        refused = forward_only and not any(found["ran"] for found in everybody) and isinstance(raised, gk.GraphkeepError)
        return "refused" if refused else f"FAULT {everybody}"
    if not all(found["equal"] for found in everybody):
        return f"FAULT {everybody}"
    return "right" if reduced <= usual else f"right, {reduced} reductions for {usual}"


def cells(name: str, compiler: str | None) -> Iterator[dict[str, str]]:
    for precision in PRECISIONS:
        if name == "Accelerate" and precision == PRECISIONS[2]:
            continue  # it has no float16 on a CPU
        way = Way(name, compiler, precision)
        for _ in range(WARM):
            raised, _, usual = run(way, "joint")
            if raised is not None:
                raise raised
        for verb in VERBS:
            yield {"precision": precision, "verb": verb, "verdict": verdict(way, verb, usual)}
        del way
        gc.collect()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    dist.init_process_group("gloo")
    _Reductions.install()
    gc.collect()
    gc.freeze()  # `watch` looks through every object, and nothing that has been imported holds a graph
    try:
        for name in sys.argv[1].split(";"):
            for cell in cells(name, sys.argv[2] if len(sys.argv) > 2 else None):
                if dist.get_rank() == 0:
                    print("CELL", json.dumps({"way": name, **cell}), flush=True)
        gc.collect()  # see `ddp_programs.py`
        dist.barrier()
    finally:
        dist.destroy_process_group()
