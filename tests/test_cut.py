"""`gk.cut`: heads freed one by one, one backward through the trunk on leaving, as ``(y1 + y2 + …).backward()``."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import graphkeep as gk


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


def test_L2_the_askers_program_has_the_joint_gradient_bit_for_bit() -> None:
    w = torch.tensor(1.0, requires_grad=True)
    with gk.cut(w + 10) as x:
        x1 = x * x
        y1 = x1 * x1
        y1.backward()
        assert gk.explain(y1).saved_bytes == 0
        assert w.grad is None  # nothing below the cut has run
        (torch.sqrt(x) / 2).backward()
    v = torch.tensor(1.0, requires_grad=True)
    x = v + 10
    ((x * x) * (x * x) + torch.sqrt(x) / 2).backward()
    reference = torch.tensor(1.0, requires_grad=True)
    x = reference + 10
    x1 = x * x
    (x1 * x1 + torch.sqrt(x) / 2).backward()
    assert torch.equal(w.grad, reference.grad)


def test_L12_leaving_frees_heads_and_trunk_by_reference_counting(no_collector: None) -> None:
    w = leaf(1000)
    trunk = w.tanh().exp()
    inner = weakref.ref(trunk.grad_fn.next_functions[0][0]._saved_result.untyped_storage())
    with gk.cut(trunk) as x:
        hidden = x.sin()
        head = weakref.ref(hidden.exp().untyped_storage())
        y = hidden.exp().cos()
        y.sum().backward()
        assert head() is None
        assert inner() is not None
    assert inner() is None  # although `trunk`, `x`, `hidden` and `y` are still names
    assert gk.explain((trunk, y)).freed


def test_L1_what_each_head_brought_can_be_read_between_heads_or_asked_for() -> None:
    w = leaf(4)
    with gk.cut(w.tanh()) as x:
        (x * 2).sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 2.0))
        (x * 3).sum().backward()
        assert torch.equal(x.grad, torch.full((4,), 5.0))
        (alone,) = torch.autograd.grad((x * 7).sum(), x)
        assert torch.equal(alone, torch.full((4,), 7.0))
    torch.testing.assert_close(w.grad, 5 * (1 - w.detach().tanh() ** 2))


Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass(frozen=True)
class Plain:
    hidden: torch.Tensor
    pooled: torch.Tensor | None
    lengths: list[int]
    derived: torch.Tensor | None = dataclasses.field(init=False, default=None)


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Like transformers': an ordered dict with attributes, registered as a pytree node."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


_pytree.register_pytree_node(
    ModelOutput, lambda out: (list(out.values()), list(out)), lambda values, names: ModelOutput(zip(names, values, strict=True))
)


def test_L21_structure_and_types_come_back_and_what_has_no_gradient_passes_through() -> None:
    w = leaf(4)
    hidden, detached, integers = w.tanh(), torch.ones(2), torch.arange(3)
    tree = {
        "dataclass": Plain(hidden, None, [1, 2]),
        "named": Pair(hidden, detached),
        "output": ModelOutput(logits=hidden * 2, mask=integers, cache=None),
        "list": [hidden, (3, "text", None)],
    }
    with gk.cut(tree) as stand_ins:
        assert isinstance(stand_ins["dataclass"], Plain)
        assert stand_ins["dataclass"].pooled is None
        assert stand_ins["dataclass"].lengths == [1, 2]
        assert isinstance(stand_ins["named"], Pair)
        assert stand_ins["named"].second is detached
        assert isinstance(stand_ins["output"], ModelOutput)
        assert stand_ins["output"].mask is integers
        assert stand_ins["list"][1] == (3, "text", None)
        one = stand_ins["named"].first
        assert one is stand_ins["dataclass"].hidden is stand_ins["list"][0]  # one tensor, one stand-in
        assert not one.is_leaf
        assert one.data_ptr() == hidden.data_ptr()
        (one.sum() + stand_ins["output"].logits.sum()).backward()
    torch.testing.assert_close(w.grad, 3 * (1 - w.detach().tanh() ** 2))


def test_a_leaf_at_the_boundary() -> None:
    p = nn.Parameter(torch.ones(3))
    with gk.cut(p) as q:
        (q * 2).sum().backward()
        assert p.grad is None
    assert torch.equal(p.grad, torch.full((3,), 2.0))


def test_what_torch_refuses_for_a_tensor_that_is_no_leaf_it_refuses_for_a_stand_in() -> None:
    with gk.cut(leaf(4).tanh()) as x:
        with pytest.raises(RuntimeError, match="only change requires_grad flags of leaf"):
            x.requires_grad_(False)
        with pytest.raises(ValueError, match="non-leaf"):
            torch.optim.SGD([x], lr=0.1)
        with pytest.raises(RuntimeError, match="deepcopy"):
            copy.deepcopy(x)


def test_L24_a_frozen_trunk_is_nothing_to_keep() -> None:
    head = nn.Linear(4, 1)
    with gk.cut(torch.randn(2, 4)) as x:
        head(x).sum().backward()
    assert head.weight.grad is not None


def test_L17_every_hook_below_the_cut_fires_once_with_the_whole_sum() -> None:
    seen: list[Any] = []
    w = leaf(4)
    w.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    x = w.tanh()
    x.register_hook(lambda g: seen.append(float(g[0])))
    x.register_hook(lambda g: g * 0.5)
    x.grad_fn.register_hook(lambda *_: seen.append("node"))
    with gk.cut(x) as s:
        (s * 2).sum().backward()
        (s * 3).sum().backward()
    assert seen == [5.0, "node", "accumulated"]
    torch.testing.assert_close(w.grad, 2.5 * (1 - w.detach().tanh() ** 2))


def test_L18_retain_grad_at_the_boundary_holds_the_whole_sum() -> None:
    w = leaf(4)
    x = w.tanh()
    x.retain_grad()
    with gk.cut(x) as s:
        (s * 2).sum().backward()
        (s * 3).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 5.0))
    assert torch.equal(s.grad, torch.full((4,), 5.0))


def test_L23_a_tied_weight_is_counted_once_in_trunk_and_head() -> None:
    w = leaf(4, 4)
    with gk.cut((w @ w).tanh()) as x:
        (x @ w).sum().backward()
        (x @ w.t()).exp().sum().backward()
    r = twin(w)
    x = (r @ r).tanh()
    ((x @ r).sum() + (x @ r.t()).exp().sum()).backward()
    torch.testing.assert_close(w.grad, r.grad)


def test_optimizer_in_backward_steps_each_head_as_its_gradient_arrives() -> None:
    torch.manual_seed(0)
    trunk, head = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in head.parameters()}

    def step(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in head.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = head.weight.detach().clone()
    data = torch.randn(3, 4)
    with gk.cut(trunk(data)) as x:
        head(x).sum().backward()
        assert not torch.equal(head.weight, before)
        assert head.weight.grad is None
    torch.testing.assert_close(trunk.bias.grad, 3 * before[0])


def test_cuts_nest() -> None:
    w = leaf(4)
    with gk.cut(w.tanh()) as low:
        with gk.cut(low.exp()) as high:
            (high * 2).sum().backward()
            high.sin().sum().backward()
        assert w.grad is None
        low.cos().sum().backward()
    r = twin(w)
    low = r.tanh()
    high = low.exp()
    ((high * 2).sum() + high.sin().sum() + low.cos().sum()).backward()
    torch.testing.assert_close(w.grad, r.grad)


def test_one_boundary_tensor_below_another() -> None:
    w = leaf(4)
    low = w.tanh()
    with gk.cut((low, low.exp())) as (a, b):
        (a * b).sum().backward()
        b.sin().sum().backward()
    r = twin(w)
    low = r.tanh()
    high = low.exp()
    ((low * high).sum() + high.sin().sum()).backward()
    torch.testing.assert_close(w.grad, r.grad)


class Bag(list):  # type: ignore[type-arg]
    """A subclass of list, which pytrees take for one thing."""


class Cutting(nn.Module):
    """A cut inside `forward`: no `with` block can span the backward, so it is closed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
        self.cut: gk.cut[torch.Tensor] | None = None

    def forward(self, data: torch.Tensor) -> list[torch.Tensor]:
        self.cut = gk.cut(self.trunk(data).tanh())
        return [head(self.cut.stand_ins) for head in self.heads]


