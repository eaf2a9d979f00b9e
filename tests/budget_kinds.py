"""Kinds of programs whose saved tensors a budget drops and has again, each of them a trap for whoever runs an op twice.

A body takes no arguments, seeds itself and returns a pytree of all that must be as in eager torch: gradients, buffers, counts.
Tensors are 64 by 64, so that dropping one matters. ``drops`` says whether the program holds something that can be dropped.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torture import Later, data, gradient

N = 64
BYTES = 4 * N * N


@dataclass(frozen=True)
class Kind:
    """A program.

    Attributes:
        raises: the errors that it may end with.
        drops: whether some of what it saves can be dropped.
        may_be_refused: whether what it does may be refused where something is dropped.
        varies: whether what it holds at most depends on how its threads are scheduled.
    """

    name: str
    group: str
    body: Callable[[], object]
    raises: tuple[type[BaseException] | None, ...] = (None,)
    drops: bool = True
    may_be_refused: bool = False
    varies: bool = False

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


KINDS: list[Kind] = []


def kind(group: str, raises: type[BaseException] | None = None, **options: bool) -> Callable[[Any], Any]:
    def add(body: Callable[[], object]) -> Callable[[], object]:
        KINDS.append(Kind(body.__name__.replace("_", " ").strip(), group, body, (raises,), **options))
        return body

    return add


def square(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return data(N, N, seed=seed, dtype=dtype)


def weight(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return square(seed, dtype).mul_(0.1).requires_grad_()


def deep(x: Tensor, times: int = 2) -> Tensor:
    """Some layers; nobody but the graph holds what is between them."""
    for _ in range(times):
        x = (x.sin() * 1.25).tanh().exp()
    return x


def loss_of(x: Tensor) -> Tensor:
    return x.square().mean()


def trained(net: nn.Module, *inputs: Tensor, steps: int = 2) -> list[Tensor]:
    """Train a little; the parameters and buffers."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net(*inputs)).backward()
        optimizer.step()
    return [t.detach() for t in net.state_dict().values()]


def net_of(*layers: nn.Module) -> nn.Sequential:
    """The layers between layers that are worth dropping."""
    torch.manual_seed(1)
    for layer in layers:
        for p in layer.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.1)
    return nn.Sequential(linear(), nn.Tanh(), *layers, linear(), nn.GELU(), linear())


def linear() -> nn.Linear:
    return nn.Linear(N, N)


class Named(nn.Module):
    """A module of one function, and of the modules that it calls."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.modules_called = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.modules_called)


# ---------------------------------------------------------------------------------------------------------------------------
# modules, each between others: buffers, random numbers, in-place


class Counts(nn.Module):
    """Reads a counter in a buffer and bumps it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return deep(x * self.calls / (1 + self.calls))


class CountsInPython(Counts):
    """The counter is a number of Python's."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        self.calls.fill_(self.number)
        return deep(x + self.number)


class MovingAverage(nn.Module):
    """Normalizes by statistics that it has just moved."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(N))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return deep(x - self.mean)


