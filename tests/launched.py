"""What the programs have in common that `torch.distributed.run` launches: each rank runs those that it is told, and says so."""

from __future__ import annotations

import datetime
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

import graphkeep as gk


@contextmanager
def group() -> Iterator[None]:
    """A process group, in which a rank that waits in vain ends with an error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", category=gk.WatchFailedWarning)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(programs: Mapping[str, Callable[[], object]], names: list[str]) -> None:
    """Run those of the programs that are named."""
    with group():
        for name in names:
            programs[name]()
            # A DDP module lies in a cycle. If it outlives the process group, gloo's threads are torn down at exit while they
            # run, and every fourth process aborts ("terminate called without an active exception"; plain DDP, torch 2.13).
            gc.collect()
            print(f"rank {dist.get_rank()}: {name} ok\n", end="", flush=True)
