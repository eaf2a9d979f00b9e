"""Torture: small programs that use autograd in every way that torch's own tests do, and some that nobody should.

Each program is a function of no arguments that seeds itself and returns a pytree: tensors, numbers, strings, and ``Later``s,
which are read only after whatever surrounded the program has ended. ``@program("group", raises=Error)`` marks those that must
raise. What a program returns, raises, warns and leaves behind must not depend on who watches it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)


@dataclass(frozen=True)
class Program:
    """A program, and the error that it must end with."""

    name: str
    group: str
    body: Callable[[], object]
    raises: type[BaseException] | None = None

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


@dataclass
class Later:
    """A value that is asked for after the context around the program has ended."""

    value: Callable[[], object]


PROGRAMS: list[Program] = []


def program(group: str, raises: type[BaseException] | None = None) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(body: Callable[[], object]) -> Callable[[], object]:
        PROGRAMS.append(Program(body.__name__.replace("_", " ").strip(), group, body, raises))
        return body

    return add


def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return data(*shape, seed=seed, dtype=dtype).requires_grad_()


def gradient(y: Any, *xs: Tensor, **options: Any) -> Any:
    return torch.autograd.grad(y, xs, **options)


def told(log: list[str], thing: Any, name: str) -> None:
    """``log`` says when ``thing`` dies."""
    weakref.finalize(thing, log.append, f"{name} dies").atexit = False


def stepped(net: nn.Module, x: Tensor, steps: int = 2, lr: float = 0.1) -> list[Tensor]:
    """Train a little; the parameters and buffers."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        out = net(x)
        out = out[0] if isinstance(out, tuple) else out
        out.square().mean().backward()
        optimizer.step()
    return [t.detach() for t in net.state_dict().values()]


def names_of(node: Any, limit: int = 200) -> list[str]:
    """The names of the nodes below, in the order of a walk."""
    found: list[str] = []
    todo = [node]
    while todo and len(found) < limit:
        node = todo.pop()
        found.append(node.name())
        todo.extend(n for n, _ in node.next_functions if n is not None)
    return found


def seeded_net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


# ---------------------------------------------------------------------------------------------------------------------------
# in place


@program("in place")
def leaf_under_no_grad():
    w, x = leaf(3), data(3, seed=1)
    for _ in range(3):
        (w.sigmoid() * x).sum().backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
            w.grad.zero_()
    return w, w.grad, w._version


@program("in place")
def relu_sigmoid_exp_tanh():
    x = leaf(6)
    y = (x * 2).relu_()
    z = (x + 1).sigmoid_()
    e = (x - 1).exp_()
    t = (x * 3).tanh_()
    return y, z, e, t, gradient((y + z + e + t).sum(), x), y._version


@program("in place")
def chained_on_one_tensor():
    x = leaf(5)
    y = x.clone()
    y.mul_(3).add_(1).sin_().sub_(0.5).sigmoid_()
    return y, y.grad_fn.name(), gradient(y.sum(), x)


@program("in place")
def index_put_and_masked_fill():
    x, v = leaf(4, 3), leaf(3, seed=1)
    y = x * 1
    y[torch.tensor([0, 2])] = v
    y.masked_fill_(y > 1, 0.25)
    y[1:2, ::2] = v[:2] * 2
    y.index_add_(0, torch.tensor([1, 1]), v.expand(2, 3))
    return y, gradient(y.square().sum(), x, v)


@program("in place")
def copy_with_a_gradient_and_a_cast():
    x, v = leaf(4), leaf(4, seed=1, dtype=torch.float64)
    y = x * 2
    y.copy_(v)
    return y, gradient(y.sin().sum(), x, v, allow_unused=True)


@program("in place")
def view_then_base():
    x = leaf(4, 4)
    base = x * 1
    view = base[1]
    view.mul_(2)
    base.add_(1)
    view.sin_()
    return base, view, view.grad_fn.name(), gradient(base.square().sum(), x)


@program("in place")
def view_of_view():
    x = leaf(4, 6)
    base = x.clone()
    base.view(2, 2, 6)[0].t()[2:4].sin_()
    base.diagonal().mul_(3)
    return base, names_of(base.grad_fn), gradient(base.sum(), x)


@program("in place")
def data_assigned():
    w = leaf(3)
    y = (w * w).sum()
    w.data = torch.ones(3)
    y.backward()
    return w, w.grad, w._version


@program("in place")
def data_changed_behind_autograd():
    w = leaf(3)
    y = w.sigmoid() * 2
    s = (y * y).sum()
    y.data.fill_(7)
    s.backward()
    return w.grad, y._version


@program("in place")
def set_to_another_storage():
    x = leaf(3)
    t = torch.zeros(3)
    y = x * t
    with torch.no_grad():
        t.set_(torch.arange(3.0))
    return y, t, t._version


@program("in place", raises=RuntimeError)
def set_after_save():
    x, t = leaf(3), torch.zeros(3)
    y = x * t
    with torch.no_grad():
        t.set_(torch.arange(3.0))
    y.sum().backward()


@program("in place")
def storage_resized_and_back():
    w = leaf(6)
    y = (w * w).sum()
    values = w.detach().clone()
    w.untyped_storage().resize_(0)
    w.untyped_storage().resize_(24)
    w.data.copy_(values)
    y.backward()
    return w.grad


@program("in place")
def resize_of_an_unsaved_tensor():
    out = torch.empty(0)
    torch.mul(data(3), data(3, seed=1), out=out)
    out.resize_(2)
    return out, out._version


@program("in place", raises=RuntimeError)
def resize_of_a_leaf_that_needs_grad():
    leaf(3).resize_(6)


@program("in place", raises=RuntimeError)
def sigmoid_changed_after_save():
    y = leaf(3).sigmoid()
    z = y.sum()
    y.add_(1)
    z.backward()


@program("in place", raises=RuntimeError)
def saved_input_changed():
    a = leaf(3) * 2
    z = a.sin().sum()
    a.zero_()
    z.backward()


@program("in place", raises=RuntimeError)
def saved_base_changed_through_its_view():
    a = leaf(3, 2) * 2
    z = (a * a).sum()
    a[0].zero_()
    z.backward()


@program("in place", raises=RuntimeError)
def saved_leaf_changed_under_no_grad():
    w = leaf(3)
    z = (w * w).sum()
    with torch.no_grad():
        w.add_(1)
    z.backward()


@program("in place", raises=RuntimeError)
def plain_input_changed():
    x = data(3)
    z = (leaf(3) * x).sum()
    x.add_(1)
    z.backward()


@program("in place", raises=RuntimeError)
def optimizer_step_between_two_backwards():
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    y = net(data(2, 4))
    y.sum().backward(retain_graph=True)
    optimizer.step()
    y.square().sum().backward()


@program("in place", raises=RuntimeError)
def changed_after_save_and_read_from_the_node():
    a = leaf(3) * 2
    y = a.sin()
    a.zero_()
    return y.grad_fn._saved_self


@program("in place", raises=RuntimeError)
def leaf_changed_with_grad_on():
    leaf(3).add_(1)


@program("in place", raises=RuntimeError)
def view_of_a_leaf_changed():
    leaf(3)[0].mul_(2)


@program("in place", raises=RuntimeError)
def one_of_many_views_changed():
    a, _b = (leaf(4) * 2).split(2)
    a.mul_(2)


@program("in place", raises=RuntimeError)
def expanded_tensor_changed():
    (leaf(1) * 2).expand(3).add_(torch.ones(3))


@program("in place", raises=RuntimeError)
def detach_of_a_view_in_place():
    (leaf(4) * 2)[:2].detach_()


@program("in place")
def detach_in_place_in_the_middle():
    x = leaf(4)
    y = x.exp()
    z = y * 2
    y.detach_()
    return y, z, gradient(z.sum(), x)


@program("in place", raises=RuntimeError)
def out_variant_with_grad():
    torch.mul(leaf(3), leaf(3), out=torch.empty(3))


@program("in place")
def out_variant_under_no_grad():
    x, out = leaf(3), torch.empty(3)
    with torch.no_grad():
        torch.sin(x, out=out)
    y = x * out
    return out, out._version, gradient(y.sum(), x)


@program("in place", raises=RuntimeError)
def out_variant_writes_over_a_saved_tensor():
    x, out = leaf(3), torch.zeros(3)
    y = x * out
    with torch.no_grad():
        torch.sin(x, out=out)
    y.sum().backward()


@program("in place")
def requires_grad_turned_on_and_off():
    x = data(3)
    y = x * 2
    x.requires_grad_()
    z = (x * y).sum()
    z.backward()
    x.requires_grad_(False)
    return x, x.grad, y, (x * 2).requires_grad


@program("in place")
def version_counter_is_the_programs_own():
    x = leaf(3)
    y = x * 2
    before = y._version
    z = y.sigmoid_()
    s = (z * z).sum()
    s.backward()
    return before, y._version, z._version, x._version, x.grad._version


@program("in place")
def change_undone_by_unsafe_preserve_version_counter():
    w = leaf(3)
    z = (w * w).sum()
    with torch.autograd._unsafe_preserve_version_counter(w), torch.no_grad():
        w.mul_(2)
    z.backward()
    return w.grad, w._version


@program("in place")
def mutation_allowed_on_saved_tensors():
    if not hasattr(torch.autograd.graph, "allow_mutation_on_saved_tensors"):
        return None
    a = leaf(3)
    b = a.clone()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        out = (b**2).sum()
        b.sin_()
        out.backward()
    return a.grad, b


# ---------------------------------------------------------------------------------------------------------------------------
# views


@program("views")
def as_strided_with_overlap():
    x = leaf(10)
    y = (x * 1).as_strided((3, 4), (2, 1), 1)
    return y, gradient(y.sin().sum(), x)


@program("views")
def expand_diagonal_unfold():
    x = leaf(3, 1)
    e = x.expand(3, 4)
    d = e.diagonal() * e.sin().diagonal(1)[:3]
    u = (x * x).flatten().unfold(0, 2, 1)
    return e, d, u, gradient(d.sum() + u.exp().sum(), x)


@program("views")
def chunk_split_unbind():
    x = leaf(6, 2)
    a, b = x.sin().chunk(2)
    c, d, e = (x * x).split(2)
    rows = x.unbind()
    y = (a * b).sum() + (c * d * e).sum() + (rows[0] * rows[5]).sum()
    return a, b, c.grad_fn.name(), rows[1].grad_fn.name(), gradient(y, x)


@program("views")
def complex_views():
    z = leaf(4, dtype=torch.complex64)
    r = torch.view_as_real(z * 2)
    back = torch.view_as_complex(r.sin())
    y = back.real.sum() + (back.imag * z.conj().imag).sum() + z.conj().mul(back).abs().sum()
    return r, back, gradient(y, z)


@program("views")
def base_changed_after_the_view_was_saved_elsewhere():
    x = leaf(4)
    base = x * 1
    v = base[:2]
    base.mul_(2)
    y = v.exp()
    base2 = base * 1
    base2[2:].zero_()
    return y, gradient(y.sum() + base2.sum(), x)


@program("views", raises=RuntimeError)
def view_made_in_no_grad_changed_later():
    x = leaf(4) * 2
    with torch.no_grad():
        v = x[:2]
    v.mul_(2)


@program("views")
def view_made_in_no_grad_read_later():
    x = leaf(4)
    with torch.no_grad():
        v = x.view(2, 2)
    y = x * v.flatten()
    return v, v.requires_grad, v.is_leaf, gradient(y.sum(), x)


@program("views")
def view_as_and_reshape_copies():
    x = leaf(4, 3)
    a = x.t().reshape(12)
    b = x.view_as(x)
    c = x.flatten().movedim(0, 0)
    return a, b, c._is_view(), b._base is x, a._is_view(), gradient((a.sin() @ b.reshape(12)).sum() + c.exp().sum(), x)


@program("views")
def squeeze_in_place_and_transpose_in_place():
    x = leaf(3, 1, 2)
    y = x * 1
    y.squeeze_(1).t_()
    return y, gradient((y @ y.t()).sum(), x)


@program("views")
def split_with_sizes_and_cat_back():
    x = leaf(7)
    parts = torch.split(x.exp(), [1, 2, 4])
    y = torch.cat(parts[::-1]) * torch.stack([p.sum() for p in parts]).sum()
    return y, gradient(y.sum(), x)