def test_a_cut_inside_a_modules_forward() -> None:
    model = Cutting()
    data = torch.randn(2, 3)
    for output in model(data):
        output.sum().backward()
    assert model.cut is not None
    assert model.trunk.weight.grad is None
    model.cut.close()
    ours = model.trunk.weight.grad
    model.zero_grad()
    h = model.trunk(data).tanh()
    sum(head(h).sum() for head in model.heads).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(ours, model.trunk.weight.grad)


def test_leaving_by_an_exception_frees_the_trunk_and_runs_nothing(no_collector: None) -> None:
    w = leaf(1000)
    hidden = w.tanh()
    storage = weakref.ref(hidden.exp().untyped_storage())
    trunk = hidden.exp()
    storage = weakref.ref(trunk.grad_fn._saved_result.untyped_storage())
    y = trunk.sin()
    assert storage() is not None
    with pytest.raises(ZeroDivisionError), gk.cut(y) as x:
        (x * 2).sum().backward()
        raise ZeroDivisionError
    assert w.grad is None
    assert gk.explain(y).freed
    del trunk
    assert storage() is None  # although `y` still points at the graph


def test_leaving_with_no_gradient_arrived_frees_the_trunk_and_runs_nothing() -> None:
    w = leaf(4)
    trunk = w.tanh().exp()
    fired: list[int] = []
    trunk.register_hook(lambda _g: fired.append(1))
    with gk.cut(trunk):
        pass
    assert w.grad is None
    assert not fired
    assert gk.explain(trunk).freed


