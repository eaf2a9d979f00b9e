"""What every peer gets wrong under a budget, each from a public bug report (the rows B1 to B17 of the design's cases)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budget_kinds import BYTES, Cached, Counts, Experts, N, deep, linear, loss_of, net_of, square, weight
from budgets import WIDE, allocated, nothing_of_a_budget_left
from torch import Tensor, nn

import graphkeep as gk


def long(times: int = 8, w: Tensor | None = None) -> Tensor:
    return loss_of(deep(weight() if w is None else w, times))


def smallest_of(step: Callable[[], object]) -> int:
    with gk.budget(WIDE) as b:
        step()
    assert b.smallest is not None
    assert b.smallest < b.peak
    return b.smallest


def gradients(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def equal(a: Any, b: Any) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def trained_within(make: Callable[[], nn.Module], share: float | None, steps: int = 3) -> tuple[nn.Module, Any]:
    """The module between others after some steps, and the budget; None: in eager torch."""
    torch.manual_seed(1)
    net = net_of(make())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train() -> None:
        for k in range(steps):
            optimizer.zero_grad()
            loss_of(net(square(k))).backward()
            optimizer.step()

    if share is None:
        train()
        return net, None
    with gk.budget(share) as b:
        train()
    assert b.recomputed_ops > 0
    return net, b


def same_training(make: Callable[[], nn.Module], share: float = 0.5) -> None:
    (plain, _), (ours, _) = trained_within(make, None), trained_within(make, share)
    assert equal(plain.state_dict().values(), ours.state_dict().values())
    assert equal(gradients(plain), gradients(ours))


# B1 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [3, 5, 9])
def test_B1_a_threshold_is_never_exceeded(held: int) -> None:
    with gk.budget(held * BYTES) as b:
        for times in (8, 3, 12, 8):
            long(times).backward()
            assert b.peak <= held * BYTES
    assert b.recomputed_ops > 0


def test_B1_what_cannot_fit_is_an_error_that_states_what_can() -> None:
    smallest = smallest_of(lambda: long().backward())
    with pytest.raises(gk.BudgetError) as caught:
        with gk.budget(smallest // 2):
            for _ in range(2):
                long().backward()
    with gk.budget(caught.value.smallest) as b:
        for _ in range(2):
            long().backward()
    assert b.peak <= caught.value.smallest


# B2 ------------------------------------------------------------------------------------------------------------------------


def test_B2_a_smaller_budget_never_has_a_higher_peak() -> None:
    net, x = net_of(nn.LayerNorm(N), linear(), nn.GELU()), square()

    def step() -> None:
        loss_of(net(x)).backward()

    step()
    limits, peaks, memory = [], [], []
    for share in (1.0, 0.8, 0.6, 0.4):
        with gk.budget(share) as b:
            step()
            memory.append(allocated(lambda: (step(), step())))
            limits.append(b.limit)
            peaks.append(b.peak)
    assert peaks[0] == limits[0]
    for limit, peak, most in zip(limits, peaks, memory, strict=True):
        assert peak <= limit
        # beside the graph: what runs, and runs again, at the moment
        assert most <= memory[0] - (limits[0] - limit) + 3 * BYTES


# B3 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_B3_a_dropped_mask_is_the_same_mask_again(inplace: bool) -> None:
    same_training(lambda: nn.Sequential(linear(), nn.Dropout(0.5, inplace=inplace), nn.Linear(N, N)))


def test_B3_the_programs_random_numbers_go_on_as_before() -> None:
    net, x = net_of(nn.Dropout(0.5)), square()

    def drawn() -> list[Tensor]:
        torch.manual_seed(3)
        out = []
        for _ in range(3):
            loss = loss_of(net(x))
            out.append(torch.rand(4))
            loss.backward()
            out.append(torch.rand(4))
        return [*out, torch.get_rng_state()]

    plain = drawn()
    with gk.budget(0.7) as b:
        ours = drawn()
    assert equal(plain, ours)
    assert b.recomputed_ops > 0


# B4 ------------------------------------------------------------------------------------------------------------------------


def test_B4_what_is_cheap_for_its_bytes_is_dropped_before_matrix_products() -> None:
    big = 256
    layers = [nn.Sequential(nn.Linear(big, big), nn.LayerNorm(big), nn.Tanh(), nn.GELU()) for _ in range(6)]
    net, x = nn.Sequential(*layers), torch.randn(big, big)
    with gk.budget(0.6) as b:
        for _ in range(2):
            loss_of(net(x)).backward()
        ops, flops = b.recomputed_ops, b.recomputed_flops
        loss_of(net(x)).backward()
        ops, flops = b.recomputed_ops - ops, b.recomputed_flops - flops
    assert ops >= 4
    assert flops <= 3 * 2 * big**3  # of six products


# B5 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(N), lambda: nn.BatchNorm1d(N, momentum=None)], ids=["moving", "mean"])
def test_B5_statistics_move_once_and_at_the_moment_at_which_they_do_in_eager(make: Callable[[], nn.Module]) -> None:
    def seen(share: float | None) -> list[Tensor]:
        torch.manual_seed(1)
        bn, net = make(), net_of()
        out: list[Tensor] = []

        def look() -> None:
            out.extend(t.clone() for t in bn.buffers())

        with gk.budget(share or WIDE) as b:
            for k in range(3):
                h = bn(net(square(k)))
                look()
                loss = loss_of(deep(bn(h)))
                look()
                loss.backward()
                look()
        assert share is None or b.recomputed_ops > 0  # a copy of statistics that an op has read needs room, too
        return out

    torch.manual_seed(1)
    bn, net, plain = make(), net_of(), []
    for k in range(3):
        h = bn(net(square(k)))
        plain += [t.clone() for t in bn.buffers()]
        loss = loss_of(deep(bn(h)))
        plain += [t.clone() for t in bn.buffers()]
        loss.backward()
        plain += [t.clone() for t in bn.buffers()]
    assert equal(plain, seen(None))
    assert equal(plain, seen(0.5))


# B6 ------------------------------------------------------------------------------------------------------------------------


def test_B6_in_place_ops_inside_are_right() -> None:
    def step() -> Tensor:
        w = weight()
        h = deep(w) * 1
        h.relu_()
        h = h + 1
        h[0].mul_(2)
        h += square(1)
        loss_of(deep(h.sigmoid_())).backward()
        assert w.grad is not None
        return w.grad

    plain = step()
    with gk.budget(smallest_of(step)) as b:
        assert all(torch.equal(step(), plain) for _ in range(3))
    assert b.recomputed_ops > 0


# B7 ------------------------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "multiplied": lambda w, x: w * x,
    "a matrix product": lambda w, x: x @ w,
    "a linear layer": F.linear,
}


@pytest.mark.parametrize("what", ["parameter", "input"])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_B7_a_saved_input_or_parameter_that_is_changed_raises_as_in_eager(use: Callable[..., Tensor], what: str) -> None:
    def program() -> None:
        w, x = weight(), square(1).requires_grad_()
        loss = loss_of(deep(use(w, x), 4))
        with torch.no_grad():
            (w if what == "parameter" else x).mul_(2)
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as plain:
        program()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as ours:
        with gk.budget(4 * BYTES):
            program()
    assert str(ours.value) == str(plain.value)


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_B7_what_was_not_saved_may_change_and_what_was_dropped_is_that_of_before(what: str) -> None:
    def program() -> Tensor:
        w, x = weight(), square(1)
        loss = loss_of(deep(w + x, 4))
        with torch.no_grad():
            (w if what == "parameter" else x).mul_(2)
        loss.backward()
        assert w.grad is not None
        return w.grad

    plain = program()
    with gk.budget(4 * BYTES) as b:
        assert torch.equal(program(), plain)
    assert b.recomputed_ops > 0


# B8 ------------------------------------------------------------------------------------------------------------------------


def test_B8_a_counter_in_a_buffer_is_read_and_bumped() -> None:
    same_training(Counts)
    net, _ = trained_within(Counts, 0.5)
    assert net[2].calls == 3


# B9 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("create_graph", [False, True])
def test_B9_a_gradient_inside_the_forward(create_graph: bool) -> None:
    def step() -> Tensor:
        w = weight()
        x = square(1).requires_grad_()
        energy = deep(x * w).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=create_graph, retain_graph=True)
        loss_of(deep(force * w) + energy / N).backward()
        assert w.grad is not None
        return w.grad

    plain = step()
    with gk.budget(smallest_of(step)) as b:
        for _ in range(2):
            assert torch.equal(step(), plain)
    assert b.recomputed_ops > 0


# B10 -----------------------------------------------------------------------------------------------------------------------


def test_B10_a_backward_starts_no_other_backward_and_hooks_fire_once() -> None:
    net = net_of(nn.BatchNorm1d(N))
    fired: dict[str, int] = {}
    inner: list[int] = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _p, name=name: fired.update({name: fired.get(name, 0) + 1}))
        p.register_hook(lambda _g: inner.append(torch._C._current_graph_task_id()))
    with gk.budget(0.7) as b:
        for k in range(3):
            inner.clear()
            loss_of(net(square(k))).backward()
            assert len(set(inner)) == 1  # all gradients come from one call of the engine
    assert b.recomputed_ops > 0
    assert set(fired.values()) == {3}


# B11 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["embedding", "half of the network"])
def test_B11_inputs_that_need_no_gradient(frozen: str) -> None:
    def step() -> list[Tensor | None]:
        torch.manual_seed(1)
        embedding, net = nn.Embedding(N, N), net_of(linear(), nn.Tanh())
        embedding.requires_grad_(False)
        if frozen != "embedding":
            net[:2].requires_grad_(False)
        loss_of(net(embedding(torch.arange(N)))).backward()
        return gradients(net)

    plain = step()
    with gk.budget(0.5) as b:
        for _ in range(3):
            assert equal(step(), plain)
    assert b.recomputed_ops > 0


# B12 -----------------------------------------------------------------------------------------------------------------------


def test_B12_a_cache_that_has_grown_since() -> None:
    same_training(Cached, 0.6)


def test_B12_python_that_runs_once_runs_once() -> None:
    calls: list[int] = []

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            self.cache.append(x.detach())
            return deep(x + torch.stack(self.cache).mean(0))

    same_training(Grows, 0.7)
    assert len(calls) == 2 * 3


# B13 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [False, True])
def test_B13_routing_does_not_flip(noise: bool) -> None:
    same_training(lambda: Experts(noise), 0.6)


def test_B13_small_integer_results_are_kept() -> None:
    def step() -> None:
        x = deep(weight())
        chosen = deep(x).mean(0).topk(4).indices  # 32 bytes
        loss_of(deep(x[chosen])).backward()

    with gk.budget(smallest_of(step)) as b:
        assert b.limit // 256 >= 32
        for _ in range(2):
            step()
    assert b.recomputed_ops > 0
    assert not any("topk" in share.what for share in b.report().dropped)
    (stays,) = [share for share in b.report().stays if "topk" in share.what]
    assert stays.nbytes == 32
    assert "must not come out otherwise" in stays.what


# B14 -----------------------------------------------------------------------------------------------------------------------


def test_B14_memory_that_is_used_again_is_not_taken_for_what_was_there_before() -> None:
    def step(k: int) -> Tensor:
        w = weight()
        total = torch.zeros(())
        for n in range(8):  # each constant takes the place of the one before
            constant = square(100 * k + n)
            total = total + loss_of(deep(w + constant))
            del constant
        total.backward()
        assert w.grad is not None
        return w.grad

    plain = [step(k) for k in range(4)]
    with gk.budget(0.5) as b:
        ours = [step(k) for k in range(4)]
    assert equal(plain, ours)
    assert b.recomputed_ops > 0


# B15 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["normally", "in the forward", "in the backward"])
def test_B15_nothing_is_left_after_the_context(ends: str) -> None:
    net, x = net_of(nn.BatchNorm1d(N)), square()
    loss_of(net(x)).backward()
    hidden: list[weakref.ref[Any]] = []
    net[1].register_forward_hook(lambda m, args, out: hidden.append(weakref.ref(out.untyped_storage())))

    def fails(_g: Tensor) -> None:
        raise ZeroDivisionError

    with nothing_of_a_budget_left():
        try:
            with gk.budget(0.7) as b:
                loss_of(net(x)).backward()
                h = net(x)
                if ends == "in the forward":
                    raise ZeroDivisionError
                if ends == "in the backward":
                    h.register_hook(fails)
                loss_of(h).backward()
        except ZeroDivisionError as error:
            error.__traceback__ = None
        del h
        assert b.live == 0
        del b
    assert hidden
    assert not any(ref() is not None for ref in hidden)


# B16 -----------------------------------------------------------------------------------------------------------------------


def test_B16_the_cap_covers_the_backward() -> None:
    held = 5

    def step() -> None:
        x: Tensor = weight()
        for _ in range(40):
            x = x.sin()
        x.sum().backward()

    full = allocated(step)
    with gk.budget(held * BYTES) as b:
        seen: list[int] = []
        w = weight()
        x: Tensor = w
        for _ in range(40):
            x = x.sin()
            x.register_hook(lambda _g: seen.append(b.live))
        loss = x.sum()
        del x
        measured = allocated(loss.backward)
        del loss
        again = allocated(step)
    assert len(seen) == 40
    assert max(seen) <= held * BYTES
    assert measured <= (held + 5) * BYTES + 64
    assert again <= (held + 5) * BYTES + 64
    assert full >= 40 * BYTES


# B17 -----------------------------------------------------------------------------------------------------------------------


def test_B17_who_holds_the_bytes_when_little_is_saved() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.extra = x.exp()
            ctx.save_for_backward(x, torch.rand_like(x))
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x, noise = ctx.saved_tensors
            return grad * 2 + 0 * x * noise * ctx.extra

    generator = torch.Generator().manual_seed(1)

    def step() -> Tensor:
        w = weight()
        noise = torch.rand(N, N, generator=generator)
        return loss_of(deep(Keeps.apply(deep(w)) * noise))

    with gk.budget(1.0) as b:
        step().backward()
        loss = step()
        report = b.report()
        loss.backward()
    assert sum(share.nbytes for share in report.held) == b.peak
    assert sum(share.nbytes for share in report.stays) >= 2 * BYTES  # what the function saved, and what it keeps on its ctx
    assert all(share.what in str(report) for share in report.stays)
    assert "Keeps" in str(report)
