"""Eight heads on one trunk: `cut` and `backward(keep=)` beside one joint backward, `retain_graph=True` and TorchJD's.

The peak that is wanted of `cut` is that of the trunk and the largest head, plus 1 %. The trunk's bytes are what lives after its
forward: its graph and its output. A head's bytes are the peak of its forward and backward alone, from a leaf that has a
gradient already, as the stand-in of a cut has from the second head on. Parameters, their gradients and the batch exist before
and are never counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import torch

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import LiveBytes, Row, mib
from benchmarks._models import HEADS, MODELS, Job, build

ROUNDS = 9


def joint(job: Job) -> None:
    h = job.trunk(job.inputs)
    torch.stack([job.loss(i, h) for i in range(HEADS)]).sum().backward()


def cut(job: Job) -> None:
    with gk.cut(job.trunk(job.inputs)) as h:
        for i in range(HEADS):
            job.loss(i, h).backward()


def keep(job: Job) -> None:
    h = job.trunk(job.inputs)
    for i in range(HEADS):
        gk.backward(job.loss(i, h), keep=h)


def retain(job: Job) -> None:
    h = job.trunk(job.inputs)
    losses = []
    for i in range(HEADS):
        losses.append(job.loss(i, h))
        losses[-1].backward(retain_graph=True)


def retain_and_del(job: Job) -> None:
    h = job.trunk(job.inputs)
    for i in range(HEADS):
        loss = job.loss(i, h)
        loss.backward(retain_graph=True)
        del loss


def mtl_backward(job: Job) -> None:
    """The Jacobian of all losses, summed, which is what the others compute."""
    from torchjd.aggregation import Sum
    from torchjd.autojac import jac_to_grad
    from torchjd.autojac import mtl_backward as backward

    h = job.trunk(job.inputs)
    backward([job.loss(i, h) for i in range(HEADS)], features=h)
    jac_to_grad(job.trunk.parameters(), Sum())


WAYS: dict[str, tuple[str, Callable[[Job], None]]] = {
    "joint": ("one joint backward", joint),
    "cut": ("cut", cut),
    "keep": ("backward(keep=) for each head", keep),
    "retain": ("retain_graph=True in a loop, losses kept", retain),
    "retain_and_del": ("retain_graph=True in a loop, losses deleted", retain_and_del),
    "mtl_backward": ("TorchJD mtl_backward", mtl_backward),
}


def ways() -> dict[str, tuple[str, Callable[[Job], None]]]:
    """Those that can run here."""
    try:
        import torchjd  # noqa: F401
    except ImportError:
        print("  TorchJD is not installed and is left out: pip install --no-deps torchjd", file=sys.stderr)
        return {key: way for key, way in WAYS.items() if key != "mtl_backward"}
    return WAYS


def rows() -> Iterator[Row]:
    for model in MODELS:
        yield from _rows(model, build(model), ways())


def _rows(model: str, job: Job, here: dict[str, tuple[str, Callable[[Job], None]]]) -> Iterator[Row]:
    gradients = {}
    for key, (_, way) in here.items():
        job.zero_grad()
        way(job)
        gradients[key] = [grad.clone() for grad in job.gradients()]
    difference = max(_measure.largest_difference(each, gradients["joint"]) for each in gradients.values())
    yield Row("heads", model, "largest gradient difference of all ways", difference, unit="", wanted=1e-5)

    runs = {key: lambda way=way: way(job) for key, (_, way) in here.items()}
    times = _measure.alternate(runs, ROUNDS, before=job.zero_grad, warm=True)
    for key, (name, _) in here.items():
        if key != "joint":
            wanted = 1.05 if key == "cut" else None
            yield _measure.time_row("heads", model, f"{name}: time", times[key], times["joint"], wanted)

    apart = job.apart()
    peaks = {key: _measure.peak_bytes(lambda way=way: way(job), apart) for key, (_, way) in here.items()}
    trunk, head = trunk_and_largest_head(job)
    yield Row(
        "heads",
        model,
        "cut: peak live bytes over trunk + largest head",
        peaks["cut"] / (trunk + head),
        wanted=1.01,
        note=f"{mib(peaks['cut'])} over {mib(trunk)} + {mib(head)}",
    )
    for key, (name, _) in here.items():
        if key != "joint":
            note = f"{mib(peaks[key])} over {mib(peaks['joint'])}"
            yield Row("heads", model, f"{name}: peak live bytes", peaks[key] / peaks["joint"], note=note)

    growth = {key: _measure.in_child("benchmarks.heads", model, key, steady=False) for key in here}
    for key, (name, _) in here.items():
        if key != "joint":
            note = f"{mib(growth[key])} over {mib(growth['joint'])}"
            yield Row("heads", model, f"{name}: growth of process peak", growth[key] / growth["joint"], note=note)


def trunk_and_largest_head(job: Job) -> tuple[int, int]:
    """Bytes of the trunk, and of the largest head."""
    with LiveBytes(job.apart()) as live:
        h = job.trunk(job.inputs)
        trunk = live.now
    leaf = h.detach().requires_grad_()
    leaf.grad = torch.zeros_like(leaf)
    apart = [*job.apart(), leaf]
    return trunk, leaf.grad.nbytes + max(
        _measure.peak_bytes(lambda i=i: job.loss(i, leaf).backward(), [*apart, leaf.grad]) for i in range(HEADS)
    )


def _child(model: str, way: str) -> None:
    torch.set_num_threads(1)
    job = build(model)
    print(json.dumps(_measure.process_growth(lambda: WAYS[way][1](job))))


if __name__ == "__main__":
    if sys.argv[1:]:
        _child(*sys.argv[1:])
    else:
        _measure.main(rows)