def test_a_part_of_the_trunk_that_no_gradient_reached_is_freed_too() -> None:
    w, v = leaf(4), leaf(4)
    a, b = w.tanh(), v.tanh()
    with gk.cut((a, b)) as (x, _unused):
        x.sum().backward()
    assert v.grad is None
    assert gk.explain((a, b)).freed


def test_L25_second_derivatives_inside_a_head_are_right() -> None:
    w = leaf(4)
    with gk.cut(w.tanh()) as x:
        (g,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
        (g**2).sum().backward()
    r = twin(w)
    x = r.tanh()
    (g,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    (g**2).sum().backward()
    torch.testing.assert_close(w.grad, r.grad)


def test_L25_create_graph_through_the_cut_is_refused_and_leaves_no_cycle(no_collector: None) -> None:
    w = leaf(4)
    trunk = w.tanh()
    with pytest.raises(gk.ArgumentError, match="second derivatives cannot pass a cut"), gk.cut(trunk) as x:
        x.exp().sum().backward(create_graph=True)
    assert w.grad is None
    assert gk.explain(trunk).freed
    stand_in = weakref.ref(x)
    del x
    assert stand_in() is None


# --- used wrongly ----------------------------------------------------------------------------------------------------------


def test_L6_a_step_in_between_is_refused_and_the_parameter_named() -> None:
    trunk, head = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
    for p in trunk.parameters():
        p.grad = torch.ones_like(p)
    out = trunk(torch.randn(2, 3)).tanh()
    with pytest.raises(gk.ChangedGraphError, match=r"`(weight|bias)` of Linear") as caught, gk.cut(out) as x:
        head(x).sum().backward()
        optimizer.step()
    assert "optimizer.step()" in str(caught.value)
    assert "after the `with` block" in str(caught.value)
    assert gk.explain(out).freed


def test_a_saved_tensor_of_the_trunk_changed_in_place_is_refused() -> None:
    w = leaf(4)
    trunk = w.tanh()
    with pytest.raises(gk.ChangedGraphError, match="changed in place"), gk.cut(trunk) as x:
        (x * 2).sum().backward()
        with torch.no_grad():
            x.mul_(2)
    assert w.grad is None


def test_a_backward_around_the_cut_is_refused() -> None:
    w = leaf(4)
    trunk = w.tanh()
    with pytest.raises(gk.FreedGraphError, match="went around the stand-ins"), gk.cut(trunk) as x:
        (x * 2).sum().backward()
        trunk.sum().backward()
    torch.testing.assert_close(w.grad, 1 - w.detach().tanh() ** 2)  # that backward's own, as in plain torch


def test_L16_a_skip_connection_around_the_cut_is_found_and_named() -> None:
    w = torch.tensor(1.0, requires_grad=True)
    low = w + 2  # saves nothing, so torch would run it twice without a word
    low.register_hook(lambda g: g.clamp(max=10))
    with pytest.raises(gk.BypassedCutError, match=r"the result of add, below .*test_cut\.py") as caught, gk.cut(low * 3) as x:
        (x * low).backward()
    assert "gk.cut((x, skip))" in str(caught.value)
    assert w.grad is None
    low = w + 2
    low.register_hook(lambda g: g.clamp(max=10))
    with gk.cut((low * 3, low)) as (x, skip):
        (x * skip).backward()
    assert w.grad == 10  # as plain torch gives


@pytest.mark.parametrize("retain", [True, False])
def test_a_second_loss_on_the_trunk_itself_is_a_backward_of_its_own(retain: bool) -> None:
    w = torch.tensor(1.0, requires_grad=True)
    x = w + 2
    with gk.cut(x) as s:
        (s * 2).backward()
        (x * 3).backward(retain_graph=retain)
    assert w.grad == 5


def test_asking_for_the_gradient_of_a_leaf_below_does_not_run_the_trunk_twice() -> None:
    w = leaf(4)
    low = w.tanh()
    with gk.cut(low.exp()) as x:
        torch.autograd.grad((x * low).sum(), x)  # the path around is not asked for
        x.sum().backward()
    assert w.grad is not None


def test_a_trunk_freed_before_is_refused_at_once() -> None:
    trunk = leaf(4).tanh()
    trunk.sum().backward()
    with pytest.raises(gk.FreedGraphError, match="by an earlier backward"):
        gk.cut(trunk)


def test_left_twice() -> None:
    c = gk.cut(leaf(4).tanh())
    with c as x:
        x.sum().backward()
    with pytest.raises(gk.ClosedCutError, match="left already"):
        c.close()
    with pytest.raises(gk.ClosedCutError), c:
        pass


def test_closed_by_hand_inside_its_own_block() -> None:
    c = gk.cut(leaf(4).tanh())
    with pytest.raises(gk.ClosedCutError), c as x:
        x.sum().backward()
        c.close()


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_a_stand_in_used_after_the_cut_has_closed(how: str) -> None:
    with gk.cut(leaf(4).tanh()) as x:
        early = x.exp().sum()
        x.sum().backward()
    for late in (early, x.exp().sum()):
        if how == "backward":
            with pytest.raises(gk.ClosedCutError, match="inside the `with"):
                late.backward()
        else:  # handed to the user, so that nothing is lost
            torch.testing.assert_close(torch.autograd.grad(late, x)[0], x.detach().exp())


def test_an_in_place_op_on_a_stand_in_works_where_it_works_on_the_tensor() -> None:
    trunk, head = nn.Conv1d(2, 3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Conv1d(3, 1, 3))
    data = torch.randn(2, 2, 8)
    with gk.cut(trunk(data)) as x:
        head(x).sum().backward()
    ours = [p.grad for m in (trunk, head) for p in m.parameters()]
    trunk.zero_grad(), head.zero_grad()
    head(trunk(data)).sum().backward()
    for a, b in zip(ours, (p.grad for m in (trunk, head) for p in m.parameters()), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(gk.ChangedGraphError, match="changed in place"), gk.cut(leaf(4).tanh()) as x:  # tanh saved it
        x.relu_().sum().backward()


@pytest.mark.parametrize("change", ["the tensor", "its base"])
def test_L15_a_tensor_changed_in_place_after_the_cut_is_refused(change: str) -> None:
    w = leaf(6)
    base = w + 10
    x = base[:3]
    with pytest.raises(gk.ChangedGraphError, match="after the cut"), gk.cut(x) as s:
        (x if change == "the tensor" else base).mul_(3)
        (s**2).sum().backward()
    assert w.grad is None


@pytest.mark.parametrize("how", ["grad", "inputs", "tied", "unused"])
def test_a_gradient_with_respect_to_something_below_the_cut_is_refused_as_it_would_be_a_part_only(how: str) -> None:
    w = leaf(4)
    h = w.sin()
    with pytest.raises(gk.BypassedCutError, match="would have to pass the cut"), gk.cut(h.exp()) as x:
        match how:
            case "grad":
                torch.autograd.grad((x * h).sum(), w)
            case "inputs":
                (x * h).sum().backward(inputs=[w])
            case "tied":
                torch.autograd.grad((x * w).sum(), w)
            case _:
                torch.autograd.grad(x.sum(), [w], allow_unused=True)
    assert w.grad is None


def test_a_gradient_through_a_cut_inside_a_cut_is_refused_too() -> None:
    w = leaf(4)
    with pytest.raises(gk.BypassedCutError), gk.cut(w.sin()) as low, gk.cut(low.exp()) as high:
        torch.autograd.grad(high.sum(), w, allow_unused=True)


def test_a_gradient_that_has_nothing_to_do_with_an_open_cut_is_let_through() -> None:
    w, v = leaf(4), leaf(4)
    with gk.cut(w.sin()) as x:
        assert torch.equal(torch.autograd.grad((v * 2).sum(), v)[0], torch.full((4,), 2.0))
        assert torch.equal(torch.autograd.grad((w * 2).sum(), w)[0], torch.full((4,), 2.0))  # not by way of the cut
        torch.autograd.grad((x * v).sum(), [x, v])
        (x * v).sum().backward(inputs=[v])
    assert w.grad is None  # no gradient arrived
    assert v.grad is not None


def test_a_cut_whose_object_is_gone_is_refused() -> None:
    model = Cutting()
    losses = [sum(output.sum() for output in model(torch.randn(2, 3))) for _ in range(2)]  # rebinds model.cut
    with pytest.raises(gk.ClosedCutError, match="whose object is gone"):
        (losses[0] + losses[1]).backward()
    assert model.cut is not None
    model.cut.__exit__(ZeroDivisionError, None, None)


def test_gradients_that_arrived_at_a_cut_that_is_dropped_are_warned_about() -> None:
    c = gk.cut(leaf(4).tanh())
    c.stand_ins.sum().backward()
    with pytest.warns(gk.LostGradientWarning, match="dropped before it was closed"):
        del c


def test_a_generator_that_is_closed_inside_its_cut_is_warned_about() -> None:
    def heads() -> Iterator[None]:
        with gk.cut(leaf(4).tanh()) as x:
            x.sum().backward()
            yield

    generator = heads()
    next(generator)
    with pytest.warns(gk.LostGradientWarning, match="generator"):
        generator.close()


def test_closed_from_a_hook_of_the_stand_in() -> None:
    c = gk.cut(leaf(4).tanh())
    c.stand_ins.register_hook(lambda _g: c.close())
    with pytest.raises(gk.ClosedCutError):
        c.stand_ins.sum().backward()


@pytest.mark.parametrize("change", ["data", "vector_to_parameters", "freeze", "dtype"])
def test_changes_of_a_leaf_that_bump_no_version_are_refused(change: str) -> None:
    trunk = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = trunk[1].weight
    with pytest.raises(gk.ChangedGraphError, match="a leaf of the trunk"), gk.cut(trunk(torch.randn(2, 3))) as x:
        x.sum().backward()
        match change:
            case "data":
                weight.data = weight.data * 2
            case "vector_to_parameters":
                nn.utils.vector_to_parameters(torch.zeros(24), trunk.parameters())
            case "freeze":
                trunk.requires_grad_(False)
            case _:
                trunk.double()


def test_what_a_user_puts_into_grad_is_what_flows_on() -> None:
    w = leaf(4)
    with gk.cut(w * 2) as x:
        x.sum().backward()
        x.grad = x.grad * 10
    assert torch.equal(w.grad, torch.full((4,), 20.0))
    w.grad = None
    with gk.cut(w * 2) as x:
        x.sum().backward()
        x.grad.mul_(3)
        (x * 5).sum().backward()
    assert torch.equal(w.grad, torch.full((4,), 16.0))
    w.grad = None
    with gk.cut(w * 2) as x:
        x.sum().backward()
        x.grad = None
    assert w.grad is None


def test_gradients_of_every_kind_add_up() -> None:
    w = leaf(4)
    with gk.cut(w.tanh()) as x:  # the gradient of sgn is a ZeroTensor
        x.sgn().sum().backward()
        x.sgn().sum().backward()
        x.sum().backward()
    torch.testing.assert_close(w.grad, 1 - w.detach().tanh() ** 2)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged, requires_grad=True)
    with gk.cut(jagged * 2) as x:
        for _ in range(3):
            (x * 2).values().sum().backward()
    assert torch.equal(jagged.grad.values(), torch.full((3, 3), 12.0))


def test_a_module_shared_by_trunk_and_head_under_one_autocast() -> None:
    shared, data = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), gk.cut(shared(data)) as x:
        shared(x).float().sum().backward()
    ours = shared.weight.grad.clone()
    shared.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shared(shared(data)).float().sum().backward()
    torch.testing.assert_close(ours, shared.weight.grad, rtol=2e-2, atol=2e-2)


def test_entered_twice() -> None:
    c = gk.cut(leaf(4).tanh())
    with c as x:
        with pytest.raises(gk.ClosedCutError, match="entered already"), c:
            pass
        x.sum().backward()


def test_a_discarded_trunk_says_where_it_was_discarded() -> None:
    trunk = leaf(4).tanh()
    with pytest.raises(gk.FreedGraphError, match=r"gk\.discard\(\) at .*test_cut\.py"), gk.cut(trunk) as x:
        x.sum().backward()
        gk.discard(trunk)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_and_strided_nested_tensors_are_refused() -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaf(4), torch.ones(4))
        with pytest.raises(gk.ArgumentError, match="forward-mode"):
            gk.cut(dual)


