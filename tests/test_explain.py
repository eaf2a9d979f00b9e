"""`gk.explain`, first form: nodes, bytes, leaves, and whether the graph has been freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import graphkeep as gk
from graphkeep import _saved


def test_counts_and_bytes() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = x.exp().sin().sum()
    e = gk.explain(y)
    assert e.nodes == 4  # sum, sin, exp, and the leaf's accumulator
    assert e.saved_bytes == 4000  # exp's result, which is sin's input as well
    assert e.saved_tensors == 2
    assert [leaf is x for leaf in e.leaves] == [True]
    assert e.ops == {"sum": 1, "sin": 1, "exp": 1}
    assert e.state == "alive"


def test_parameters_are_told_by_storage() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 5))
    data = torch.randn(3, 10)
    e = gk.explain(model(data))
    # Linear saves W.t(), which is no Parameter; the first layer's input needs no gradient, so only the second saves it
    assert e.parameter_bytes == 20 * 5 * 4
    assert e.saved_bytes == (3 * 10 + 3 * 20) * 4  # data, and tanh's result, which is the second layer's input
    assert len(e.leaves) == 4


def test_frozen_parameters_and_buffers_are_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval().requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    e = gk.explain(model(x))
    assert e.parameter_bytes >= 4 * 4 * 4
    assert e.saved_bytes <= 2 * 4 * 4 * 2


def test_views_and_expand_count_their_storage_once() -> None:
    x = torch.ones(10, requires_grad=True)
    big = (x * 2).expand(1000, 10)
    y = (big[:5].exp() + big[5:10].sin()).sum()
    e = gk.explain(y)
    assert e.saved_bytes < 10 * 4 + 5 * 10 * 4 + 100


def test_several_graphs_are_taken_as_one() -> None:
    x = torch.ones(1000, requires_grad=True)
    trunk = x.exp()
    a, b = trunk.sin(), trunk.cos()
    assert gk.explain([a, {"b": b}]).saved_bytes == 4000
    assert gk.explain((a, torch.ones(1), None)).saved_bytes == 4000


def test_freed_graphs_are_said_to_be_freed() -> None:
    x = torch.ones(10, requires_grad=True)
    y = x.exp().sum()
    y.backward()
    e = gk.explain(y)
    assert (e.state, e.saved_bytes, e.freed_tensors) == ("freed", 0, 1)
    assert "freed" in str(e)


def test_a_freed_custom_function_is_said_to_be_freed() -> None:
    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x * 2, None)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * ctx.saved_tensors[0]

    y = Saving.apply(torch.ones(10, requires_grad=True))
    assert gk.explain(y).saved_bytes == 40
    y.sum().backward()
    assert gk.explain(y).freed


def test_partly_freed() -> None:
    x = torch.ones(10, requires_grad=True)
    trunk = x.exp()
    y = trunk.sin().sum()
    gk.backward(y, keep=trunk)
    assert gk.explain(y).state == "partly freed"


def test_a_tensor_without_a_graph() -> None:
    e = gk.explain(torch.ones(3))
    assert (e.nodes, e.saved_bytes, e.state) == (0, 0, "no graph")
    assert "no graph" in str(e)


def test_an_edge() -> None:
    x = torch.ones(10, requires_grad=True)
    assert gk.explain(get_gradient_edge(x.exp())).nodes == 2


def test_a_graph_that_saved_nothing_is_alive() -> None:
    assert gk.explain(torch.ones(3, requires_grad=True) + 1).state == "alive"


def test_hidden_nodes_are_counted() -> None:
    x = torch.ones(4, requires_grad=True) * 1
    x[:2].mul_(3)
    e = gk.explain(x)
    assert e.hidden_nodes == 1
    assert "hidden" in str(e)


@pytest.mark.skipif(not _saved._HAS_DATA, reason="this torch shows what hooks packed only by unpacking it")
def test_what_foreign_hooks_packed_is_counted_and_no_hook_runs() -> None:
    ran: list[str] = []

    def pack(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        return "packed", tensor

    def unpack(packed: tuple[str, torch.Tensor]) -> torch.Tensor:
        ran.append("unpack")
        return packed[1]

    x = torch.ones(1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = x.exp()
    assert gk.explain(y).saved_bytes == 4000
    assert not ran


def test_changed_in_place_does_not_raise() -> None:
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    y.add_(1)
    assert gk.explain(y).saved_tensors == 1


def test_sparse_complex_bfloat16_and_meta() -> None:
    sparse = torch.eye(3).to_sparse().requires_grad_()
    dense = torch.randn(3, 2, requires_grad=True)
    assert gk.explain(torch.sparse.mm(sparse, dense * 1)).saved_bytes >= 3 * 2 * 4
    z = torch.ones(10, dtype=torch.complex64, requires_grad=True)
    assert gk.explain(z.exp()).saved_bytes == 80
    assert gk.explain(torch.ones(10, device="meta", requires_grad=True).exp()).saved_bytes == 0


def test_L27_a_million_nodes() -> None:
    y = torch.ones(1, requires_grad=True)
    for _ in range(1_000_000):
        y = y + 1
    assert gk.explain(y).nodes == 1_000_001
    del y


def test_str_and_html_are_readable_and_escaped() -> None:
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    Odd.__name__ = "<script>"
    renamed = type("<script>", (torch.autograd.Function,), {"forward": Odd.forward, "backward": Odd.backward})
    e = gk.explain(renamed.apply(torch.ones(3, requires_grad=True)))
    page = e._repr_html_()
    assert page.startswith("<table>")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "saved" in str(e)
    assert str(e).count("\n") < 10


def test_not_a_tensor() -> None:
    with pytest.raises(gk.ArgumentTypeError, match="holds no tensor"):
        gk.explain(3)
