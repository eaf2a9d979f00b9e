"""What `watch` changes of the memory of a program, and what it needs itself over 10,000 steps.

*Live bytes* of one step, and the growth of a process's peak over three, have the plain step as their measure. Over many steps a
watch may grow while its records fill up (4096 lives of graphs, 1024 calls, 1024 records of steps); after that it may not:
the figures are what is there after 10,000 steps over what is there after 5,000. *Bytes* are those that `tracemalloc` sees,
*blocks* those that Python's allocator has given out, *objects* those that the collector knows, each less what the same program
has without a watch.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import sys
import tracemalloc
from collections.abc import Iterator

import torch

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row, mib
from benchmarks.watch_jobs import NAMES, Job, build

MARKS = (1_000, 5_000, 10_000)


def rows(quick: bool = False) -> Iterator[Row]:
    for model in ("small",) if quick else ("conv", "transformer", "flat"):
        yield from _peaks(model, build(model), quick)
    yield from _long(tuple(mark // 500 for mark in MARKS) if quick else MARKS)


def _peaks(model: str, job: Job, quick: bool) -> Iterator[Row]:
    apart = job.apart()
    job.step()
    plain = _measure.peak_bytes(job.step, apart)
    with gk.watch():
        watched = _measure.peak_bytes(job.step, apart)
    note = f"{mib(watched)} over {mib(plain)}"
    yield Row("watch_memory", NAMES[model], "watch: peak live bytes", watched / plain, wanted=1.0, note=note)
    if not quick:
        a, b = (_measure.in_child("benchmarks.watch_memory", model, way, steady=False) for way in ("watch", "plain"))
        note = f"{mib(a)} over {mib(b)}"
        yield Row("watch_memory", NAMES[model], "watch: growth of process peak", a / b, note=note)


def _long(marks: tuple[int, ...]) -> Iterator[Row]:
    where = f"{NAMES['small']}, {marks[-1]:,} steps"
    plain, watched = _train(marks, watch=False), _train(marks, watch=True)
    different = sum(a != b for a, b in zip(plain[0], watched[0], strict=True))
    yield Row("watch_memory", where, "losses that are not the same bit for bit", different, "", wanted=0)
    for i, (what, unit) in enumerate((("bytes", "KiB"), ("blocks", ""), ("objects", ""))):
        # what the program itself gains between two marks (nothing, or a cache of torch's) is no memory of the watch's
        own = [b[i] - a[i] for a, b in zip(plain[1], watched[1], strict=True)]
        scale = 1024 if unit else 1
        note = ", ".join(f"{each / scale:,.0f} after {mark:,}" for each, mark in zip(own, marks, strict=True))
        figure = f"{what} of the watch: after {marks[-1]:,} steps over after {marks[-2]:,}"
        yield Row("watch_memory", where, figure, own[-1] / own[-2], wanted=1.01, note=f"{note} {unit}".strip())


def _train(marks: tuple[int, ...], *, watch: bool) -> tuple[array.array[float], list[tuple[int, int, int]]]:
    """Losses, and at each mark: traced bytes, allocated blocks, tracked objects."""
    job = build("small")
    losses = array.array("d", [0.0] * marks[-1])
    seen = []
    gc.collect()
    tracemalloc.start()
    with gk.watch() if watch else contextlib.nullcontext():
        for step in range(marks[-1]):
            losses[step] = job.step().item()
            if step + 1 in marks:
                gc.collect()
                seen.append((tracemalloc.get_traced_memory()[0], sys.getallocatedblocks(), len(gc.get_objects())))
    tracemalloc.stop()
    return losses, seen


def _child(model: str, way: str) -> None:
    torch.set_num_threads(1)
    build("small").step()  # what torch loads in a first backward
    job = build(model)
    with gk.watch() if way == "watch" else contextlib.nullcontext():
        print(json.dumps(_measure.process_growth(lambda: job.step().item())))


if __name__ == "__main__":
    if sys.argv[1:]:
        _child(*sys.argv[1:])
    else:
        _measure.main(rows)