@pytest.mark.parametrize("container", [set, frozenset, lambda x: iter(list(x)), lambda x: functools.partial(print, *x), Bag])
def test_a_container_that_is_no_pytree_is_refused(container: Any) -> None:
    x, h = leaf(3).tanh(), leaf(3).tanh()
    for use in (lambda t: gk.cut(t), gk.discard, lambda t: gk.backward(x.sum(), keep=t, allow_unused=True)):
        with pytest.raises(gk.ArgumentTypeError, match="overlooked"):
            use([x, container([h])])


@pytest.mark.parametrize("tree", [None, 3, "x", [], {}, object()])
def test_no_tensor(tree: Any) -> None:
    with pytest.raises(gk.ArgumentTypeError, match="got no tensor"):
        gk.cut(tree)


def test_an_object_that_hides_a_tensor_is_refused() -> None:
    class Output:
        def __init__(self, hidden: torch.Tensor) -> None:
            self.hidden = hidden

    with pytest.raises(gk.ArgumentTypeError, match="dataclass"):
        gk.cut([torch.ones(1), Output(leaf(3).tanh())])


# --- kinds of tensors ------------------------------------------------------------------------------------------------------


def test_L15_a_view_at_the_boundary() -> None:
    w = leaf(4, 4)
    with gk.cut(w.tanh()[1:].t()) as x:
        x.exp().sum().backward()
    r = twin(w)
    r.tanh()[1:].t().exp().sum().backward()
    torch.testing.assert_close(w.grad, r.grad)


