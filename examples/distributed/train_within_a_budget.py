"""Train within a byte budget, on several ranks: each rank holds its own graph within its own limit, and no weight differs.

``torchrun --nproc-per-node 2 train_within_a_budget.py`` with DistributedDataParallel, or with ``--fsdp`` for
FSDP2 (`fully_shard`). What FSDP2 gathers for a moment cannot be read again, so what sharded weights have made stays there, and
what can be dropped is the rest.
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
fsdp = "--fsdp" in sys.argv
torch.manual_seed(0)
data, target = torch.randn(5, ranks, 64, 32), torch.randint(10, (5, ranks, 64))  # of all ranks; each uses data[step][rank]


def build():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid(), nn.Softplus()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def wrap(net):
    if not fsdp:
        return DistributedDataParallel(net)
    for layer in net:
        fully_shard(layer)
    return fully_shard(net)


def train(model, batch):
    """Plain PyTorch; it knows nothing of a budget."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        batch(model, step).backward()
        optimizer.step()
    weights = [parameter.full_tensor() if fsdp and model is not alone else parameter for parameter in model.parameters()]
    return [weight.detach() for weight in weights]


def mine(model, step):
    return cross_entropy(model(data[step][rank]), target[step][rank])


def everybody(model, step):
    """One process with the batches of all ranks."""
    return cross_entropy(model(data[step].flatten(0, 1)), target[step].flatten())


alone = build()
wanted = train(alone, everybody)
plain = train(wrap(build()), mine)
with gk.budget(0.8 if fsdp else 0.4) as b:
    ours = train(wrap(build()), mine)
assert b.peak <= b.limit
assert b.recomputed_ops
assert all(map(torch.equal, ours, plain))
for one, other in zip(ours, wanted, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
print(
    f"rank {rank}: {'FSDP2' if fsdp else 'DDP'}, at most {b.limit:,} bytes of graph, {b.recomputed_ops} ops ran again; "
    "weights equal those without a budget bit for bit, and those of one process",
    flush=True,
)

gc.collect()  # a wrapper lies in a cycle, and has to be gone before the process group
dist.barrier()
dist.destroy_process_group()
