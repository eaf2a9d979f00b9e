"""The job of `graphkeep demo`: one trunk with eight heads, trained on real handwritten digits in four ways.

**The data** are scikit-learn's 1797 digits of 8 x 8 pixels; a fifth is held out. **The tasks**: each head tells two digits that
look alike from each other and from all the rest, so it has three classes (the first, the second, neither), and every sample
contributes to every head. **The model**: a convolutional trunk, whose saved tensors take about twice the memory of one head's,
and heads of two pointwise convolutions and a linear layer.

**The four ways** differ in nothing but how the gradients are had. Each trains in a process of its own, so that the process
peak is its own; the four processes live side by side and take turns, one step each, so that a busy machine slows all of them
alike. A child speaks JSON, one line an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphkeep as gk
from graphkeep._errors import GraphkeepError
from graphkeep.cli._process import STEADY_MALLOC, process_peak

LOOK_ALIKES = ((0, 6), (1, 7), (2, 7), (3, 5), (3, 8), (4, 9), (5, 6), (8, 9))
BATCH = 256
HELD_OUT = 360
_CHANNELS = 32
_DATA, _GRADIENTS = "digits.pt", "gradients-{}.pt"


@dataclass(frozen=True)
class Result:
    """How one way did.

    Attributes:
        way: its key in `WAYS`.
        step_seconds: median time of a training step, on one thread.
        time_ratio: that, over the joint backward's.
        graph_bytes: bytes of the unique storages that live graphs hold for their backward, parameters apart, at the worst
            moment of a step: right before one of its backward calls.
        process_peak: peak resident bytes of the process, Python and torch included.
        gradient_difference: largest absolute difference from the joint backward's gradients after the first step, over the
            largest of those gradients.
        accuracy: share of right answers on the held-out samples, over all heads. "Neither" alone would give about 0.8.
    """

    way: str
    step_seconds: float
    time_ratio: float
    graph_bytes: int
    process_peak: int
    gradient_difference: float
    accuracy: float


class Model(nn.Module):
    """A trunk and its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_block(1, 3), *(_block(_CHANNELS, 3) for _ in range(4)))
        self.heads = nn.ModuleList(_head() for _ in LOOK_ALIKES)


