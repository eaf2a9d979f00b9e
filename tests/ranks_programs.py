"""What `test_ranks.py` runs on two ranks: ``python -m torch.distributed.run --nproc-per-node 2 ranks_programs.py NAME...``.

Unequal work, a rank that raises in the middle, checkpoints while something of ours is open, and Accelerate.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import re
import runpy
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import launched
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import graphkeep as gk
from graphkeep._boundary import open_trunks
from graphkeep._ledger import LEDGER

autograd: Any = torch.autograd
UNPATCHED = torch.autograd.backward, autograd._engine_run_backward
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "distributed"


class Net(nn.Module):
    """A trunk and some heads; `fail`, if it is set, is called in the first head."""

    def __init__(self, heads: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 3), nn.Sigmoid()) for _ in range(heads))
        self.cut: gk.cut[Tensor] | None = None
        self.fail: Callable[[], None] | None = None

    def forward(self, x: Tensor, cutting: bool = False, heads: int | None = None) -> list[Tensor]:
        h = self.trunk(x)
        if cutting:
            self.cut = gk.cut(h)
            h = self.cut.stand_ins
        if self.fail is not None:
            self.fail()
        return [head(h) for head in self.heads[:heads]]


def batches(number: int = 0) -> Tensor:
    """Those of all ranks."""
    return torch.randn(dist.get_world_size(), 10, 6, generator=torch.Generator().manual_seed(number))


def losses(outputs: list[Tensor]) -> list[Tensor]:
    return [out.square().sum() for out in outputs]


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum()


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def assert_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            whole(a.grad), whole(b.grad), rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_nothing_stays() -> None:
    x = torch.ones(2, requires_grad=True)
    slot: Any = x.sin().grad_fn._raw_saved_self  # type: ignore[union-attr]
    assert not hasattr(slot, "data") or slot.data is x, "a saved-tensor hook is active"
    assert (torch.autograd.backward, autograd._engine_run_backward) == UNPATCHED
    assert _get_current_dispatch_mode_stack() == []
    assert not open_trunks.trunks
    assert not LEDGER.listeners


# unequal work -----------------------------------------------------------------------------------------------------------------


def unequal_infer() -> None:
    """Batches of other sizes, other numbers of backwards before the last, and a rank that keeps no sample."""
    net, twin, rank, ranks = Net(), Net(), dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(net)
    data = [x[: 10 - 3 * r] for r, x in enumerate(batches())]
    rows: list[list[list[int]]] = [[[1, 4], [0], [9, 2, 2]], [[]]]
    out = gk.infer(ddp, data[rank], chunk_size=4 - rank)
    mine = rows[rank % 2]
    for some in mine[:-1]:
        with ddp.no_sync():
            total(losses(out[some])).backward()
    total(losses(out[mine[-1]])).backward()
    for r in range(ranks):
        picked = [i for some in rows[r % 2] for i in some]
        (total(losses([o[picked] for o in twin(data[r])])) / ranks).backward()
    assert_gradients(net, twin)


def unequal_heads_infer() -> None:
    """Heads that only some ranks use, with ``find_unused_parameters=True``."""
    net, twin, rank, ranks = Net(3), Net(3), dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    for step in range(2):
        ddp.zero_grad()
        twin.zero_grad()
        heads = [3 - (r + step) % 2 * 2 for r in range(ranks)]  # three on one rank, one on the other, and the other way round
        out = gk.infer(ddp, batches(step)[rank], heads=heads[rank], chunk_size=3)
        total(losses(out[[1, 5, 7]])).backward()
        for r in range(ranks):
            outputs = twin(batches(step)[r], heads=heads[r])
            (total(losses([o[[1, 5, 7]] for o in outputs])) / ranks).backward()
        assert_gradients(net, twin)


def unequal_heads_cut() -> None:
    """Heads outside of the wrapped trunk, as many as a rank likes; one of them has no row left, or no head at all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net, twin = Net(3), Net(3)
    trunk = DistributedDataParallel(net.trunk)
    for step in range(2):
        net.zero_grad()
        twin.zero_grad()
        with gk.cut(trunk(batches(step)[rank])) as h:
            if rank % 2 == 0:
                for head in net.heads[: 3 - step]:
                    head(h).square().sum().backward()
            elif step:
                h[:0].sum().backward()
            else:
                net.heads[0](h)[[]].square().sum().backward()
        for r in range(0, ranks, 2):
            (total(losses(twin(batches(step)[r], heads=3 - step))) / ranks).backward()
        assert_gradients(net.trunk, twin.trunk)


def unequal_heads_cut_inside() -> None:
    """Inside of the wrapped module it is as in plain torch: an error on each rank, and no end of waiting."""
    with failing_group() as group:
        net, rank = Net(2), dist.get_rank()
        ddp = DistributedDataParallel(net, process_group=group)

        def step() -> None:
            for loss in losses(ddp(batches()[rank], cutting=True, heads=2 - rank % 2)):
                loss.backward()
            assert net.cut is not None
            net.cut.close()
            ddp(batches()[rank])  # a rank that has reached fewer leaves is told here

        error = raised(step)
        assert isinstance(error, RuntimeError)
        assert re.search(r"Expected to have finished reduction" if rank % 2 else r"(?i)timed out|timeout", str(error)), error
    assert_nothing_stays()


