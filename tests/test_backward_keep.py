"""`gk.backward(keep=)`: the gradients of ``retain_graph=True``, the head freed, what leads to ``keep`` usable."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

import graphkeep as gk


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def asked() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The third asker's program up to the first backward."""
    w = torch.tensor(1.0, requires_grad=True)
    x = w + 10
    x1 = x * x
    return w, x, x1, x1 * x1


def joint_gradient() -> torch.Tensor:
    w, x, _, y1 = asked()
    (y1 + torch.sqrt(x) / 2).backward()
    assert w.grad is not None
    return w.grad


def test_the_askers_program_has_the_joint_gradient_bit_for_bit() -> None:
    w, x, x1, y1 = asked()
    gk.backward(y1, keep=x)
    assert gk.explain(y1).saved_bytes == 0
    assert gk.explain(y1).freed
    assert x1.grad_fn is not None  # the names still point at the freed graph
    (torch.sqrt(x) / 2).backward()
    assert torch.equal(w.grad, joint_gradient())


def test_memory_between_keep_and_tensors_is_gone_when_the_call_returns(no_collector: None) -> None:
    w = leaf(1000)
    x = w.tanh()
    hidden = x.sin().exp()
    y = hidden.cos().sum()
    held_by_head = [weakref.ref(hidden.grad_fn._saved_result.untyped_storage())]
    held_by_trunk = weakref.ref(x.untyped_storage())
    node = hidden.grad_fn.next_functions[0][0]
    del hidden
    gk.backward(y, keep=x)
    assert [reference() for reference in held_by_head] == [None]
    assert node is not None
    del x
    assert held_by_trunk() is not None  # the trunk's own saved result


def test_the_trunk_can_be_used_again_any_number_of_times() -> None:
    w = leaf(3)
    x = w.tanh()
    for _ in range(3):
        gk.backward((x * x).sum(), keep=x)
    (x * x).sum().backward()
    reference = w.detach().clone().requires_grad_()
    (4 * (reference.tanh() ** 2)).sum().backward()
    torch.testing.assert_close(w.grad, reference.grad)


def test_the_head_cannot_be_used_again_and_the_error_says_who_freed_it() -> None:
    w = leaf(3)
    x = w.tanh()
    y = x.exp().sum()
    gk.backward(y, keep=x)
    with pytest.raises(gk.FreedGraphError, match=r"gk\.backward\(keep=\) at .*test_backward_keep\.py:\d+"):
        y.backward()


def test_a_large_node_is_released_while_the_backward_goes_on(no_collector: None) -> None:
    w = leaf(512, 1024)  # 2 MiB
    x = w.tanh()
    dead: list[bool] = []
    hidden = x.exp()
    storage = weakref.ref(hidden.untyped_storage())
    y = hidden.sum()
    del hidden
    x.register_hook(lambda _grad: dead.append(storage() is None))
    gk.backward(y, keep=x)
    assert dead == [True]


def test_several_kept_tensors_and_one_below_another() -> None:
    w, v = leaf(3), leaf(3)
    low = w.tanh()
    high = low.exp() * v.sin()
    y = (high * low).sum()
    gk.backward(y, keep=(low, {"high": high}))
    high.sum().backward(retain_graph=True)  # the part between the two is kept
    low.sum().backward()
    a, b = w.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()
    low = a.tanh()
    high = low.exp() * b.sin()
    ((high * low).sum() + high.sum() + low.sum()).backward()
    torch.testing.assert_close(w.grad, a.grad)
    torch.testing.assert_close(v.grad, b.grad)


def test_only_the_lower_of_two_kept_means_the_part_between_is_freed() -> None:
    w = leaf(3)
    low = w.tanh()
    high = low.exp()
    gk.backward((high * low).sum(), keep=low)
    with pytest.raises(gk.FreedGraphError):
        high.sum().backward()


def test_a_leaf_as_keep_frees_everything_above_it() -> None:
    w = leaf(3)
    y = w.tanh().exp().sum()
    gk.backward(y, keep=w)
    assert gk.explain(y).freed
    assert w.grad is not None


def test_keep_is_the_root_itself_runs_all_and_frees_nothing() -> None:
    w = leaf(3)
    y = w.exp().sum()
    gk.backward(y, keep=y)
    y.backward()
    torch.testing.assert_close(w.grad, 2 * w.detach().exp())


