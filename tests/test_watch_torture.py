"""The user's program runs as before: every program of ``torture.py`` with and without ``gk.watch()``, compared bit for bit."""

from __future__ import annotations

import concurrent.futures.thread
import dataclasses
import gc
import os
import random
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torture import PROGRAMS, SCRIPTS, Later, Program

import graphkeep as gk

Around = Callable[[], AbstractContextManager[Any]]

# Where a watch may have patched something: none of it may differ afterwards.
PATCHABLE = (
    torch,
    torch.Tensor,
    torch._C._autograd,
    torch.autograd,
    torch.autograd.graph,
    torch.autograd.function,
    torch.autograd.function.Function,
    torch.autograd.function.FunctionCtx,
    torch.autograd.function.BackwardCFunction,
    torch.autograd.graph.saved_tensors_hooks,
    torch.autograd.graph.disable_saved_tensors_hooks,
    torch.func,
    torch._functorch.eager_transforms,
    torch._functorch.apis,
    torch.nn.Module,
    torch.utils.checkpoint,
    threading,
    threading.Thread,
    concurrent.futures.thread.ThreadPoolExecutor,
)


@dataclasses.dataclass
class Outcome:
    """All that a program did that can be seen from outside."""

    result: object = None
    raised: tuple[type[BaseException], str] | None = None
    warned: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    state: list[object] = dataclasses.field(default_factory=list)
    left: list[str] = dataclasses.field(default_factory=list)


def tensors_alive(known: set[int] = frozenset()) -> list[Tensor]:  # type: ignore[assignment]
    """Those with values: what the compiler and the meta device make is none of it."""
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and id(o) not in known]
    return [t for t in found if type(t).__name__ != "FakeTensor" and t.device.type == "cpu" and t.numel()]


def read_later(value: object) -> object:
    """The result with every ``Later`` asked."""
    if isinstance(value, Later):
        return read_later(value.value())
    if isinstance(value, tuple | list):
        return [read_later(v) for v in value]
    if isinstance(value, Mapping):
        return {k: read_later(v) for k, v in value.items()}
    return value


def run(program: Program, around: Around) -> Outcome:
    """What the program does inside ``around()``, and what it leaves alive once its result is dropped."""
    outcome = Outcome()
    torch.manual_seed(0)
    random.seed(0)
    gc.collect()
    known = {id(t) for t in tensors_alive()}
    gc.disable()
    try:
        result: object = None
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with around():
                    result = program.body()
                result = read_later(result)
            except BaseException as error:
                result, outcome.raised = None, (type(error), str(error))
                traceback.clear_frames(error.__traceback__)
        outcome.warned = [(w.category.__name__, str(w.message)) for w in warned]
        outcome.result = frozen(result)
        outcome.state = [
            torch.get_rng_state().sum().item(),
            random.random(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._len_torch_function_stack(),
            torch._C._autograd._saved_tensors_hooks_is_enabled(),
        ]
        del result, warned
        outcome.left = sorted(f"{type(t).__name__} of {t.numel()} {t.dtype}" for t in tensors_alive(known))
    finally:
        gc.enable()
        gc.collect()
    return outcome


def frozen(value: object) -> object:
    """The pytree with every tensor replaced by all that is compared of it, so that no tensor is held."""
    if isinstance(value, Tensor):
        return {
            "type": type(value).__name__,
            "dtype": value.dtype,
            "shape": tuple(value.shape),
            "stride": value.stride() if value.layout == torch.strided else None,
            "layout": value.layout,
            "requires_grad": value.requires_grad,
            "is_leaf": value.is_leaf,
            "grad_fn": value.grad_fn.name() if value.grad_fn is not None else None,
            "bits": bits(value),
        }
    if isinstance(value, tuple | list):
        return [frozen(v) for v in value]
    if isinstance(value, Mapping):
        return {k: frozen(v) for k, v in value.items()}
    return value


def bits(t: Tensor) -> bytes:
    t = t.detach()
    t = (t.to_dense() if t.layout != torch.strided else t).resolve_conj().resolve_neg().contiguous()
    return t.view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def differences(a: object, b: object, where: str = "result") -> list[str]:
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for k, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{k}]")]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f"{where}.{k}")]
    if type(a) is type(b) and (a == b or (a != a and b != b)):  # noqa: PLR0124 (nan is nan)
        return []
    return [f"{where}: {a!r} without, {b!r} with"]


def compared(plain: Outcome, other: Outcome) -> list[str]:
    return [d for f in dataclasses.fields(Outcome) for d in differences(getattr(plain, f.name), getattr(other, f.name), f.name)]


def patched() -> dict[tuple[str, str], object]:
    return {(repr(home), name): value for home in PATCHABLE for name, value in vars(home).items() if name != "__doc__"}


def active_hooks() -> object:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True)
    node = torch.ones(2, requires_grad=True).sin().grad_fn
    assert node is not None
    node._raw_saved_self.register_hooks(lambda t: t, lambda t: t)  # raises where a pair has been at work
    return None


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


