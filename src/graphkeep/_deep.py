"""Deep graphs that have been walked die without recursion.

torch frees a chain of nodes in a loop, unless Python has looked at them: since torch 2.13 a node keeps its Python wrapper once
it has one, and nodes with wrappers are freed by recursion, five C++ frames a node. A chain of 100,000 nodes that something
walked (``y.grad_fn.next_functions`` …) then overflows the C stack when its last name goes. graphkeep walks graphs, so it has to
see to that: every few thousand nodes it leaves an object in ``node.metadata`` that takes the next nodes over when the node
dies, which ends the recursion there. They are dropped from a pending call of the interpreter, that is at the next bytecode
boundary. Graphs of fewer nodes get no such object and die at once, by reference counting.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Collection
from typing import Any

from torch.autograd.graph import Node

_STRIDE = 5_000  # nodes; the default C stack of 8 MiB takes some 50,000
_KEY = "graphkeep.deep"
_waiting: deque[Node] = deque()


def guard(nodes: Collection[Node]) -> None:
    """Bound the recursion in which the given nodes, all that some walk has seen, will be freed."""
    if len(nodes) < _STRIDE:
        return
    for node in nodes:
        # a parent is made after its children, so numbers fall along every path, and a path within one stride is short
        here = node._sequence_nr() // _STRIDE
        below = [
            child
            for child, _ in node.next_functions
            if child is not None and child.next_functions and child._sequence_nr() // _STRIDE != here
        ]
        if below:
            metadata: Any = node.metadata  # torch's stub has it as a method
            metadata.setdefault(_KEY, _Heir(below))


class _Heir:
    """Takes nodes over when the node above them dies."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def __del__(self, waiting: deque[Node] = _waiting) -> None:
        waiting.extend(self.nodes)
        self.nodes = []
        _schedule()


def _drop(_unused: Any) -> int:
    # a node that dies here may put others into the queue; the loop drops them one after the other
    while _waiting:
        _waiting.popleft()
    return 0


_pending_call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_drop)


def _schedule() -> None:
    ctypes.pythonapi.Py_AddPendingCall(_pending_call, None)