def test_a_view_as_keep() -> None:
    w = leaf(4, 4)
    x = w.tanh()
    view = x[1:]
    gk.backward(view.exp().sum(), keep=view)
    view.sin().sum().backward()
    reference = w.detach().clone().requires_grad_()
    r = reference.tanh()[1:]
    (r.exp().sum() + r.sin().sum()).backward()
    torch.testing.assert_close(w.grad, reference.grad)


def test_an_in_place_result_as_keep() -> None:
    w = leaf(4)
    x = w * 2
    x.sin_()
    gk.backward(x.exp().sum(), keep=x)
    x.sum().backward()
    reference = w.detach().clone().requires_grad_()
    r = (reference * 2).sin()
    (r.exp().sum() + r.sum()).backward()
    torch.testing.assert_close(w.grad, reference.grad)


def test_L15_a_tensor_changed_in_place_since_is_refused_and_its_edge_from_before_works() -> None:
    w = leaf(4)
    x = w * 2
    edge = get_gradient_edge(x)
    y = (x + 1).exp().sum()
    x.add_(1)
    with pytest.raises(gk.NotInGraphError, match="get_gradient_edge"):
        gk.backward(y, keep=x)
    assert w.grad is None
    gk.backward(y, keep=edge)
    torch.testing.assert_close(w.grad, 2 * (w.detach() * 2 + 1).exp())


def test_L15_a_view_made_apart_from_the_path_is_refused() -> None:
    w = leaf(4)
    x = w.tanh()
    y = x.exp().sum()
    with pytest.raises(gk.NotInGraphError):
        gk.backward(y, keep=x.view(2, 2))


def test_allow_unused() -> None:
    w, other = leaf(4), leaf(4).exp()
    y = w.tanh().exp().sum()
    with pytest.raises(gk.NotInGraphError):
        gk.backward(y, keep=other)
    gk.backward(y, keep=other, allow_unused=True)
    assert gk.explain(y).freed
    other.sum().backward()


def test_L16_a_skip_connection_around_keep_is_part_of_the_backward() -> None:
    w, v = leaf(4), leaf(4)
    low = w.exp()
    x = low.tanh()
    for _ in range(2):  # the place where the path enters the trunk is kept as well
        gk.backward((x.sin() * v + low * 3).sum(), keep=x)
    a, b = w.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()
    low = a.exp()
    for _ in range(2):
        (low.tanh().sin() * b + low * 3).sum().backward(retain_graph=True)
    torch.testing.assert_close(w.grad, a.grad)
    torch.testing.assert_close(v.grad, b.grad)


def test_L23_a_weight_used_in_trunk_and_head_is_counted_once_each() -> None:
    w = leaf(4, 4)
    x = (w @ w).tanh()
    gk.backward((x @ w).sum(), keep=x)
    reference = w.detach().clone().requires_grad_()
    ((reference @ reference).tanh() @ reference).sum().backward()
    assert torch.equal(w.grad, reference.grad)


def test_L17_every_hook_fires_once_and_a_halving_hook_halves_once() -> None:
    fired: list[str] = []

    def count(name: str, factor: float = 1.0) -> Any:
        def hook(*args: Any) -> Any:
            fired.append(name)
            return args[0] * factor if factor != 1.0 else None

        return hook

    w, p = leaf(4), leaf(4)
    w.register_hook(count("leaf"))
    w.register_post_accumulate_grad_hook(count("accumulated"))
    p.register_post_accumulate_grad_hook(count("head accumulated"))
    x = w.tanh()
    x.register_hook(count("boundary", 0.5))
    x.grad_fn.register_prehook(count("prenode"))
    x.grad_fn.register_hook(count("node"))
    gk.backward((x * p).sum(), keep=x)
    assert sorted(fired) == ["accumulated", "boundary", "head accumulated", "leaf", "node", "prenode"]
    torch.testing.assert_close(w.grad, 0.5 * p.detach() * (1 - w.detach().tanh() ** 2))


