"""How time and memory are measured, and the rows in which results are kept.

**Live bytes**: unique storages alive, told by weak references. **Time**: variants alternate A B B A in one process, on one
thread; the figure is the ratio of medians, with the middle 90 % of a bootstrap over rounds beside it. It is the process's CPU
time: one thread that never waits has no other, and what else the machine does stays out of it. **Process peak**: how far the
peak of resident memory rises while a child process runs one variant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # 35 MiB, which torch imports in the first backward that is given a gradient
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphkeep.cli._process import STEADY_MALLOC, process_peak

ROOT = Path(__file__).parent.parent


class LiveBytes(TorchDispatchMode):
    """Bytes of the unique storages that ops have made and that are still alive; a context manager.

    It sees what ops return. What an op allocates and frees inside itself, such as a convolution's workspace, stays unseen.
    While a dispatch mode is on, the engine adds gradients out of place, so a sum of gradients may briefly count twice; that is
    so for every variant.

    Arguments:
        apart: tensors that exist before and are not to be counted, such as parameters, their gradients and the batch.

    Attributes:
        now: bytes alive.
        peak: the largest `now` so far.
    """

    def __init__(self, apart: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        # torch would import it in the first op under the mode, and leave that op's frames, with their tensors, in a cycle
        import torch._dynamo  # noqa: F401

        # held, so that none of their addresses is used again
        self._apart = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in apart)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for member in tree_leaves(result):
            if isinstance(member, torch.Tensor):
                sparse = member.layout is torch.sparse_coo
                for part in (member._indices(), member._values()) if sparse else (member,):
                    self._see(part.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._apart or address in self._alive:
            return

        def died(_: object) -> None:
            del self._alive[address]
            self.now -= size

        self._alive[address] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


def peak_bytes(fn: Callable[[], object], apart: Iterable[torch.Tensor]) -> int:
    """The peak of live bytes while `fn` runs once."""
    with LiveBytes(apart) as live:
        fn()
    return live.peak


class _Slot:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def graph_peak(fn: Callable[[], object], apart: Iterable[torch.Tensor]) -> int:
    """The most bytes of unique storages that graphs save while `fn` runs once, seen by a pair of saved-tensor hooks.

    Arguments:
        fn: what to run; it must not have saved-tensor hooks of its own.
        apart: tensors whose storages are not to be counted, such as parameters and the batch.
    """
    held = {tensor.untyped_storage()._cdata for tensor in apart}
    slots: dict[int, int] = {}  # how many stand on a storage; its address is its own while one does
    now = most = 0

    def pack(tensor: torch.Tensor) -> _Slot:
        nonlocal now, most
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        slot = _Slot(tensor.detach())  # a saved output itself would close a cycle
        if address in held:
            return slot
        slots[address] = slots.get(address, 0) + 1
        if slots[address] == 1:
            now += size
            most = max(most, now)

        def died() -> None:
            nonlocal now
            slots[address] -= 1
            if not slots[address]:
                del slots[address]
                now -= size

        weakref.finalize(slot, died)
        return slot

    with saved_tensors_hooks(pack, lambda slot: slot.tensor):
        fn()
    return most


def allocated_peak(fn: Callable[[], object]) -> int:
    """How far the bytes that torch's allocator has given out rise while `fn` runs once.

    It sees everything that ops allocate, whatever runs them: a backward, a recomputation, a compiled function. What only the
    collector of cycles would free counts as alive.
    """
    gc.collect()
    gc.disable()
    try:
        with silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            fn()
    finally:
        gc.enable()
    events: Any = seen.profiler.kineto_results.events() if seen.profiler is not None else ()
    now = most = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """The profiler's library writes a line on stderr whenever it starts and stops."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


LEAST = 5  # rounds: a bracket of fewer says little
ALLOWANCE = 4.0  # seconds of one comparison


def rounds(most: int, least: int = LEAST, seconds: float = ALLOWANCE) -> Iterator[int]:
    """The numbers of rounds: after the least, none begins when the time is up.

    This keeps `make bench` within its twenty minutes. It is wall time, so that a slow or busy machine has fewer rounds and
    not more minutes.
    """
    start = time.monotonic()
    for number in range(most):
        if number < least or time.monotonic() - start < seconds:
            yield number


