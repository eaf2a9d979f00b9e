"""What is there at once at a fixed chunk size, whatever the number of samples.

All samples run forward, then all run backward in batches of 256 rows in random order. Apart from weights, inputs, their gradients and
targets, which exist before, the bytes of `out.values` and of the random order are taken off: these are what N must cost. Nothing else
is. *Graph bytes* are what the graphs of all outputs that are alive at the end of a forward hold, parameters apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row, mib
from benchmarks._nets import Batch, images

CHUNK, ROWS = 64, 256


def step(batch: Batch, order: torch.Tensor) -> None:
    out = gk.infer(batch.net, batch.inputs, chunk_size=CHUNK)
    for j in order.split(ROWS):
        batch.loss(out[j], j).backward()


def peaks(samples: int) -> tuple[int, int]:
    """Live bytes, less what N must cost, and graph bytes."""
    batch = images(samples, scale=1)
    order = torch.randperm(samples)
    values = samples * 10 * 4
    step(batch, order)  # a first time, so that what is made once is there
    live = _measure.peak_bytes(lambda: step(batch, order), [*batch.apart(), order]) - values
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def forward_ended(_module: object, _args: object, out: torch.Tensor) -> None:
        nonlocal most, alive
        alive = [ref for ref in alive if ref() is not None]
        if out.requires_grad:
            alive.append(weakref.ref(out))
            most = max(most, gk.explain([ref() for ref in alive]).saved_bytes)

    hook = batch.net.register_forward_hook(forward_ended)
    batch.zero_grad()
    step(batch, order)
    hook.remove()
    _check(batch, order)
    return live, most


def _check(batch: Batch, order: torch.Tensor) -> None:
    found = [grad.clone() for grad in batch.gradients()]
    batch.zero_grad()
    for j in order.split(ROWS):
        batch.loss(batch.net(batch.inputs[j]), j).backward()
    _measure.largest_difference(found, batch.gradients())


def rows() -> Iterator[Row]:
    measured = {samples: peaks(samples) for samples in (1024, 4096, 16384)}
    live, graph = measured[1024]
    for samples in (4096, 16384):
        where = f"tutorial network, {samples:,} samples by {CHUNK}"
        for name, value, base in (("live", measured[samples][0], live), ("graph", measured[samples][1], graph)):
            note = f"{mib(value)} over {mib(base)}"
            yield Row(
                "infer_peaks", where, f"infer: peak {name} bytes, over 1,024 samples", value / base, wanted=1.01, note=note
            )


if __name__ == "__main__":
    _measure.main(rows)