def test_L17_module_backward_hooks_fire_once() -> None:
    fired: list[str] = []
    trunk, head = nn.Linear(3, 3), nn.Linear(3, 1)
    trunk.register_full_backward_hook(lambda *_: fired.append("trunk"))
    trunk.register_full_backward_pre_hook(lambda *_: fired.append("trunk pre"))
    head.register_full_backward_hook(lambda *_: fired.append("head"))
    x = trunk(leaf(2, 3))
    gk.backward(head(x).sum(), keep=x)
    assert sorted(fired) == ["head", "trunk", "trunk pre"]


def test_L17_no_hook_of_ours_stays() -> None:
    w = leaf(512, 1024)
    x = w.tanh()
    hidden = x.exp()
    gk.backward(hidden.sum(), keep=x)
    handle = hidden.grad_fn.register_hook(lambda *_: None)
    hooks = handle.hooks_dict_ref()
    assert list(hooks) == [handle.id]


def test_L18_retain_grad_at_the_boundary_holds_the_whole_sum() -> None:
    w = leaf(4)
    x = w.tanh()
    x.retain_grad()
    gk.backward((x * 2).sum() + (x * 3).sum(), keep=x)
    assert torch.equal(x.grad, torch.full((4,), 5.0))


def test_L25_create_graph_is_refused_with_the_reason() -> None:
    w = leaf(4)
    x = w.tanh()
    with pytest.raises(gk.ArgumentError, match="gradients' own graph runs through the nodes that keep= frees"):
        gk.backward(x.exp().sum(), keep=x, create_graph=True)
    assert w.grad is None


def test_L1_the_gradient_that_each_head_brings_to_an_inner_tensor_can_be_had() -> None:
    w = leaf(4)
    x = w.tanh()
    brought: list[torch.Tensor] = []
    handle = x.register_hook(brought.append)
    for factor in (2.0, 3.0):
        gk.backward((x * factor).sum(), keep=x)
    handle.remove()
    assert [float(gradient[0]) for gradient in brought] == [2.0, 3.0]