class Replaced(nn.Module):
    """A buffer that is another tensor after each call."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(N, N))

    def forward(self, x: Tensor) -> Tensor:
        y = deep(x * self.last)
        self.last = y.detach() * 0.5
        return y


class Quantizer(nn.Module):
    """Vector quantization: nearest codes, straight through, and a codebook that moves."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", data(8, N, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        with torch.no_grad():
            self.codes.index_add_(0, nearest, x - quantized, alpha=0.1)
        return deep(x + (quantized - x).detach())


class Experts(nn.Module):
    """Top-k routing."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.route = nn.Linear(N, 4)
        self.experts = nn.ModuleList(linear() for _ in range(4))
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        scores = self.route(x)
        if self.noise:
            scores = scores + torch.randn_like(scores)
        weights, chosen = scores.softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows, places = (chosen == n).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]).sigmoid_() * weights[rows, places, None])
        return out


class Residual(nn.Module):
    """In-place additions on a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(), nn.Sequential(linear(), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(F.layer_norm(x, (N,)))
        y += x
        z = self.two(y)
        z = z * 1
        z += y
        z.mul_(0.5)
        return z


class Attention(nn.Module):
    """Heads, a causal mask, dropout."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.qkv, self.p = nn.Linear(N, 3 * N), p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, N, 3, 4, N // 4).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True)
        return out.transpose(1, 2).reshape(N, N)


class Recurrent(nn.Module):
    """A recurrent module of torch's over rows as time."""

    def __init__(self, which: type[nn.RNNBase], dropout: float = 0.0) -> None:
        super().__init__()
        self.rnn: nn.RNNBase = which(N, N, num_layers=2, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[:8, None])[0].squeeze(1).repeat(8, 1)


class Image(nn.Module):
    """Layers on images, of which the stream is 4 of 4 channels, 16 by 16."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(4, 4, 16, 16)).reshape(N, N)


class Cached(nn.Module):
    """A cache of keys, preallocated and written in place, that the forward reads while it grows."""

    def __init__(self) -> None:
        super().__init__()
        self.key = linear()

    def forward(self, x: Tensor) -> Tensor:
        cache, outs = torch.zeros(N, N), []
        for start in range(0, N, 16):
            rows = x[start : start + 16]
            cache[start : start + 16] = self.key(rows)
            outs.append((rows @ cache[: start + 16].clone().t()).softmax(-1) @ cache[: start + 16].clone())
        return torch.cat(outs)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Dropout(0.3),
    "dropout in place": lambda: nn.Sequential(linear(), nn.Dropout(0.3, inplace=True)),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "dropout of channels": lambda: Image(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout2d(0.5)),
    "dropout by hand": lambda: Named(lambda x: x * torch.empty_like(x).bernoulli_(0.7) / 0.7),
    "random leaky relu": lambda: nn.RReLU(),
    "noise": lambda: Named(lambda x: deep(x + torch.randn_like(x))),
    "noise in place": lambda: Named(lambda x: deep((x * 1).add_(torch.empty(N, N).normal_()))),
    "gumbel softmax": lambda: Named(lambda x: F.gumbel_softmax(x, hard=True)),
    "sampled rows": lambda: Named(lambda x: deep(x)[torch.randperm(N)]),
    "sampled actions": lambda: Named(lambda x: deep(x).gather(1, torch.multinomial(x.softmax(-1), N, replacement=True))),
    "a reparameterized distribution": lambda: Named(lambda x: torch.distributions.Normal(x, 1 + x.square()).rsample()),
    "a gamma distribution": lambda: Named(lambda x: torch.distributions.Gamma(1 + x.square(), 1 + x.square()).rsample()),
    "batch norm": lambda: nn.BatchNorm1d(N),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(N, momentum=None),
    "batch norm without statistics": lambda: nn.BatchNorm1d(N, track_running_stats=False),
    "batch norm, evaluated": lambda: nn.BatchNorm1d(N).eval(),
    "batch norm twice": lambda: Named(lambda x, bn, m: bn(m(bn(x))), nn.BatchNorm1d(N), linear()),
    "batch norm of images": lambda: Image(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
    "instance norm with statistics": lambda: Image(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "layer norm, group norm, rms norm": lambda: nn.Sequential(nn.LayerNorm(N), nn.GroupNorm(4, N), nn.RMSNorm(N)),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(linear()),
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(linear()),
    "an orthogonal weight": lambda: torch.nn.utils.parametrizations.orthogonal(linear()),
    "a counter in a buffer": Counts,
    "a counter in python": CountsInPython,
    "a moving average": MovingAverage,
    "a buffer that is replaced": Replaced,
    "a codebook": Quantizer,
    "relu in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "silu, sigmoid and tanh in place": lambda: Named(
        lambda x: F.silu(x * 2, inplace=True) + (x + 1).sigmoid_() + (x * 3).tanh_()
    ),
    "residual in place": Residual,
    "in place on a view": lambda: Named(lambda x: in_place_on_views(deep(x) + 1)),
    "a mask filled in place": lambda: Named(lambda x: (deep(x) * 1).masked_fill_(x > 0, 0.5).clamp_(-1, 1)),
    "indices put": lambda: Named(lambda x: (deep(x) + 1).index_put_((torch.tensor([1, 2]),), x[:2], accumulate=True).sin()),
    "routing": Experts,
    "routing with noise": lambda: Experts(noise=True),
    "a growing cache": Cached,
    "attention": Attention,
    "multi-head attention": lambda: Named(lambda x, m: m(x, x, x)[0], nn.MultiheadAttention(N, 4, dropout=0.2)),
    "a transformer's layer": lambda: nn.TransformerEncoderLayer(N, 4, 2 * N, dropout=0.1),
    "an rnn": lambda: Recurrent(nn.RNN),
    "an lstm with dropout": lambda: Recurrent(nn.LSTM, 0.3),
    "a gru": lambda: Recurrent(nn.GRU),
    "convolutions": lambda: Image(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.ConvTranspose2d(8, 4, 3, padding=1)),
    "channels last": lambda: Image(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()).to(memory_format=torch.channels_last),
    "pooling and its indices": lambda: Image(nn.FractionalMaxPool2d(2, output_size=8), nn.Upsample(scale_factor=2)),
    "sorted and chosen": lambda: Named(lambda x: deep(x).sort(-1)[0] + x.topk(4)[0].sum() + x.median() + x.kthvalue(3)[0]),
    "decompositions": lambda: Named(
        lambda x: torch.linalg.qr(deep(x) + 3 * torch.eye(N))[0] @ torch.linalg.inv(x + torch.eye(N))
    ),
    "a spectrum": lambda: Named(lambda x: torch.fft.irfft(torch.fft.rfft(deep(x)).tanh(), n=N)),
    "complex numbers": lambda: Named(lambda x: (torch.complex(deep(x), x).exp().conj() * 1j).sin().imag),
    "half precision": lambda: Named(lambda x: deep(x.half()).float() + deep(x.bfloat16()).float() + deep(x.double()).float()),
    "views of all kinds": lambda: Named(lambda x: views_of(deep(x))),
    "an expanded scalar": lambda: Named(lambda x: deep(x).mean().expand(N, N) * x),
    "sparse matrices": lambda: Named(lambda x: torch.sparse.mm(torch.eye(N).to_sparse(), deep(x)).tanh()),
    "nothing at all": lambda: Named(lambda x: torch.cat([deep(x), deep(x[:0]), torch.zeros(0, N).exp()]).reshape(N, N)),
    "a number read": lambda: Named(lambda x: deep(x) * deep(x).mean().item()),
    "a branch on a value": lambda: Named(lambda x: deep(x) if float(x.detach().sum()) > 0 else x.cos().exp()),
    "rows that are chosen by value": lambda: Named(lambda x: chosen_rows(deep(x))),
    "checkpoint": lambda: checkpointed(linear(), use_reentrant=False),
    "reentrant checkpoint": lambda: checkpointed(linear(), use_reentrant=True),
    "checkpoint with a batch norm": lambda: checkpointed(nn.BatchNorm1d(N), use_reentrant=False),
    "reentrant checkpoint with a counter": lambda: checkpointed(Counts(), use_reentrant=True),
    "checkpoint that keeps no random state": lambda: checkpointed(linear(), use_reentrant=False, preserve_rng_state=False),
    "checkpoints in a row": lambda: Named(
        lambda x, m: checkpoint_sequential(m, 2, deep(x), use_reentrant=False), nn.Sequential(linear(), nn.Tanh(), linear())
    ),
    "saved on the cpu": lambda: Named(lambda x: inside(save_on_cpu(), deep, deep(x))),
    "hooks of its own": lambda: Named(lambda x: inside(saved_tensors_hooks(lambda t: t + 0, lambda t: t * 1), deep, deep(x))),
    "autocast": lambda: Named(lambda x, m: inside(autocast(), lambda y: deep(m(deep(m(y))).float()), x), linear()),
    "autocast switched off within": lambda: Named(
        lambda x, m: inside(autocast(), lambda y: inside(autocast(False), m, deep(m(y)).float()), x), linear()
    ),
    "an embedding": lambda: Named(lambda x, m: deep(m(x.argmax(-1) % 8)) + deep(x), nn.Embedding(8, N)),
    "a frozen embedding": lambda: Named(lambda x, m: deep(m(x.argmax(-1) % 8) + x), nn.Embedding(8, N).requires_grad_(False)),
    "losses": lambda: Named(
        lambda x: deep(x) * (F.cross_entropy(x, x.argmax(-1)) + F.smooth_l1_loss(x.softmax(-1), x.sigmoid()))
    ),
    "scatter and gather": lambda: Named(
        lambda x: deep(x).scatter_add(1, x.argsort(1), deep(x)).gather(1, x.argsort(1)).cumsum(0)
    ),
    "torch.func": lambda: Named(lambda x: deep(x) + torch.func.grad(lambda y: deep(y).sum())(x.detach())),
    "torch.vmap": lambda: Named(lambda x: torch.vmap(lambda row: deep(row).softmax(-1))(deep(x))),
    "gradients inside": lambda: Named(lambda x: deep(x) + torch.autograd.grad(deep(x).sum(), x, create_graph=True)[0]),
    "gradients inside, of a detached copy": lambda: Named(gradient_of_a_copy),
    "a second head that is dropped": lambda: Named(lambda x: (deep(x), deep(x).cos())[0]),
    "no_grad in the middle": lambda: Named(lambda x: deep(x) * inside(torch.no_grad(), deep, x)),
    "inference mode in the middle": lambda: Named(
        lambda x: deep(x) + inside(torch.inference_mode(), deep, x.detach()).sum().item()
    ),
    "foreach": lambda: Named(lambda x: sum(torch._foreach_exp(torch._foreach_mul([deep(x), x], [x, deep(x)])))),
    "foreach in place": lambda: Named(foreach_in_place),
    "einsum": lambda: Named(lambda x: torch.einsum("ij,jk,kl->il", deep(x), x, x.sin())),
    "a lot of outputs": lambda: Named(lambda x: sum((deep(t) for t in x.unbind(0)[:8]), torch.zeros(N)) + x),
    "rolled, flipped, padded": lambda: Named(lambda x: F.pad(deep(x).roll(1, 0).flip(1), (1, 1), mode="replicate")[:, 1:-1]),
}


def checkpointed(module: nn.Module, **options: Any) -> nn.Module:
    return Named(lambda x, m: checkpoint(lambda y: F.dropout(deep(m(y))), deep(x), **options), module)


def in_place_on_views(x: Tensor) -> Tensor:
    x[0].mul_(2)
    x.diagonal().zero_()
    x.view(-1)[::2].add_(1)
    x.t()[3:5, :].sigmoid_()
    return x.sin()


def views_of(x: Tensor) -> Tensor:
    a, b = x.chunk(2)
    c = torch.cat([b.sin(), a.exp()]).t()
    d = c.as_strided((N, N), (N, 1)).unfold(0, 2, 2).sum(-1).repeat(2, 1)
    return (c * d).movedim(0, 1)[:, torch.arange(N).flip(0)].view(N, N) + x[::1].narrow(1, 0, 1).expand(N, N).exp()


def chosen_rows(x: Tensor) -> Tensor:
    mask = x.detach().mean(1) > x.detach().mean()
    rows = x[mask].sin()
    out = x.cos()
    out[mask] = rows * len(rows)
    return out


def gradient_of_a_copy(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(deep(deep(y)).sum(), y)
    return deep(x - 0.1 * g)


def foreach_in_place(x: Tensor) -> Tensor:
    parts = [deep(x) + 1, x * 2]
    torch._foreach_mul_(parts, 0.5)
    torch._foreach_add_(parts, [x, x])
    return (parts[0] * parts[1]).sin()


def inside(context: Any, function: Callable[..., Any], *args: Any) -> Any:
    with context:
        return function(*args)


def autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def _module(make: Callable[[], nn.Module]) -> object:
    torch.manual_seed(1)
    net = net_of(make())
    after = trained(net, square(3))
    return after, [p.grad for p in net.parameters()]


KINDS.extend(Kind(name, "module", functools.partial(_module, make)) for name, make in MODULES.items())

# ---------------------------------------------------------------------------------------------------------------------------
# something changes between forward and backward: as in eager


def _changed(change: Callable[[Tensor, Tensor, Tensor], object], use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> object:
    w, x, b = weight(), square(1), torch.zeros(N)
    h = deep(use(w, x, b))
    with torch.no_grad():
        change(w, x, b)
    loss_of(deep(h)).backward()
    return w.grad, x, b, w.detach()


def _numpy(x: Tensor) -> None:
    x.numpy()[:] = 7.0


def _optimized(w: Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], foreach=True).step()
    w.grad = None


USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "added": lambda w, x, b: w + x + b,  # neither is saved
    "multiplied": lambda w, x, b: w * x * (1 + b),
    "a linear layer": lambda w, x, b: F.linear(x, w, b),
    "seen through views": lambda w, x, b: (w.t() + x.t()[:, :].view_as(w)) + b.view(1, N),
    "cast": lambda w, x, b: w.double().add(x).float() + b,
    "gone into a constant": lambda w, x, b: w * 2 + deep(x) + (x + b).exp(),
    "gone into a constant in place": lambda w, x, b: w * 2 + (x * 1).add_(b).exp_(),
}
CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "the parameter": lambda w, x, b: w.add_(1),
    "the parameter, by an optimizer": lambda w, x, b: _optimized(w),
    "the parameter's data": lambda w, x, b: w.data.add_(1),
    "the parameter's data, assigned": lambda w, x, b: setattr(w, "data", torch.ones(N, N)),
    "the parameter, swapped": lambda w, x, b: w.set_(torch.ones(N, N)),
    "the input": lambda w, x, b: x.zero_(),
    "the input, through a view": lambda w, x, b: x[3:5].zero_(),
    "the input, by foreach": lambda w, x, b: torch._foreach_zero_([x]),
    "the input, as an out argument": lambda w, x, b: torch.ones(N, N, out=x),
    "the input, outside torch": lambda w, x, b: _numpy(x),
    "the input, resized": lambda w, x, b: x.resize_(2 * N, N).fill_(1),
    "the input, with its version kept": lambda w, x, b: inside(torch.autograd._unsafe_preserve_version_counter(x), x.zero_),
    "the buffer": lambda w, x, b: b.add_(1),
    "the buffer, by a batch norm": lambda w, x, b: F.batch_norm(torch.randn(8, N), b, torch.ones(N), training=True),
    "the buffer, twice": lambda w, x, b: b.add_(1).mul_(3),
}


def _add_changes() -> None:
    for what, change in CHANGES.items():
        for how, use in USES.items():
            body = functools.partial(_changed, change, use)
            outside = what == "the input, outside torch"
            # eager says which of them raise
            KINDS.append(Kind(f"{what}; {how}", "changed", body, (None, RuntimeError), may_be_refused=outside))


_add_changes()


@kind("changed")
def an_intermediate_that_nothing_has_saved():
    w = weight()
    h = w + 1
    a = deep(h * 2)
    with torch.no_grad():
        h.zero_()
    loss_of(a).backward()
    return w.grad, h.detach()


@kind("changed", raises=RuntimeError)
def an_intermediate_that_was_saved():
    w = weight()
    h = deep(w + 1)
    a = h.sin()
    with torch.no_grad():
        h.zero_()
    loss_of(deep(a)).backward()


@kind("changed", raises=RuntimeError)
def an_intermediate_that_was_saved_and_changed_through_a_view_after_it_was_dropped():
    w = weight()
    h = deep(w)
    view = h.detach()[0]
    a = h.sin()
    b = deep(a, 4)
    view.zero_()
    loss_of(b).backward()


@kind("changed")
def a_result_that_was_saved_is_changed_by_the_program_in_the_right_way():
    w = weight()
    h = deep(w)
    a = h + 1  # saves nothing
    b = a.mul_(2)
    c = b.sin()
    loss_of(deep(c)).backward()
    return w.grad


@kind("changed")
def a_constant_in_the_middle():
    w = weight()
    mask = (square(2) > 0).float()
    a = deep(w + mask)
    mask = mask * 2
    b = deep(a + mask)
    mask += 1
    c = b + mask
    mask.zero_()
    loss_of(deep(c)).backward()
    return w.grad


@kind("changed")
def scratch_space_that_is_filled_again_and_again():
    w = weight()
    scratch, total = torch.empty(N, N), torch.zeros(())
    for k in range(3):
        torch.mul(square(k), 0.5, out=scratch)
        total = total + loss_of(deep(w + scratch))
    scratch.fill_(float("nan"))
    total.backward()
    return w.grad


@kind("changed")
def the_input_in_another_thread():
    w, x = weight(), square(1)
    h = deep(w + x)
    thread = threading.Thread(target=x.zero_)
    thread.start()
    thread.join()
    loss_of(h).backward()
    return w.grad, x


@kind("changed")
def the_parameters_by_an_optimizer_in_the_backward():
    """Each parameter is stepped as soon as its gradient is there; branches are still to come."""
    torch.manual_seed(1)
    net = net_of()
    side = net_of()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in [*net.parameters(), *side.parameters()]}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    for k in range(2):
        a, b = net(square(k)), side(square(k))
        loss_of(deep(a) * deep(b)).backward()
    return [p.detach() for p in optimizers]


@kind("changed")
def the_parameter_steps_between_branches_that_did_not_save_it():
    w, x = weight(), square(1)
    losses = [loss_of(deep(w + x * k)) for k in range(3)]
    for one in losses:
        one.backward()
        with torch.no_grad():
            w -= 0.1 * w.grad
    return w.detach(), w.grad


@kind("changed", raises=RuntimeError)
def the_optimizer_steps_between_two_backwards():
    net = net_of()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = net(square())
    loss_of(out).backward(retain_graph=True)
    optimizer.step()
    out.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------------
# batch norms between graphs


def _norms(*modes: bool, late: bool) -> object:
    bn, w = nn.BatchNorm1d(N), weight()
    losses = []
    for k, mode in enumerate(modes):
        bn.train(mode)
        losses.append(loss_of(deep(bn(deep(w * (k + 1)) + square(k)))))
        if not late:
            losses.pop().backward()
    for one in losses:
        one.backward()
    return w.grad, bn.state_dict(), [p.grad for p in bn.parameters()]


for _late in (False, True):
    for _modes in ((True, True), (False, True), (True, False), (False, True, False)):
        _name = f"{' then '.join('train' if m else 'eval' for m in _modes)}, {'all' if _late else 'each'} before a backward"
        KINDS.append(Kind(_name, "batch norm", functools.partial(_norms, *_modes, late=_late)))


@kind("batch norm")
def statistics_are_read_between_forward_and_backward():
    net = net_of(nn.BatchNorm1d(N))
    seen = []
    for k in range(2):
        loss = loss_of(net(square(k)))
        seen += [net[2].running_mean.clone(), net[2].num_batches_tracked.clone()]
        loss.backward()
        seen += [net[2].running_mean.clone(), net[2].num_batches_tracked.clone()]
    return seen


# ---------------------------------------------------------------------------------------------------------------------------
# custom functions


class Attributes(Function):
    """Keeps tensors and numbers on its ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.middle = x.sin()
        ctx.factor = factor
        return ctx.middle * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor * (1 - ctx.middle**2).sqrt(), None


class SavesAll(Function):
    """Saves an input, an intermediate, an output, and None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        middle = x.exp()
        y = middle * w
        ctx.save_for_backward(x, w, middle, y, None)
        return y, x.cos()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        x, w, middle, y, nothing = ctx.saved_tensors
        assert nothing is None
        return a * y - b * x.sin(), a * middle + 0 * w


class Dirty(Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class Dropping(Function):
    """Draws random numbers in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(x, mask)
        return deep(x) * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, mask = ctx.saved_tensors
        return grad * mask * x + torch.rand_like(grad)


class ThroughNumpy(Function):
    """Computes outside torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(np.cbrt(x.detach().numpy()))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad / (1 + 3 * y**2)


class Unused(Function):
    """Two outputs, of which one gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        chosen = x.argmax(-1)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(x, chosen)
        return x.sin(), x.cos(), chosen

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, _c: None) -> Tensor:
        x, chosen = ctx.saved_tensors
        assert b is None
        return a * x.cos() + F.one_hot(chosen, N)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "attributes on ctx": lambda x: Attributes.apply(x, 0.5),
    "saves inputs, outputs and intermediates": lambda x: sum(SavesAll.apply(x, x.sin())),
    "marked dirty": lambda x: Dirty.apply(x * 1),
    "random": Dropping.apply,
    "outside torch": ThroughNumpy.apply,
    "an output without a gradient": lambda x: Unused.apply(x)[0],
    "nested in a checkpoint": lambda x: checkpoint(lambda y: Attributes.apply(deep(y), 2.0), x, use_reentrant=False),
}


