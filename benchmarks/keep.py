"""`backward(keep=)` for each head beside the same loop with `retain_graph=True`, in the orders that people write.

Both run the trunk's backward once a head. What `keep=` gives is memory: it frees each head, whatever names still point at it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row, mib
from benchmarks._models import HEADS, MODELS, Job, build

ROUNDS = 7

Backward = Callable[[Tensor, Tensor], None]


def with_retain(loss: Tensor, _: Tensor) -> None:
    loss.backward(retain_graph=True)


def with_keep(loss: Tensor, h: Tensor) -> None:
    gk.backward(loss, keep=h)


def all_forward_first(job: Job, backward: Backward) -> None:
    h = job.trunk(job.inputs)
    losses = [job.loss(i, h) for i in range(HEADS)]
    for loss in losses:
        backward(loss, h)


def head_by_head(job: Job, backward: Backward) -> None:
    h = job.trunk(job.inputs)
    losses = []
    for i in range(HEADS):
        losses.append(job.loss(i, h))
        backward(losses[-1], h)


def head_by_head_and_del(job: Job, backward: Backward) -> None:
    h = job.trunk(job.inputs)
    for i in range(HEADS):
        loss = job.loss(i, h)
        backward(loss, h)
        del loss


ORDERS: dict[str, Callable[[Job, Backward], None]] = {
    "all heads forward first": all_forward_first,
    "head by head, losses kept": head_by_head,
    "head by head, losses deleted": head_by_head_and_del,
}


def rows() -> Iterator[Row]:
    for model in MODELS:
        job = build(model)
        for order, run in ORDERS.items():
            yield from _rows(model, job, order, run)


def _rows(model: str, job: Job, order: str, run: Callable[[Job, Backward], None]) -> Iterator[Row]:
    gradients = []
    for backward in (with_keep, with_retain):
        job.zero_grad()
        run(job, backward)
        gradients.append([grad.clone() for grad in job.gradients()])
    difference = _measure.largest_difference(*gradients)
    yield Row("keep", model, f"{order}: gradient difference", difference, unit="", wanted=0.0)

    times = _measure.alternate(
        {"keep": lambda: run(job, with_keep), "retain": lambda: run(job, with_retain)}, ROUNDS, before=job.zero_grad, warm=True
    )
    yield _measure.time_row("keep", model, f"{order}: time", times["keep"], times["retain"], wanted=1.0)

    apart = job.apart()
    keep = _measure.peak_bytes(lambda: run(job, with_keep), apart)
    retain = _measure.peak_bytes(lambda: run(job, with_retain), apart)
    note = f"{mib(keep)} over {mib(retain)}"
    yield Row("keep", model, f"{order}: peak live bytes", keep / retain, wanted=1.0, note=note)


if __name__ == "__main__":
    _measure.main(rows)