def test_L3_backward_block_by_block_down_a_network() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    data = torch.randn(2, 4)
    bounds = [data]
    for block in blocks:
        bounds.append(block(bounds[-1]))
    gk.backward(bounds[3].sum(), keep=bounds[2])
    assert gk.explain(bounds[3]).state == "partly freed"
    gk.backward(bounds[2].sum(), keep=bounds[1])
    bounds[1].sum().backward()
    assert gk.explain(bounds[3]).freed
    twin = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
    twin.load_state_dict(blocks.state_dict())
    total, x = torch.zeros(()), data
    for block in twin:
        x = block(x)
        total = total + x.sum()
    total.backward()
    for ours, theirs in zip(blocks.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_non_scalar_tensors_with_gradients_and_several_roots() -> None:
    w = leaf(4)
    x = w.tanh()
    a, b = x.exp(), x.sin().sum()
    gk.backward([a, b], [torch.arange(4.0), None], keep=x)
    reference = w.detach().clone().requires_grad_()
    r = reference.tanh()
    torch.autograd.backward([r.exp(), r.sin().sum()], [torch.arange(4.0), None])
    assert torch.equal(w.grad, reference.grad)


def test_edges_as_tensors() -> None:
    w = leaf(4)
    x = w.tanh()
    edge = get_gradient_edge(x.exp())
    gk.backward(edge, torch.ones(4), keep=get_gradient_edge(x))
    torch.testing.assert_close(w.grad, w.detach().tanh().exp() * (1 - w.detach().tanh() ** 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    w = leaf(4, dtype=dtype)
    x = w * w
    gk.backward((x * x).abs().sum(), keep=x)
    reference = w.detach().clone().requires_grad_()
    r = reference * reference
    (r * r).abs().sum().backward()
    assert torch.equal(w.grad, reference.grad)


def test_complex_output_with_a_complex_gradient() -> None:
    w = leaf(4, dtype=torch.complex64)
    x = w * w
    gk.backward(x * 2, torch.ones(4, dtype=torch.complex64), keep=x)
    torch.testing.assert_close(w.grad, 4 * w.detach().conj())


def test_sparse_gradients_and_sparse_tensors() -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    matrix = torch.eye(3).to_sparse().requires_grad_()
    x = embedding(torch.tensor([1, 2, 2]))
    y = torch.sparse.mm(matrix, x).exp().sum()
    gk.backward(y, keep=x)
    assert embedding.weight.grad.is_sparse
    assert gk.explain(y).state in ("partly freed", "freed")
    assert matrix.grad is not None


def test_zero_size_tensors() -> None:
    w = leaf(0, 3)
    x = w.tanh()
    gk.backward(x.exp().sum(), keep=x)
    x.sum().backward()
    assert w.grad.shape == (0, 3)


def test_tensors_on_several_devices() -> None:
    w = leaf(3)
    other = torch.ones(3, device="meta", requires_grad=True)
    x, meta = w.tanh(), other.tanh()
    gk.backward([x.exp().sum(), meta.exp().sum()], keep=(x, meta))
    assert w.grad is not None
    assert other.grad is not None
    assert other.grad.device.type == "meta"


def test_L27_a_deep_head() -> None:
    w = leaf(1)
    x = w * 1
    y = x
    for _ in range(100_000):
        y = y * 1
    y = y.exp()
    gk.backward(y.log(), keep=x)
    torch.testing.assert_close(w.grad, torch.ones(1))
    assert gk.explain(y).state == "partly freed"  # `x = w * 1` is kept
    assert gk.explain(y).nodes > 100_000


def test_a_batch_norm_an_lstm_and_attention_as_heads() -> None:
    torch.manual_seed(0)
    trunk = nn.Linear(8, 8)
    heads = nn.ModuleList([nn.BatchNorm1d(8), nn.LSTM(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)])
    data = torch.randn(5, 8)

    def losses(x: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [heads[0](x).exp().sum(), heads[1](x)[0].sum(), heads[2](x[None]).sin().sum()]

    x = trunk(data)
    for loss in losses(x):
        gk.backward(loss, keep=x)
    ours = [p.grad for m in (trunk, heads) for p in m.parameters()]
    trunk.zero_grad(), heads.zero_grad()
    x = trunk(data)
    for loss in losses(x):
        loss.backward(retain_graph=True)
    for a, p in zip(ours, (p for m in (trunk, heads) for p in m.parameters()), strict=True):
        assert torch.equal(a, p.grad)


class TwoOutputs(torch.autograd.Function):
    """Saves, and keeps an attribute, as torch's documentation says not to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        (_x,) = ctx.saved_tensors
        return a * 2 + b * 3


def test_a_custom_function_with_several_outputs_is_freed() -> None:
    w = leaf(4)
    x = w.tanh()
    a, b = TwoOutputs.apply(x)
    y = (a * b).sum()
    gk.backward(y, keep=x)
    with pytest.raises(gk.FreedGraphError):
        (a + b).sum().backward()


# --- what torch gives no way to release ------------------------------------------------------------------------------------


def test_an_in_place_op_on_a_view_is_right_and_warned_about() -> None:
    w, p = leaf(4), leaf(2)
    x = w.tanh()
    hidden = x * 1
    hidden[:2].mul_(p)
    with pytest.warns(gk.NotFreedWarning, match="in-place op on a view"):
        gk.backward(hidden.exp().sum(), keep=x)
    x.sum().backward()
    a, b = w.detach().clone().requires_grad_(), p.detach().clone().requires_grad_()
    r = a.tanh()
    hidden = r * 1
    hidden[:2].mul_(b)
    (hidden.exp().sum() + r.sum()).backward()
    torch.testing.assert_close(w.grad, a.grad)
    torch.testing.assert_close(p.grad, b.grad)


def test_what_other_saved_tensor_hooks_packed_is_right_and_warned_about() -> None:
    w = leaf(4)
    x = w.tanh()
    with torch.autograd.graph.save_on_cpu():
        y = x.exp().sum()
    with pytest.warns(gk.NotFreedWarning, match="exp"):
        gk.backward(y, keep=x)
    torch.testing.assert_close(w.grad, x.detach().exp() * (1 - x.detach() ** 2))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_head_and_a_checkpointed_trunk(use_reentrant: bool) -> None:
    trunk, head = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    data = leaf(2, 3)
    x = checkpoint(trunk, data, use_reentrant=use_reentrant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gk.NotFreedWarning)
        gk.backward(checkpoint(head, x, use_reentrant=use_reentrant).sum(), keep=x)
    x.sum().backward()
    ours = [p.grad for m in (trunk, head) for p in m.parameters()] + [data.grad]
    trunk.zero_grad(), head.zero_grad()
    data.grad = None
    x = trunk(data)
    (head(x).sum() + x.sum()).backward()
    for a, b in zip(ours, [p.grad for m in (trunk, head) for p in m.parameters()] + [data.grad], strict=True):
        torch.testing.assert_close(a, b)


# --- errors in the middle --------------------------------------------------------------------------------------------------


def test_an_exception_in_a_users_hook_leaves_nothing_behind(no_collector: None) -> None:
    w = leaf(512, 1024)
    x = w.tanh()
    hidden = x.exp()

    def fail(_grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        gk.backward(hidden.sum(), keep=x)
    handle.remove()
    probe = hidden.grad_fn.register_hook(lambda *_: None)
    assert len(probe.hooks_dict_ref()) == 1
    probe.remove()
    reference = weakref.ref(x.untyped_storage())
    del x, hidden, probe
    assert reference() is None


def test_a_graph_freed_by_an_earlier_plain_backward_is_refused_by_name() -> None:
    w = leaf(4)
    low = w.tanh()
    x = low.exp()
    x.sum().backward()
    with pytest.raises(gk.FreedGraphError, match=r"exp, tanh|tanh"):
        gk.backward(x.sin().sum(), keep=low)


def test_in_another_thread() -> None:
    w = leaf(4)
    x = w.tanh()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            gk.backward(x.exp().sum(), keep=x)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    x.sum().backward()
    assert w.grad is not None


# --- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "keep", "error", "says"),
    [
        ("y", "x", gk.ArgumentTypeError, "`tensors` is of type str"),
        (None, "x", gk.ArgumentTypeError, "`tensors` is of type NoneType"),
        ([], "x", gk.ArgumentError, "`tensors` is empty"),
        ([1], "x", gk.ArgumentTypeError, "element 0 of `tensors` is of type int"),
        (torch.ones(1), "x", gk.ArgumentError, "does not require a gradient"),
        ("loss", None, gk.ArgumentTypeError, "`keep` holds no tensor"),
        ("loss", [], gk.ArgumentTypeError, "it is empty"),
        ("loss", True, gk.ArgumentTypeError, "of type bool"),
        ("loss", torch.ones(1), gk.ArgumentError, "no tensor in `keep` requires a gradient"),
    ],
)
def test_bad_tensors_and_bad_keep(tensors: Any, keep: Any, error: type[Exception], says: str) -> None:
    w = leaf(4)
    x = w.tanh()
    loss = x.exp().sum()
    names = {"loss": loss, "x": x}
    with pytest.raises(error, match=says) as caught:
        gk.backward(
            names.get(tensors, tensors) if isinstance(tensors, str) else tensors,
            keep=names.get(keep, keep) if isinstance(keep, str) else keep,
        )
    assert isinstance(caught.value, gk.GraphkeepError)
    assert isinstance(caught.value, RuntimeError)  # what torch raises, so that existing handlers still catch it
    assert "write instead" in str(caught.value)
    assert w.grad is None
    loss.backward()  # nothing has run and nothing was freed


@pytest.mark.parametrize(
    ("grads", "error", "says"),
    [
        (None, gk.ArgumentError, "no gradient was given"),
        (torch.ones(3), gk.ArgumentError, r"shape \(3,\)"),
        (torch.ones(4, dtype=torch.complex64), gk.ArgumentError, "complex"),
        ([torch.ones(4), None], gk.ArgumentError, "1 `tensors` and 2 `grad_tensors`"),
        ([1.0], gk.ArgumentTypeError, "of type float"),
    ],
)
def test_bad_gradients(grads: Any, error: type[Exception], says: str) -> None:
    w = leaf(4)
    x = w.tanh()
    with pytest.raises(error, match=says):
        gk.backward(x.exp(), grads, keep=x)
    assert w.grad is None


def test_an_object_that_hides_a_tensor_is_refused() -> None:
    class Output:
        def __init__(self, hidden: torch.Tensor) -> None:
            self.hidden = hidden

    x = leaf(4).tanh()
    with pytest.raises(gk.ArgumentTypeError, match="attribute `hidden`"):
        gk.backward(x.exp().sum(), keep=Output(x))
