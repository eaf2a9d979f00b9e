"""The pictures on the pages: where something is compared with others, time against memory for each, or time alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks._measure import Row
from benchmarks._svg import Panel, Point, Strip, panels, strips

BYTES = "live bytes at the peak of a step"


@dataclass(frozen=True)
class Picture:
    """One of them: what it says to somebody who does not see it, and how it is drawn."""

    alt: str
    draw: Callable[[Sequence[Row]], str]


def points(rows: Sequence[Row], benchmark: str) -> dict[str, dict[str, Point]]:
    """For each model and each way, live bytes and time, where both are known."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        name, _, figure = row.figure.rpartition(": ")
        if row.benchmark == benchmark and figure in ("time", "live bytes", "peak live bytes"):
            found.setdefault(row.model, {}).setdefault(name, {})[figure.removeprefix("peak ")] = row.measured
    known = {
        model: {name: (both["live bytes"], both["time"]) for name, both in ways.items() if len(both) == 2}
        for model, ways in found.items()
    }
    return {model: ways for model, ways in known.items() if ways}


def _keep(rows: Sequence[Row]) -> str:
    given = [Panel(f"{model}, eight heads", ways) for model, ways in points(rows, "heads").items()]
    ours = ("cut", "backward(keep=) for each head")
    return panels(given, ours, "one joint backward", f"{BYTES}, over the joint backward's", "time of a step")


def _infer(rows: Sequence[Row]) -> str:
    given = [
        Panel(model, {_short(name): point for name, point in ways.items()}) for model, ways in points(rows, "infer").items()
    ]
    # there, each row is the other way round: infer over what it is compared with
    for model, over in points(rows, "infer_contrastive").items():
        x, y = over["infer over plain batch"]
        others = {
            name.removeprefix("infer over "): (x / a, y / b)
            for name, (a, b) in over.items()
            if name != "infer over plain batch"
        }
        given.append(Panel(f"contrastive, {model.rpartition(', ')[2]}", {"infer keep=nothing": (x, y), **others}))
    ours = ("infer keep=nothing", "infer keep=auto", "infer keep=everything")
    plain = "two forwards and one backward of the whole batch; contrastive: the plain batch"
    return panels(given, ours, plain, BYTES, "time of a step")


def _short(name: str) -> str:
    """Without what the table says besides: whose chunks are fixed, where all batches are known."""
    return name.partition(", wh")[0]


def _watch(rows: Sequence[Row]) -> str:
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for row in rows:
        name, _, figure = row.figure.rpartition(": ")
        if row.benchmark == "watch" and figure == "time" and row.low is not None and row.high is not None:
            found.setdefault(row.model, {})[name] = row.measured, row.low, row.high
    return strips([Strip(model, figures) for model, figures in found.items()], ("watch",), "time of a step, over plain torch's")


def _budget(rows: Sequence[Row]) -> str:
    ours, peers = points(rows, "budget"), points(rows, "budget_peers")
    given = [Panel(model, peers.get(model, {}), {"gk.budget": [*ours.get(model, {}).values()]}) for model in ours | peers]
    return panels(given, ("gk.budget",), "plain torch", f"{BYTES}, over plain torch's", "time of a step")


PICTURES = {
    "keep": Picture(
        "Time over live bytes of eight heads on one trunk, for two models: cut and backward(keep=) beside retain_graph=True "
        "and TorchJD",
        _keep,
    ),
    "infer": Picture(
        "Time over live bytes of backward batch by batch and of a contrastive step: infer beside the same by hand, GradCache "
        "and others",
        _infer,
    ),
    "watch": Picture(
        "Time of a training step over plain torch's, for networks of large and of tiny ops: watch beside identity hooks, "
        "torch.profiler and memray",
        _watch,
    ),
    "budget": Picture(
        "Time of a step over its live bytes, for seven models: gk.budget at ever smaller limits as a line, its peers as points",
        _budget,
    ),
}