# What differs under any saved-tensor hooks of torch, or cannot be hidden: each still differs (else it must leave this list),
# and `docs/watch.md` says so. Gradients and errors are equal in all of them but the graph that `make_fx` traces.
_DETACHED = "what a node saved of its output is a detached tensor that Python can see"
_REWRAPPED = "torch makes a new tensor of what an unpack hook returns, with one more `detach`"
DIFFERS = {
    "custom: identity of a saved intermediate": _DETACHED,
    "custom: identity of a saved view of a parameter": _DETACHED,
    "reading: collector sees the same tensors": _DETACHED,
    "lifetimes: reference counts of tensors": "a saved input is held by its Python object",
    "lifetimes: use counts of tensors": "a saved input is held by its Python object",
    "reading: saved input is the tensor itself": _REWRAPPED,
    "subclasses: subclass read from the node": _REWRAPPED,
    "subclasses: wrapper ops in backward": _REWRAPPED,
    "modes: dispatch mode around backward saved leaves": _REWRAPPED,
    "modes: dispatch mode around backward saved intermediates": _REWRAPPED,
    "modes: dispatch mode around double backward": _REWRAPPED,
    "compile: made into an fx graph": _REWRAPPED,
    "lifetimes: model that goes before its loss": "a node that was asked for its op, once for each line, dies a little later",
    "own hooks: asks for the pair that is active": "the watch's pair is the one that is active",
    "own hooks: registered on one saved tensor": "a saved tensor takes one pair of hooks, and the watch's is there",
    "own hooks: register hooks on a saved output": "a saved tensor takes one pair of hooks, and the watch's is there",
    "own hooks: raw saved tensors": "a saved tensor takes one pair of hooks, and the watch's is there",
    "modes: anomaly with a function that raises": "the stack that anomaly mode quotes has frames of graphkeep in it",
    "modes: anomaly in a double backward": "the stack that anomaly mode quotes has frames of graphkeep in it",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_does_the_same_under_watch(program: Program) -> None:
    runs = []
    for around in (nullcontext, nullcontext, nullcontext, gk.watch):  # from one line, for anomaly mode quotes the stack
        before = patched()
        runs.append(run(program, around))
        if len(runs) == 1:
            gc.freeze()  # what was alive before is looked at no more: a look at all live tensors then takes a millisecond
    _, plain, again, watched = runs  # the first one did what torch does only once
    assert (plain.raised and plain.raised[0]) == program.raises, plain.raised
    assert compared(plain, again) == [], "not deterministic"
    after = patched()
    assert [k for k in before if after.get(k) is not before[k]] == []
    assert active_hooks() is None
    differs = compared(plain, watched)
    if str(program) not in DIFFERS:
        assert differs == []
    else:
        assert differs, f"equal now: {DIFFERS[str(program)]}"
        assert plain.raised == watched.raised or "register" in str(program)


def test_what_differs_is_a_program() -> None:
    assert set(map(str, PROGRAMS)) >= set(DIFFERS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_process_does_the_same_under_watch(script: str) -> None:
    def process(*before: str) -> tuple[int, str, str]:
        lines = [*before, f"exec(compile({SCRIPTS[script]!r}, 'program', 'exec'), globals())"]
        if before:
            lines[-1] = "    " + lines[-1]
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120, env=os.environ, check=False
        )
        # of a traceback only the program's own lines: the watch stands above it
        own = [line for line in done.stderr.splitlines() if not line.startswith(" ") or '"program"' in line]
        return done.returncode, done.stdout, "\n".join(own)

    plain, watched = process(), process("import graphkeep as gk", "with gk.watch():")
    assert watched[:2] == plain[:2]
    assert watched[2].startswith(plain[2])  # a note may follow the exception


def test_hooks_that_were_there_before_the_watch_see_what_they_saw() -> None:
    def program(around: Around) -> tuple[list[str], Tensor]:
        log: list[str] = []

        def pack(t: Tensor) -> Tensor:
            log.append("pack")
            return t * 1

        def unpack(t: Tensor) -> Tensor:
            log.append("unpack")
            return t * 2

        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack), around():
            y = x.sin()
            z = y.exp()
        z.sum().backward()
        assert x.grad is not None
        return log, x.grad

    plain, watched = program(nullcontext), program(gk.watch)
    assert watched[0] == plain[0]
    assert torch.equal(watched[1], plain[1])


def test_a_graph_made_before_the_watch_runs_inside_it() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.sigmoid().exp()
    (want,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    with gk.watch():
        (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, want)


def test_a_watch_in_a_watch_changes_nothing_either() -> None:
    def twice() -> AbstractContextManager[Any]:
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(gk.watch())
        stack.enter_context(gk.watch())
        return stack

    for program in (p for p in PROGRAMS if p.group in ("in place", "custom") and str(p) not in DIFFERS):
        run(program, nullcontext)
        assert compared(run(program, nullcontext), run(program, twice)) == [], str(program)
