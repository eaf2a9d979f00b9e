"""Random programs: a trunk, some tensors of it at the boundary, and heads, all drawn from one seed.

A program can be run any number of times on fresh leaves with the same values, so that two ways of running its backward are
compared on equal graphs. It uses what real graphs have: shared leaves (also tied between trunk and head), in-place ops, views,
multi-output ops, custom Functions, skip paths around the boundary, and hooks of every kind, which count and sometimes scale.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)


class Scale(torch.autograd.Function):
    """A custom Function that saves an input and an output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 0.7
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _x, _y = ctx.saved_tensors
        return grad * 0.7


class Sentinel:
    """Put into ``node.metadata``; its weak reference tells when the C++ node dies."""


@dataclass
class Run:
    """One execution of a program: its leaves, its tensors, what its hooks saw."""

    leaves: list[torch.Tensor]
    boundary: list[torch.Tensor] = field(default_factory=list)
    bypass: list[torch.Tensor] = field(default_factory=list)
    retained: list[torch.Tensor] = field(default_factory=list)
    fired: dict[str, int] = field(default_factory=dict)

    def grads(self) -> list[torch.Tensor | None]:
        return [leaf.grad for leaf in self.leaves] + [tensor.grad for tensor in self.retained]


class Program:
    """Arguments: a seed; how many heads; whether heads may reach into the trunk beside the boundary (skip paths)."""

    def __init__(self, seed: int, *, heads: int = 3, skips: bool = True) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.dtype = rng.choice(DTYPES)
        self.heads = heads
        self.n_leaves = rng.randint(2, 4)
        self.trunk_size = rng.randint(2, 8)
        self.n_boundary = rng.randint(1, 3)
        self.head_sizes = [rng.randint(1, 6) for _ in range(heads)]
        self.skip = [skips and rng.random() < 0.4 for _ in range(heads)]
        self.tied = [rng.random() < 0.6 for _ in range(heads)]

    def start(self) -> Run:
        """Fresh leaves, hooks on them, and the trunk."""
        generator = torch.Generator().manual_seed(self.seed)
        leaves = [torch.randn(4, 4, generator=generator).to(self.dtype).requires_grad_() for _ in range(self.n_leaves)]
        run = Run(leaves)
        rng = random.Random(self.seed + 1)
        for i, leaf in enumerate(leaves):
            if rng.random() < 0.5:
                leaf.register_hook(self._counter(run, f"leaf {i}"))
            if rng.random() < 0.5:
                leaf.register_post_accumulate_grad_hook(self._counter(run, f"accumulated {i}"))
        pool = [leaf * 1 for leaf in leaves[: self.n_leaves - 1]]  # the last leaf belongs to heads only
        self._grow(run, rng, pool, self.trunk_size, "trunk")
        # in-place ops give a tensor a new node, so the boundary is chosen when the trunk is complete
        run.boundary = rng.sample(pool, min(self.n_boundary, len(pool)))
        run.bypass = [tensor for tensor in pool if not any(tensor is b for b in run.boundary)]
        for i, tensor in enumerate(run.boundary):
            if rng.random() < 0.5:
                tensor.register_hook(self._counter(run, f"boundary {i}", factor=0.5))
            if rng.random() < 0.3:
                tensor.retain_grad()
                run.retained.append(tensor)
            if rng.random() < 0.3:
                tensor.grad_fn.register_hook(self._counter(run, f"node {i}"))
            if rng.random() < 0.3:
                tensor.grad_fn.register_prehook(self._counter(run, f"prenode {i}"))
        return run

    def head(self, run: Run, i: int, boundary: list[torch.Tensor]) -> torch.Tensor:
        """Head `i` on the given boundary tensors (the trunk's own, or stand-ins for them); a real scalar."""
        rng = random.Random(self.seed * 1000 + i)
        # fresh nodes first: an in-place op in a head must not change what another head sees
        pool = [tensor * 1 for tensor in boundary]
        if self.tied[i]:
            pool += [leaf * 1 for leaf in rng.sample(run.leaves, 2)]
        if self.skip[i] and run.bypass:
            pool.append(rng.choice(run.bypass) * 1)
        pool[0] = pool[0].clone()
        self._grow(run, rng, pool, self.head_sizes[i], f"head {i}")
        total = sum(tensor.abs().sum() if tensor.is_complex() else tensor.sum() for tensor in pool)
        assert isinstance(total, torch.Tensor)
        return total

    def _grow(self, run: Run, rng: random.Random, pool: list[torch.Tensor], size: int, where: str) -> None:
        for k in range(size):
            a, b = rng.choice(pool), rng.choice(pool)
            made = _op(rng, a, b)
            pool.append(made)
            if made.requires_grad and rng.random() < 0.15:
                made.register_hook(self._counter(run, f"{where} {k}", factor=rng.choice((1, 0.5))))

    def _counter(self, run: Run, name: str, factor: float = 1) -> Any:
        fired = run.fired  # the hook must not hold the run, which holds the hooked tensors

        def hook(*args: Any) -> Any:
            fired[name] = fired.get(name, 0) + 1
            if factor != 1 and len(args) == 1 and isinstance(args[0], torch.Tensor):
                return args[0] * factor
            return None

        return hook


def _op(rng: random.Random, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    ops = [
        lambda: a.sin(),
        lambda: a.tanh(),
        lambda: a * b,
        lambda: a + b,
        lambda: a @ b * 0.3,
        lambda: Scale.apply(a),
        lambda: a.t(),
        lambda: a.transpose(0, 1).reshape(4, 4),
        lambda: a.split(2)[1].repeat(2, 1),
        lambda: torch.stack(a.unbind(0)[::-1]),
        lambda: torch.cat([a.narrow(0, 0, 2), b.narrow(0, 2, 2)]),
        lambda: torch.linalg.norm(a).expand(4, 4) * b,
        lambda: a[torch.tensor([3, 1, 0, 0])],
        # in-place, on a fresh tensor and on a view of one
        lambda: (a * 2).mul_(b),
        lambda: (a + 1).sin_().add_(b),
        lambda: _in_place_on_view(a, b),
        lambda: _set_rows(a, b),
    ]
    if a.dtype is not torch.bfloat16:
        ops.append(lambda: torch.linalg.qr(a + 3 * torch.eye(4, dtype=a.dtype))[1])
    if not a.is_complex():
        ops += [lambda: a.relu(), lambda: a.max(0).values.expand(4, 4) * 1, lambda: torch.where(a > 0, a, b)]
    made = rng.choice(ops)()
    assert isinstance(made, torch.Tensor)
    return made


def _in_place_on_view(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    base = a * 1
    base[1].mul_(b[0])
    return base


def _set_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    base = a * 1
    base[:2] = b[2:]
    return base


def watch_death(roots: list[torch.Tensor]) -> list[weakref.ref[Sentinel]]:
    """Weak references that die with the nodes of the graphs of `roots` (leaves' accumulators left out)."""
    seen: set[Any] = set()
    stack = [root.grad_fn for root in roots]
    while stack:
        node = stack.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        stack += [child for child, _ in node.next_functions]
    references = []
    for node in seen:
        sentinel = Sentinel()
        node.metadata["sentinel"] = sentinel
        references.append(weakref.ref(sentinel))
    return references
