"""A data file as `graphkeep run` would write it, of a loop that keeps its losses: made up, so that every figure is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphkeep._watch._datafile import FORMAT, SCHEMA_VERSION, DataFile

HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"
MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        weights = scores.softmax(-1)
        return self.out(weights @ v)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        h = self.up(h)
        h = nn.functional.gelu(h)
        return x + self.down(h)


class Model(nn.Module):
    def forward(self, tokens):
        x = self.embed(tokens)
        x = nn.functional.dropout(x, 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
"""
TRAIN = """\
import torch

from model import Model


class Trainer:
    def __init__(self, model, data):
        self.model, self.data = model, data
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.losses = []

    def step(self, tokens, target):
        logits = self.model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        penalty = logits.pow(2).mean()
        self.optimizer.zero_grad()
        (loss + 1e-4 * penalty).backward()
        self.optimizer.step()
        self.losses.append(penalty)
        return loss

    def train(self):
        for tokens, target in self.data:
            loss = self.step(tokens, target)
            if loss.isnan():
                break


Trainer(Model(), load()).train()
"""
# id, file, line, function, module, op, bytes held at a backward
SITES: list[tuple[int, str, int, str, str | None, str, int]] = [
    (1, "model.py", 13, "attention", "Linear", "addmm", 3_000_000),
    (2, "model.py", 14, "attention", "Block", "bmm", 5_200_000),
    (3, "model.py", 15, "attention", "Block", "_softmax", 6_400_000),
    (4, "model.py", 16, "attention", "Linear", "addmm", 2_600_000),
    (5, "model.py", 19, "forward", "LayerNorm", "native_layer_norm", 1_700_000),
    (6, "model.py", 20, "forward", "LayerNorm", "native_layer_norm", 1_600_000),
    (7, "model.py", 21, "forward", "Linear", "addmm", 1_900_000),
    (8, "model.py", 22, "forward", "Block", "gelu", 7_300_000),
    (9, "model.py", 23, "forward", "Linear", "addmm", 7_100_000),
    (10, "model.py", 28, "forward", "Embedding", "embedding", 120_000),
    (11, "model.py", 29, "forward", "Model", "native_dropout", 900_000),
    (12, "model.py", 32, "forward", "Linear", "addmm", 1_400_000),
    (13, "train.py", 14, "step", None, "_log_softmax", 2_900_000),
    (14, "train.py", 15, "step", None, "pow", 0),
    (15, "train.py", 17, "step", None, "", 0),
    (16, "train.py", 24, "train", None, "", 0),
]
BORN, LEAK, BACKWARD, REBOUND = 13, 14, 15, 16
LEAK_BYTES = 60_000  # a step
FINDING = {
    "id": "GK101",
    "severity": "bytes grow",
    "where": "train.py:19",
    "why": "`self.losses.append(penalty)` stores a tensor with its history",
    "instead": "`self.losses.append(penalty.detach())`; or `.item()` for a number",
}
COSTS = {
    "id": "GK301",
    "severity": "costs",
    "what": "`retain_graph=True` was given three times or more, and no later backward used what it had kept",
    "where": "train.py:17",
    "why": "the saved tensors live on until the next forward has built its own",
    "instead": "`(loss + 1e-4 * penalty).backward()`",
}


