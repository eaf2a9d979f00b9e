"""Infer all, then back-propagate batch by batch, on several ranks: gradients are synchronised once, in the last backward.

``torchrun --nproc-per-node 2 backward_batch_by_batch.py``, with DistributedDataParallel. `gk.infer` refuses
FSDP2, whose hooks count forwards; there `keep_part_of_a_graph.py --fsdp` shows `gk.cut`.
"""

import contextlib
import copy
import gc

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import graphkeep as gk

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 200), torch.nn.ReLU(), torch.nn.Linear(200, 10))
data, target = torch.randn(ranks, 64, 20), torch.randint(10, (ranks, 64))  # of all ranks; each uses data[rank]
plain = copy.deepcopy(model)
ddp = DistributedDataParallel(model)


def pick(values):
    """The outside logic: the 32 samples that the network is least sure of, 8 at a time."""
    return values.detach().softmax(1).amax(1).argsort()[:32].split(8)


inputs = data[rank].clone().requires_grad_()
out = gk.infer(ddp, inputs, chunk_size=16)
batches = pick(out.values)
for i, rows in enumerate(batches):
    # Whether a backward is synchronised is known when its rows are asked for: `out[rows]` stands within no_sync(), too.
    with ddp.no_sync() if i < len(batches) - 1 else contextlib.nullcontext():
        cross_entropy(out[rows], target[rank][rows], reduction="sum").backward()
    assert out.input_grad(rows).any()  # there at once; the choice of the next batch may depend on it

# One process with the batches of all ranks, and one backward. DDP divides the sum by the number of ranks.
whole = data.clone().requires_grad_()
for r in range(ranks):
    values = plain(whole[r])
    picked = torch.cat(pick(values))
    (cross_entropy(values[picked], target[r][picked], reduction="sum") / ranks).backward()
torch.testing.assert_close(inputs.grad, whole.grad[rank] * ranks, rtol=1e-4, atol=1e-5)  # inputs are this rank's own
for ours, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-5)
print(f"rank {rank}: {len(batches)} backwards, the last one synchronised; gradients equal those of one process", flush=True)

del ddp  # before the process group: it lies in a cycle
gc.collect()
dist.barrier()
dist.destroy_process_group()
