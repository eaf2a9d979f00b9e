"""Random programs under random budgets: as in eager, within the limit at every moment, and nothing left."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import WIDE, fitted, nothing_of_a_budget_left, under
from outcomes import compared, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import graphkeep as gk
from graphkeep._ledger import LEDGER, Call, Entry

PROGRAMS_A_TEST = 20
TESTS = 10
SHARES = {"unary": 50, "binary": 33, "in place": 8, "delete": 16, "change": 3, "no grad": 4}

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
    lambda t: checkpoint(lambda u: u.sin().tanh(), t, use_reentrant=False),
    lambda t: t * float(t.detach().mean()),
    lambda t: t.sin() if float(t.detach().sum()) > 0 else t.cos(),
    lambda t: Twice.apply(t),
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


@dataclass
class Hands:
    """The tensors that the program itself holds right now."""

    tensors: list[Tensor] = field(default_factory=list)


class RandomProgram:
    """A program drawn from a seed, that does the same each time it is called."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.n = rng.choice([8, 16, 32])
        kinds = rng.choices(
            ["unary", "binary", "in place", "delete", "change", "no grad"], [50, 33, 8, 16, 3, 4], k=rng.randint(5, 40)
        )
        self.ops = [(kind, rng.random(), rng.random(), rng.random()) for kind in kinds]
        self.outputs = rng.randint(1, 3)
        self.retains = rng.random() < 0.3
        self.creates = rng.random() < 0.15
        self.steps = rng.randint(1, 3)
        self.hands = Hands()

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
                errors.append(str(error))
            finally:
                self.hands.tensors = []
        return [leaf.grad for leaf in leaves], leaves, data, buffer, errors

    def _step(self, leaves: list[Tensor], data: Tensor, buffer: Tensor) -> None:
        held = self.hands.tensors = [*(leaf * 1.0 for leaf in leaves), *leaves, data]
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
            del one
        loss = sum((t.square().mean() for t in held[-self.outputs :]), leaves[0].sum() * 0)
        held.clear()
        if self.creates:
            for leaf, grad in zip(leaves, torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True), strict=True):
                loss = loss if grad is None else loss + grad.square().mean()
                leaf.grad = None
        if self.retains:
            loss.backward(retain_graph=True)
        loss.backward()


class Meter:
    """Listens beside the budget: which storages that were saved are alive, and not in the program's own hands."""

    def __init__(self, hands: Hands) -> None:
        self.hands = hands
        self.saves: dict[int, weakref.ref[Any]] = {}
        self.entries: weakref.WeakValueDictionary[int, Entry] = weakref.WeakValueDictionary()
        self.before = True  # there is no graph yet: what is saved was there before
        self.most = 0

    def look(self, but: Tensor | None = None) -> None:
        known = {t.untyped_storage()._cdata for t in [*self.hands.tensors, *([] if but is None else [but])]}
        held = {}
        for ref in self.saves.values():
            storage = ref()
            if storage is not None and storage._cdata not in known:
                held[storage._cdata] = storage.nbytes()
        self.most = max(self.most, sum(held.values()))

    def saved(self, entry: Entry) -> None:
        tensor = entry.tensor
        self.look(tensor)
        if not (tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)):
            storage = tensor.untyped_storage()
            self.saves[id(storage)] = weakref.ref(storage)

    def died(self, entry: Entry, call: Call | None) -> None:
        self.look()

    def failed(self, error: Exception) -> None:
        raise error

    def begins(self, call: Call) -> None:
        self.look()

    def ends(self, call: Call, error: BaseException | None) -> None:
        self.look()

    def used(self, entry: Entry) -> None:
        pass

    def reused(self, entry: Entry, earlier: int, call: Call) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def metered(program: RandomProgram, meter: Meter) -> Callable[[], object]:
    def body() -> object:
        LEDGER.join(meter)
        try:
            return program()
        finally:
            LEDGER.leave(meter)

    return body


@pytest.mark.parametrize("part", range(TESTS))
def test_a_random_program_is_as_in_eager_and_within_its_limit(part: int) -> None:
    seen: Counter[str] = Counter()
    run(RandomProgram(0), nullcontext)
    gc.freeze()
    for seed in range(part, PROGRAMS_A_TEST * TESTS, TESTS):
        program = RandomProgram(seed)
        plain = run(program, nullcontext)
        assert plain.raised is None, (seed, plain.raised)
        wide, budget, _ = under(program, WIDE)
        assert compared(plain, wide) == [], seed
        full = budget.peak
        if not full:
            continue
        shares = random.Random(seed).sample([0.15, 0.3, 0.45, 0.6, 0.75, 0.9], 2)
        limits: list[Any] = [max(int(full * share), 1) for share in shares] + [budget.smallest or 1]
        for limit in limits:
            meter = Meter(program.hands)
            with nothing_of_a_budget_left():
                fit = fitted(metered(program, meter), limit)
            assert compared(plain, fit.outcome) == [], (seed, limit)
            assert fit.peak <= fit.limit <= full, (seed, limit)
            assert fit.live == 0, (seed, limit)
            if not program.creates:
                assert meter.most <= fit.limit, (seed, limit)
            seen["recomputed"] += fit.recomputed > 0
            seen["raised as in eager"] += bool(plain.result[4])  # type: ignore[index]
            seen["much held"] += meter.most > fit.limit // 2
    assert seen["recomputed"] > PROGRAMS_A_TEST
    assert seen["raised as in eager"] > 0
    assert seen["much held"] > PROGRAMS_A_TEST


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1.0])
def test_a_random_program_under_a_fraction_of_what_it_needs(share: float) -> None:
    recomputed = 0
    for seed in range(1000, 1000 + PROGRAMS_A_TEST):
        program = RandomProgram(seed)
        plain = run(lambda program=program: [program() for _ in range(3)], nullcontext)
        outcome, budget, stated = under(lambda program=program: [program() for _ in range(3)], share)
        if stated:
            assert budget.limit < stated[0], seed
            continue
        assert compared(plain, outcome) == [], seed
        recomputed += budget.recomputed_ops
    assert (recomputed > PROGRAMS_A_TEST) == (share < 1.0)
