"""Some of the samples: all run forward, and only a share of them, known from their outputs, runs backward.

`infer` is beside the way of Composer's selective backprop (forward without a graph, then forward and backward of those that are
kept), in chunks of the same size and so at equal memory; and beside masking (one batch, rejected samples with weight zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row, mib
from benchmarks._nets import Batch, images, sequences

ROUNDS = 5
CHUNK = 64
Way = Callable[[Batch, Tensor], None]


def masking(batch: Batch, kept: Tensor) -> None:
    losses = F.cross_entropy(batch.net(batch.inputs), batch.target, reduction="none")
    (losses * torch.zeros(len(batch)).index_fill_(0, kept, 1.0)).sum().backward()


def forward_again(batch: Batch, kept: Tensor) -> None:
    """As in Composer, but for the gradients of the inputs, which it does not give."""
    with torch.no_grad():
        torch.cat([batch.net(chunk) for chunk in batch.inputs.split(CHUNK)])
    for part in kept.split(CHUNK):
        rows = batch.inputs.detach()[part].requires_grad_()
        batch.loss(batch.net(rows), part).backward()
        batch.inputs.grad[part] += rows.grad


def one_by_one(batch: Batch, kept: Tensor) -> None:
    wanted, losses = set(kept.tolist()), []
    for i in range(len(batch)):
        out = batch.net(batch.inputs[i : i + 1])
        if i not in wanted:
            continue
        losses.append(batch.loss(out, slice(i, i + 1)))
        if len(losses) == 32:
            torch.stack(losses).sum().backward()
            losses = []
    if losses:
        torch.stack(losses).sum().backward()


def infer(keep: str, chunk_size: int | None = CHUNK) -> Way:
    def run(batch: Batch, kept: Tensor) -> None:
        out = gk.infer(batch.net, batch.inputs, chunk_size=chunk_size, keep=keep)
        batch.loss(out[kept], kept).backward()

    return run


def rows() -> Iterator[Row]:
    for share in (10, 25, 50, 75, 100):
        yield from _share("conv", images(256, scale=3), share)
    for share in (25, 100):
        yield from _share("transformer", sequences(256), share)


def _share(model: str, batch: Batch, share: int) -> Iterator[Row]:
    kept = torch.randperm(len(batch))[: len(batch) * share // 100].sort().values
    where = f"{model}, {share} % of {len(batch)}"
    ways: dict[str, Way] = {
        "masking": masking,
        "again": forward_again,
        "nothing": infer("nothing"),
        "auto": infer("auto"),
        "whole": infer("auto", chunk_size=None),
    }
    gradients = {}
    for key, way in (ways | {"one": one_by_one}).items() if share == 25 else ways.items():
        batch.zero_grad()
        way(batch, kept)
        gradients[key] = [grad.clone() for grad in batch.gradients()]
    difference = max(_measure.largest_difference(each, gradients["masking"]) for each in gradients.values())
    yield Row("infer_some", where, "largest gradient difference of all ways", difference, unit="", wanted=1e-5)

    times = _measure.alternate(
        {key: lambda way=way: way(batch, kept) for key, way in ways.items()}, ROUNDS, before=batch.zero_grad, warm=True
    )
    wanted = 1.02 if share == 25 else None
    name = "infer keep=nothing over the rows forward again: time"
    yield _measure.time_row("infer_some", where, name, times["nothing"], times["again"], wanted)
    for key, name in (("whole", "keep=auto, chunk_size=None"), ("auto", f"keep=auto, chunk_size={CHUNK}")):
        name = f"infer {name}, over masking: time"
        yield _measure.time_row("infer_some", where, name, times[key], times["masking"], 1.0)
    yield _measure.time_row("infer_some", where, "infer keep=nothing over masking: time", times["nothing"], times["masking"])
    if share == 25:
        slow = {"one": lambda: one_by_one(batch, kept), "nothing": lambda: infer("nothing")(batch, kept)}
        times = _measure.alternate(slow, 3, before=batch.zero_grad, least=3, warm=True)
        yield _measure.time_row("infer_some", where, "one sample at a time over infer: time", times["one"], times["nothing"])
        apart = batch.apart()
        peaks = {key: _measure.peak_bytes(lambda way=way: way(batch, kept), apart) for key, way in ways.items()}
        for key, name in (("again", "the rows forward again"), ("masking", "masking")):
            note = f"{mib(peaks['nothing'])} over {mib(peaks[key])}"
            figure = f"infer keep=nothing over {name}: peak live bytes"
            wanted = 1.01 if key == "again" else None
            yield Row("infer_some", where, figure, peaks["nothing"] / peaks[key], wanted=wanted, note=note)


if __name__ == "__main__":
    _measure.main(rows)
