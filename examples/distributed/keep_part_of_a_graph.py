"""Keep part of a graph, on several ranks: two heads run backward one by one, the trunk once, gradients are reduced once.

``torchrun --nproc-per-node 2 keep_part_of_a_graph.py`` with DistributedDataParallel, or with ``--fsdp`` for
FSDP2 (`fully_shard`). `gk.backward(keep=)` would bring the trunk's gradients twice, and is refused under DDP.
"""

import copy
import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(64, 10), nn.Linear(64, 1)])

    def forward(self, x, cutting=True):
        x = self.trunk(x)
        if cutting:  # inside of the wrapped forward no `with` block can span the backwards
            self.cut = gk.cut(x)
            x = self.cut.stand_ins
        return [head(x).square().mean() for head in self.heads]


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = TwoHeads()
data = torch.randn(ranks, 32, 20)  # of all ranks; each uses data[rank]
plain = copy.deepcopy(net)

if "--fsdp" in sys.argv:
    for part in (net.trunk, *net.heads):
        fully_shard(part)
    model = fully_shard(net)
    losses = model(data[rank])
    model.set_requires_gradient_sync(False)  # else each backward reduces what it has brought: the same sums, more collectives
    for loss in losses:
        loss.backward()  # frees this head; nothing below the cut has run
    model.set_requires_gradient_sync(True)
    net.cut.close()  # the trunk runs backward here, once, and all gradients are reduced
    gradients = [parameter.grad.full_tensor() for parameter in net.parameters()]
else:
    model = DistributedDataParallel(net)
    for loss in model(data[rank]):
        loss.backward()
    net.cut.close()
    gradients = [parameter.grad for parameter in net.parameters()]

# One process with the batches of all ranks, and one joint backward. The wrappers divide the sum by the number of ranks.
(sum(sum(plain(data[r], cutting=False)) for r in range(ranks)) / ranks).backward()
for ours, wanted in zip(gradients, plain.parameters(), strict=True):
    torch.testing.assert_close(ours, wanted.grad, rtol=1e-4, atol=1e-6)
kind = "FSDP2" if "--fsdp" in sys.argv else "DDP"
print(f"rank {rank}: {kind}, two heads and one backward of the trunk; gradients equal those of one process", flush=True)

del model, net  # before the process group: a wrapper lies in a cycle
gc.collect()
dist.barrier()
dist.destroy_process_group()
