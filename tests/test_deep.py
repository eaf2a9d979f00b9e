"""L27: deep graphs that graphkeep has walked die without recursion, and by reference counting when they are not that deep."""

from __future__ import annotations

import subprocess
import sys
import weakref

import pytest
import torch

import graphkeep as gk

# in a process of its own, since what it guards against is a segmentation fault
_DIES = """
import sys, torch, weakref, graphkeep as gk
a = torch.ones(1, requires_grad=True)
for use in (gk.explain, gk.discard, gk.cut, lambda y: gk.backward(y, keep=a.sin(), allow_unused=True)):
    y = a.sin()
    bottom = weakref.ref(y.untyped_storage())
    for _ in range(100_000):
        y = getattr(y, sys.argv[1])(*map(int, sys.argv[2:]))
    use(y)
    del y
    assert bottom() is None or bottom() is None  # the interpreter's next step has dropped what was waiting
print("freed")
"""


@pytest.mark.parametrize("op", [["sin"], ["mul", "1"]], ids=["sin", "mul"])
def test_a_deep_graph_that_was_walked_is_freed_without_recursion(op: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", _DIES, *op], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "freed"), done.stderr


def test_a_graph_of_usual_depth_dies_at_once(no_collector: None) -> None:
    y = torch.ones(1, requires_grad=True).sin()
    bottom = weakref.ref(y.untyped_storage())
    for _ in range(1000):
        y = y.sin()
    gk.explain(y)
    del y
    assert bottom() is None
