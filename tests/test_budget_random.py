"""Random programs under random budgets: as in eager, within the limit at every moment, and nothing left."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import WIDE, fitted, nothing_of_a_budget_left, under, warm_up
from outcomes import Outcome, compared, run, tensors_alive
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import graphkeep as gk
from graphkeep._budget import _record

PROGRAMS_A_TEST = 25
TESTS = 10
SHARES = {"unary": 50, "binary": 33, "in place": 8, "delete": 16, "change": 3, "no grad": 4}


class Twice(torch.autograd.Function):
    """Saves its input, its output, and something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y, x.sin())
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y, z = ctx.saved_tensors
        return grad * 2 + 0 * (x + y + z)


def twice(x: Tensor) -> Tensor:
    return Twice.apply(x)


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(lambda t: t.sin().tanh(), x, use_reentrant=False)


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    lambda t: (t * 0.1).exp(),
    torch.relu,
    lambda t: t * 2.5,
    lambda t: t.softmax(-1),
    lambda t: F.layer_norm(t, t.shape[-1:]),
    lambda t: t.t().contiguous(),
    lambda t: F.dropout(t, 0.3),
    lambda t: t + torch.randn_like(t),
    lambda t: t.view(-1).view(t.shape) + 1,
    lambda t: t.clamp(-2, 2),
    F.gelu,
    lambda t: t.sort(-1)[0],
    lambda t: t.cumsum(-1) / 8,
    lambda t: t.max(-1, keepdim=True)[0] + t,
    lambda t: t.topk(2, -1).values.sum(-1, keepdim=True) * t,
    lambda t: torch.cat(t.chunk(2)[::-1]).sigmoid(),
    lambda t: t.expand(2, *t.shape).sin().mean(0),
    lambda t: F.batch_norm(t, None, None, training=True),
    lambda t: t[torch.arange(len(t)).flip(0)].cos(),
    lambda t: t.bfloat16().sin().float(),
    lambda t: torch.complex(t, t).tanh().real,
    checkpointed,
    lambda t: t * float(t.detach().mean()),
    lambda t: t.sin() if float(t.detach().sum()) > 0 else t.cos(),
    twice,
    lambda t: t.detach().sin() + t,
    lambda t: torch.unbind(t)[0].expand_as(t) * t,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    lambda a, b: a @ b / len(a),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a, b], 0)[: len(a)],
    torch.sub,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: F.linear(a, b).tanh(),
    lambda a, b: torch.einsum("ij,kj->ik", a, b).sin(),
]
IN_PLACE: list[Callable[[Tensor], object]] = [
    lambda t: t.relu_(),
    lambda t: t.mul_(1.5),
    lambda t: t.sigmoid_(),
    lambda t: t[0].add_(1),
    lambda t: t.view(-1)[::2].mul_(0.5),
    lambda t: t.tanh_(),
    lambda t: t.t()[1:].clamp_(-1, 1),
    lambda t: t.bernoulli_(0.5),
    lambda t: t.masked_fill_(t.detach() > 1, 0.0),
    lambda t: t.copy_(t.detach().flip(0)),
]


