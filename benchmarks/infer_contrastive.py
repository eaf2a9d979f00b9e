"""A contrastive step: the loss is over all pairs of the batch, and the graph of one chunk is all that there is room for.

InfoNCE over 128 pairs with one encoder. All ways but the plain batch run forward twice, in chunks of the same size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import graphkeep as gk
from benchmarks import _measure, _peers
from benchmarks._measure import Row, mib
from benchmarks._nets import Encoder

ROUNDS = 5
PAIRS, CHUNK, SCALE = 128, 32, 20.0


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    scores = SCALE * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(a)))


def rows() -> Iterator[Row]:
    torch.manual_seed(0)
    encoder = Encoder(64)
    anchors, positives = torch.randn(2, PAIRS, 32, 64).unbind()
    parameters = list(encoder.parameters())

    def zero_grad() -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()

    zero_grad()

    def plain() -> None:
        info_nce(encoder(anchors), encoder(positives)).backward()

    def infer() -> None:
        a, b = (gk.infer(encoder, inputs, chunk_size=CHUNK) for inputs in (anchors, positives))
        info_nce(a[:], b[:]).backward()

    ways: dict[str, tuple[str, Callable[[], object]]] = {
        "plain": ("plain batch", plain),
        "infer": ("infer", infer),
    }
    peer = _peers.grad_cache()
    if peer is not None:
        step = peer([encoder, encoder], CHUNK, info_nce)
        ways["grad_cache"] = ("GradCache", lambda: step(anchors, positives))
    cached = _peers.cached_loss(encoder, CHUNK)
    if cached is not None:
        ways["cached"] = ("sentence-transformers' cached loss", lambda: cached(anchors, positives).backward())

    gradients = {}
    for key, (_, way) in ways.items():
        zero_grad()
        way()
        gradients[key] = [parameter.grad.clone() for parameter in parameters]
    model = f"transformer, {PAIRS} pairs by {CHUNK}"
    difference = max(_measure.largest_difference(each, gradients["plain"]) for each in gradients.values())
    yield Row("infer_contrastive", model, "largest gradient difference of all ways", difference, unit="", wanted=1e-5)

    times = _measure.alternate({key: way for key, (_, way) in ways.items()}, ROUNDS, before=zero_grad, warm=True)
    apart = [*parameters, *(parameter.grad for parameter in parameters), anchors, positives]
    peaks = {key: _measure.peak_bytes(way, apart) for key, (_, way) in ways.items()}
    for key, (name, _) in ways.items():
        if key != "infer":
            wanted = 1.0 if key == "grad_cache" else None
            yield _measure.time_row("infer_contrastive", model, f"infer over {name}: time", times["infer"], times[key], wanted)
            note = f"{mib(peaks['infer'])} over {mib(peaks[key])}"
            figure = f"infer over {name}: peak live bytes"
            yield Row("infer_contrastive", model, figure, peaks["infer"] / peaks[key], wanted=wanted, note=note)


if __name__ == "__main__":
    _measure.main(rows)