def write(
    path: Path,
    steps: int = 1_000,
    *,
    hostile: bool = False,
    cut: bool = False,
    leaks: bool = True,
    raised: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> Path:
    """Write a run of so many steps; ``hostile`` names, ``cut`` off before its end, one of several ranks."""
    file = DataFile(path)
    name = HOSTILE if hostile else "Block"
    for record in (_header(rank, world_size, hostile), *_program(name, hostile)):
        file.write(record)
    leak = 0
    at, s = 40, 0.0  # a warm-up forward lay before the first step
    file.write({"type": "steps_begin", "at": at, "boundary": "optimizer"})
    for k in range(steps):
        leak += LEAK_BYTES if leaks else 0
        begin, wave = at, 1 + 0.15 * ((k * 7) % 5) / 5
        at += 90
        sites = [[i, int(size * wave)] for i, *_, size in SITES if size]
        kept = [[LEAK, leak]] if leak else []
        total = sum(size for _, size in sites) + leak
        s += 0.052
        for record in _one_step(k, begin, at, s, total, leak, [*sites, *kept], kept):
            file.write(record)
    if not cut:
        for record in _last(name, steps, at, s, leak, raised):
            file.write(record)
    file.close()
    return path


def _header(rank: int, world_size: int, hostile: bool) -> dict[str, Any]:
    return {
        "type": "header",
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "graphkeep": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "program": HOSTILE + ".py" if hostile else "train.py",
        "argv": ["train.py", "--lr", "3e-4", *(["</script><b>"] if hostile else [])],
        "cwd": "/home/me/project",
        "pid": 4711 + rank,
        "host": "box",
        "started": "2026-11-30T12:00:00Z",
        "rank": rank,
        "world_size": world_size,
        "group": "4711",
    }


def _program(name: str, hostile: bool) -> list[dict[str, Any]]:
    evil = "  # </script><script>window.hacked=1</script>\u2028" if hostile else ""
    records: list[dict[str, Any]] = [
        {"type": "source", "file": f"/home/me/project/{file}", "text": "\n".join(line + evil for line in text.split("\n"))}
        for file, text in (("model.py", MODEL), ("train.py", TRAIN))
    ]
    for i, file, line, function, module, *_ in SITES:
        shown = name if module == "Block" else module
        path = f"/home/me/project/{file}"
        records.append({"type": "site", "id": i, "file": path, "line": line, "function": function, "module": shown})
    return records


def _one_step(
    k: int, begin: int, at: int, s: float, total: int, leak: int, sites: list[list[int]], kept: list[list[int]]
) -> list[dict[str, Any]]:
    saved = total - leak
    step = {"step": k, "at": at}
    life = {"type": "life", "born_first": begin + 1, "died_at": at, "died_step": k}
    called = {"retain_graph": False, "create_graph": False, "failed": False, "reused": False, "kept_bytes": leak}
    records: list[dict[str, Any]] = [
        {"type": "sample", **step, "s": s, "bytes": total, "sites": sites},
        {"type": "backward", "number": k + 1, "site": BACKWARD, **step, **called},
        {**life, "born": BORN, "died": BACKWARD, "born_last": at, "tensors": 80, "bytes": saved, "backward": k + 1},
    ]
    if k % 3 == 2:  # a graph of the step before, freed when its name is bound anew
        records.append(
            {**life, "born": LEAK, "died": REBOUND, "born_first": begin - 30, "born_last": begin, "tensors": 4}
            | {"died_at": at - 20, "bytes": 4_000, "backward": None}
        )
    sums = {"count": 1, "at": begin, "s": s + 0.01, "tensors": 90, "bytes": saved, "left": leak, "backwards": 1}
    return [
        *records,
        {"type": "optimizer_step", "optimizer": "AdamW", "site": BACKWARD, **step},
        {"type": "sample", **step, "s": s + 0.01, "bytes": leak, "sites": kept},
        {"type": "step", "first": k, **sums, "peak": int(total * 1.02)},
    ]


def _last(name: str, steps: int, at: int, s: float, leak: int, raised: bool) -> list[dict[str, Any]]:
    words = f"`self.losses[0..{steps - 1}]` (list, attribute of Trainer with {name})"
    losses = {"holder": words, "kind": "list", "name": f"self.losses[0..{steps - 1}]", "file": "train.py", "line": 19}
    losses |= {"nodes": 7 * steps, "bytes": leak, "parts": [[k, 7, LEAK_BYTES] for k in range(steps)], "sites": [LEAK]}
    loss = {"holder": "local `loss` in Trainer.train()", "kind": "local", "name": "loss", "file": "train.py", "line": 24}
    loss |= {"nodes": 31, "bytes": 0, "parts": [[steps - 1, 31, 0]], "sites": [BORN]}
    what = f"{words} keeps one graph more each step: +7 nodes and 58.6 KiB of saved tensors a step, built at train.py:15"
    findings = [{**FINDING, "what": what}, COSTS] if leak else []
    look = {"type": "look", "at": at, "s": s}
    held = {"step": steps, "final": True, "holders": [losses] if leak else [], "findings": findings}
    during = {"step": steps - 1, "final": False, "holders": [*held["holders"], loss], "findings": []}  # type: ignore[misc]
    sites = [
        [i, op or None, 3 * steps, size * steps, steps if i == LEAK else 0, leak if i == LEAK else 0, 2 * steps, steps // 3]
        for i, *_, op, size in SITES
    ]
    deaths = [[BORN, BACKWARD, True, steps, 80 * steps, 42_000_000 * steps]]
    deaths += [[LEAK, REBOUND, False, steps // 3, 4 * (steps // 3), 4_000 * (steps // 3)]]
    peak = int((48_000_000 + leak) * 1.02)
    note = (
        "graphkeep GK201: this loss reaches a part of the graph that has been freed before\n  built:   train.py:14 in step 0\n"
    )
    note += "  write instead: `hidden = hidden.detach()` before line 14"
    error = "RuntimeError: Trying to backward through the graph a second time"
    how = {"how": "raised" if raised else "finished", "error": error if raised else None}
    return [
        {**look, **during},
        {**look, **held},
        {"type": "totals", "sites": sites, "deaths": deaths, "calls": [[BACKWARD, steps, 0, 0, 0, 0]], "peak": peak},
        *([{"type": "note", "id": "GK201", "text": note, "error": error}] if raised else []),
        {"type": "end", **how, "s": s},
    ]