def alternate(
    variants: dict[str, Callable[[], object]],
    most: int,
    before: Callable[[], object] = lambda: None,
    *,
    least: int = LEAST,
    warm: bool = False,
) -> dict[str, list[float]]:
    """Seconds of each variant in each round, A B B A.

    Arguments:
        variants: what to time.
        most: how often each, if `rounds` has time for so many.
        before: runs before each timed call, outside its time.
        least: how often each in any case.
        warm: each has run before; else each runs once more and is not counted.
    """
    for fn in () if warm else variants.values():
        before()
        fn()
    times: dict[str, list[float]] = {name: [] for name in variants}
    with frozen():
        for number in rounds(most, least):
            for name, fn in list(variants.items())[:: -1 if number % 2 else 1]:
                before()
                gc.collect()
                gc.disable()
                start = time.process_time()
                fn()
                times[name].append(time.process_time() - start)
                gc.enable()
    return times


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """What is there before is no garbage: a collection, which comes before each timed call, need not look at all of torch."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def ratio(times: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Ratio of medians, and the middle 90 % of it when rounds are drawn again with replacement."""
    pairs = list(zip(times, baseline, strict=True))
    rng = random.Random(0)

    def of(sample: list[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in sample) / statistics.median(b for _, b in sample)

    drawn = sorted(of(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return of(pairs), drawn[100], drawn[-101]


def process_growth(fn: Callable[[], object]) -> int:
    """How far this process's peak rises while `fn` runs three times. For a child process; see `in_child`."""
    before = process_peak()
    for _ in range(3):
        fn()
    return process_peak() - before


def in_child(module: str, *args: str, steady: bool) -> Any:
    """Run ``python -m module args`` and return what its last line of output says, as JSON.

    Arguments:
        module: a module of this package.
        args: its arguments.
        steady: with `STEADY_MALLOC`, for times; peaks are those of the allocator as users have it.
    """
    env = {name: value for name, value in os.environ.items() if name not in STEADY_MALLOC}
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env=env | STEADY_MALLOC if steady else env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        benchmark: the file it is from.
        model: what it was measured on.
        figure: what it is.
        measured: its value; smaller is better.
        unit: ``x`` for a ratio, ``us``, ``MiB``, or nothing.
        wanted: the most that it should be; None if it is shown for comparison.
        low, high: interval of a ratio of times.
        note: what the figure is made of.
    """

    benchmark: str
    model: str
    figure: str
    measured: float
    unit: str = "x"
    wanted: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """``met``, ``MISSED``, or ``within noise``: over what is wanted, by less than the interval."""
        if self.wanted is None:
            return ""
        if self.measured <= self.wanted:
            return "met"
        return "within noise" if self.low is not None and self.low <= self.wanted else "MISSED"


def time_row(
    benchmark: str, model: str, figure: str, times: list[float], baseline: list[float], wanted: float | None = None
) -> Row:
    """A ratio of times."""
    value, low, high = ratio(times, baseline)
    note = f"{statistics.median(times) * 1e3:.0f} ms over {statistics.median(baseline) * 1e3:.0f} ms"
    return Row(benchmark, model, figure, value, wanted=wanted, low=low, high=high, note=note)


def with_note(row: Row, note: str) -> Row:
    """The same row with another note."""
    return dataclasses.replace(row, note=note)


def mib(count: float) -> str:
    """Bytes for a note."""
    return f"{count / 2**20:.1f} MiB"


def largest_difference(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Largest absolute difference over the largest expected gradient; raises where that is no rounding any more."""
    largest = max(grad.abs().max().item() for grad in expected)
    difference = max((a - b).abs().max().item() for a, b in zip(gradients, expected, strict=True)) / largest
    if not difference < 1e-4:
        raise AssertionError(f"gradients differ from the joint backward's by {difference:.1e} of the largest")
    return difference


def main(rows: Callable[[], Iterable[Row]]) -> None:
    """What a benchmark does when it runs alone: a line a row on stderr as it comes, all of them as JSON at the end."""
    torch.set_num_threads(1)
    done = []
    for row in rows():
        print(f"  {row.model}: {row.figure}: {row.measured:.3g} {row.unit} {row.verdict}", file=sys.stderr, flush=True)
        done.append(dataclasses.asdict(row))
    print(json.dumps(done))
