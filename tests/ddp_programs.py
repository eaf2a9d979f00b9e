"""What `test_ddp.py` runs on two ranks: ``python -m torch.distributed.run --nproc-per-node 2 ddp_programs.py NAME``."""

import copy
import sys
from typing import Any

import launched
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8).eval(), nn.Tanh(), nn.Linear(8, 3))


def data() -> torch.Tensor:
    """The batches of all ranks."""
    return torch.randn(dist.get_world_size(), 10, 6, generator=torch.Generator().manual_seed(5))


class Counting:
    """A DDP model that counts its all-reduces."""

    def __init__(self, **options: Any) -> None:
        self.ddp = DistributedDataParallel(model(), **options)
        self.reduced = 0
        self.ddp.register_comm_hook(None, self._reduce)

    def _reduce(self, _state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.reduced += 1
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / dist.get_world_size())


def assert_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def infer(**options: Any) -> None:
    """Other rows, and other numbers of chunks, on each rank; one of them keeps no sample in every second step."""
    counting, twin, batches = Counting(**options), model(), data()
    ddp, rank = counting.ddp, dist.get_rank()
    picks = [[[1, 4, 7], [0]], [[2], []], [[5, 6], [3, 8, 9, 1]]]
    for rows in picks:
        ddp.zero_grad(), twin.zero_grad()
        counting.reduced = 0
        out = gk.infer(ddp, batches[rank], chunk_size=3 + rank)
        out[rows[rank]].square().sum().backward()
        assert counting.reduced == 1, counting.reduced
        (sum(twin(batches[r])[rows[r]].square().sum() for r in range(len(batches))) / len(batches)).backward()
        assert_gradients(ddp, twin)


def infer_no_sync() -> None:
    """Batch by batch with one synchronisation, at the last backward; a plain step before and after."""
    counting, twin, batches = Counting(), model(), data()
    ddp, rank = counting.ddp, dist.get_rank()
    ddp(batches[rank]).sum().backward()
    ddp.zero_grad()
    counting.reduced = 0
    out = gk.infer(ddp, batches[rank], chunk_size=4)
    with ddp.no_sync():
        out[[1, 2]].sum().backward()
        out[[7]].sum().backward()
    assert counting.reduced == 0
    (out[[3]].sum() + out[[4]].square().sum()).backward()
    assert counting.reduced == 1
    for r in range(len(batches)):
        y = twin(batches[r])
        ((y[[1, 2, 7, 3]].sum() + y[[4]].square().sum()) / len(batches)).backward()
    assert_gradients(ddp, twin)
    ddp.zero_grad(), twin.zero_grad()
    ddp(batches[rank]).sum().backward()
    for r in range(len(batches)):
        (twin(batches[r]).sum() / len(batches)).backward()
    assert_gradients(ddp, twin)


def refused() -> None:
    """What could not be right says so before anything runs."""
    for build, says in (
        (lambda: DistributedDataParallel(model(), static_graph=True), "static_graph"),
        (lambda: nn.Sequential(DistributedDataParallel(model()), nn.Linear(3, 1)), "inside"),
    ):
        with pytest.raises(gk.ArgumentError, match=says):
            gk.infer(build(), data()[0])


def cut() -> None:
    """A trunk and two heads in one wrapped module, three separate backwards."""

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = model()
            self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
            self.cut: gk.cut[torch.Tensor] | None = None

        def forward(self, x: torch.Tensor, use_cut: bool) -> list[torch.Tensor]:
            h = self.trunk(x)
            if use_cut:
                self.cut = gk.cut(h)
                h = self.cut.stand_ins
            return [head(h).square().mean() for head in self.heads]

    torch.manual_seed(0)
    ours = TwoHeads()
    theirs = copy.deepcopy(ours)
    ddp, batches = DistributedDataParallel(ours), data()
    for loss in ddp(batches[dist.get_rank()], True):
        loss.backward()
    assert ours.cut is not None
    ours.cut.close()
    (sum(sum(theirs(batches[r], False)) for r in range(len(batches))) / len(batches)).backward()
    assert_gradients(ddp, theirs)


PROGRAMS = {
    "infer": infer,
    "infer_find_unused": lambda: infer(find_unused_parameters=True),
    "infer_no_sync": infer_no_sync,
    "refused": refused,
    "cut": cut,
}

if __name__ == "__main__":
    launched.run(PROGRAMS, sys.argv[1:])