def _block(channels: int, kernel: int) -> nn.Module:
    conv = nn.Conv2d(channels, _CHANNELS, kernel, padding=kernel // 2, bias=False)
    # GroupNorm, since it has no running statistics: the four ways then differ in their gradients only
    return nn.Sequential(conv, nn.GroupNorm(8, _CHANNELS), nn.SiLU())


def _head() -> nn.Module:
    blocks = (_block(_CHANNELS, 1), _block(_CHANNELS, 1))
    return nn.Sequential(*blocks, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(_CHANNELS * 16, 3))


# What is told before each backward: every root of a graph that is alive at that moment.
Probe = Callable[..., None]


def _retain(model: Model, images: Tensor, targets: Tensor, probe: Probe) -> None:
    h = model.trunk(images)
    losses = []  # kept for logging, as most training loops do
    for head, target in zip(model.heads, targets, strict=True):
        loss = F.cross_entropy(head(h), target)
        losses.append(loss)
        probe(losses)
        loss.backward(retain_graph=True)


def _retain_and_del(model: Model, images: Tensor, targets: Tensor, probe: Probe) -> None:
    h = model.trunk(images)
    for head, target in zip(model.heads, targets, strict=True):
        loss = F.cross_entropy(head(h), target)
        probe(loss)
        loss.backward(retain_graph=True)
        del loss


def _joint(model: Model, images: Tensor, targets: Tensor, probe: Probe) -> None:
    h = model.trunk(images)
    losses = [F.cross_entropy(head(h), target) for head, target in zip(model.heads, targets, strict=True)]
    total = torch.stack(losses).sum()
    probe(total)
    total.backward()


def _cut(model: Model, images: Tensor, targets: Tensor, probe: Probe) -> None:
    trunk = model.trunk(images)
    losses = []
    with gk.cut(trunk) as h:
        for head, target in zip(model.heads, targets, strict=True):
            loss = F.cross_entropy(head(h), target)
            losses.append(loss)
            probe(losses, trunk)
            loss.backward()


WAYS = {"retain": _retain, "retain_and_del": _retain_and_del, "joint": _joint, "cut": _cut}


def compare(steps: int, progress: Callable[[str], None] = lambda _: None) -> list[Result]:
    """Train in all four ways, in turns.

    Arguments:
        steps: timed training steps each way.
        progress: is told ``ready`` once for each way, then the way's key after each of its steps.

    Returns:
        One result a way, in the order of `WAYS`.

    Raises:
        GraphkeepError: scikit-learn is not installed.
    """
    digits = _load()
    with tempfile.TemporaryDirectory(prefix="graphkeep-demo-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        torch.save(digits, folder / _DATA)
        children = {way: stack.enter_context(_child(way, folder)) for way in WAYS}
        measured: dict[str, dict[str, Any]] = {}
        for way, child in children.items():
            measured[way] = _receive(child)
            progress("ready")
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(steps):
            for way, child in children.items():
                print("step", file=child.stdin, flush=True)
                times[way].append(_receive(child)["seconds"])
                progress(way)
        for way, child in children.items():
            child.stdin.close()  # type: ignore[union-attr]
            measured[way] |= _receive(child)
        differences = _differences(folder)
    seconds = {way: statistics.median(each) for way, each in times.items()}
    return [
        Result(
            way,
            step_seconds=seconds[way],
            time_ratio=seconds[way] / seconds["joint"],
            gradient_difference=differences[way],
            **measured[way],
        )
        for way in WAYS
    ]


def _load() -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] and targets [heads, N], shuffled, those held out first."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise GraphkeepError(
            "the demo trains on handwritten digits that scikit-learn brings, and scikit-learn is not installed",
            instead="pip install 'graphkeep[demo]'",
        ) from error
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    digits = torch.from_numpy(bunch.target)[order]
    images = torch.from_numpy(bunch.images).float()[order, None] / 16
    targets = torch.stack([torch.where(digits == a, 0, torch.where(digits == b, 1, 2)) for a, b in LOOK_ALIKES])
    return images, targets


@contextlib.contextmanager
def _child(way: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __name__, way, str(folder)]
    env = STEADY_MALLOC | os.environ
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _receive(child: subprocess.Popen[str]) -> dict[str, Any]:
    line = child.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"{' '.join(map(str, child.args))} ended with exit code {child.wait()}")  # type: ignore[arg-type]
    answer: dict[str, Any] = json.loads(line)
    return answer


def _differences(folder: Path) -> dict[str, float]:
    gradients = {way: torch.load(folder / _GRADIENTS.format(way)) for way in WAYS}
    joint = gradients["joint"]
    largest = max(grad.abs().max().item() for grad in joint)
    return {
        way: max((a - b).abs().max().item() for a, b in zip(grads, joint, strict=True)) / largest
        for way, grads in gradients.items()
    }


def _train(way: str, folder: Path) -> None:
    """What a child does: two steps at once, then one for each line that comes in, and at the end the accuracy."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, targets = torch.load(folder / _DATA)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)

    def step(probe: Probe = lambda *_: None) -> float:
        start = time.perf_counter()
        batch = torch.randperm(len(images) - HELD_OUT, generator=generator)[:BATCH] + HELD_OUT
        optimizer.zero_grad()
        WAYS[way](model, images[batch], targets[:, batch], probe)
        optimizer.step()
        return time.perf_counter() - start

    graph_bytes = 0

    def probe(*alive: object) -> None:
        nonlocal graph_bytes
        graph_bytes = max(graph_bytes, gk.explain(alive).saved_bytes)

    step()
    torch.save([parameter.grad for parameter in model.parameters()], folder / _GRADIENTS.format(way))
    step(probe)
    _send(graph_bytes=graph_bytes)
    for _ in sys.stdin:
        _send(seconds=step())
    peak = process_peak()
    with torch.no_grad():
        h = model.trunk(images[:HELD_OUT])
        answers = torch.stack([head(h).argmax(1) for head in model.heads])
    right = (answers == targets[:, :HELD_OUT]).float().mean().item()
    _send(process_peak=peak, accuracy=right)


def _send(**answer: float) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _train(sys.argv[1], Path(sys.argv[2]))