@program("views")
def base_and_views_asked_for_identity():
    x = leaf(4)
    y = x.sin()
    v = y[1:]
    return v._base is y, v._is_view(), v.storage_offset(), v.data_ptr() - y.data_ptr(), gradient(v.sum(), x)


# ---------------------------------------------------------------------------------------------------------------------------
# double backward and more


@program("higher order")
def double_and_triple_backward():
    x = leaf(4, dtype=torch.float64)
    y = (x.sin() * x.exp()).sum()
    out = [y]
    for _ in range(3):
        (y,) = gradient(y, x, create_graph=True)
        out.append(y)
        y = y.square().sum()
    return out


@program("higher order")
def double_backward_through_saved_outputs():
    x = leaf(4)
    g = [gradient(f(x * 0.5).sum(), x, create_graph=True)[0] for f in (torch.sigmoid, torch.tanh, torch.exp)]
    return g, gradient(sum(t.square().sum() for t in g), x)


@program("higher order")
def hessian_by_hand():
    x = leaf(4)
    y = (x**3).sum() * x.prod()
    (g,) = gradient(y, x, create_graph=True)
    return torch.stack([gradient(g[i], x, retain_graph=True)[0] for i in range(4)])


@program("higher order")
def gradcheck_and_gradgradcheck():
    x, w = leaf(2, 3, dtype=torch.float64), leaf(3, 2, seed=1, dtype=torch.float64)
    return (
        torch.autograd.gradcheck(lambda a, b: (a @ b).sigmoid(), (x, w)),
        torch.autograd.gradgradcheck(lambda a, b: (a @ b).sin(), (x, w)),
        torch.autograd.gradgradcheck(lambda a: F.softmax(a, -1), (x,), fast_mode=True),
    )


@program("higher order")
def gradient_penalty():
    net = seeded_net()
    x = leaf(2, 4)
    (g,) = gradient(net(x).sum(), x, create_graph=True)
    (net(x).mean() + (g.norm(dim=1) - 1).square().mean()).backward()
    return [p.grad for p in net.parameters()], x.grad


@program("higher order")
def create_graph_backward_accumulates_with_a_graph():
    x = leaf(3)
    (x**3).sum().backward(create_graph=True)
    g = x.grad
    (h,) = gradient(g.sum(), x)
    x.grad = None
    return g.detach(), h


@program("higher order")
def maml_inner_loop():
    w = leaf(3)
    x, t = data(5, 3, seed=1), data(5, seed=2)
    fast = w
    for _ in range(3):
        (g,) = gradient(F.mse_loss(x @ fast, t), fast, create_graph=True)
        fast = fast - 0.1 * g
    return fast, gradient(F.mse_loss(x @ fast, t), w)


@program("higher order")
def double_backward_of_conv_and_norms():
    x, w = leaf(1, 2, 5, 5), leaf(3, 2, 3, 3, seed=1)
    y = F.group_norm(F.conv2d(x, w), 3)
    y = F.layer_norm(F.max_pool2d(y, 2).flatten(1), (3,))
    g = gradient(y.sin().sum(), x, w, create_graph=True)
    return y, g, gradient(sum(t.square().sum() for t in g), x, w)


@program("higher order")
def double_backward_after_the_first_graph_was_freed():
    x = leaf(3)
    y = x.exp()
    (g,) = gradient(y.sin().sum(), x, create_graph=True)
    del y
    (g2,) = gradient(g.sum(), x, retain_graph=True)
    return g, g2, gradient(g.prod(), x)


# ---------------------------------------------------------------------------------------------------------------------------
# options of backward


@program("options")
def retained_twice():
    x = leaf(3)
    y = x.sigmoid().prod()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    y.backward()
    return x.grad


@program("options", raises=RuntimeError)
def second_backward():
    y = leaf(3).sigmoid().sum()
    y.backward()
    y.backward()


@program("options", raises=RuntimeError)
def saved_tensor_read_after_backward():
    y = leaf(3).sin()
    y.sum().backward()
    return y.grad_fn._saved_self


@program("options", raises=RuntimeError)
def saved_output_read_after_backward():
    y = leaf(3).exp()
    y.sum().backward()
    return y.grad_fn._saved_result


@program("options", raises=RuntimeError)
def second_backward_through_a_custom_function():
    y = SavesAll.apply(leaf(3), data(3, seed=1)).sum()
    y.backward()
    y.backward()


@program("options", raises=RuntimeError)
def gradient_of_a_vector():
    leaf(3).sin().backward()


@program("options", raises=RuntimeError)
def gradient_of_the_wrong_shape():
    leaf(3).sin().backward(torch.ones(4))


@program("options", raises=RuntimeError)
def unused_input():
    gradient(leaf(3).sin().sum(), leaf(3))


@program("options", raises=RuntimeError)
def nothing_requires_grad():
    data(3).sin().sum().backward()


@program("options", raises=RuntimeError)
def no_inputs():
    leaf(3).sin().sum().backward(inputs=[])


@program("options")
def backward_with_inputs():
    x, w = leaf(3), leaf(3, seed=1)
    h = x * w
    y = h.tanh().sum()
    y.backward(inputs=[x], retain_graph=True)
    first = x.grad.clone(), w.grad
    y.backward(inputs=[w, x])
    return first, x.grad, w.grad


@program("options")
def backward_with_a_non_leaf_input():
    x = leaf(3)
    h = x.exp()
    h.retain_grad()
    h.sin().sum().backward(inputs=[h])
    return h.grad, x.grad


@program("options")
def unused_and_materialized():
    x, w = leaf(3), leaf(2, seed=1)
    y = x.exp().sum()
    return gradient(y, x, w, allow_unused=True, retain_graph=True), gradient(y, x, w, materialize_grads=True)


@program("options")
def batched_gradients():
    x = leaf(3)
    y = x.sin() * x.sum()
    return gradient(y, x, grad_outputs=torch.eye(3), is_grads_batched=True)


@program("options")
def several_roots_and_gradients():
    x = leaf(3)
    a, b = x.sin(), x.exp()
    torch.autograd.backward([a, b, a.sum()], [torch.ones(3), data(3, seed=1), None])
    return x.grad


@program("options")
def backward_from_gradient_edges():
    x = leaf(3)
    h = x.exp()
    y = (h * h).sum()
    edge = torch.autograd.graph.get_gradient_edge
    return torch.autograd.grad(edge(y), [edge(h), edge(x)])


@program("options")
def retain_grad_on_the_way():
    x = leaf(3)
    h = x * 2
    h.retain_grad()
    k = h.sin()
    k.retain_grad()
    k.sum().backward()
    return h.retains_grad, k.retains_grad, h.grad, k.grad


@program("options")
def gradient_accumulates_in_place():
    w = leaf(3)
    w.grad = torch.ones(3)
    kept = w.grad
    (w.exp()).sum().backward()
    return w.grad is kept, w.grad, kept._version


@program("options")
def gradient_is_stolen_not_copied():
    w = leaf(3)
    seen = []
    h = w * 2
    h.register_hook(lambda g: seen.append(g))
    (h * torch.ones(3)).sum().backward()
    return w.grad, len(seen), seen[0].data_ptr() == w.grad.data_ptr()


@program("options")
def graph_that_outlives_the_context():
    x = leaf(3)
    y = x.sigmoid() * x.exp()
    z = SavesAll.apply(x, y)
    return Later(lambda: gradient(z.sum(), x))


@program("options")
def graph_that_outlives_the_context_twice():
    x = leaf(3)
    y = (x.sigmoid() * x).exp()
    return Later(lambda: (y.grad_fn._saved_result, gradient(gradient(y.sum(), x, create_graph=True)[0].sum(), x)))


@program("options", raises=RuntimeError)
def graph_that_outlives_the_context_and_was_changed():
    x = leaf(3)
    y = x.sigmoid()
    z = y * y

    def later():
        with torch.no_grad():
            y.mul_(2)
        z.sum().backward()

    return Later(later)


# ---------------------------------------------------------------------------------------------------------------------------
# custom Functions


class SavesAll(Function):
    """Saves both inputs, an intermediate, the output and None."""

    @staticmethod
    def forward(ctx, x, w):
        middle = x.sin()
        y = middle * w
        ctx.save_for_backward(x, w, middle, y, None)
        ctx.scale = 2.0
        return y

    @staticmethod
    def backward(ctx, grad):
        x, w, middle, y, nothing = ctx.saved_tensors
        assert nothing is None
        assert y.shape == x.shape
        return grad * x.cos() * w, grad * middle


@program("custom")
def saves_inputs_output_intermediate_none():
    x, w = leaf(3), leaf(3, seed=1)
    y = SavesAll.apply(x, w)
    g = gradient(y.sum(), x, w, create_graph=True)
    return y, g, gradient(g[0].sum(), x, w)