def _custom(function: Callable[[Tensor], Tensor]) -> object:
    torch.manual_seed(2)
    w = weight()
    for _ in range(2):
        loss_of(deep(function(deep(w)))).backward()
    return w.grad


KINDS.extend(Kind(name, "custom", functools.partial(_custom, function)) for name, function in FUNCTIONS.items())


def _nested(layout: torch.layout) -> object:
    w = weight()
    for _ in range(2):
        h = deep(w)
        nested = torch.nested.as_nested_tensor([h[:5], h[5:9], h[9:]], layout=layout)
        rows = F.gelu(nested * 2)
        loss_of(deep(torch.cat([*rows.unbind(), h]))).backward()
    return w.grad


for _layout in (torch.strided, torch.jagged):
    KINDS.append(Kind(f"nested, {str(_layout)[6:]}", "subclass", functools.partial(_nested, _layout)))


@kind("custom")
def outside_torch_and_back_without_a_function():
    w = weight()
    h = deep(w)
    constant = torch.from_numpy(np.cbrt(h.detach().numpy()))
    listed = torch.tensor(h.detach()[0].tolist())
    loss_of(deep(h * constant + listed)).backward()
    return w.grad


@kind("custom")
def an_op_of_the_programs_own():
    @torch.library.custom_op("graphkeep_tests::scaled", mutates_args=())
    def scaled(x: Tensor, factor: float) -> Tensor:
        return x.sin() * factor

    scaled.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[0].cos() * ctx.factor, None), setup_context=_remember_for_scaled
    )
    w = weight()
    loss_of(deep(scaled(deep(w), 0.5))).backward()
    return w.grad


