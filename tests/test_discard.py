"""`gk.discard`: a graph freed now, and what could not be freed listed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import graphkeep as gk
from graphkeep import _saved


def test_L7_frees_at_once_although_names_still_point(no_collector: None) -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 100), nn.Sigmoid())
    data = torch.randn(50, 100)
    out = model(data)
    hidden = weakref.ref(out.grad_fn.next_functions[0][0]._saved_mat1.untyped_storage())
    loss = (out - 1).square().sum()
    freed = gk.discard(loss)
    assert hidden() is None
    assert freed >= 50 * 100 * 4
    assert out.grad_fn is not None
    assert torch.isfinite(out).all()  # values stay
    assert gk.explain(loss).freed


def test_the_bytes_are_those_of_the_storages_that_died() -> None:
    x = torch.ones(1000, requires_grad=True)
    hidden = x.exp()  # held by a name
    loss = hidden.sin().cos().sum()
    freed = gk.discard(loss)
    assert freed == 4000
    assert isinstance(freed, int)
    (kept,) = freed.kept
    assert (kept.what, kept.bytes) == ("result of exp, float32 [1000]", 4000)
    assert "name" in kept.why


def test_what_is_kept_is_worked_out_when_it_is_read() -> None:
    x = torch.ones(1000, requires_grad=True)
    hidden = x.exp()
    freed = gk.discard(hidden.sin().sum())
    assert len(freed.kept) == 1
    del hidden
    assert freed.kept == ()


def test_parameters_and_inputs_that_are_leaves_are_not_listed() -> None:
    model = nn.Linear(3, 3)
    x = torch.ones(3, requires_grad=True)
    assert gk.discard(model(x).sum()).kept == ()


def test_a_view_held_elsewhere_and_another_output_of_the_same_node_are_told() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    hidden = x.exp()
    view = hidden[0]
    u, s, v = torch.linalg.svd(x)
    loss = hidden.sin().sum() + s.sum()
    del hidden
    freed = gk.discard(loss)
    assert any("exp" in kept.what for kept in freed.kept)  # `view` holds its storage
    assert view.requires_grad
    assert any("svd" in kept.what for kept in freed.kept)
    with pytest.raises(gk.FreedGraphError):
        (u.sum() + v.sum()).backward()


@pytest.mark.skipif(not _saved._HAS_DATA, reason="this torch shows what hooks packed only by unpacking it")
def test_in_place_on_a_view_and_foreign_hooks_and_attributes_are_told() -> None:
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.extra = x * 2
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.randn(4, requires_grad=True)
    a = x * 1
    a[:2].mul_(2)
    with torch.autograd.graph.save_on_cpu():
        b = x.exp()
    freed = gk.discard(a, b, Keeps.apply(x))
    whats = {kept.what: kept.bytes for kept in freed.kept}
    assert whats["an in-place op on a view"] is None
    assert whats["result of exp"] == 16
    assert whats["attribute `extra` of Keeps's ctx, float32 [4]"] == 16


def test_a_later_backward_says_where_it_was_discarded() -> None:
    x = torch.randn(4, requires_grad=True)
    loss = x.exp().sum()
    gk.discard(loss)
    with pytest.raises(gk.FreedGraphError, match=r"gk\.discard\(\) at .*test_discard\.py:\d+"):
        loss.backward()
    with pytest.raises(gk.FreedGraphError):
        torch.autograd.grad(loss, x)
    assert x.grad is None


def test_no_hook_fires() -> None:
    fired: list[int] = []
    x = torch.randn(4, requires_grad=True)
    x.register_hook(lambda _g: fired.append(1))
    hidden = x.exp()
    hidden.register_hook(lambda _g: fired.append(1))
    hidden.grad_fn.register_hook(lambda *_: fired.append(1))
    gk.discard(hidden.sin())
    assert not fired


def test_keep_protects_what_leads_to_it() -> None:
    w = torch.randn(4, requires_grad=True)
    x = w.tanh()
    rejected = x.exp().sum()
    gk.discard(rejected, keep=x)
    x.sum().backward()
    torch.testing.assert_close(w.grad, 1 - w.detach().tanh() ** 2)


def test_pytrees_edges_several_and_repeated() -> None:
    x = torch.randn(4, requires_grad=True)
    a, b = x.exp(), x.sin()
    edge = torch.autograd.graph.get_gradient_edge(b)
    gk.discard({"a": a, "n": 3}, [edge, None])
    assert gk.explain((a, b)).freed
    assert gk.discard(a, b) == 0


def test_without_a_graph_nothing_is_freed() -> None:
    assert gk.discard(torch.ones(3)) == 0
    with torch.no_grad():
        assert gk.discard(torch.ones(3, requires_grad=True).exp()) == 0


@pytest.mark.parametrize("bad", [(), (1,), ("loss",), (None,)])
def test_not_a_tensor(bad: tuple[Any, ...]) -> None:
    with pytest.raises(gk.ArgumentTypeError, match="holds no tensor"):
        gk.discard(*bad)


def test_L9_a_rejected_sample_with_nan_never_touches_a_gradient() -> None:
    w = torch.ones(3, requires_grad=True)
    total = torch.zeros(())
    for sample in (torch.ones(3), torch.full((3,), float("nan"))):
        out = (w * sample).sum()
        if not torch.isfinite(out):
            gk.discard(out)
            continue
        total = total + out
    total.backward()
    assert torch.equal(w.grad, torch.ones(3))


def test_many_rejected_samples_hold_one_graph_at_most() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 10), nn.Sigmoid())
    outs = []
    for _ in range(5):
        out = model(torch.randn(20, 100))
        outs.append(out)
        gk.discard(out)
    assert gk.explain(outs).saved_bytes == 0
    assert gk.explain(outs).state == "freed"