class ReadsMainGrad(Function):
    """Megatron's: weight gradients go to an attribute of the parameter that was saved."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.t() @ x)
        return grad @ weight, None


@program("custom")
def parameter_with_main_grad():
    weight = nn.Parameter(data(3, 4))
    weight.main_grad = torch.zeros(3, 4)
    x = leaf(2, 4, seed=1)
    ReadsMainGrad.apply(x, weight).sum().backward()
    return weight.main_grad, x.grad, weight.grad


def looks(seen: list[Any], wanted: dict[str, Tensor], grad_of: Callable[[Any], Any]) -> type[Function]:
    """A Function that writes down what it gets back of what it saved."""

    class Looks(Function):
        @staticmethod
        def forward(ctx, x):
            wanted.setdefault("x", x)
            ctx.save_for_backward(wanted["x"])
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (t,) = ctx.saved_tensors
            seen.append((t is wanted["x"], type(t).__name__, t.requires_grad, t.is_leaf, grad_of(t)))
            return grad * 2

    return Looks


@program("custom")
def identity_of_a_saved_parameter():
    seen: list[Any] = []
    w = nn.Parameter(data(3))
    w.tag = "mine"
    looks(seen, {"x": w}, lambda t: getattr(t, "tag", None)).apply(w).sum().backward()
    return seen


@program("custom")
def identity_of_a_saved_leaf():
    seen: list[Any] = []
    w = leaf(3)
    w.tag = "mine"
    looks(seen, {"x": w}, lambda t: getattr(t, "tag", None)).apply(w).sum().backward()
    return seen


@program("custom")
def identity_of_a_saved_intermediate():
    seen: list[Any] = []
    h = leaf(3) * 3
    h.tag = "mine"
    looks(seen, {"x": h}, lambda t: (getattr(t, "tag", None), t.grad_fn is h.grad_fn)).apply(h).sum().backward()
    return seen


@program("custom")
def identity_of_a_saved_tensor_without_grad():
    seen: list[Any] = []
    plain = data(3, seed=1)
    plain.tag = "mine"
    looks(seen, {"x": plain}, lambda t: getattr(t, "tag", None)).apply(leaf(3)).sum().backward()
    return seen


@program("custom")
def identity_of_a_saved_buffer_subclass():
    class Mine(Tensor):
        pass

    seen: list[Any] = []
    plain = data(3, seed=1).as_subclass(Mine)
    looks(seen, {"x": plain}, lambda t: None).apply(leaf(3)).sum().backward()
    return seen


@program("custom")
def identity_of_a_saved_view_of_a_parameter():
    seen: list[Any] = []
    w = nn.Parameter(data(3, 2))
    view = w.t()
    looks(seen, {"x": view}, lambda t: (t._is_view(), t._base is w, t.data_ptr() == w.data_ptr(), t.stride())).apply(
        view
    ).sum().backward()
    return seen


@program("custom")
def saved_parameter_gets_its_gradient_by_hand():
    class ByHand(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            w.grad = (grad * x).detach()
            return grad * w.detach(), None

    w, x = nn.Parameter(data(3)), leaf(3, seed=1)
    ByHand.apply(x, w).sum().backward()
    return w.grad, x.grad


@program("custom")
def hook_on_a_saved_intermediate_in_backward():
    class HooksIt(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            x.register_hook(lambda g: g * 10)
            return grad * x.cos()

    x = leaf(3)
    h = x * 2
    return gradient(HooksIt.apply(h).sum(), x)


@program("custom")
def attributes_on_ctx():
    class Attributes(Function):
        @staticmethod
        def forward(ctx, x, k, label):
            ctx.k, ctx.label, ctx.x = k, label, x
            return x * k

        @staticmethod
        def backward(ctx, grad):
            log.append((ctx.label, ctx.needs_input_grad, ctx.x is x))
            return grad * ctx.k, None, None

    log: list[Any] = []
    x = leaf(3)
    y = Attributes.apply(x, 3.0, "a")
    gradient(y.sum(), x)
    return log, y.grad_fn.name(), y.grad_fn.k, type(y.grad_fn).__name__


@program("custom")
def marked_dirty():
    class Doubles(Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            ctx.mark_dirty(x)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * 2 * y.sign().abs()

    x = leaf(3)
    h = x * 1
    y = Doubles.apply(h)
    return y is h, y, y._version, gradient(y.sum(), x)


@program("custom")
def marked_dirty_view():
    class Zeros(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            ctx.save_for_backward(x.clone())
            return x.zero_()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    x = leaf(4)
    h = x * 1
    Zeros.apply(h[:2])
    return h, names_of(h.grad_fn), gradient(h.sum(), x)


@program("custom")
def not_differentiable_and_not_materialized():
    class Sorts(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            values, order = x.sort()
            ctx.mark_non_differentiable(order)
            ctx.save_for_backward(order)
            return values, order, x * 2

        @staticmethod
        def backward(ctx, g_values, g_order, g_twice):
            log.append((g_values is None, g_order is None, g_twice is None))
            (order,) = ctx.saved_tensors
            return torch.zeros(4).scatter(0, order, g_values)

    log: list[Any] = []
    x = leaf(4)
    values, order, _twice = Sorts.apply(x)
    return values, order, order.requires_grad, gradient((values * torch.arange(4.0)).sum(), x), log


@program("custom")
def once_differentiable_first_time():
    x = leaf(3)
    return gradient(Once.apply(x).sum(), x)


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].exp()


@program("custom", raises=RuntimeError)
def once_differentiable_second_time():
    x = leaf(3)
    (g,) = gradient(Once.apply(x).sum(), x, create_graph=True)
    g.sum().backward()


@program("custom", raises=RuntimeError)
def saved_input_of_a_function_changed():
    h = leaf(3) * 1
    y = SavesAll.apply(h, data(3, seed=1))
    h.add_(1)
    y.sum().backward()


@program("custom", raises=RuntimeError)
def saved_output_of_a_function_changed():
    y = SavesAll.apply(leaf(3), data(3, seed=1))
    z = y.sum()
    y.add_(1)
    z.backward()


@program("custom", raises=RuntimeError)
def returned_view_of_an_input_changed():
    class Views(Function):
        @staticmethod
        def forward(ctx, x):
            return x[:2], x[2:]

        @staticmethod
        def backward(ctx, a, b):
            return torch.cat([a, b])

    a, _ = Views.apply(leaf(4) * 1)
    a.mul_(2)


class Raises(Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.save_for_backward(x)
        ctx.where = where
        if where == "forward":
            raise KeyError("in forward")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            raise LookupError("in backward")
        return grad


@program("custom", raises=KeyError)
def raises_in_forward():
    Raises.apply(leaf(3), "forward")


@program("custom", raises=LookupError)
def raises_in_backward():
    x = leaf(3)
    (Raises.apply(x.exp(), "backward") * x.sin()).sum().backward()


@program("custom", raises=RuntimeError)
def wrong_number_of_gradients():
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, grad):
            return grad

    Wrong.apply(leaf(3), leaf(3)).sum().backward()


@program("custom", raises=RuntimeError)
def wrong_shape_of_gradient():
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0].new_ones(5)

    Wrong.apply(leaf(3)).sum().backward()


@program("custom", raises=TypeError)
def saves_what_is_no_tensor():
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, "text")
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    Wrong.apply(leaf(3))


@program("custom")
def caught_and_gone_on():
    x = leaf(3)
    with contextlib.suppress(LookupError):
        Raises.apply(x.exp(), "backward").sum().backward()
    (x.exp() * 2).sum().backward()
    return x.grad


@program("custom")
def nested_functions():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            y = SavesAll.apply(x, x)
            ctx.save_for_backward(x, y)
            return y * 1

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return SavesAll.apply(grad, y) + x

    x = leaf(3)
    (g,) = gradient(Outer.apply(x).sum(), x, create_graph=True)
    return g, gradient(g.sum(), x)


class Reenters(Function):
    """Its backward runs a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.out = (ctx.inner.sin() * ctx.inner.exp()).sum()
        ctx.save_for_backward(x)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            (x,) = ctx.saved_tensors
            again = x.detach().requires_grad_()
            (again.sigmoid()).sum().backward()
            ctx.out.backward(retain_graph=True)
        return grad * ctx.inner.grad + 0 * again.grad


@program("custom")
def re_entrant_backward():
    x = leaf(3)
    y = Reenters.apply(x * 2) + Reenters.apply(x.sin())
    return y, gradient(y, x)