# a rank that raises in the middle ---------------------------------------------------------------------------------------------


class Ours(Exception):
    """What the program raises."""


@contextlib.contextmanager
def failing_group() -> Iterator[Any]:
    """A process group that waits for three seconds, so that the one of all ranks is still good afterwards."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    yield group
    gc.collect()
    dist.barrier()


def raised(function: Callable[[], object]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error.with_traceback(None)
    return None


def fail() -> None:
    raise Ours("on this rank only")


Step = Callable[[Any, Net, "list[weakref.ref[Any]]"], None]


def a_rank_raises(step: Step, shard: bool = False) -> None:
    """`step` runs on all ranks, and a second time with a rank that raises; it notes what must not be alive afterwards."""
    with failing_group() as group:
        net, rank = Net(), dist.get_rank()
        model: Any = None
        if shard:
            mesh = DeviceMesh.from_group(group, "cpu")
            for part in (net.trunk, *net.heads):
                fully_shard(part, mesh=mesh)
            model = fully_shard(net, mesh=mesh)
        else:
            model = DistributedDataParallel(net, process_group=group)
        alive: list[weakref.ref[Any]] = []
        step(model, net, alive)  # all goes well
        if rank == 1:
            net.fail = fail
        error = raised(lambda: step(model, net, alive))
        if rank == 1:
            assert isinstance(error, Ours), repr(error)
        else:
            assert isinstance(error, RuntimeError), repr(error)
            assert not isinstance(error, gk.GraphkeepError)
            assert re.search(r"(?i)timed out|timeout", str(error)), error
        net.cut = None
        assert len(alive) == 2
        assert [ref() for ref in alive] == [None] * 2
        assert_nothing_stays()
        assert not net.trunk[1].training
        if not shard:
            assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in net.modules())


def raises_in_infer() -> None:
    def step(model: Any, net: Net, alive: list[weakref.ref[Any]]) -> None:
        alive.append(weakref.ref(data := batches()[dist.get_rank()]))
        out = gk.infer(model, data, chunk_size=4)
        total(losses(out[[1, 2, 8]])).backward()

    a_rank_raises(step)


def raises_in_a_replay() -> None:
    """One rank raises inside of the backward, while another waits for its gradients."""

    def step(model: Any, net: Net, alive: list[weakref.ref[Any]]) -> None:
        failing, net.fail = net.fail, None
        out = gk.infer(model, batches()[dist.get_rank()], chunk_size=4)
        alive.append(weakref.ref(out))
        net.fail = failing
        total(losses(out[[0, 1, 2, 3]])).backward()

    a_rank_raises(step)


def _cut_and_fail(model: Any, net: Net, alive: list[weakref.ref[Any]]) -> None:
    failing, net.fail = net.fail, None
    found = losses(model(batches()[dist.get_rank()], cutting=True))
    assert net.cut is not None
    alive.append(weakref.ref(net.cut))
    net.fail = failing
    try:
        with net.cut:
            found[0].backward()
            if net.fail is not None:
                net.fail()
            found[1].backward()
    finally:
        assert not open_trunks.trunks


def raises_in_a_head() -> None:
    a_rank_raises(_cut_and_fail)


def raises_in_a_head_fsdp() -> None:
    a_rank_raises(_cut_and_fail, shard=True)


def raises_in_a_budget() -> None:
    """And in a watch."""

    def step(model: Any, net: Net, alive: list[weakref.ref[Any]]) -> None:
        with gk.watch() as w, gk.budget(2_000) as b:
            alive.append(weakref.ref((w, b)[len(alive)]))  # each once
            total(losses(model(batches()[dist.get_rank()]))).backward()

    a_rank_raises(step)


# checkpoints ------------------------------------------------------------------------------------------------------------------


class Training:
    def __init__(self, wrapper: str, verb: str, seed: int = 0) -> None:
        self.verb = verb
        self.net = Net(seed=seed)
        if wrapper == "FSDP2":
            for part in (self.net.trunk, *self.net.heads):
                fully_shard(part)
            self.model: Any = fully_shard(self.net)
        else:
            self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return gk.budget(3_000) if self.verb == "budget" else gk.watch() if self.verb == "watch" else contextlib.nullcontext()

    def step(self, number: int, pause: Callable[[], None] = lambda: None) -> None:
        x = batches(number)[dist.get_rank()]
        self.optimizer.zero_grad()
        if self.verb == "infer":
            with gk.infer(self.model, x, chunk_size=3) as out:
                pause()
                total(losses(out[[1, 5, 6]])).backward()
        elif self.verb == "cut":
            found = losses(self.model(x, cutting=True))
            found[0].backward()
            pause()
            found[1].backward()
            assert self.net.cut is not None
            self.net.cut.close()
        else:
            found = losses(self.model(x))
            pause()
            total(found).backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        return [whole(tensor) for tensor in self.net.state_dict().values()]

    def save(self, folder: str, distributed: bool) -> None:
        if distributed:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        else:
            states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(states, Path(folder, f"{dist.get_rank()}.pt"))

    def load(self, folder: str, distributed: bool) -> None:
        if distributed:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        else:
            states = torch.load(Path(folder, f"{dist.get_rank()}.pt"))
            self.model.load_state_dict(states["model"])
            self.optimizer.load_state_dict(states["optimizer"])


def checkpoint(wrapper: str, verb: str, distributed: bool) -> None:
    """Saved between forward and backward of a step inside of a verb, and resumed from there inside of it."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    (folder,) = folders
    twin, ours, resumed = (Training(wrapper, verb, seed) for seed in (0, 0, 1))
    with twin.context():
        for number in range(4):
            twin.step(number)
    with ours.context():
        ours.step(0)
        ours.step(1, lambda: ours.save(folder, distributed))
        for number in range(2, 4):
            ours.step(number)
    with resumed.context():
        resumed.load(folder, distributed)
        for number in range(1, 4):
            resumed.step(number)
    for one in ours, resumed:
        assert all(map(torch.equal, one.state(), twin.state())), (wrapper, verb, one is ours)
    assert_nothing_stays()
    if verb in ("cut", "infer"):  # weights that are loaded while their graph waits are other weights
        with pytest.raises(RuntimeError, match=r"was changed|modified by an inplace operation"):  # torch's words, of a head's
            ours.step(4, lambda: ours.load(folder, distributed))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def checkpoints(wrapper: str, distributed: bool) -> None:
    for verb in ("budget", "watch", "cut", "infer"):
        if verb != "infer" or wrapper != "FSDP2":
            checkpoint(wrapper, verb, distributed)