def _remember_for_scaled(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.factor = inputs
    ctx.save_for_backward(x)


# ---------------------------------------------------------------------------------------------------------------------------
# ways to run a backward


@kind("backward")
def twice():
    w = weight()
    loss = loss_of(deep(w, 4))
    loss.backward(retain_graph=True)
    first = w.grad.clone()
    loss.backward()
    return first, w.grad


@kind("backward")
def three_times_in_part():
    w, v = weight(), weight(1)
    h = deep(w)
    loss = loss_of(deep(h * v))
    a = gradient(loss, h, retain_graph=True)
    b = gradient(loss, v, retain_graph=True)
    c = gradient(loss, w, v)
    return a, b, c


@kind("backward", raises=RuntimeError)
def once_too_often():
    loss = loss_of(deep(weight(), 4))
    loss.backward()
    loss.backward()


@kind("backward")
def twice_differentiated():
    w = weight()
    (g,) = gradient(loss_of(deep(w)), w, create_graph=True)
    (h,) = gradient(g.square().sum(), w)
    return g, h


@kind("backward")
def three_times_differentiated():
    w = weight()
    y = w.sin().exp().tanh().sum()
    out = []
    for _ in range(3):
        (g,) = gradient(y, w, create_graph=True)
        out.append(g)
        y = g.square().sum()
    return [g.detach() for g in out]


@kind("backward")
def a_gradient_penalty():
    net, x = net_of(), square(3).requires_grad_()
    for _ in range(2):
        (g,) = gradient(net(x).sum(), x, create_graph=True)
        (loss_of(net(x)) + (g.norm(dim=1) - 1).square().mean()).backward()
    return [p.grad for p in net.parameters()], x.grad


@kind("backward")
def a_product_with_the_hessian():
    net = net_of()
    params = list(net.parameters())
    grads = gradient(loss_of(net(square())), *params, create_graph=True)
    dot = sum((g * g.detach()).sum() for g in grads)
    return gradient(dot, *params)


@kind("backward")
def created_and_accumulated():
    w = weight()
    loss_of(deep(w)).backward(create_graph=True)
    g = w.grad
    w.grad = None
    g.square().sum().backward()
    out = g.detach(), w.grad
    w.grad = None
    return out


@kind("backward")
def losses_one_after_the_other_on_one_trunk():
    w = weight()
    trunk = deep(w)
    heads = [loss_of(deep(trunk * k)) for k in range(1, 4)]
    for head in heads[:-1]:
        head.backward(retain_graph=True)
    heads[-1].backward()
    return w.grad


@kind("backward")
def graphs_that_overlap_in_time():
    w = weight()
    a = loss_of(deep(w))
    b = loss_of(deep(w * 2))
    a.backward()
    c = loss_of(deep(w * 3))
    del a
    c.backward()
    d = loss_of(deep(w * 4))
    b.backward()
    d.backward()
    return w.grad


@kind("backward")
def one_graph_waits_over_many_steps():
    w = weight()
    waiting = loss_of(deep(w))
    for k in range(3):
        loss_of(deep(w * k)).backward()
    waiting.backward()
    return w.grad


@kind("backward")
def backward_in_a_backward():
    class Again(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                deep(y.sin()).backward(grad)
            return y.grad

    w = weight()
    loss_of(deep(Again.apply(deep(w)))).backward()
    return w.grad


@kind("backward")
def gradients_that_are_handed_in():
    w = weight()
    outs = [deep(w), deep(w.t())]
    torch.autograd.backward(outs, [square(1), square(2)], inputs=[w])
    return w.grad


@kind("backward")
def batched_gradients():
    w = weight()
    out = deep(w).sum(1)
    return gradient(out, w, grad_outputs=torch.eye(N)[:4], is_grads_batched=True)


@kind("backward")
def a_jacobian():
    x = square(1)[0]
    return torch.autograd.functional.jacobian(lambda y: deep(y, 3), x), torch.func.jacrev(lambda y: deep(y, 3))(x)


@kind("backward")
def with_anomaly_detection():
    w = weight()
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(deep(w)).backward()
    return w.grad


# ---------------------------------------------------------------------------------------------------------------------------
# graphs that nobody runs, and errors


@kind("dropped")
def graphs_without_a_backward():
    w = weight()
    for k in range(4):
        loss = loss_of(deep(w * k))
        if k % 2:
            loss.backward()
    del loss
    return w.grad


@kind("dropped")
def a_head_that_goes_before_the_backward():
    w = weight()
    trunk = deep(w)
    rejected = deep(trunk, 3)
    loss = loss_of(deep(trunk))
    del rejected
    loss.backward()
    return w.grad


@kind("dropped", raises=ZeroDivisionError)
def an_error_in_the_forward():
    h = deep(weight(), 4)
    h / (1 // 0)


@kind("dropped", raises=ZeroDivisionError)
def an_error_in_the_backward():
    h = deep(weight())
    h.register_hook(lambda g: 1 // 0)
    loss_of(deep(h)).backward()


@kind("dropped")
def errors_that_the_program_catches():
    w = weight()
    for k in range(6):
        with contextlib.suppress(ZeroDivisionError):
            h = deep(w + k)
            if k % 3 == 0:
                1 // 0  # noqa: B018
            if k % 3 == 1:
                h.register_hook(lambda g: 1 // 0)
            loss_of(deep(h)).backward()
    del h
    return w.grad


@kind("dropped")
def a_backward_that_failed_and_is_run_again():
    w = weight()
    fails = [True]

    def hook(g: Tensor) -> None:
        if fails:
            raise ZeroDivisionError(fails.pop())

    h = deep(w, 3)
    w2 = h * 1
    w2.register_hook(hook)
    loss = loss_of(w2 + 1)
    with contextlib.suppress(ZeroDivisionError):
        loss.backward(retain_graph=True)
    loss.backward()
    return w.grad


# ---------------------------------------------------------------------------------------------------------------------------
# hooks: exactly once


@kind("hooks")
def all_kinds_of_hooks():
    fired: Counter[str] = Counter()
    net = net_of(nn.BatchNorm1d(N))

    def counts(name: str, answer: Callable[[Any], Any] = lambda args: None) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            fired[name] += 1
            return answer(args)

        return hook

    for name, layer in net.named_children():
        layer.register_forward_pre_hook(counts(f"forward pre {name}"))
        layer.register_forward_hook(counts(f"forward {name}"))
        layer.register_full_backward_hook(counts(f"backward {name}"))
        layer.register_full_backward_pre_hook(counts(f"backward pre {name}"))
    for name, p in net.named_parameters():
        p.register_hook(counts(f"tensor {name}"))
        p.register_post_accumulate_grad_hook(counts(f"accumulated {name}"))
    for k in range(2):
        h = deep(net(square(k)))
        h.register_hook(counts("halved", lambda args: args[0] * 0.5))
        h.grad_fn.register_hook(counts("node"))
        h.grad_fn.register_prehook(counts("node pre"))
        h.retain_grad()
        out = deep(h)
        torch.autograd.graph.register_multi_grad_hook((h, out), counts("several"))
        loss_of(out).backward()
        seen = h.grad
    return dict(fired), [p.grad for p in net.parameters()], seen


@kind("hooks")
def a_hook_that_keeps_and_uses_activations():
    kept: list[Tensor] = []
    net = net_of()
    net[1].register_forward_hook(lambda m, args, out: kept.append(out))
    for k in range(2):
        (loss_of(net(square(k))) + 0.1 * kept.pop().abs().mean()).backward()
    return [p.grad for p in net.parameters()]


@kind("hooks")
def a_hook_that_changes_its_argument():
    w = weight()
    h = deep(w)
    h.register_hook(lambda g: g.clone().mul_(3))
    loss_of(deep(h)).backward()
    return w.grad


@kind("hooks")
def forward_hooks_that_draw_random_numbers():
    net = net_of(nn.Dropout(0.3))
    net[0].register_forward_hook(lambda m, args, out: out + torch.randn_like(out))
    return trained(net, square())


# ---------------------------------------------------------------------------------------------------------------------------
# random numbers


@kind("random")
def a_generator_of_its_own():
    w, g = weight(), torch.Generator().manual_seed(5)
    for _ in range(2):
        noise = torch.randn(N, N, generator=g)
        mask = torch.bernoulli(torch.full((N, N), 0.5), generator=g)
        h = deep(w + noise) * mask
        h = h + torch.empty(N, N).normal_(generator=g) + torch.rand(N, N, generator=g)
        loss_of(deep(h) * torch.empty_like(h).bernoulli_(0.5, generator=g)).backward()
    return w.grad, g.get_state()


@kind("random")
def seeds_are_set_in_the_forward():
    w = weight()
    for _ in range(2):
        torch.manual_seed(7)
        h = F.dropout(deep(w))
        with torch.random.fork_rng():
            torch.manual_seed(9)
            h = F.dropout(deep(h)) + torch.randn(N, N)
        state = torch.get_rng_state()
        h = deep(h + torch.randn(N, N))
        torch.set_rng_state(state)
        loss_of(F.dropout(h)).backward()
    return w.grad, torch.rand(2)


@kind("random")
def random_numbers_between_forward_and_backward():
    w, drawn = weight(), []
    for _ in range(2):
        loss = loss_of(F.dropout(deep(F.dropout(w))))
        drawn.append(torch.rand(3))
        loss.backward()
        drawn.append(torch.rand(3))
    return w.grad, drawn


@kind("random")
def random_numbers_in_a_backward():
    w, drawn = weight(), []
    h = F.dropout(deep(w))
    h.register_hook(lambda g: g + torch.randn_like(g))
    h.register_hook(lambda g: drawn.append(torch.rand(2)))
    loss_of(F.dropout(deep(h))).backward()
    return w.grad, drawn


@kind("random")
def every_random_op_in_place():
    w = weight()
    h = deep(w)
    total = torch.zeros(())
    for fill in ("uniform_", "normal_", "exponential_", "cauchy_", "geometric_", "log_normal_", "random_"):
        args = (0.5,) if fill == "geometric_" else ()
        noise = getattr(torch.empty(N, N), fill)(*args)
        total = total + loss_of((h * noise).sin())
    total.backward()
    return w.grad


# ---------------------------------------------------------------------------------------------------------------------------
# programs as people write them


def _adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def _optimizers(**options: bool) -> object:
    net = net_of(nn.LayerNorm(N))
    optimizer = _adam(net, **options)
    for k in range(3):
        optimizer.zero_grad()
        loss_of(net(square(k))).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net.state_dict()


KINDS.extend(Kind(f"adam, {name}", "training", functools.partial(_optimizers, **{name: True})) for name in ("foreach", "fused"))


@kind("training")
def lbfgs():
    net = net_of()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net(square()))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return net.state_dict()


@kind("training")
def accumulated_gradients():
    net = net_of(nn.Dropout(0.1))
    optimizer = _adam(net)
    for k in range(6):
        (loss_of(net(square(k))) / 3).backward()
        if k % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


@kind("training")
def a_gan():
    g, d = net_of(nn.BatchNorm1d(N)), net_of(nn.Dropout(0.2))
    opt_g, opt_d = _adam(g), _adam(d)
    for k in range(2):
        real, fake = square(k), g(square(k + 9))
        opt_d.zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()).backward()
        opt_d.step()
        opt_g.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        opt_g.step()
    return g.state_dict(), d.state_dict()


@kind("training")
def truncated_backpropagation_through_time():
    cell = nn.GRUCell(N, N)
    for p in cell.parameters():
        nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(1))
    optimizer = _adam(cell)
    h = torch.zeros(N, N)
    for window in range(3):
        h = h.detach()
        optimizer.zero_grad()
        total = torch.zeros(())
        for t in range(4):
            h = cell(square(window * 4 + t), h)
            total = total + loss_of(h)
        total.backward()
        optimizer.step()
    return cell.state_dict(), h.detach()


@kind("training")
def a_loader():
    net = net_of(nn.Dropout(0.1))
    torch.manual_seed(4)
    dataset = torch.utils.data.TensorDataset(data(4 * N, N, seed=2), data(4 * N, N, seed=3))
    loader = torch.utils.data.DataLoader(dataset, batch_size=N, shuffle=True)
    optimizer = _adam(net)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    return net.state_dict()


@kind("training")
def a_loader_with_a_worker():
    net = net_of()
    torch.manual_seed(4)
    dataset = torch.utils.data.TensorDataset(data(2 * N, N, seed=2), data(2 * N, N, seed=3))
    loader = torch.utils.data.DataLoader(dataset, batch_size=N, shuffle=True, num_workers=1)
    for x, y in loader:
        F.mse_loss(net(x), y).backward()
    for thread in threading.enumerate():
        if thread.name.startswith("QueueFeeder"):
            thread.join()  # our hooks are there until it has ended
    return [p.grad for p in net.parameters()]


@kind("training")
def mixed_precision():
    net = net_of(nn.LayerNorm(N))
    optimizer = _adam(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for k in range(3):
        optimizer.zero_grad()
        with autocast():
            loss = loss_of(net(square(k)))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return net.state_dict(), scaler.get_scale()


@kind("training")
def one_autocast_around_several_steps():
    net = net_of()
    with autocast():
        with torch.no_grad():
            net(square())
        for k in range(2):
            loss_of(net(square(k)).float()).backward()
    return [p.grad for p in net.parameters()]


@kind("training")
def a_backward_within_autocast_of_what_ran_without():
    w, v = weight(), weight(1)
    for _ in range(2):
        loss = loss_of(deep(deep(w) @ v) @ v)
        with autocast():
            loss.backward()
    return w.grad, v.grad


@kind("training")
def tied_weights():
    embedding, body = nn.Embedding(N, N), net_of()
    nn.init.normal_(embedding.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    for k in range(2):
        tokens = torch.arange(N).roll(k)
        F.cross_entropy(body(embedding(tokens)) @ embedding.weight.t(), tokens).backward()
    return embedding.weight.grad, [p.grad for p in body.parameters()]


@kind("training")
def views_of_the_input():
    w = weight()
    x = data(2 * N, 2 * N, seed=1)
    for k in range(2):
        rows = x[k * N : (k + 1) * N]
        a, b = rows[:, :N], rows[:, N:].t()
        loss_of(deep(w * a) + deep(w + b)).backward()
    return w.grad


@kind("training")
def an_input_that_needs_a_gradient():
    net, x = net_of(), square().requires_grad_()
    for _ in range(2):
        loss_of(net(x[:, :].t())).backward()
    return x.grad, [p.grad for p in net.parameters()]


@kind("training")
def a_frozen_trunk():
    trunk, head = net_of().requires_grad_(False), net_of()
    for k in range(2):
        loss_of(head(trunk(square(k)))).backward()
    return [p.grad for p in head.parameters()], [p.grad for p in trunk.parameters()]


@kind("training")
def a_unet():
    torch.manual_seed(1)
    down = nn.ModuleList(linear() for _ in range(3))
    up = nn.ModuleList(nn.Linear(2 * N, N) for _ in range(3))
    for k in range(2):
        h, skips = square(k), []
        for layer in down:
            h = layer(h).relu_()
            skips.append(h)
        for layer in up:
            h = F.gelu(layer(torch.cat([h, skips.pop()], 1)))
        loss_of(h).backward()
    return [p.grad for p in [*down.parameters(), *up.parameters()]]


@kind("training")
def evaluated_between_steps():
    net = net_of(nn.BatchNorm1d(N), nn.Dropout(0.2))
    optimizer = _adam(net)
    seen = []
    for k in range(3):
        net.train()
        optimizer.zero_grad()
        loss_of(net(square(k))).backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            seen.append(net(square(9)))
        seen.append(net(square(9)).detach())
    return net.state_dict(), seen


@kind("training")
def an_average_of_the_weights():
    net = net_of(nn.Dropout(0.1))
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = _adam(net)
    for k in range(3):
        optimizer.zero_grad()
        (loss_of(net(square(k))) + F.mse_loss(net(square(k)), average(square(k)))).backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(average.parameters(), net.parameters(), strict=True):
                p.lerp_(q, 0.1)
    return net.state_dict(), average.state_dict()


@kind("training")
def a_reinforcement_learner():
    policy, optimizer = net_of(), None
    optimizer = _adam(policy)
    torch.manual_seed(3)
    for episode in range(2):
        logs = []
        state = square(episode)
        for _ in range(3):
            distribution = torch.distributions.Categorical(logits=policy(state))
            action = distribution.sample()
            logs.append(distribution.log_prob(action) * (action % 2))
            state = state.roll(1, 0)
        optimizer.zero_grad()
        torch.stack(logs).mean().neg().backward()
        optimizer.step()
    return policy.state_dict()


# ---------------------------------------------------------------------------------------------------------------------------
# threads


@kind("threads")
def the_backward_in_another_thread():
    w = weight()
    for _ in range(2):
        loss = loss_of(deep(F.dropout(w), 3))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
    return w.grad


@kind("threads")
def the_step_in_another_thread():
    net = net_of(nn.Dropout(0.1))
    out: list[Any] = []
    for k in range(2):
        with ThreadPoolExecutor(1) as pool:
            out.append(pool.submit(trained, net, square(k), steps=1).result())
    return net.state_dict(), len(out)


@kind("threads", varies=True)
def several_threads_at_once():
    weights = [weight(k) for k in range(4)]

    def step(w: Tensor) -> Tensor:
        for _ in range(3):
            loss_of(deep(w, 3)).backward()
        assert w.grad is not None
        return w.grad

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(step, weights))


@kind("threads")
def one_thread_in_no_grad_beside_another():
    w, seen = weight(), []

    def evaluate() -> None:
        with torch.no_grad():
            seen.append(deep(w.detach() * 2))

    h = deep(w)
    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    loss_of(deep(h)).backward()
    return w.grad, seen


# ---------------------------------------------------------------------------------------------------------------------------
# on leaving


@kind("left")
def a_graph_that_is_run_later():
    w = weight()
    loss = loss_of(deep(F.dropout(w), 3))
    return Later(lambda: (loss.backward(), w.grad)[1])


@kind("left")
def a_graph_that_is_run_later_twice():
    w = weight()
    loss = loss_of(deep(F.dropout(w), 3))
    return Later(lambda: [gradient(loss, w, retain_graph=True), gradient(loss, w)])


@kind("left")
def a_graph_that_is_run_later_after_its_input_has_changed():
    w, x = weight(), square(1)
    loss = loss_of(deep(w + x, 3))
    return Later(lambda: (x.zero_(), loss.backward(), w.grad)[2])


@kind("left", drops=False)
def a_graph_that_nobody_runs():
    w = weight()
    loss = loss_of(deep(w, 3))
    return Later(lambda: loss.detach())


# ---------------------------------------------------------------------------------------------------------------------------
# compiled


@kind("compile")
def a_compiled_module():
    return _compiled(fullgraph=False)


@kind("compile")
def a_compiled_module_in_one_graph():
    return _compiled(fullgraph=True)


def _compiled(fullgraph: bool) -> object:
    net = net_of()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=fullgraph)
    for k in range(2):
        loss_of(deep(compiled(square(k)))).backward()
    return [p.grad for p in net.parameters()]