@program("custom")
def re_entrant_fifty_deep():
    class Deep(Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            if ctx.depth:
                with torch.enable_grad():
                    y = x.detach().requires_grad_()
                    Deep.apply(y, ctx.depth - 1).sum().backward()
                    return grad * y.grad, None
            return grad * x.exp(), None

    x = leaf(3)
    return gradient(Deep.apply(x, 50).sum(), x)


class Cube(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3, 3 * x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        _y, dy = output
        ctx.save_for_backward(x, dy)
        ctx.save_for_forward(x, dy)

    @staticmethod
    def backward(ctx, grad, g_dy):
        x, dy = ctx.saved_tensors
        return grad * dy + g_dy * 6 * x

    @staticmethod
    def jvp(ctx, t):
        x, dy = ctx.saved_tensors
        return t * dy, t * 6 * x


@program("custom")
def setup_context_and_vmap_rule():
    x = leaf(4)
    (g,) = gradient(Cube.apply(x)[0].sum(), x, create_graph=True)
    batched = torch.vmap(lambda t: Cube.apply(t)[0])(leaf(2, 3))
    return g, gradient(g.sum(), x), batched


@program("custom")
def vmap_over_grad_of_a_function():
    return torch.vmap(torch.func.grad(lambda t: Cube.apply(t)[0].sum()))(data(2, 3))


@program("custom")
def jvp_of_a_function():
    with fwd.dual_level():
        y, dy = Cube.apply(fwd.make_dual(leaf(3), data(3, seed=1)))
        return fwd.unpack_dual(y).tangent, fwd.unpack_dual(dy).tangent


@program("custom")
def function_returns_its_input():
    class Same(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    x = leaf(3)
    y = Same.apply(x)
    return y is x, y.grad_fn.name(), gradient(y.sum(), x)


@program("custom")
def needs_input_grad_seen():
    class Needs(Function):
        @staticmethod
        def forward(ctx, a, b, c):
            seen.append(ctx.needs_input_grad)
            ctx.save_for_backward(*(t for t, n in zip((a, b, c), ctx.needs_input_grad, strict=True) if n))
            return a * b * c

        @staticmethod
        def backward(ctx, grad):
            seen.append((ctx.needs_input_grad, len(ctx.saved_tensors)))
            return grad, None, grad

    seen: list[Any] = []
    a, b, c = leaf(2), data(2), leaf(2)
    return gradient(Needs.apply(a, b, c).sum(), a, c), seen


@program("custom")
def saved_tensors_read_from_outside():
    x = leaf(3)
    y = SavesAll.apply(x, data(3, seed=1))
    saved = y.grad_fn.saved_tensors
    return saved[:4], len(saved), saved[0] is x, saved[3] is y, y.grad_fn.scale


@program("custom")
def clears_saved_tensors_when_read():
    if not hasattr(Function, "clear_saved_tensors_on_access"):
        return None

    class Clears(SavesAll):
        clear_saved_tensors_on_access = True

    x = leaf(3)
    return gradient(Clears.apply(x, data(3, seed=1)).sum(), x)


# ---------------------------------------------------------------------------------------------------------------------------
# torch.func and torch.autograd.functional


def smooth(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).sum()


@program("func")
def func_grad():
    return torch.func.grad(smooth)(data(3)), torch.func.grad_and_value(smooth)(data(3))


@program("func")
def func_grad_of_grad():
    return torch.func.grad(lambda x: torch.func.grad(smooth)(x).sum())(data(3))


@program("func")
def func_vjp():
    y, pull = torch.func.vjp(lambda x: x.sin() * x.sum(), data(3))
    return y, pull(torch.ones(3)), pull(torch.arange(3.0))


@program("func")
def func_jacobians_and_hessian():
    def f(x: Tensor) -> Tensor:
        return x.sin() * x.sum()

    return torch.func.jacrev(f)(data(3)), torch.func.jacfwd(f)(data(3)), torch.func.hessian(smooth)(data(3))


@program("func")
def per_sample_gradients():
    net = seeded_net()
    parameters = {k: v.detach() for k, v in net.named_parameters()}

    def loss(p, x, t):
        return F.cross_entropy(torch.func.functional_call(net, p, (x[None],)), t[None])

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, data(5, 4), torch.arange(5) % 3)


@program("func")
def vmap_with_autograd_outside():
    x, w = leaf(4, 3), leaf(3, seed=1)
    y = torch.vmap(lambda row: (row * w).sigmoid().sum())(x)
    return y, gradient(y.square().sum(), x, w)


@program("func")
def functional_call_with_autograd_outside():
    net = seeded_net()
    scale = leaf(1)
    parameters = {k: v * scale for k, v in net.named_parameters()}
    return gradient(torch.func.functional_call(net, parameters, (data(2, 4),)).sum(), scale, *net.parameters())


@program("func")
def grad_inside_a_custom_function():
    class UsesGrad(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(torch.func.grad(smooth)(x))
            return smooth(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    x = leaf(3)
    return gradient(UsesGrad.apply(x * 2), x)


@program("func")
def grad_inside_a_graph():
    x = leaf(3)
    y = torch.func.grad(smooth)(x * 2).exp().sum()
    return y, gradient(y, x)


@program("func", raises=ZeroDivisionError)
def func_grad_of_what_raises():
    def f(x: Tensor) -> Tensor:
        y = x.sin()
        return y.sum() * (1 / 0)

    torch.func.grad(f)(data(3))


@program("func", raises=RuntimeError)
def func_grad_of_a_vector():
    torch.func.grad(lambda x: x.sin())(data(3))


@program("func", raises=RuntimeError)
def func_grad_under_the_programs_own_hooks():
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        torch.func.grad(smooth)(data(3))


@program("func")
def goes_on_after_a_transform_raised():
    def f(x: Tensor) -> Tensor:
        raise ValueError(float(x.detach().sum()) * 0)

    with contextlib.suppress(ValueError):
        torch.func.grad(f)(data(3))
    x = leaf(3)
    return gradient(x.sigmoid().prod(), x), torch.func.grad(smooth)(data(3))


@program("func")
def func_linearize_and_jvp():
    y, push = torch.func.linearize(lambda x: x.sin() * 2, data(3))
    return y, push(torch.ones(3)), torch.func.jvp(smooth, (data(3),), (torch.ones(3),))


@program("func")
def func_grad_of_backward_inside():
    net = seeded_net()

    def f(x: Tensor) -> Tensor:
        y = net(x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return g.square().sum()

    return torch.func.grad(f)(data(2, 4))


@program("func")
def functionalized():
    def f(x: Tensor) -> Tensor:
        y = x * 1
        y[0].mul_(2)
        return y.sin().sum()

    return torch.func.functionalize(f)(data(3)), torch.func.grad(torch.func.functionalize(f))(data(3))


@program("func")
def autograd_functional():
    def f(x: Tensor) -> Tensor:
        return x.sin() * x.sum()

    from torch.autograd import functional as AF

    x = data(3)
    return (
        AF.jacobian(f, x),
        AF.jacobian(f, x, vectorize=True),
        AF.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        AF.hessian(smooth, x, vectorize=True),
        AF.hessian(smooth, x),
        AF.vjp(f, x, torch.ones(3)),
        AF.jvp(f, x, torch.ones(3)),
        AF.hvp(smooth, x, torch.ones(3)),
    )


@program("forward mode")
def dual_numbers():
    x, w = leaf(3), leaf(3, seed=1)
    with fwd.dual_level():
        d = fwd.make_dual(x, data(3, seed=2))
        y = (d.sigmoid() * w).exp()
        p, t = fwd.unpack_dual(y)
        return p, t, gradient(t.sum(), x, w)


@program("forward mode")
def forward_over_reverse():
    x = leaf(3)
    with fwd.dual_level():
        d = fwd.make_dual(x, data(3, seed=2))
        (g,) = gradient(smooth(d), d, create_graph=True)
        return fwd.unpack_dual(g)


@program("forward mode")
def reverse_over_forward_after_the_level():
    x = leaf(3)
    with fwd.dual_level():
        t = fwd.unpack_dual(fwd.make_dual(x, torch.ones(3)).sin().exp()).tangent
    return gradient(t.sum(), x)


@program("forward mode")
def hessian_vector_product_both_ways():
    v = data(3, seed=4)
    return torch.func.jvp(torch.func.grad(smooth), (data(3),), (v,)), torch.func.vjp(torch.func.grad(smooth), data(3))[1](v)


# ---------------------------------------------------------------------------------------------------------------------------
# checkpoint


def block(x: Tensor) -> Tensor:
    return F.dropout(x.sin() * x.exp(), 0.5).tanh()


@program("checkpoint")
def checkpoint_not_reentrant():
    torch.manual_seed(3)
    x = leaf(6)
    y = checkpoint(block, x * 2, use_reentrant=False)
    y = checkpoint(block, y, use_reentrant=False)
    return y, gradient(y.sum(), x)


@program("checkpoint")
def checkpoint_reentrant():
    torch.manual_seed(3)
    x = leaf(6)
    y = checkpoint(block, x * 2, use_reentrant=True)
    y = checkpoint(block, y, use_reentrant=True)
    y.sum().backward()
    return y, x.grad


@program("checkpoint")
def checkpoint_nested():
    torch.manual_seed(3)
    x = leaf(6)

    def inner(t):
        return checkpoint(block, t.sigmoid(), use_reentrant=False) * t

    y = checkpoint(inner, x, use_reentrant=False).exp()
    (g,) = gradient(y.sum(), x)
    return y, g


@program("checkpoint")
def checkpoint_double_backward():
    x = leaf(6)
    y = checkpoint(lambda t: t.sin() * t.exp(), x, use_reentrant=False)
    (g,) = gradient(y.sum(), x, create_graph=True)
    return g, gradient(g.sum(), x)


@program("checkpoint")
def checkpoint_counts_its_ops():
    calls: list[str] = []

    def f(t):
        calls.append("first")
        t = t.exp()
        calls.append("second")
        t = t.sin()
        calls.append("third")
        return t + 1

    x = leaf(3)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    with set_checkpoint_early_stop(False):
        y = checkpoint(f, x, use_reentrant=False)
    y.sum().backward()
    return calls, x.grad


@program("checkpoint")
def checkpoint_selective():
    def policy(ctx, op, *args, **kwargs):
        seen.append((str(op), ctx.is_recompute))
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    seen: list[Any] = []
    x, w = leaf(3, 3), leaf(3, 3, seed=1)

    def f(a, b):
        return (a @ b).sigmoid() @ b.exp()

    y = checkpoint(f, x, w, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    return y, gradient(y.sum(), x, w), seen


@program("checkpoint")
def checkpoint_sequential_with_a_model():
    net = seeded_net()
    x = leaf(2, 4)
    checkpoint_sequential(net, 2, x, use_reentrant=False).square().sum().backward()
    return x.grad, [p.grad for p in net.parameters()]


@program("checkpoint", raises=torch.utils.checkpoint.CheckpointError)
def checkpoint_that_recomputes_something_else():
    state = [0]

    def f(t):
        state[0] += 1
        return t.sin() if state[0] == 1 else t.sin()[:2].exp()

    with set_checkpoint_early_stop(False):
        y = checkpoint(f, leaf(3), use_reentrant=False)
    y.sum().backward()


@program("checkpoint", raises=ZeroDivisionError)
def checkpoint_that_raises_when_recomputed():
    state = [0]

    def f(t):
        state[0] += 1
        return (1 / (2 - state[0])) * t.sin()

    checkpoint(f, leaf(3), use_reentrant=False).sum().backward()


@program("checkpoint")
def checkpoint_inside_save_on_cpu_inside_checkpoint():
    x = leaf(4)
    with save_on_cpu():
        y = checkpoint(lambda t: t.sin().exp(), x, use_reentrant=False)
        z = y.sigmoid()

    def inner(t):
        with save_on_cpu():
            return t.tanh() * t

    u = checkpoint(inner, z, use_reentrant=False)
    return u, gradient(u.sum(), x)


# ---------------------------------------------------------------------------------------------------------------------------
# the program's own saved-tensor hooks


@program("own hooks")
def counted_pack_and_unpack():
    log: list[Any] = []

    def pack(t):
        log.append(("pack", t.shape, t.grad_fn.name() if t.grad_fn else None, t.is_leaf))
        return t.numpy(force=True).copy()

    def unpack(a):
        log.append(("unpack", a.shape))
        return torch.from_numpy(a)

    x = leaf(3)
    with saved_tensors_hooks(pack, unpack):
        y = x.sin() * x.exp()
    z = y.sigmoid()
    return gradient(z.sum(), x), log


@program("own hooks")
def nested_pairs_and_what_is_outside_them():
    log: list[str] = []

    def pair(name):
        return saved_tensors_hooks(lambda t: (log.append(f"pack {name}"), t)[1], lambda t: (log.append(f"un {name}"), t)[1])

    x = leaf(3)
    with pair("a"):
        y = x.sin()
        with pair("b"):
            y = y.exp()
        y = y.sin()
    y = y.sin()
    return gradient(y.sum(), x), log


@program("own hooks")
def nobody_but_a_backward_unpacks():
    log: list[str] = []
    x = leaf(3)
    with saved_tensors_hooks(lambda t: (log.append("pack"), t)[1], lambda t: (log.append("unpack"), t)[1]):
        y = (x.sin() * x.exp()).sum()

    def later():
        before = list(log)
        return before, gradient(y, x), log

    return Later(later)


@program("own hooks")
def graph_whose_unpack_raises_stays_alive():
    def unpack(t):
        raise ValueError("nobody asked")

    x = leaf(3)
    with saved_tensors_hooks(lambda t: t, unpack):
        y = x.sin().exp()
    return y


@program("own hooks")
def save_on_cpu_with_modules():
    net = seeded_net()
    with save_on_cpu():
        y = net(data(2, 4)).square().sum()
    y.backward()
    return [p.grad for p in net.parameters()]


@program("own hooks", raises=ValueError)
def pack_raises():
    def pack(t):
        raise ValueError("no")

    with saved_tensors_hooks(pack, lambda t: t):
        leaf(3).sin()


@program("own hooks", raises=ValueError)
def unpack_raises():
    def unpack(t):
        raise ValueError("no")

    with saved_tensors_hooks(lambda t: t, unpack):
        y = leaf(3).sin()
    y.sum().backward()


@program("own hooks", raises=TypeError)
def unpack_gives_no_tensor():
    with saved_tensors_hooks(lambda t: t, lambda t: 3):
        y = leaf(3).sin()
    y.sum().backward()


@program("own hooks", raises=RuntimeError)
def pack_changes_what_it_packs():
    with saved_tensors_hooks(lambda t: t.detach().add_(1), lambda t: t):
        (leaf(3) * 2).sin()


@program("own hooks", raises=RuntimeError)
def disabled_then_used():
    with disable_saved_tensors_hooks("not here"):
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            pass


@program("own hooks")
def disabled_and_not_used():
    x = leaf(3)
    with disable_saved_tensors_hooks("not here"):
        y = x.sin().exp()
    return gradient(y.sum(), x), torch._C._autograd._saved_tensors_hooks_is_enabled()


@program("own hooks", raises=RuntimeError)
def disabled_inside_the_programs_own_pair():
    with saved_tensors_hooks(lambda t: t, lambda t: t), disable_saved_tensors_hooks("not here"):
        pass


@program("own hooks")
def asks_for_the_pair_that_is_active():
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    inside = None
    if top is not None:
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            inside = top(False) is not None
    return top is None or top(False) is None, inside


@program("own hooks")
def registered_on_one_saved_tensor():
    log: list[str] = []
    x = leaf(3)
    y = x.sin()
    y.grad_fn._raw_saved_self.register_hooks(lambda t: (log.append("pack"), t)[1], lambda t: (log.append("unpack"), t)[1])
    return gradient(y.sum(), x), log


@program("own hooks")
def register_hooks_on_a_saved_output():
    x = leaf(3)
    y = x.exp()
    y.grad_fn._raw_saved_result.register_hooks(lambda t: t * 1, lambda t: t * 2)
    return gradient(y.sum(), x)


@program("own hooks")
def raw_saved_tensors():
    x = leaf(3)
    y = x.sin()
    raw = y.grad_fn._raw_saved_self
    data_of = getattr(raw, "data", None)
    return type(raw).__name__, data_of is None or data_of is x


# ---------------------------------------------------------------------------------------------------------------------------
# gradient hooks


@program("hooks")
def tensor_hooks_in_order():
    log: list[Any] = []
    x = leaf(3)
    h = x * 2
    h.register_hook(lambda g: (log.append(("a", g.clone())), g * 2)[1])
    h.register_hook(lambda g: log.append(("b", g.clone())))
    handle = h.register_hook(lambda g: g * 100)
    handle.remove()
    x.register_hook(lambda g: g.neg())
    x.register_post_accumulate_grad_hook(lambda p: log.append(("post", p.grad.clone())))
    h.sin().sum().backward()
    return log, x.grad


@program("hooks")
def node_hooks_in_order():
    log: list[Any] = []
    x = leaf(3)
    a = x.exp()
    b = a.sin()
    b.grad_fn.register_prehook(lambda g: (log.append("pre b"), (g[0] * 2,))[1])
    b.grad_fn.register_hook(lambda i, o: log.append(("post b", i[0].clone(), o[0].clone())))
    a.grad_fn.register_hook(lambda i, o: (log.append("post a"), (i[0] * 3,))[1])
    a.register_hook(lambda g: log.append("tensor a"))
    a.grad_fn.register_prehook(lambda g: log.append("pre a"))
    b.sum().backward()
    return log, x.grad


@program("hooks")
def multi_grad_hooks():
    log: list[Any] = []
    x, w = leaf(3), leaf(3, seed=1)
    a, b = x.sin(), w.exp()
    register = torch.autograd.graph.register_multi_grad_hook
    one = register((a, b), lambda gs: log.append(("all", [None if g is None else g.clone() for g in gs])), mode="all")
    two = register((a, b), lambda g: log.append(("any", g.clone())), mode="any")
    (a * b).sum().backward(retain_graph=True)
    a.sum().backward()
    one.remove()
    two.remove()
    return log, x.grad, w.grad


@program("hooks")
def module_hooks():
    log: list[Any] = []
    net = seeded_net()
    net[0].register_full_backward_hook(lambda m, i, o: log.append(("full 0", [None if t is None else t.clone() for t in i])))
    net[2].register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    net[2].register_full_backward_pre_hook(lambda m, o: (o[0] * 3,))
    net[1].register_forward_hook(lambda m, i, o: o * 1.5)
    net[1].register_forward_pre_hook(lambda m, i: log.append("forward"))
    net(data(2, 4)).sum().backward()
    return log, [p.grad for p in net.parameters()]


@program("hooks")
def global_module_hooks():
    log: list[str] = []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda m, i, o: log.append(f"f {type(m).__name__}")),
        nn.modules.module.register_module_full_backward_hook(lambda m, i, o: log.append(f"b {type(m).__name__}")),
    ]
    try:
        seeded_net()(leaf(2, 4)).sum().backward()
    finally:
        for h in handles:
            h.remove()
    return log


@program("hooks", raises=ArithmeticError)
def tensor_hook_raises():
    def hook(g):
        raise ArithmeticError("hook")

    x = leaf(3)
    h = x.exp()
    h.register_hook(hook)
    h.sin().sum().backward()


@program("hooks", raises=ArithmeticError)
def node_post_hook_raises():
    def hook(i, o):
        raise ArithmeticError("hook")

    y = leaf(3).exp()
    y.grad_fn.register_hook(hook)
    y.sum().backward()


@program("hooks", raises=RuntimeError)
def hook_returns_the_wrong_shape():
    h = leaf(3) * 2
    h.register_hook(lambda g: g.new_ones(7))
    h.sum().backward()


@program("hooks")
def raises_then_backward_again():
    x = leaf(3)
    h = x.exp()
    state = [0]

    def hook(g):
        state[0] += 1
        if state[0] == 1:
            raise ArithmeticError

    h.register_hook(hook)
    y = (h * h).sum()
    with contextlib.suppress(ArithmeticError):
        y.backward(retain_graph=True)
    y.backward()
    return x.grad, state


@program("hooks")
def optimizer_inside_backward():
    net = seeded_net()
    optimizers = {p: torch.optim.Adam([p], lr=0.01, foreach=False) for p in net.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    x = data(2, 4)
    for _ in range(3):
        net(x).square().sum().backward()
    return [p.detach() for p in net.parameters()], [p.grad for p in net.parameters()]


@program("hooks")
def backward_inside_a_hook():
    x, w = leaf(3), leaf(3, seed=1)
    h = x.exp()

    def hook(g):
        with torch.enable_grad():
            w.sin().sum().backward()

    h.register_hook(hook)
    h.sum().backward()
    return x.grad, w.grad


@program("hooks")
def queued_callback():
    log: list[str] = []
    x = leaf(3)
    h = x.exp()
    h.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(lambda: log.append("end")))
    x.register_hook(lambda g: log.append("leaf"))
    h.sum().backward()
    return log


@program("hooks")
def hook_drops_the_graph():
    x = leaf(3)
    h = [x.exp()]
    y = [h[0].sin().sum()]
    log: list[str] = []
    told(log, h[0], "h")
    h[0].register_hook(lambda g: (log.append("hook"), h.clear(), None)[2])
    y.pop().backward()
    return log, x.grad


@program("hooks")
def hooks_on_accumulate_nodes():
    log: list[str] = []
    w = leaf(3)
    node = w.view_as(w).grad_fn.next_functions[0][0]
    node.register_hook(lambda i, o: log.append("acc post"))
    node.register_prehook(lambda g: log.append("acc pre"))
    (w * w).sum().backward()
    w.sin().sum().backward()
    return log, node.variable is w, node.name()


# ---------------------------------------------------------------------------------------------------------------------------
# modes


@program("modes", raises=RuntimeError)
def anomaly_nan():
    with torch.autograd.detect_anomaly():
        x = leaf(3)
        y = (x * 0).sqrt() * 0
        y.sum().backward()


@program("modes")
def anomaly_without_a_fault():
    with torch.autograd.detect_anomaly():
        x = leaf(3)
        y = x.sin().exp()
        has = "traceback_" in y.grad_fn.metadata
        y.sum().backward()
    return x.grad, has


@program("modes", raises=LookupError)
def anomaly_with_a_function_that_raises():
    with torch.autograd.detect_anomaly(check_nan=False):
        Raises.apply(leaf(3).exp(), "backward").sum().backward()


@program("modes", raises=RuntimeError)
def anomaly_with_a_tensor_changed_in_place():
    with torch.autograd.detect_anomaly():
        y = leaf(3).sigmoid()
        z = y * y
        y.add_(1)
        z.sum().backward()


@program("modes", raises=RuntimeError)
def anomaly_in_a_double_backward():
    with torch.autograd.detect_anomaly():
        x = torch.zeros(3, requires_grad=True)
        (g,) = gradient(x.abs().pow(1.5).sum(), x, create_graph=True)
        (g * float("inf")).sum().backward()


@program("modes")
def anomaly_parents():
    with torch.autograd.set_detect_anomaly(True):
        x = leaf(3)
        (g,) = gradient(x.sin().sum(), x, create_graph=True)
        found = g.grad_fn.metadata.get("parent_")
        return None if found is None else found.name()


@program("modes")
def inference_and_no_grad_mixed():
    net = seeded_net()
    with torch.inference_mode():
        frozen = net(data(2, 4))
    with torch.no_grad():
        target = net(data(2, 4))
        with torch.enable_grad():
            y = net(data(2, 4))
    y = F.mse_loss(y, target + frozen.clone())
    y.backward()
    return frozen.is_inference(), target.requires_grad, [p.grad for p in net.parameters()]


@program("modes", raises=RuntimeError)
def inference_tensor_saved():
    with torch.inference_mode():
        t = data(3) * 2
    return leaf(3) * t


@program("modes", raises=RuntimeError)
def inference_tensor_saved_by_a_function():
    with torch.inference_mode():
        t = data(3) * 2
    return SavesAll.apply(leaf(3), t)


@program("modes", raises=RuntimeError)
def inference_tensor_changed_outside():
    with torch.inference_mode():
        t = data(3) * 2
    t.add_(1)
    t.requires_grad_()
    return t._version


@program("modes")
def grad_mode_as_decorator_and_generator():
    @torch.no_grad()
    def g() -> Iterator[bool]:
        yield torch.is_grad_enabled()
        yield torch.is_grad_enabled()

    it = g()
    first = next(it)
    return first, torch.is_grad_enabled(), next(it), (leaf(2) * 2).requires_grad


@program("modes")
def autocast_and_its_weight_cache():
    net = seeded_net()
    x = leaf(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = net(x)
        b = net(x * 2)
        y = (a * b).float().sum()
    y.backward()
    return a, x.grad, [p.grad for p in net.parameters()]


@program("modes")
def autocast_with_a_custom_function():
    class Mixed(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad @ w.t(), x.t() @ grad

    x, w = leaf(2, 3), leaf(3, 2, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Mixed.apply(x @ x.t() @ x, w)
    return y, gradient(y.sum(), x, w)


@program("modes")
def autocast_cache_loses_the_graph_of_a_no_grad_pass():
    net = seeded_net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            net(data(2, 4))
        y = net(data(2, 4))
    return y.requires_grad, y.grad_fn is not None and names_of(y.grad_fn)


@program("modes")
def grad_scaler():
    net = seeded_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    scales = []
    for k in range(3):
        optimizer.zero_grad()
        scaler.scale(net(data(2, 4)).sum() * (float("inf") if k == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p.detach() for p in net.parameters()]


class RecordsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class RecordsOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@program("modes")
def function_mode_around_a_step():
    net, x = seeded_net(), leaf(2, 4)
    with RecordsFunctions() as mode:
        y = net(x).sigmoid()
        z = SavesAll.apply(y, y.exp()).sum()
        z.backward()
    return mode.names, x.grad


@program("modes")
def function_mode_with_a_function_that_reads_saved_tensors():
    x = leaf(3)
    y = SavesAll.apply(x, x * 2)
    with RecordsFunctions() as mode:
        gradient(y.sum(), x)
    return mode.names


@program("modes")
def device_and_default_dtype_contexts():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("cpu"):
            x = torch.ones(3, requires_grad=True)
            return x, gradient(x.sigmoid().sum(), x)
    finally:
        torch.set_default_dtype(torch.float32)


@program("modes")
def device_context_on_meta():
    with torch.device("meta"):
        net = nn.Linear(3, 3)
        y = net(torch.ones(2, 3)).sigmoid()
        y.sum().backward()
    return net.weight.grad.device.type, tuple(net.weight.grad.shape)


@program("modes")
def dispatch_mode_around_forward():
    net, x = seeded_net(), leaf(2, 4)
    with RecordsOps() as mode:
        y = net(x).sigmoid()
        z = (y * y.exp()).sum()
    z.backward()
    return mode.names, x.grad


@program("modes")
def dispatch_mode_around_forward_of_a_function():
    x, w = leaf(3), leaf(3, seed=1)
    with RecordsOps() as mode:
        y = SavesAll.apply(x * 1, w)
    return mode.names, gradient(y.sum(), x, w)


@program("modes")
def dispatch_mode_around_backward_saved_leaves():
    x = leaf(3)
    y = x.sin().sum()
    with RecordsOps() as mode:
        y.backward()
    return mode.names, x.grad


@program("modes")
def dispatch_mode_around_backward_saved_intermediates():
    x = leaf(3)
    y = (x * 2).sin().sum()
    with RecordsOps() as mode:
        y.backward()
    return mode.names, x.grad


@program("modes")
def dispatch_mode_around_backward_saved_outputs():
    x = leaf(3)
    y = x.sigmoid().exp().sum()
    with RecordsOps() as mode:
        y.backward()
    return mode.names, x.grad


@program("modes")
def dispatch_mode_around_backward_saved_data():
    x = leaf(3)
    y = (x * data(3, seed=1)).sum()
    with RecordsOps() as mode:
        y.backward()
    return mode.names, x.grad


@program("modes")
def dispatch_mode_around_double_backward():
    x = leaf(3)
    with RecordsOps() as mode:
        (g,) = gradient(x.sigmoid().exp().sum(), x, create_graph=True)
        g.sum().backward()
    return mode.names, x.grad


@program("modes")
def dispatch_mode_that_keeps_what_it_sees():
    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            kept.append(out)
            return out

    kept: list[Any] = []
    log: list[str] = []
    x = leaf(3)
    with Keeps():
        y = x.exp().sigmoid()
        z = (x * 2).tanh()
    told(log, y.untyped_storage(), "y's storage")
    told(log, z.untyped_storage(), "z's storage")
    g = gradient(y.sum(), x)
    kept.clear()
    log.append("del y")
    del y
    log.append("del z")
    del z  # never run
    log.append("end")
    return log, g


@program("modes")
def dispatch_mode_that_keeps_what_it_sees_and_the_collector():
    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.last = func(*args, **(kwargs or {}))
            return self.last

    log: list[str] = []
    x = leaf(3)
    with Keeps() as mode:
        y = x.exp()
        told(log, y.untyped_storage(), "y's storage")
        y.grad_fn.metadata["sentinel"] = sentinel = Sentinel()
        told(log, sentinel, "node")
        del sentinel
    del mode
    log.append("del y")
    del y
    gc.collect()
    log.append("end")
    return log


@program("modes")
def python_kernel_that_keeps_its_output():
    library = torch.library.Library("graphkeep_torture", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor")
    kept: list[Tensor] = []
    log: list[str] = []

    def kernel(x):
        kept.append(x * 2)
        return kept[-1]

    library.impl("noise", kernel, "CompositeImplicitAutograd")
    x = leaf(3)
    y = torch.ops.graphkeep_torture.noise(x).exp()
    told(log, y.untyped_storage(), "y's storage")
    g = gradient(y.sum(), x)
    log.append("clear")
    kept.clear()
    del y
    library._destroy()
    return log, g


@program("modes")
def debugger_that_reads_locals():
    log: list[str] = []

    def trace(frame, event, arg):
        len(frame.f_locals)
        return trace

    x = leaf(3)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        y = x.exp()
    finally:
        sys.settrace(before)
    told(log, y.untyped_storage(), "y's storage")
    log.append("del y")
    del y
    log.append("end")
    return log


@program("modes")
def flop_counter():
    from torch.utils.flop_counter import FlopCounterMode

    net, x = seeded_net(), leaf(2, 4)
    with FlopCounterMode(display=False) as mode:
        net(x).sum().backward()
    return mode.get_total_flops(), x.grad


@program("modes")
def deterministic_algorithms():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        x = leaf(5)
        y = x.index_select(0, torch.tensor([0, 0, 1])).sin()
        return gradient(y.sum(), x)
    finally:
        torch.use_deterministic_algorithms(before)


@program("modes")
def multithreading_off_and_view_replay():
    x = leaf(4)
    with torch.autograd.set_multithreading_enabled(False), torch.autograd._force_original_view_tracking(True):
        h = x * 1
        h[1:].sigmoid_()
        return gradient(h.exp().sum(), x)


# ---------------------------------------------------------------------------------------------------------------------------
# dtypes and layouts


@program("kinds")
def sparse_embedding():
    e = nn.Embedding.from_pretrained(data(5, 3), freeze=False, sparse=True)
    e(torch.tensor([1, 1, 4])).sin().sum().backward()
    first = e.weight.grad.coalesce()
    out = first.indices().clone(), first.values().clone()
    (e.weight * 2).sum().backward()
    return out, e.weight.grad.layout == torch.strided, e.weight.grad


@program("kinds")
def sparse_matrices():
    i = torch.tensor([[0, 1, 2], [2, 0, 1]])
    s = torch.sparse_coo_tensor(i, data(3), (3, 3), check_invariants=False).coalesce().requires_grad_()
    d = leaf(3, 2, seed=1)
    y = torch.sparse.mm(s, d).sin()
    y.sum().backward()
    return y, d.grad, s.grad.to_dense()


@program("kinds")
def nested_jagged():
    parts = [data(2, 3), data(4, 3, seed=1)]
    n = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    w = leaf(3, 3, seed=2)
    y = (n * w[0]).sin() * n
    y.values().sum().backward()
    return list(n.grad.unbind()), w.grad


@program("kinds")
def nested_strided():
    n = torch.nested.nested_tensor([data(2, 3), data(4, 3, seed=1)], requires_grad=True)
    y = torch.nested.to_padded_tensor(torch.relu(n * n), 0.0)
    y.sum().backward()
    return y, list(n.grad.unbind())


@program("kinds")
def complex_chain():
    z = leaf(3, dtype=torch.complex128)
    w = leaf(3, seed=1, dtype=torch.float64)
    y = (z * w).exp().conj() * z.abs() + torch.polar(w, w)
    return y, gradient(y.real.sum() + y.imag.square().sum(), z, w)


@program("kinds")
def integer_outputs():
    x = leaf(3, 4)
    v, i = x.max(1)
    s, j = x.sort(descending=True)
    t, k = x.topk(2)
    m, n = x.flatten().median(0)
    y = v.sum() + (s * torch.arange(4)).sum() + t.prod() + m
    return i, j, k, n, i.requires_grad, x.argmax(), gradient(y, x)


@program("kinds")
def many_ops():
    x = leaf(4, 4, dtype=torch.float64)
    p = x @ x.t() + 5 * torch.eye(4, dtype=torch.float64)
    w, v = torch.linalg.eigh(p)
    y = torch.linalg.cholesky(p).sum() + w.sum() + v.square().sum() + torch.logdet(p) + torch.linalg.solve(p, x).sum()
    y = y + torch.einsum("ij,jk,kl->il", x, p, x).sum() + torch.fft.fft(x).abs().sum() + x.cumsum(0).cumprod(1).sum()
    y = y + F.interpolate(x[None, None], scale_factor=2, mode="bilinear").sum() + x.logsumexp(0).sum() + x.std()
    return y, gradient(y, x)


@program("kinds")
def losses():
    x = leaf(4, 3)
    t = torch.tensor([0, 2, 1, 1])
    y = F.cross_entropy(x, t, label_smoothing=0.1) + F.nll_loss(x.log_softmax(1), t) + F.huber_loss(x, data(4, 3, seed=1))
    y = y + F.binary_cross_entropy_with_logits(x, data(4, 3, seed=2).sigmoid()) + F.kl_div(x.log_softmax(1), x.softmax(1))
    logp = leaf(5, 1, 3, seed=3)
    y = y + F.ctc_loss(logp.log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))
    return y, gradient(y, x, logp)


@program("kinds")
def zero_sized_and_scalar():
    x, s = leaf(0, 3), leaf()
    y = (x * s).sum() + s.exp() * 2 + torch.cat([x, leaf(1, 3) * s]).sin().sum()
    return y, gradient(y, x, s)


@program("kinds")
def undefined_and_none_gradients():
    x, w = leaf(3), leaf(3, seed=1)
    a, b = torch.unbind(torch.stack([x, w]))
    y = a.sin().sum()
    return b, gradient(y, x, w)


@program("kinds")
def foreach_ops_with_autograd():
    xs = [leaf(3), leaf(2, seed=1)]
    ys = torch._foreach_mul(torch._foreach_exp(xs), [2.0, 3.0])
    torch._foreach_sigmoid_(ys)
    return ys, gradient(sum(y.sum() for y in ys), *xs)


# ---------------------------------------------------------------------------------------------------------------------------
# modules


@program("modules")
def batch_norm_train_and_eval():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(0.3))
    x = leaf(4, 2, 5)
    net(x).sum().backward()
    net.eval()
    net(x).square().sum().backward()
    return x.grad, list(net.state_dict().values()), [p.grad for p in net.parameters()]


@program("modules")
def recurrent():
    torch.manual_seed(1)
    out = []
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        net = kind(3, 4, num_layers=2, bidirectional=True, dropout=0.2)
        x = leaf(5, 2, 3)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
        y = nn.utils.rnn.pad_packed_sequence(net(packed)[0])[0]
        y.square().sum().backward()
        out.append((y.detach(), x.grad, [p.grad for p in net.parameters()]))
    return out


@program("modules")
def attention_module():
    torch.manual_seed(1)
    net = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    x = leaf(2, 3, 8)
    y, weights = net(x, x, x)
    (y.sum() + weights.square().sum()).backward()
    return y.detach(), x.grad, [p.grad for p in net.parameters()]


@program("modules")
def transformer_layer():
    torch.manual_seed(1)
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return stepped(net, data(2, 3, 8))


@program("modules")
def scaled_dot_product():
    q, k, v = (leaf(1, 2, 4, 8, seed=s) for s in range(3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=data(4, 4, seed=4))
    return y, z, gradient((y * z).sum(), q, k, v)


@program("modules")
def parametrizations():
    torch.manual_seed(1)
    a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    b = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
    c = nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))
    net = nn.Sequential(a, b, c)
    out = stepped(net, data(5, 4), steps=3)
    with nn.utils.parametrize.cached():
        y = net(data(5, 4)).sum()
        y.backward()
    return out, [p.grad for p in net.parameters()]


@program("modules")
def spectral_norm_old():
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.utils.spectral_norm(nn.Linear(4, 3))
        return stepped(net, data(5, 4))


@program("modules")
def embedding_with_max_norm():
    torch.manual_seed(1)
    e = nn.Embedding(5, 3, max_norm=0.5, padding_idx=0)
    i = torch.tensor([0, 1, 1, 3])
    y = e(i).sin()
    y.sum().backward()
    return y, e.weight, e.weight.grad, e.weight._version


@program("modules")
def tied_weights():
    torch.manual_seed(1)
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    i = torch.tensor([1, 2, 5])
    F.cross_entropy(head(embedding(i).tanh()), i).backward()
    return embedding.weight.grad, head.weight is embedding.weight


@program("modules")
def deepcopy_and_pickle_on_the_way():
    net = seeded_net()
    net(data(2, 4)).sum().backward()
    twin = copy.deepcopy(net)
    again = pickle.loads(pickle.dumps(net))
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer)
    twin(data(2, 4)).sum().backward()
    again(data(2, 4)).sum().backward()
    return [p.grad for p in twin.parameters()], [p.grad for p in again.parameters()], state


@program("modules", raises=RuntimeError)
def deepcopy_of_a_tensor_with_a_graph():
    copy.deepcopy(leaf(3) * 2)


@program("modules")
def adam_and_accumulated_gradients():
    net = seeded_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for k in range(4):
        (F.cross_entropy(net(data(6, 4, seed=k)), torch.arange(6) % 3) / 2).backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=k == 1)
    return [p.detach() for p in net.parameters()], optimizer.state_dict()["state"]


@program("modules")
def lbfgs_with_a_closure():
    w = nn.Parameter(data(3))
    optimizer = torch.optim.LBFGS([w], max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = (w.exp() - 1).square().sum()
        loss.backward()
        return loss

    return optimizer.step(closure), w.detach()


@program("modules")
def random_state_goes_on():
    torch.manual_seed(5)
    x = leaf(8)
    y = F.dropout(x, 0.5) * torch.rand(8)
    F.gumbel_softmax(y, hard=True).sum().backward()
    return x.grad, torch.rand(3)


# ---------------------------------------------------------------------------------------------------------------------------
# subclasses


FUNCTIONS: list[str] = []


class Recorded(Tensor):
    """Writes down every function that it goes through."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        FUNCTIONS.append(getattr(func, "__qualname__", None) or getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def recorded_names(body: Callable[[], object]) -> tuple[list[str], object]:
    FUNCTIONS.clear()
    out = body()
    return list(FUNCTIONS), out


@program("subclasses")
def functions_that_a_subclass_sees():
    def body():
        x = data(3).as_subclass(Recorded).requires_grad_()
        y = (x.sigmoid() * x).exp().sum()
        y.backward()
        return type(x.grad).__name__, x.grad.as_subclass(Tensor)

    return recorded_names(body)


@program("subclasses")
def functions_that_a_subclass_sees_in_double_backward():
    def body():
        x = data(3).as_subclass(Recorded).requires_grad_()
        (g,) = gradient((x.sin() * x.exp()).sum(), x, create_graph=True)
        (h,) = gradient(g.sum(), x)
        return type(g).__name__, type(h).__name__, h.as_subclass(Tensor)

    return recorded_names(body)


@program("subclasses")
def subclass_saved_by_a_function():
    def body():
        seen: list[str] = []

        class Types(Function):
            @staticmethod
            def forward(ctx, x):
                y = x * 2
                ctx.save_for_backward(x, y)
                return y

            @staticmethod
            def backward(ctx, grad):
                x, y = ctx.saved_tensors
                seen.extend([type(x).__name__, type(y).__name__, type(grad).__name__])
                return grad * x.cos() + y

        x = data(3).as_subclass(Recorded).requires_grad_()
        (g,) = gradient(Types.apply(x * 1).sum(), x)
        return seen, type(g).__name__, g.as_subclass(Tensor)

    return recorded_names(body)


@program("subclasses")
def subclass_read_from_the_node():
    x = data(3).as_subclass(Recorded).requires_grad_()
    y = x.sin()
    z = y.exp()
    below = [t.grad_fn.next_functions[0][0] for t in (y, z)]  # the nodes of `y` and `z` themselves make them a subclass again
    return type(below[0]._saved_self).__name__, type(below[1]._saved_result).__name__


@program("subclasses")
def parameter_subclass():
    class Mine(nn.Parameter):
        pass

    net = nn.Linear(3, 2)
    net.weight, net.bias = Mine(data(2, 3)), Mine(data(2))
    return stepped(net, data(4, 3, seed=1)), type(net.weight).__name__


class Scaled(Tensor):
    """A wrapper: a tensor inside a tensor, which writes down the ops that reach it."""

    inner: Tensor
    ops: list[str] = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Scaled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.ops.append(str(func))
        take = lambda t: t.inner if isinstance(t, Scaled) else t  # noqa: E731
        wrap = lambda t: Scaled(t) if isinstance(t, Tensor) else t  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(take, (args, kwargs or {}))
        return torch.utils._pytree.tree_map(wrap, func(*args, **kwargs))


@program("subclasses")
def wrapper_values():
    x = Scaled(data(3)).requires_grad_()
    (x.sigmoid() * x).exp().sum().backward()
    return x.grad.inner


@program("subclasses")
def wrapper_ops_in_forward():
    Scaled.ops.clear()
    x = Scaled(data(3)).requires_grad_()
    y = (x.sigmoid() * x).exp().sum()
    return list(Scaled.ops), y.detach().inner


@program("subclasses")
def wrapper_ops_in_backward():
    x = Scaled(data(3)).requires_grad_()
    y = (x.sin() * 2).sum()
    Scaled.ops.clear()
    y.backward()
    return list(Scaled.ops), x.grad.inner


@program("subclasses")
def wrapper_ops_in_backward_of_saved_outputs():
    x = Scaled(data(3)).requires_grad_()
    y = x.sigmoid().sum()
    Scaled.ops.clear()
    y.backward()
    return list(Scaled.ops), x.grad.inner


@program("subclasses")
def wrapper_with_an_attribute_saved():
    seen: list[Any] = []
    w = Scaled(data(3))
    looks(seen, {"x": w}, lambda t: t.inner is w.inner).apply(leaf(3)).sum().backward()
    return seen


@program("subclasses")
def two_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(data(3), data(3, seed=1)).requires_grad_()
    w = nn.Parameter(TwoTensor(data(3, seed=2), data(3, seed=3)))
    y = (x.sigmoid() * w).exp().sum()
    y.backward()
    return x.grad.a, x.grad.b, w.grad.a, w.grad.b, type(w.grad).__name__


@program("subclasses")
def two_tensors_as_model_weights():
    from torch.testing._internal.two_tensor import TwoTensor

    net = nn.Linear(4, 2, bias=False)
    net.weight = nn.Parameter(TwoTensor(data(2, 4), data(2, 4, seed=1)))
    F.linear(data(3, 4, seed=2), net.weight).tanh().sum().backward()
    return net.weight.grad.a, net.weight.grad.b


@program("subclasses")
def masked_tensor():
    from torch.masked import masked_tensor as masked

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = masked(data(4), torch.tensor([True, False, True, True]), requires_grad=True)
        x.exp().sum().backward()
        return x.grad.get_data(), x.grad.get_mask()


# ---------------------------------------------------------------------------------------------------------------------------
# torch.compile


def compiled(f: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(f, backend=backend)


@program("compile")
def compile_with_eager_backend():
    x, w = leaf(3), leaf(3, seed=1)
    f = compiled(lambda a, b: (a.sin() * b).exp(), "eager")
    y = f(x, w)
    return y, gradient(y.sum(), x, w)


@program("compile")
def compile_with_aot_eager():
    x, w = leaf(3), leaf(3, seed=1)
    f = compiled(lambda a, b: (a.sin() * b).exp(), "aot_eager")
    y = f(x * 1, w).sigmoid()
    return y, gradient(y.sum(), x, w)


@program("compile")
def compile_counts_its_graphs():
    count = [0]

    def backend(gm, inputs):
        count[0] += 1
        return gm.forward

    torch._dynamo.reset()
    f = torch.compile(lambda a: a.sin().exp() * 2, backend=backend, fullgraph=True)
    x = leaf(3)
    for _ in range(3):
        y = f(x)
    return y, count, gradient(y.sum(), x)


@program("compile")
def compile_a_module_and_train():
    net = seeded_net()
    torch._dynamo.reset()
    fast = torch.compile(net, backend="aot_eager")
    fast(data(2, 4)).square().sum().backward()
    return [p.grad for p in net.parameters()]


@program("compile")
def compile_with_hooks_of_its_own():
    x = leaf(3)
    log: list[str] = []

    def f(a):
        return a.sin().exp()

    g = compiled(f, "eager")
    with saved_tensors_hooks(lambda t: (log.append("p"), t)[1], lambda t: (log.append("u"), t)[1]):
        y = g(x)
    return gradient(y.sum(), x), log


@program("compile")
def made_into_an_fx_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x):
        y = x.sigmoid() * x.exp()
        return torch.autograd.grad(y.sum(), x)[0]

    g = make_fx(f)(leaf(3))
    return [str(n.target) for n in g.graph.nodes], g(leaf(3))


@program("compile")
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = torch.jit.trace(lambda a: a.sin() * a.exp(), (data(3),))
        x = leaf(3)
        return gradient(f(x).sum(), x)


# ---------------------------------------------------------------------------------------------------------------------------
# threads, generators, exceptions


def in_a_thread(f: Callable[[], Any]) -> Any:
    out: queue.Queue[tuple[bool, Any]] = queue.Queue()

    def body() -> None:
        try:
            out.put((True, f()))
        except BaseException as error:
            out.put((False, error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    good, value = out.get()
    if not good:
        raise value
    return value


@program("threads")
def forward_here_backward_there():
    x = leaf(3)
    y = (x.sigmoid() * x).sum()
    in_a_thread(y.backward)
    return x.grad


@program("threads")
def forward_there_backward_here():
    x = leaf(3)
    y = in_a_thread(lambda: (x.sigmoid() * x).sum())
    y.backward()
    return x.grad


@program("threads")
def step_in_another_thread():
    net = seeded_net()
    in_a_thread(lambda: net(data(2, 4)).sum().backward())
    return [p.grad for p in net.parameters()]


@program("threads", raises=RuntimeError)
def changed_in_place_in_another_thread():
    def body():
        y = leaf(3).sigmoid()
        z = y.sum()
        y.add_(1)
        z.backward()

    in_a_thread(body)


@program("threads")
def pool_of_threads():
    def work(seed: int):
        x = leaf(4, seed=seed)
        (g,) = gradient(smooth(x), x, create_graph=True)
        return gradient(g.sum(), x)[0]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(12)))


@program("threads")
def one_graph_from_many_threads():
    x = torch.arange(4.0).requires_grad_()  # whole numbers: the order in which gradients are summed is up to the threads
    h = x * x
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(lambda k: (h * h * k).sum(), range(6)))
    return gradient(sum(parts), x)


@program("threads")
def func_grad_in_another_thread():
    return in_a_thread(lambda: torch.func.grad(smooth)(data(3)))


@program("threads")
def thread_that_outlives_the_context():
    go = threading.Event()
    out: list[Any] = []
    x = leaf(3)
    y = x.sigmoid()

    def body():
        go.wait()
        z = y.exp()
        out.append(gradient(z.sum(), x))

    thread = threading.Thread(target=body)
    thread.start()

    def later():
        go.set()
        thread.join()
        return out[0]

    return Later(later)


@program("threads")
def thread_with_hooks_of_its_own():
    def body():
        log: list[str] = []
        x = leaf(3)
        with saved_tensors_hooks(lambda t: (log.append("p"), t)[1], lambda t: (log.append("u"), t)[1]):
            y = x.sin()
        return gradient(y.exp().sum(), x), log

    return in_a_thread(body)


@program("threads")
def thread_in_no_grad_does_not_leak_its_mode():
    def body():
        torch.set_grad_enabled(False)
        return (leaf(3) * 2).requires_grad

    return in_a_thread(body), (leaf(3) * 2).requires_grad


@program("generators")
def suspended_with_a_graph():
    def steps(x: Tensor) -> Iterator[Tensor]:
        while True:
            x = x.sin() * 1.1
            yield x

    x = leaf(3)
    it = steps(x)
    for _ in range(3):
        y = next(it)
    (g,) = gradient(y.sum(), x, retain_graph=True)
    return g, gradient(next(it).sum(), x)


@program("generators")
def suspended_inside_hooks_and_modes():
    log: list[str] = []

    def body(x: Tensor) -> Iterator[Tensor]:
        with saved_tensors_hooks(lambda t: (log.append("p"), t)[1], lambda t: (log.append("u"), t)[1]):
            yield x.sin()
            yield x.exp()

    x = leaf(3)
    it = body(x)
    a = next(it)
    b = x.sigmoid()
    c = next(it)
    it.close()
    return gradient((a * b * c).sum(), x), log


@program("generators")
def dropped_while_suspended():
    log: list[str] = []

    def body(x: Tensor) -> Iterator[None]:
        h = x.exp()
        y = h.sin()
        told(log, h.untyped_storage(), "h's storage")
        yield
        y.sum().backward()

    it = body(leaf(3))
    next(it)
    log.append("drop")
    del it
    log.append("end")
    return log


@program("exceptions", raises=ValueError)
def in_the_middle_of_forward():
    net = seeded_net()
    net[1].register_forward_hook(lambda m, i, o: (_ for _ in ()).throw(ValueError("middle")))
    net(data(2, 4))


@program("exceptions")
def in_forward_and_caught():
    net = seeded_net()
    handle = net[1].register_forward_hook(lambda m, i, o: (_ for _ in ()).throw(ValueError("middle")))
    with contextlib.suppress(ValueError):
        net(data(2, 4))
    handle.remove()
    net(data(2, 4)).sum().backward()
    return [p.grad for p in net.parameters()]


@program("exceptions")
def system_exit_and_keyboard_interrupt_in_backward():
    out = []
    for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration):
        x = leaf(3)
        h = x.exp()

        def hook(g, kind=kind):
            raise kind(3)

        h.register_hook(hook)
        try:
            h.sum().backward()
        except BaseException as error:
            out.append((type(error).__name__, str(error)))
    return out


@program("exceptions")
def chained_from_a_failed_backward():
    y = leaf(3).sigmoid().sum()
    y.backward()
    try:
        try:
            y.backward()
        except RuntimeError as error:
            raise KeyError("mine") from error
    except KeyError as error:
        return str(error), type(error.__cause__).__name__, str(error.__cause__), error.__context__ is error.__cause__


@program("exceptions", raises=RuntimeError)
def shapes_do_not_fit():
    return leaf(3) @ leaf(4)


@program("exceptions", raises=NotImplementedError)
def derivative_that_does_not_exist():
    x = leaf(3)
    y = NoBackward.apply(x)
    y.sum().backward()


class NoBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


@program("exceptions", raises=RuntimeError)
def graph_freed_between_two_heads():
    x = leaf(3)
    trunk = x.exp()
    trunk.sin().sum().backward()
    trunk.cos().sum().backward()


# ---------------------------------------------------------------------------------------------------------------------------
# when things die


@program("lifetimes")
def saved_input_tensor():
    log: list[str] = []
    x = leaf(3)
    h = x * 2
    told(log, h, "h")
    y = h.sin()
    log.append("del h")
    del h
    log.append("backward")
    y.sum().backward()
    log.append("del y")
    del y
    log.append("end")
    return log


@program("lifetimes")
def saved_input_storage():
    log: list[str] = []
    x = leaf(3)
    h = x * 2
    told(log, h.untyped_storage(), "h's storage")
    y = h.sin()
    log.append("del h")
    del h
    log.append("backward")
    y.sum().backward()
    log.append("end")
    return log


@program("lifetimes")
def saved_output_tensor():
    log: list[str] = []
    x = leaf(3)
    h = x.exp()
    told(log, h, "h")
    told(log, h.untyped_storage(), "h's storage")
    y = h + 1
    log.append("del h")
    del h
    log.append("backward")
    y.sum().backward()
    log.append("end")
    return log


@program("lifetimes")
def saved_output_never_run():
    log: list[str] = []
    h = leaf(3).sigmoid()
    told(log, h, "h")
    told(log, h.untyped_storage(), "h's storage")
    h.grad_fn.metadata["sentinel"] = sentinel = Sentinel()
    told(log, sentinel, "node")
    del sentinel
    log.append("del h")
    del h
    log.append("end")
    return log


@program("lifetimes")
def saved_input_never_run():
    log: list[str] = []
    x = leaf(3)
    h = x + 1
    told(log, h, "h")
    told(log, x, "x")
    y = (h.sin() * h).sum()
    log.append("del h")
    del h
    log.append("del x")
    del x
    log.append("del y")
    del y
    log.append("end")
    return log


class Sentinel:
    """Put into ``node.metadata``: it dies with the node."""


@program("lifetimes")
def nodes_and_storages_of_a_chain():
    log: list[str] = []
    t = leaf(3)
    told(log, t, "leaf")
    for k in range(4):
        t = (t.sin(), t.exp())[k % 2]
        t.grad_fn.metadata["sentinel"] = sentinel = Sentinel()
        told(log, sentinel, f"node {k}")
        told(log, t.untyped_storage(), f"storage {k}")
        del sentinel
    log.append("backward")
    t.sum().backward()
    log.append("del t")
    del t
    log.append("end")
    return log


@program("lifetimes")
def tensors_of_a_chain():
    log: list[str] = []
    t = leaf(3)
    for k in range(4):
        t = (t.sin(), t.exp())[k % 2]
        told(log, t, f"tensor {k}")
    log.append("backward")
    t.sum().backward()
    log.append("del t")
    del t
    log.append("end")
    return log


@program("lifetimes")
def retained_backward():
    log: list[str] = []
    x = leaf(3)
    h = x.exp()
    told(log, h.untyped_storage(), "h's storage")
    y = (h * h).sum()
    del h
    y.backward(retain_graph=True)
    log.append("retained")
    y.backward()
    log.append("freed")
    return log, x.grad


@program("lifetimes")
def partial_backward():
    log: list[str] = []
    x, w = leaf(3), leaf(3, seed=1)
    a, b = x.exp(), w.sigmoid()
    told(log, a.untyped_storage(), "a's storage")
    told(log, b.untyped_storage(), "b's storage")
    y = (a.sin() + b.cos()).sum()
    del a, b
    log.append("inputs=x")
    y.backward(inputs=[x])
    log.append("del y")
    del y
    log.append("end")
    return log


@program("lifetimes")
def failed_backward():
    log: list[str] = []
    x = leaf(3)
    a = x.exp()
    b = Raises.apply(a, "backward")
    c = b.sin()
    for name, t in (("a", a), ("b", b), ("c", c)):
        told(log, t.untyped_storage(), f"{name}'s storage")
    y = (c * c).sum()
    del a, b, c, t
    try:
        y.backward()
    except LookupError:
        log.append("raised")
    log.append("del y")
    del y
    log.append("end")
    return log


@program("lifetimes")
def what_a_function_saved():
    log: list[str] = []

    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            middle = x.sin()
            y = middle * 2
            told(log, middle, "middle")
            told(log, middle.untyped_storage(), "middle's storage")
            told(log, y.untyped_storage(), "y's storage")
            ctx.save_for_backward(x, middle, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            log.append("in backward")
            return grad * ctx.saved_tensors[1]

    x = leaf(3)
    h = x * 1
    told(log, h, "input")
    y = Saves.apply(h)
    told(log, y, "output")
    log.append("del h")
    del h
    z = y.sum()
    log.append("del y")
    del y
    log.append("backward")
    z.backward()
    log.append("end")
    return log


@program("lifetimes")
def what_a_dropped_function_saved():
    log: list[str] = []

    class Saves(Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            told(log, ctx, "ctx")
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad

    y = Saves.apply(leaf(3) * 1)
    told(log, y, "output")
    told(log, y.untyped_storage(), "output's storage")
    log.append("del y")
    del y
    log.append("end")
    return log


@program("lifetimes")
def gradient_buffers():
    log: list[str] = []
    x = leaf(3)
    h = x * 2

    def hook(g):
        told(log, g, "gradient")

    h.register_hook(hook)
    x.register_hook(lambda g: log.append("at the leaf"))
    h.sin().sum().backward()
    log.append("end")
    return log


@program("lifetimes")
def views_and_their_base():
    log: list[str] = []
    base = leaf(4) * 1
    told(log, base, "base")
    v = base[:2]
    told(log, v, "view")
    y = v.sin()
    log.append("del base")
    del base
    log.append("del v")
    del v
    log.append("del y")
    del y
    log.append("end")
    return log


@program("lifetimes")
def model_that_goes_before_its_loss():
    log: list[str] = []
    net = seeded_net()
    told(log, net, "net")
    told(log, net[0].weight, "weight 0")
    told(log, net[2].weight, "weight 2")
    told(log, net[2].bias, "bias 2")
    loss = net(data(2, 4)).sum()
    log.append("del net")
    del net
    log.append("backward")
    loss.backward()
    log.append("del loss")
    del loss
    log.append("end")
    return log


@program("lifetimes")
def data_that_goes_before_its_loss():
    log: list[str] = []
    w, x = leaf(3), data(3, seed=1)
    x.name_of_mine = "x"
    told(log, x, "x")
    told(log, x.untyped_storage(), "x's storage")
    y = (w * x).sum()
    log.append("del x")
    del x
    log.append("backward")
    y.backward()
    log.append("end")
    return log


@program("lifetimes")
def python_attributes_of_saved_tensors():
    log: list[str] = []
    h = leaf(3) * 2
    h.attribute = Sentinel()
    told(log, h.attribute, "attribute")
    y = h.sin()
    log.append("del h")
    del h
    log.append("del y")
    del y
    log.append("end")
    return log


@program("lifetimes")
def collected_cycle():
    log: list[str] = []
    h = leaf(3).exp()
    h.myself = h
    told(log, h, "h")
    told(log, h.untyped_storage(), "h's storage")
    y = h.sin()
    del h
    log.append("del y")
    del y
    log.append("collect")
    gc.collect()
    log.append("end")
    return log


@program("lifetimes")
def cycle_through_a_hook():
    log: list[str] = []
    h = leaf(3).exp()
    told(log, h, "h")
    y = h.sin()
    handle = h.register_hook(lambda g, y=y: None)
    told(log, y, "y")
    log.append("del")
    del h, y
    gc.collect()
    log.append("remove")  # torch never frees such a cycle
    handle.remove()
    log.append("end")
    return log


@program("lifetimes")
def output_kept_on_ctx():
    log: list[str] = []

    class Keeps(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.y = x.exp()
            return ctx.y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.y

    y = Keeps.apply(leaf(3))
    told(log, y, "y")
    z = y.sum()
    log.append("del y")
    del y
    z.backward()
    log.append("del z")
    del z
    gc.collect()
    log.append("end")
    return log


@program("lifetimes")
def create_graph_keeps():
    log: list[str] = []
    x = leaf(3)
    h = x.exp()
    told(log, h.untyped_storage(), "h's storage")
    y = h.sin().sum()
    del h
    (g,) = gradient(y, x, create_graph=True)
    log.append("del y")
    del y
    log.append("second")
    (s,) = gradient(g.sum(), x)
    log.append("del g")
    del g
    log.append("end")
    return log, s


@program("lifetimes")
def detached_in_place():
    log: list[str] = []
    h = leaf(3).exp()
    h.grad_fn.metadata["sentinel"] = sentinel = Sentinel()
    told(log, sentinel, "node")
    del sentinel
    log.append("detach_")
    h.detach_()
    log.append("end")
    return log


@program("lifetimes")
def overwritten_in_place():
    log: list[str] = []
    x = leaf(3)
    h = x.exp()
    told(log, h, "h")
    y = h.sin()
    told(log, y, "y")
    y.mul_(2)
    z = y.sigmoid_()
    log.append("del h")
    del h
    log.append("del y, z")
    del y, z
    log.append("end")
    return log


@program("lifetimes")
def exception_that_holds_the_frame():
    log: list[str] = []

    def fails():
        h = leaf(3).exp()
        told(log, h, "h")
        y = h.sin()
        raise ValueError(float(y.detach()[0]) * 0)

    try:
        fails()
    except ValueError as error:
        log.append("caught")
        kept = error
    log.append("del kept")
    del kept
    log.append("end")
    return log


@program("lifetimes")
def running_total_of_losses():
    log: list[str] = []
    w = leaf(3)
    total = 0.0
    for k in range(3):
        h = w.exp()
        told(log, h.untyped_storage(), f"storage {k}")
        loss = (h * h).sum()
        del h
        loss.backward()
        total = total + loss
        log.append(f"step {k}")
    del total, loss
    log.append("end")
    return log


@program("lifetimes")
def reference_counts_of_tensors():
    x = leaf(3)
    h = x * 2
    before = sys.getrefcount(h), sys.getrefcount(x)
    y = h.sin() * x
    during = sys.getrefcount(h), sys.getrefcount(x)
    y.sum().backward()
    return before, during, (sys.getrefcount(h), sys.getrefcount(x))


@program("lifetimes")
def use_counts_of_tensors():
    x = leaf(3)
    h = x * 2
    before = h._use_count(), h.untyped_storage()._use_count() if hasattr(h.untyped_storage(), "_use_count") else None
    y = h.sin()
    during = h._use_count()
    y.sum().backward()
    return before, during, h._use_count()


# ---------------------------------------------------------------------------------------------------------------------------
# reading the graph


@program("reading")
def names_and_next_functions():
    net = seeded_net()
    y = net(leaf(2, 4)).softmax(-1).sum()
    return names_of(y.grad_fn), y.grad_fn.next_functions[0][1], type(y.grad_fn).__name__, str(y)[:6]


@program("reading")
def saved_attributes():
    x, w = leaf(2, 3), leaf(3, 2, seed=1)
    mm = x @ w
    e = mm.exp()
    p = e.pow(2.5)
    s = p.softmax(1)
    v = s.max(1)
    return (
        mm.grad_fn._saved_self,
        mm.grad_fn._saved_mat2,
        e.grad_fn._saved_result,
        p.grad_fn._saved_exponent,
        p.grad_fn._saved_self,
        s.grad_fn._saved_dim,
        v.values.grad_fn._saved_indices,
        [n for n in dir(mm.grad_fn) if n.startswith(("_saved", "_raw"))],
    )


@program("reading")
def saved_input_is_the_tensor_itself():
    x = leaf(3)
    h = x * 2
    plain = data(3, seed=1)
    y = h.sin()
    z = x * plain
    u = x.exp()
    return (
        y.grad_fn._saved_self is h,
        z.grad_fn._saved_other is plain,
        x.cos().grad_fn._saved_self is x,
        u.grad_fn._saved_result is u,
        y.grad_fn._saved_self.grad_fn is h.grad_fn,
        u.grad_fn._saved_result.grad_fn is u.grad_fn,
    )


@program("reading")
def saved_lists():
    xs = [leaf(3), leaf(3, seed=1)]
    y = torch.stack(xs)
    z = y[torch.tensor([0, 1, 1]), torch.tensor([0, 2, 1])]
    return z.grad_fn._saved_indices, names_of(z.grad_fn), gradient(z.sin().sum(), *xs)


@program("reading")
def node_called_by_hand():
    x = leaf(3)
    y = x.sin()
    with torch.no_grad():
        return y.grad_fn(torch.ones(3)), y.grad_fn(torch.arange(3.0))


@program("reading")
def sequence_numbers():
    x = leaf(3)
    a = x.sin()
    b = a.exp()
    c = SavesAll.apply(b, a)
    first = a.grad_fn._sequence_nr()
    return b.grad_fn._sequence_nr() - first, c.grad_fn._sequence_nr() - first


@program("reading")
def printed():
    x = leaf(2)
    y = (x * 0 + 1).exp()
    return repr(x * 0), repr(y), str(y.grad_fn)[:14], repr(y.detach())


@program("reading")
def metadata_is_empty():
    x = leaf(3)
    y = x.exp()
    z = SavesAll.apply(y, y)
    return dict(y.grad_fn.metadata), dict(z.grad_fn.metadata), len(z.grad_fn.__dict__) if hasattr(z.grad_fn, "__dict__") else 0


@program("reading")
def very_deep_graph_is_dropped():
    x = leaf(1)
    t = x
    for k in range(120_000):
        t = t + 1 if k % 4 else t.sin()
    del t
    return x


@program("reading")
def deep_graph_is_run():
    x = leaf(1)
    t = x
    for k in range(5_000):
        t = t + 0.5 if k % 2 else t.sin()
    return gradient(t, x)


@program("reading")
def collector_sees_the_same_tensors():
    gc.collect()
    before = {id(o) for o in gc.get_objects() if isinstance(o, Tensor)}
    x = leaf(3)
    h = x * 2
    y = h.sin().exp()
    del h
    found = [o for o in gc.get_objects() if type(o) is Tensor and id(o) not in before]
    return len(found), len([r for r in gc.get_referrers(y) if type(r).__name__ not in ("frame", "list")])


# ---------------------------------------------------------------------------------------------------------------------------
# programs of their own process: `python -c SCRIPT`, inside a context that is called `around` there


SCRIPTS: dict[str, str] = {
    "plain": """
import torch
x = torch.arange(3.0).requires_grad_()
(x.sigmoid() * x).sum().backward()
print(x.grad)
""",
    "raises": """
import torch
x = torch.arange(3.0).requires_grad_()
y = x.sigmoid().sum()
y.backward()
y.backward()
""",
    "exits": """
import sys, torch
x = torch.arange(3.0).requires_grad_()
h = x.exp()
h.register_hook(lambda g: sys.exit(7))
h.sum().backward()
""",
    "fork": """
import os, sys, torch
x = torch.arange(3.0).requires_grad_()
y = (x.sigmoid() * x).sum()
want, = torch.autograd.grad((x.sigmoid() * x).sum(), x)
pid = os.fork()
if pid == 0:
    y.backward()
    again, = torch.autograd.grad((x.sigmoid() * x).sum(), x)
    os._exit(0 if torch.equal(x.grad, want) and torch.equal(again, want) else 3)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
y.backward()
print(x.grad)
""",
    "DataLoader": """
import torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        x = torch.full((3,), float(i)).requires_grad_()
        x.sigmoid().sum().backward()
        return x.grad

torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
torch.nn.init.ones_(net.weight)
for rows in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
    net(rows).sigmoid().sum().backward()
print(net.weight.grad)
""",
}