class RandomProgram:
    """A program drawn from a seed, that does the same each time it is called.

    Attributes:
        look: is called, while no op runs, with the tensors that the program itself holds.
        plain: whether nothing in it holds tensors in passing that are neither the program's nor the graph's.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.n = rng.choice([8, 16, 32])
        kinds = rng.choices(list(SHARES), list(SHARES.values()), k=rng.randint(5, 40))
        self.ops = [(kind, rng.random(), rng.random(), rng.random()) for kind in kinds]
        self.outputs = rng.randint(1, 3)
        self.retains = rng.random() < 0.3
        self.creates = rng.random() < 0.15
        self.steps = rng.randint(1, 3)
        used = {UNARY[int(b * len(UNARY))] for kind, _, b, _ in self.ops if kind == "unary"}
        self.plain = not self.creates and not used & {checkpointed, twice}
        self.look: Callable[[list[Tensor]], object] | None = None

    def __str__(self) -> str:
        return f"program {self.seed}"

    def __call__(self) -> object:
        torch.manual_seed(self.seed)
        leaves = [torch.randn(self.n, self.n, requires_grad=True) for _ in range(3)]
        data, buffer = torch.randn(self.n, self.n), torch.zeros(self.n)
        errors: list[str] = []
        for _ in range(self.steps):
            try:
                self._step(leaves, data, buffer)
            except gk.BudgetError:
                raise
            except RuntimeError as error:
                # torch goes on to say what it is, which output of which node; nobody knows that of a tensor that was dropped
                errors.append(str(error).partition(": [torch.")[0])
        return [leaf.grad for leaf in leaves], leaves, data, buffer, errors

    def _looked(self, own: list[Tensor], held: list[Tensor], *gradient: Tensor) -> None:
        if self.look is not None:
            self.look([*own, *held, *(t.grad for t in own if t.grad is not None), *gradient])

    def _step(self, leaves: list[Tensor], data: Tensor, buffer: Tensor) -> None:
        own = [*leaves, data, buffer]
        held = [*(leaf * 1.0 for leaf in leaves), *leaves, data]
        for kind, a, b, c in self.ops:
            one = held[int(a * len(held))]
            if kind == "unary":
                held.append(UNARY[int(b * len(UNARY))](one))
            elif kind == "binary":
                held.append(BINARY[int(b * len(BINARY))](one, held[int(c * len(held))]))
            elif kind == "in place":
                if c < 0.5 or one.is_leaf:
                    one = one.clone()
                    held.append(one)
                IN_PLACE[int(b * len(IN_PLACE))](one)
                buffer.add_(one.detach().mean(0))
            elif kind == "delete":
                if not one.is_leaf:
                    del held[int(a * len(held))]
            elif kind == "change":
                with torch.no_grad():
                    (data if b < 0.5 else leaves[int(c * 3)]).mul_(1.01)
            else:
                with torch.no_grad():
                    held.append(one.sin() * 0.5)
            if self.look is not None and a < 0.3 and one.requires_grad and not one.is_leaf:
                one.register_hook(lambda grad: self._looked(own, [], grad))
            del one
            self._looked(own, held)
        loss = sum((t.square().mean() for t in held[-self.outputs :]), leaves[0].sum() * 0)
        held.clear()
        if self.creates:
            for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True), strict=True):
                loss = loss if grad is None else loss + grad.square().mean()
                leaf.grad = None
        if self.retains:
            loss.backward(retain_graph=True)
        loss.backward()


NEGLIGIBLE = (4, 8, 5056)  # bytes: of a number; of the state of a generator, from which a result is drawn again


class Alive:
    """The most bytes that were alive and not in the program's own hands, counted by going through all of Python's objects.

    Everything that is saved inside a budget is a Python object, and gradients that only torch holds are none.
    """

    def __init__(self) -> None:
        self.most = 0
        self.before: list[torch.UntypedStorage] = []
        self.seen: dict[int, weakref.ref[Any]] = {}  # gradients that hooks have been given: torch may hold them still

    def __enter__(self) -> None:
        self.most = 0
        self.before = [t.untyped_storage() for t in tensors_alive()]

    def __exit__(self, *_: object) -> None:
        self.before = []

    def look(self, own: list[Tensor]) -> None:
        if own and torch._C._current_graph_task_id() >= 0:
            self.seen[own[-1].untyped_storage()._cdata] = weakref.ref(own[-1].untyped_storage())
        given = [storage for ref in self.seen.values() if (storage := ref()) is not None]
        mine = {s._cdata for s in [*self.before, *given, *(t.untyped_storage() for t in own)]}
        found: dict[int, int] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if kind is Tensor:
                if thing.layout is not torch.strided or thing.is_nested:
                    continue
                thing = thing.untyped_storage()
            elif kind is not torch.UntypedStorage:
                continue
            if thing._cdata not in mine and thing.nbytes() not in NEGLIGIBLE and thing.filename is None:
                found[thing._cdata] = thing.nbytes()
        self.most = max(self.most, sum(found.values()))


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_thaw() -> Iterator[None]:
    warm_up()
    yield
    gc.unfreeze()


def different(plain: Outcome, other: Outcome) -> list[str]:
    """What is not as in eager. Of a graph that lies in a cycle with itself, there too, other objects can be seen."""
    return compared(plain, replace(other, left=plain.left) if plain.left else other)


def looked_at(program: RandomProgram) -> tuple[Callable[[], object], Alive]:
    alive = Alive()

    def body() -> object:
        program.look = alive.look if program.plain else None
        try:
            with alive:
                return program()
        finally:
            program.look = None

    return body, alive


@pytest.mark.parametrize("part", range(TESTS))
def test_a_random_program_is_as_in_eager_and_within_its_limit(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if part % 2:  # random results are drawn again, however small
        monkeypatch.setattr(_record, "SMALL", 0)
    options: dict[str, Any] = {"spill": ("recompute", "recompute", "recompute", "both", "host")[part % 5]}
    seen: Counter[str] = Counter()
    run(RandomProgram(0), nullcontext)
    gc.freeze()
    for seed in range(part, PROGRAMS_A_TEST * TESTS, TESTS):
        program = RandomProgram(seed)
        plain = run(program, nullcontext)
        assert plain.raised is None, (seed, plain.raised)
        wide, budget, _ = under(program, WIDE)
        assert different(plain, wide) == [], seed
        full = budget.peak
        if not full:
            continue
        share = random.Random(seed).choice([0.15, 0.3, 0.45, 0.6, 0.75, 0.9])
        for limit in (max(int(full * share), 1), budget.smallest or 1):
            body, alive = looked_at(program)
            with nullcontext() if plain.left else nothing_of_a_budget_left():
                fit = fitted(body, limit, **options)
            assert different(plain, fit.outcome) == [], (seed, limit)
            assert fit.peak <= fit.limit <= full, (seed, limit)
            assert fit.live == 0, (seed, limit)
            assert alive.most <= fit.limit, (seed, limit)
            seen["dropped"] += fit.peak < full
            seen["recomputed"] += fit.recomputed > 0
            seen["much held"] += alive.most > fit.limit // 2
    assert seen["dropped"] > PROGRAMS_A_TEST
    assert (seen["recomputed"] > PROGRAMS_A_TEST // 2) == (options["spill"] != "host")
    assert seen["much held"] > PROGRAMS_A_TEST // 4
