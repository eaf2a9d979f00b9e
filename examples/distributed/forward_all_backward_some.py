"""Forward all, backward some, on several ranks: each picks rows of its own samples, one of them none at all.

``torchrun --nproc-per-node 2 forward_all_backward_some.py``, with DistributedDataParallel. `gk.infer` refuses
FSDP2, whose hooks count forwards; there `keep_part_of_a_graph.py --fsdp` shows `gk.cut`.
"""

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


def condition(out, whose):
    return out.detach().amax(1) > (0.5 if whose % 2 == 0 else torch.inf)  # a rank with an odd number rejects all


out = gk.infer(ddp, data[rank], chunk_size=16 + 8 * rank)  # the ranks may have other numbers of chunks
rows = condition(out.values, rank)
cross_entropy(out[rows], target[rank][rows], reduction="sum").backward()  # on every rank, also where no row was picked

# One process with the batches of all ranks. DDP divides the sum by the number of ranks.
for r in range(ranks):
    values = plain(data[r])
    picked = condition(values, r)
    (cross_entropy(values[picked], target[r][picked], reduction="sum") / ranks).backward()
for ours, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-4, atol=1e-5)
print(f"rank {rank}: {int(rows.sum())} of 64 rows have run backward; gradients equal those of one process", flush=True)

del ddp  # before the process group: it lies in a cycle
gc.collect()
dist.barrier()
dist.destroy_process_group()
