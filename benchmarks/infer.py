"""Batch by batch: all samples forward, then backward in K batches of rows in random order, gradients of the inputs wanted.

The floor is what the same work costs if nothing is kept: two forwards and one backward of the whole batch. The batches together
have every sample once. `infer` has chunks of 64. *By hand* is what a user would write: forward without a graph, in such chunks,
then forward the rows again. Inputs and targets are apart from the live bytes, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import graphkeep as gk
from benchmarks import _measure, _peers
from benchmarks._measure import Row, mib
from benchmarks._nets import Batch, images, sequences

ROUNDS = 5
CHUNK = 64
Way = Callable[[Batch, list[Tensor]], None]


def one_backward(batch: Batch, batches: list[Tensor]) -> None:
    outputs = batch.net(batch.inputs)
    torch.stack([batch.loss(outputs[j], j) for j in batches]).sum().backward()


def two_forwards(batch: Batch, batches: list[Tensor]) -> None:
    batch.net(batch.inputs)
    one_backward(batch, batches)


def retain(batch: Batch, batches: list[Tensor]) -> None:
    outputs = batch.net(batch.inputs)
    for j in batches:
        batch.loss(outputs[j], j).backward(retain_graph=True)


def one_by_one(batch: Batch, batches: list[Tensor]) -> None:
    outputs = [batch.net(batch.inputs[i : i + 1]) for i in range(len(batch))]
    for j in batches:
        batch.loss(torch.cat([outputs[i] for i in j]), j).backward()


def infer(keep: str) -> Way:
    def run(batch: Batch, batches: list[Tensor]) -> None:
        out = gk.infer(batch.net, batch.inputs, chunk_size=CHUNK, keep=keep)
        for j in batches:
            batch.loss(out[j], j).backward()

    return run


def by_hand(batch: Batch, batches: list[Tensor]) -> None:
    with torch.no_grad():
        for chunk in batch.inputs.split(CHUNK):
            batch.net(chunk)
    for j in batches:
        for part in j.split(CHUNK):
            rows = batch.inputs.detach()[part].requires_grad_()
            batch.loss(batch.net(rows), part).backward()
            batch.inputs.grad[part] += rows.grad


def grad_cache(batch: Batch, _: list[Tensor]) -> None:
    """Fixed chunks in their order, and one loss: no batch can be picked, but it costs the same two forwards."""
    _peers.grad_cache()([batch.net], CHUNK, lambda outputs: batch.loss(outputs, slice(None)))(batch.inputs)


def rows() -> Iterator[Row]:
    yield from _batch_by_batch("conv", images(512, scale=3), (1, 4, 8, 32))
    yield from _batch_by_batch("transformer", sequences(128), (1, 4, 8))
    yield from _growth()


NAMES = {
    "nothing": "infer keep=nothing",
    "auto": "infer keep=auto",
    "everything": "infer keep=everything",
    "hand": "rows forward again, by hand",
    "grad_cache": "GradCache, whose chunks are fixed",
    "one": "one summed backward, where all batches are known",
    "retain": "retain_graph=True for each batch",
    "one_by_one": "one sample at a time",
}


def _batch_by_batch(model: str, batch: Batch, counts: tuple[int, ...]) -> Iterator[Row]:
    order = torch.randperm(len(batch))
    expected = _gradients(batch, one_backward, [order])
    for k in counts:
        batches = list(order.split(len(batch) // k))
        where = f"{model}, {k} x {len(batches[0])} rows"
        ways: dict[str, Way] = {"floor": two_forwards, "hand": by_hand, "nothing": infer("nothing")}
        slow: dict[str, Way] = {}
        if k in (1, 8):
            ways |= {"auto": infer("auto"), "everything": infer("everything")}
        if k == 1:
            ways["one"] = one_backward
        if k == 1 and _peers.grad_cache() is not None:
            ways["grad_cache"] = grad_cache
        if k == 4:
            slow = {"floor": two_forwards, "retain": retain, "one_by_one": one_by_one}
        difference = max(
            _measure.largest_difference(_gradients(batch, way, batches), expected) for way in (ways | slow).values()
        )
        yield Row("infer", where, "largest gradient difference of all ways", difference, unit="", wanted=1e-5)
        times = _measure.alternate(_runs(ways, batch, batches), ROUNDS, before=batch.zero_grad, warm=True)
        for key, name in NAMES.items():
            if key in times:
                wanted = 1.10 if key in ("nothing", "auto") else None
                yield _measure.time_row("infer", where, f"{name}: time", times[key], times["floor"], wanted)
        name = "infer keep=nothing over by hand: time"
        yield _measure.time_row("infer", where, name, times["nothing"], times["hand"])
        # far from the others: few rounds tell
        times = _measure.alternate(_runs(slow, batch, batches), 3, before=batch.zero_grad, least=3, warm=True)
        for key in slow:
            if key != "floor":
                yield _measure.time_row("infer", where, f"{NAMES[key]}: time", times[key], times["floor"])
        runs, apart = _runs(ways | slow, batch, batches), [*batch.apart(), *batches]
        peaks = {key: _measure.peak_bytes(run, apart) for key, run in runs.items()}
        for key, name in NAMES.items():
            if key in peaks:
                note = f"{mib(peaks[key])} over {mib(peaks['floor'])}"
                yield Row("infer", where, f"{name}: peak live bytes", peaks[key] / peaks["floor"], note=note)


def _growth() -> Iterator[Row]:
    """The cost of one batch of 64 rows out of ever more samples."""
    rows = {}
    for samples in (256, 1024, 4096):
        batch = images(samples)
        out = gk.infer(batch.net, batch.inputs, chunk_size=CHUNK)
        j = torch.randperm(samples)[:64]

        def run(batch: Batch = batch, out: gk.Inference = out, j: Tensor = j) -> None:
            batch.loss(out[j], j).backward()

        batch.zero_grad()
        run()
        (expected,) = torch.autograd.grad(batch.loss(batch.net(batch.inputs[j]), j), batch.inputs)
        _measure.largest_difference([batch.inputs.grad], [expected])
        rows[samples] = run
    times = _measure.alternate({str(samples): run for samples, run in rows.items()}, 15)
    for samples in (1024, 4096):
        yield _measure.time_row(
            "infer",
            f"conv, 64 rows of {samples}",
            "infer keep=nothing: one batch, over one of 256",
            times[str(samples)],
            times["256"],
            1.05,
        )


def _runs(ways: dict[str, Way], batch: Batch, batches: list[Tensor]) -> dict[str, Callable[[], None]]:
    return {key: lambda way=way: way(batch, batches) for key, way in ways.items()}


def _gradients(batch: Batch, way: Way, batches: list[Tensor]) -> list[Tensor]:
    batch.zero_grad()
    way(batch, batches)
    return [grad.clone() for grad in batch.gradients()]


if __name__ == "__main__":
    _measure.main(rows)