def test_L15_an_in_place_op_on_the_original_after_the_cut_keeps_the_edge() -> None:
    w = leaf(4)
    x = w * 2  # saves no output, so torch allows the change
    with gk.cut(x) as s:
        s.sum().backward()
        x.add_(1)
    torch.testing.assert_close(w.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    w = leaf(4, dtype=dtype)
    with gk.cut(w * w) as x:
        assert x.dtype is dtype
        (x * x).abs().sum().backward()
    r = twin(w)
    x = r * r
    (x * x).abs().sum().backward()
    assert torch.equal(w.grad, r.grad)


def test_sparse_tensors() -> None:
    w = torch.eye(3).to_sparse().requires_grad_()
    embedding = nn.Embedding(10, 3, sparse=True)
    with gk.cut((w * 2, embedding(torch.tensor([1, 1])))) as (m, e):
        assert m.is_sparse
        torch.sparse.mm(m, e.sum(0)[:, None]).sum().backward()
    assert w.grad is not None
    assert embedding.weight.grad.is_sparse


def test_zero_size_and_several_devices() -> None:
    w, meta = leaf(0, 3), torch.ones(3, device="meta", requires_grad=True)
    with gk.cut((w.tanh(), meta.tanh())) as (x, m):
        x.sum().backward()
        m.sum().backward()
    assert w.grad.shape == (0, 3)
    assert meta.grad.device.type == "meta"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_trunk(use_reentrant: bool) -> None:
    trunk = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    data = leaf(2, 3)
    with gk.cut(checkpoint(trunk, data, use_reentrant=use_reentrant)) as x:
        (x * 2).sum().backward()
    r = twin(data)
    (trunk(r) * 2).sum().backward()
    torch.testing.assert_close(data.grad, r.grad)


def test_a_trunk_saved_on_the_cpu() -> None:
    w = leaf(4)
    with torch.autograd.graph.save_on_cpu():
        trunk = w.tanh().exp()
    with gk.cut(trunk) as x:
        x.sum().backward()
    torch.testing.assert_close(w.grad, w.detach().tanh().exp() * (1 - w.detach().tanh() ** 2))


def test_under_no_grad_nothing_arrives_and_the_trunk_is_freed() -> None:
    trunk = leaf(4).tanh()
    with torch.no_grad(), gk.cut(trunk) as x:
        assert not (x * 2).requires_grad
    assert gk.explain(trunk).freed


def test_L27_a_deep_trunk() -> None:
    w = leaf(1)
    x = w
    for _ in range(100_000):
        x = x * 1
    with gk.cut(x) as s:
        s.sum().backward()
    assert torch.equal(w.grad, torch.ones(1))


def test_L10_the_number_of_trunk_backwards_is_one_however_many_heads() -> None:
    runs: list[int] = []
    x = leaf(4).tanh()
    x.register_hook(lambda _g: runs.append(1))
    with gk.cut(x) as s:
        for _ in range(8):
            s.exp().sum().backward()
    assert runs == [1]


# copies of a module that holds it ---------------------------------------------------------------------------------------------


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 3), nn.Linear(3, 1)
        self.cut: gk.cut[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cut = gk.cut(self.trunk(x).tanh())
        return self.head(self.cut.stand_ins)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("when", ["open", "closed"])
def test_a_copy_of_a_module_has_a_cut_that_has_closed(copied: Any, when: str) -> None:
    module, twin, x = Holding(), Holding(), torch.randn(2, 3)
    twin.load_state_dict(module.state_dict())
    loss = module(x).sum()
    if when == "closed":
        loss.backward()
        module.cut.close()
    other = copied(module)
    assert other.cut.stand_ins is None
    with pytest.raises(gk.ClosedCutError):
        other.cut.close()
    with pytest.raises(gk.ClosedCutError):
        other.cut.__enter__()
    if when == "open":
        copy.copy(module.cut)  # that it goes does not end the one that was copied
        loss.backward()
        module.cut.close()
    other(x).sum().backward()  # the copy makes cuts of its own
    other.cut.close()
    for net in twin, other, module:
        if net is twin:
            twin(x).sum().backward()
            twin.cut.close()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
