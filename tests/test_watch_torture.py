"""The user's program runs as before: every program of ``torture.py`` with and without ``gk.watch()``, compared bit for bit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from outcomes import Around, active_hooks, compared, patched, run
from torch import Tensor
from torture import PROGRAMS, SCRIPTS, Program

import graphkeep as gk


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
        runs.append(run(program.body, around))
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
        run(program.body, nullcontext)
        assert compared(run(program.body, nullcontext), run(program.body, twice)) == [], str(program)