# Accelerate -------------------------------------------------------------------------------------------------------------------


def accelerate() -> None:
    """`accumulate`: two micro-batches, each with `infer` or with a cut, and one step of the optimizer."""
    from accelerate import Accelerator

    rank, ranks = dist.get_rank(), dist.get_world_size()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for verb in ("infer", "cut"):
        net, twin = Net(), Net()
        sgd = torch.optim.SGD(twin.parameters(), lr=0.5)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for number in range(4):
            x = batches(number)
            rows = [1, 3, 8][: 3 - number % 3]
            with accelerator.accumulate(model):
                if verb == "infer":
                    out = gk.infer(model, x[rank], chunk_size=4)
                    accelerator.backward(total(losses(out[rows])))
                else:
                    for loss in losses([o[rows] for o in model(x[rank], cutting=True)]):
                        accelerator.backward(loss)
                    assert net.cut is not None
                    net.cut.close()
                optimizer.step()
                optimizer.zero_grad()
            for r in range(ranks):
                (total(losses([o[rows] for o in twin(x[r])])) / ranks / 2).backward()
            if number % 2:
                sgd.step()
                sgd.zero_grad()
        for ours, wanted in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
        del model, optimizer
        accelerator.free_memory()


# watch ------------------------------------------------------------------------------------------------------------------------


def watch() -> None:
    """The rank that keeps its losses is told, and no other; gradients are those without a watch."""
    net, twin, rank = Net(), Net(), dist.get_rank()
    watched, plain = DistributedDataParallel(net), DistributedDataParallel(twin)
    with gk.watch() as w:
        kept = []
        for number in range(12):
            loss = total(losses(watched(batches(number)[rank])))
            loss.backward()
            w.step()
            if rank == 1:
                kept.append(loss)
    for number in range(12):
        total(losses(plain(batches(number)[rank]))).backward()
    assert all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert [finding.id for finding in w.findings] == ["GK102"] * rank, w.findings
    assert_nothing_stays()


def examples(lines: list[str]) -> None:
    """Run examples one after the other, in one process group instead of one for each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda _backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        for line in lines:
            patch.setattr(sys, "argv", line.split())
            runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
            gc.collect()


PROGRAMS: dict[str, Callable[[], None]] = {
    "unequal_infer": unequal_infer,
    "unequal_heads_infer": unequal_heads_infer,
    "unequal_heads_cut": unequal_heads_cut,
    "unequal_heads_cut_inside": unequal_heads_cut_inside,
    "checkpoint_ddp": lambda: checkpoints("DDP", False),
    "checkpoint_ddp_distributed": lambda: checkpoints("DDP", True),
    "checkpoint_fsdp": lambda: checkpoints("FSDP2", True),
    "accelerate": accelerate,
    "watch": watch,
    "raises_in_infer": raises_in_infer,
    "raises_in_a_replay": raises_in_a_replay,
    "raises_in_a_head": raises_in_a_head,
    "raises_in_a_budget": raises_in_a_budget,
    "raises_in_a_head_fsdp": raises_in_a_head_fsdp,
}

if __name__ == "__main__":
    if sys.argv[1] == "examples":
        with launched.group():
            examples(sys.argv[2:])
    else:
        launched.run(PROGRAMS, sys.argv[1:])
