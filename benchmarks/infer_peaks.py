"""What is there at once at a fixed chunk size, whatever the number of samples.

All samples run forward, then all run backward in batches of 256 rows in random order. Weights, inputs, their gradients and
targets exist before and do not count. The bytes of `out.values` and of the random order are taken off: these are what N
must cost. Nothing else is. *Graph bytes* are what the graphs of all outputs that are alive at the end of a forward hold,
parameters apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row, mib
from benchmarks._nets import CLASSES, Batch, images

CHUNK, ROWS = 64, 256


def step(batch: Batch, order: torch.Tensor) -> None:
    out = gk.infer(batch.net, batch.inputs, chunk_size=CHUNK)
    for j in order.split(ROWS):
        batch.loss(out[j], j).backward()


def peaks(samples: int) -> tuple[int, int]:
    """Live bytes, less what N must cost, and graph bytes."""
    batch = images(samples, scale=1)
    order = torch.randperm(samples)
    values = samples * CLASSES * 4
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def forward_ended(_module: object, _args: object, out: torch.Tensor) -> None:
        nonlocal most, alive
        alive = [ref for ref in alive if ref() is not None]
        if out.requires_grad:
            alive.append(weakref.ref(out))
            most = max(most, gk.explain([ref() for ref in alive]).saved_bytes)

    hook = batch.net.register_forward_hook(forward_ended)
    live = _measure.peak_bytes(lambda: step(batch, order), [*batch.apart(), order]) - values
    hook.remove()
    found = [grad.clone() for grad in batch.gradients()]
    batch.zero_grad()
    for j in order.split(ROWS):
        batch.loss(batch.net(batch.inputs.detach()[j]), j).backward()
    _measure.largest_difference(found[1:], batch.gradients()[1:])  # of the weights
    return live, most


def rows() -> Iterator[Row]:
    peaks(ROWS)  # what is made once, is made here
    measured = {samples: peaks(samples) for samples in (256, 1024, 4096)}
    for i, name in enumerate(("live", "graph")):
        least = min(each[i] for each in measured.values())
        for samples, each in measured.items():
            where = f"tutorial network, {samples:,} samples by {CHUNK}"
            note = f"{mib(each[i])} over {mib(least)}"
            figure = f"infer: peak {name} bytes, over the least of these"
            yield Row("infer_peaks", where, figure, each[i] / least, wanted=1.01, note=note)


if __name__ == "__main__":
    _measure.main(rows)
