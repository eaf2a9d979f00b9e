"""`gk.infer`: rows of a batch, picked after the forward, with the gradients of plain torch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphkeep as gk

N = 12
KEEPS = ["nothing", "everything", "auto", "2KiB"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> torch.Tensor:
    return torch.randn(N, 6, requires_grad=True)


def gradients(model: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
    found = [p.grad for p in model.parameters()] + [x.grad for x in inputs]
    return [None if g is None else g.to_dense().clone() for g in found]


def assert_equal(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None], **tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


PICKS: list[Any] = [
    [3, 11, 5],
    [0],
    slice(2, 7),
    slice(None, None, -3),
    torch.tensor([1, 1, 2]),
    np.array([4, -1]),
    torch.arange(N) % 5 == 0,
    (torch.arange(N) % 4 == 1).tolist(),
    range(3),
]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunk_size", [None, 1, 5, 100])
def test_any_rows_in_any_order_any_number_of_times(keep: str, chunk_size: int | None) -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=chunk_size, keep=keep)
    torch.testing.assert_close(out.values, model(x).detach())
    assert not out.values.requires_grad
    for rows in PICKS:
        out[rows].square().sum().backward()
    out[7].sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    y = model(x)
    for rows in PICKS:
        rows = torch.as_tensor(list(rows)) if isinstance(rows, (range, list)) else rows
        rows = torch.arange(N).flip(0)[::3] if isinstance(rows, slice) and rows.step else rows
        y[rows].square().sum().backward(retain_graph=True)
    y[7].sum().backward()
    assert_equal(ours, gradients(model, x))


def test_with_one_chunk_everything_is_bit_for_bit_the_plain_forward_and_backward() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x)
    plain = model(x)
    assert torch.equal(out.values, plain)
    out[:].square().sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    plain.square().sum().backward()
    for a, b in zip(ours, gradients(model, x), strict=True):
        assert torch.equal(a, b)


def test_several_rows_in_one_loss_and_a_loss_over_all_outputs() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=4)
    (out[[0, 1]].sum() * out[[1, 2]].square().sum()).backward()
    z = F.normalize(out[:], dim=1)
    (z @ z.t()).logsumexp(1).sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    y = model(x)
    z = F.normalize(y, dim=1)
    (y[[0, 1]].sum() * y[[1, 2]].square().sum() + (z @ z.t()).logsumexp(1).sum()).backward()
    assert_equal(ours, gradients(model, x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.unsqueeze(1).expand(-1, 4, -1)).mean(1)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.view(len(x), 2, 3))[0][:, -1]


class Counter(nn.Module):
    """A counter in a buffer is read and bumped in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.rebound = self.rebound + 1
        return self.linear(x) * self.calls * self.rebound


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "batch norm, train": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "batch norm, eval": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval(),
    "batch norm, mixed": lambda: nn.Sequential(nn.BatchNorm1d(6).eval(), nn.Linear(6, 8), nn.BatchNorm1d(8)),
    "layer norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(inplace=True)),
    "group norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8)),
    "lstm": Lstm,
    "attention": Attention,
    "attention, eval": lambda: Attention().eval(),
    "counter": Counter,
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh()),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh()),
}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_values_and_buffers_equal_plain_torch(name: str, keep: str) -> None:
    torch.manual_seed(3)
    ours = MODELS[name]()
    theirs, x = copy.deepcopy(ours), batch()
    y = x.detach().clone().requires_grad_()

    torch.manual_seed(4)
    out = gk.infer(ours, x, keep=keep)
    drawn = torch.get_rng_state()
    # a forward between the first pass and the backward changes running statistics (and counters, but plain torch refuses that)
    if name != "counter":
        ours(x.detach() + 1)
    for rows in ([1, 5, 6], [5], [11, 0]):
        out[rows].square().sum().backward()

    torch.manual_seed(4)
    plain = theirs(y)
    assert torch.equal(drawn, torch.get_rng_state())
    assert torch.equal(out.values, plain)
    if name != "counter":
        theirs(y.detach() + 1)
    if name in ("batch norm, eval", "batch norm, mixed", "spectral norm"):
        # plain torch's own backward would read the changed statistics; the right gradient is that without the forward between
        torch.manual_seed(3)
        theirs = MODELS[name]()
        plain = theirs(y)
        buffers = [b.clone() for b in theirs.buffers()]
        theirs(y.detach() + 1)
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            for b, was in zip(theirs.buffers(), buffers, strict=True):
                b.data.copy_(was)
    else:
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(a, b)
    for rows in ([1, 5, 6], [5], [11, 0]):
        plain[rows].square().sum().backward(retain_graph=True)
    assert_equal(gradients(ours, x), gradients(theirs, y))


def test_B8_a_counter_that_was_bumped_in_between_is_put_back_for_the_replay() -> None:
    ours, x = Counter(), batch()
    theirs, y = copy.deepcopy(ours), x.detach().clone().requires_grad_()
    out = gk.infer(ours, x)
    ours(x.detach())  # plain torch would refuse the backward after this
    out[[1, 5]].sum().backward()
    assert ours.calls == ours.rebound == 2
    theirs(y)[[1, 5]].sum().backward()
    assert_equal(gradients(ours, x), gradients(theirs, y))


def test_L13_batch_norm_in_chunks_is_refused_by_name_and_nothing_has_run() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    before = model[1].running_mean.clone()
    with pytest.raises(gk.ArgumentError, match="`1`, a BatchNorm1d"):
        gk.infer(model, batch(), chunk_size=4)
    assert torch.equal(model[1].running_mean, before)
    gk.infer(model.eval(), batch(), chunk_size=4)


def test_buffers_in_a_checkpoint_are_updated_once() -> None:
    inner, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), batch()
    out = gk.infer(lambda x: checkpoint(inner, x, use_reentrant=False), x)
    mean = inner[1].running_mean.clone()
    for rows in ([1, 2], [3]):
        out[rows].square().sum().backward()
    assert inner[1].num_batches_tracked == 1
    assert torch.equal(inner[1].running_mean, mean)
    ours = gradients(inner, x)
    inner.zero_grad()
    x.grad = None
    y = inner(x)
    (y[[1, 2]].square().sum() + y[[3]].square().sum()).backward()
    assert_equal(ours, gradients(inner, x))


def test_L13_buffers_are_updated_once() -> None:
    model = nn.BatchNorm1d(6)
    out = gk.infer(model, batch())
    for _ in range(3):
        out[[0, 1]].sum().backward()
    assert model.num_batches_tracked == 1


def test_L14_dropout_is_the_same_in_every_chunk_and_the_generator_is_left_alone() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), batch()
    torch.manual_seed(0)
    out = gk.infer(model, x, chunk_size=5)
    state = torch.get_rng_state()
    for rows in ([9, 2], [11], [0]):  # the first chunk last, so that a generator left there would be seen
        out[rows].square().sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    torch.manual_seed(0)
    y = torch.cat([model(chunk) for chunk in x.split(5)])
    assert torch.equal(out.values, y)
    (y[[9, 2]].square().sum() + y[[11]].square().sum() + y[[0]].square().sum()).backward()
    assert_equal(ours, gradients(model, x))


@pytest.mark.parametrize("draw", ["numpy", "python", "attribute", "list"])
def test_L14_what_cannot_be_replayed_is_refused_by_comparison(draw: str) -> None:
    class Impure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)
            self.count = 0
            self.cache: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if draw == "numpy":
                return y * float(np.random.rand())
            if draw == "python":
                return y * random.random()
            if draw == "attribute":
                self.count += 1
                return y * self.count
            self.cache.append(y.detach())
            return y + torch.stack(self.cache).sum(0).mean()

    x = batch()
    model = Impure()
    out = gk.infer(model, x)
    # the list does not stack after it has been extended by some rows: the model's own error
    with pytest.raises(RuntimeError if draw == "list" else gk.ReplayError, match=r"Impure|Python attribute|stack expects"):
        out[:].sum().backward()
    assert x.grad is None
    if draw != "list":
        out = gk.infer(model, x, keep="everything")  # nothing has to run again
        out[:].sum().backward()
        assert x.grad is not None


class Gate(nn.Module):
    """A branch that mixes samples, behind a gate that is zero at initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + self.gate * y.mean(0)


class Table(nn.Module):
    """A table of zeros, indexed by the position in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 3), nn.Parameter(torch.zeros(N, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table[: len(x)]


class Auxiliary(nn.Module):
    """An auxiliary loss over the batch that is there in the gradient only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        loss = y.square().mean()
        return y + (loss - loss.detach())


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y - y.mean(0)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", [Gate, Table, Auxiliary, Centred])
@pytest.mark.parametrize("keep", KEEPS)
def test_samples_that_meet_only_in_the_gradient(kind: Callable[[], nn.Module], dropout: float, keep: str) -> None:
    model, x = nn.Sequential(kind(), nn.Dropout(dropout)), batch()
    torch.manual_seed(0)
    out = gk.infer(model, x, keep=keep)
    out[[5, 7]].square().sum().backward()
    out[[2]].sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    torch.manual_seed(0)
    y = model(x)
    (y[[5, 7]].square().sum() + y[[2]].sum()).backward()
    assert_equal(ours, gradients(model, x))


@pytest.mark.parametrize("switch", ["argument", "attribute"])
def test_independence_is_looked_at_anew_when_a_model_is_switched(switch: str) -> None:
    class Switched(Auxiliary):
        mixes = False

        def forward(self, x: torch.Tensor, mixes: bool = False) -> torch.Tensor:
            return super().forward(x) if mixes or self.mixes else self.linear(x)

    model, x = Switched(), batch()
    gk.infer(model, x)[[5, 7]].sum().backward()  # independent so far
    model.zero_grad()
    x.grad = None
    if switch == "attribute":
        model.mixes = True
    out = gk.infer(model, x, mixes=switch == "argument")
    out[[5, 7]].square().sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    model(x, True)[[5, 7]].square().sum().backward()
    assert_equal(ours, gradients(model, x))


def test_stale_ok_does_not_take_mixing_samples_for_independent_ones() -> None:
    model, x = Centred(), batch()
    out = gk.infer(model, x, stale_ok=True)
    out[[5]].sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    model(x)[[5]].sum().backward()
    assert_equal(ours, gradients(model, x))


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x - x.mean(0),
    "flip": lambda x: 0.7 * x + 0.3 * x.flip(0),
    "first": lambda x: x - x[:1],
    "last": lambda x: x - x[-1:],
    "softmax": lambda x: x.softmax(0),
}


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, N - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_samples_is_refused_in_chunks(
    name: str, dropout: float, dtype: torch.dtype, chunk_size: int
) -> None:
    layer = nn.Dropout(dropout)
    with pytest.raises(gk.ArgumentError, match="in other company"):
        gk.infer(lambda x: layer(MIXING[name](x)), torch.randn(N, 6).to(dtype), chunk_size=chunk_size)


def test_a_mask_value_does_not_hide_a_difference() -> None:
    generator = torch.Generator()
    linear = nn.Linear(6, 3)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x) * torch.rand((), generator=generator)
        return y.masked_fill(torch.arange(3) == 1, -1e9)

    out = gk.infer(model, batch())
    with pytest.raises(gk.ReplayError):
        out[[1]].sum().backward()


@pytest.mark.parametrize("kind", ["spectral norm", "instance norm", "counter", "met later"])
def test_buffers_that_change_are_refused_in_chunks_and_put_back(kind: str) -> None:
    class Later(nn.Module):
        """A module that only a plain object knows runs from the second chunk on."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count = nn.Linear(6, 8), 0
            self.hidden = [[nn.BatchNorm1d(8)]]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return self.hidden[0][0](self.linear(x)) if self.count > 1 else self.linear(x)

    later = Later()
    model = {
        "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(6, 8)),
        "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True)),
        "counter": Counter,
        "met later": lambda: later,
    }[kind]()
    buffers = list((later.hidden[0][0] if kind == "met later" else model).buffers())
    before = [b.clone() for b in buffers]
    with pytest.raises(gk.ArgumentError, match=r"buffers in its forward|other statistics"):
        gk.infer(model, batch(), chunk_size=4)
    for a, b in zip(buffers, before, strict=True):
        assert torch.equal(a, b)
    gk.infer(mlp() if kind in ("counter", "met later") else model.eval(), batch(), chunk_size=4)


def test_a_buffer_that_the_forward_registers_is_updated_once() -> None:
    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(()))
            self.seen += 1
            return self.linear(x) * self.seen

    model, x = Registers(), batch()
    out = gk.infer(model, x)
    out[[1]].sum().backward()
    assert model.seen == 1


def test_some_chunks_without_a_gradient() -> None:
    linear, x = nn.Linear(6, 3), batch()

    def model(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        return y if y.sum() > sums[1] else torch.zeros(len(x), 3)

    sums = sorted(linear(chunk).sum().item() for chunk in x.detach().split(4))
    try:
        out = gk.infer(model, x, chunk_size=4)
    except gk.ArgumentError as error:  # early exit by the chunk's sum is a kind of mixing
        assert "in other company" in str(error)  # noqa: PT017
        return
    assert out[:].requires_grad


def test_weights_replaced_by_others_of_equal_value_are_refused() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(gk.ChangedGraphError, match="a weight was changed"):
        out[[1]]


def test_values_are_not_the_users_own_memory() -> None:
    x = batch()
    out = gk.infer(lambda x: x * 1 if x is None else x, x)
    out.values.zero_()
    assert (x != 0).any()


def test_an_output_that_hides_tensors_with_a_graph_is_refused() -> None:
    class Layer:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    class Cache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.layers = [Layer(keys)]

    model = mlp()
    with pytest.raises(gk.ArgumentTypeError, match="Cache, and its attribute `layers`"):
        gk.infer(lambda x: (model(x), Cache(model(x))), batch())


def test_two_threads_with_buffers_and_dropout() -> None:
    model, x = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout()), batch()
    out = gk.infer(model, x)
    buffers, state = list(model.buffers()), torch.get_rng_state()
    values = [b.clone() for b in buffers]
    losses = [out[[i, i + 1]].square().sum() for i in range(8)]
    errors: list[BaseException] = []

    def work(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(state, torch.get_rng_state())
    for now, before, value in zip(model.buffers(), buffers, values, strict=True):
        assert now is before
        assert torch.equal(now, value)


def test_under_inference_mode_nothing_is_differentiable() -> None:
    with torch.inference_mode():
        out = gk.infer(mlp(), torch.randn(N, 6), chunk_size=5)
        assert out[[1]].shape == (1, 3)


def test_L4_the_cost_of_a_batch_is_its_own_rows() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=4)
    for i in range(0, N, 3):
        out[[i, (i + 5) % N]].sum().backward()
    assert out.plan.rows_asked == out.plan.rows_backward == out.plan.rows_replayed == 8


def test_L9_nan_in_a_rejected_sample_reaches_no_gradient() -> None:
    for keep in KEEPS:
        for model in (mlp(), nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))):
            x = batch()
            with torch.no_grad():
                x[4, 2] = float("nan")
                x[7, 2] = float("inf")  # in the other chunk; its outputs are finite after tanh, 0 · inf is not
            torch.manual_seed(0)
            out = gk.infer(model, x, chunk_size=6, keep=keep)
            good = torch.isfinite(x.detach()).all(1)
            out[good].square().sum().backward()
            for gradient in gradients(model, x):
                assert torch.isfinite(gradient).all()


def test_L5_two_logical_runs_on_one_batched_forward() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x)
    first, second = out[: N // 2].sum(), out[N // 2 :].square().sum()
    first.backward()
    second.backward()  # the first backward has freed its own part only
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    y = model(x)
    (y[: N // 2].sum() + y[N // 2 :].square().sum()).backward()
    assert_equal(ours, gradients(model, x))


def test_L6_mini_batch_losses_on_one_embedding_with_a_step_between_are_an_early_error() -> None:
    embed, head = mlp(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
    out = gk.infer(embed, batch())
    with pytest.raises(gk.ChangedGraphError, match=r"optimizer\.step"):
        for rows in torch.arange(N).split(4):
            head(out[rows]).sum().backward()
            optimizer.step()


def test_L11_the_bytes_of_kept_graphs_are_reported_and_the_choice_is_the_users() -> None:
    model, x = mlp(), batch()
    kept, recomputed = gk.infer(model, x, chunk_size=4, keep="everything"), gk.infer(model, x, chunk_size=4)
    assert kept.plan.kept_bytes > 0 == recomputed.plan.kept_bytes
    for out in (kept, recomputed):
        model.zero_grad()
        torch.cat([out[rows] for rows in torch.arange(N).split(4)]).square().sum().backward()
        assert out.plan.rows_replayed == (0 if out is kept else N)


def test_L12_leaving_the_context_frees_all(no_collector: None) -> None:
    model, x = mlp(), batch()
    with gk.infer(model, x, chunk_size=4, keep="everything") as out:
        held = [weakref.ref(t.untyped_storage()) for kept in out._first.kept.values() for t in kept.outputs]
    assert [ref() for ref in held] == [None] * 3


def test_L10_the_number_of_samples_run_backward_is_the_number_asked_for() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x)
    wanted = out.values[:, 0] > 0
    out[wanted].sum().backward()
    assert out.plan.rows_backward == int(wanted.sum())
    assert f"{int(wanted.sum())} run backward" in str(out.plan)


# --- structures ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    labels: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    loss: None = None
    n: int = 3


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any], *, scale: torch.Tensor, flag: bool) -> Output:
        hidden = self.a(batch["x"]).tanh() * scale
        logits = self.b(hidden)
        assert flag
        return Output(logits, logits.argmax(1), (hidden, hidden.detach()))


def test_L21_dataclass_outputs_with_none_and_integers_and_keyword_pytrees() -> None:
    model, x = Structured(), batch()
    scale = torch.tensor(2.0, requires_grad=True)
    out = gk.infer(model, {"x": x, "names": ["a", "b"]}, chunk_size=5, scale=scale, flag=True)
    assert isinstance(out.values, Output)
    assert out.values.labels.dtype is torch.int64
    assert out.values.n == 3
    picked = out[[2, 9]]
    assert isinstance(picked, Output)
    assert picked.loss is None
    assert not picked.labels.requires_grad
    assert not picked.hidden[1].requires_grad
    (picked.logits.sum() + picked.hidden[0].square().sum()).backward()
    ours = [*gradients(model, x), scale.grad.clone()]
    model.zero_grad()
    x.grad = scale.grad = None
    y = model({"x": x}, scale=scale, flag=True)
    (y.logits[[2, 9]].sum() + y.hidden[0][[2, 9]].square().sum()).backward()
    assert_equal(ours, [*gradients(model, x), scale.grad])


def test_a_parameter_or_mask_for_all_is_passed_on_unchanged() -> None:
    weight = nn.Parameter(torch.randn(N, 6))  # as many rows as the batch has samples
    x = batch()

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert weight.shape == (N, 6)
        return x @ weight.t()

    out = gk.infer(model, x, weight, chunk_size=5)
    out[[1, 2]].sum().backward()
    torch.testing.assert_close(weight.grad, x.detach()[[1, 2]].sum(0).expand(N, 6))


def test_batch_dim() -> None:
    lstm = nn.LSTM(3, 5)
    x = torch.randn(4, N, 3, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return lstm(x)[0]

    out = gk.infer(model, x, chunk_size=5, batch_dim=1)
    assert out.values.shape == (4, N, 5)
    assert out[[1, 2]].shape == (4, 2, 5)
    assert out[3].shape == (4, 5)
    out[[1, 10]].sum().backward()
    ours = [*gradients(lstm, x)]
    lstm.zero_grad()
    x.grad = None
    model(x)[:, [1, 10]].sum().backward()
    assert_equal(ours, gradients(lstm, x))


def test_a_batch_in_another_dimension_is_found_out() -> None:
    lstm = nn.LSTM(6, 5)  # batch_first=False: dimension 0 is time
    with pytest.raises(gk.ArgumentError, match="batch_first=True"):
        gk.infer(lambda x: lstm(x)[0], torch.randn(N, 4, 6), chunk_size=4)


def test_L24_a_frozen_encoder() -> None:
    encoder = mlp().requires_grad_(False)
    head = nn.Linear(3, 2)
    out = gk.infer(lambda x: head(encoder(x)), torch.randn(N, 6), chunk_size=5)
    out[[1, 2]].sum().backward()
    assert head.weight.grad is not None
    everything_frozen = gk.infer(encoder, torch.randn(N, 6), chunk_size=5)
    assert not everything_frozen[[1]].requires_grad


def test_an_embedding_with_sparse_gradients() -> None:
    embedding = nn.Embedding(20, 4, sparse=True)
    tokens = torch.randint(20, (N, 3))

    def model(tokens: torch.Tensor) -> torch.Tensor:
        return embedding(tokens).tanh().sum(1)

    out = gk.infer(model, tokens, chunk_size=5)
    out[[0, 7, 11]].sum().backward()
    assert embedding.weight.grad.is_sparse
    ours = embedding.weight.grad.to_dense()
    embedding.weight.grad = None
    model(tokens)[[0, 7, 11]].sum().backward()
    torch.testing.assert_close(ours, embedding.weight.grad.to_dense())


def test_complex_outputs() -> None:
    weight = torch.randn(6, 3, dtype=torch.complex64, requires_grad=True)
    x = torch.randn(N, 6, dtype=torch.complex64, requires_grad=True)
    out = gk.infer(lambda x: x @ weight, x, chunk_size=5)
    out[[1, 7]].abs().square().sum().backward()
    ours = [weight.grad.clone(), x.grad.clone()]
    weight.grad = x.grad = None
    (x @ weight)[[1, 7]].abs().square().sum().backward()
    assert_equal(ours, [weight.grad, x.grad])


def test_shared_encoders_two_inferences_in_one_loss() -> None:
    model, a, b = mlp(), batch(), batch()
    left, right = gk.infer(model, a, chunk_size=5), gk.infer(model, b, chunk_size=5)
    (left[[0, 1, 2]] @ right[[3, 4]].t()).exp().sum().backward()
    ours = gradients(model, a, b)
    model.zero_grad()
    a.grad = b.grad = None
    (model(a)[[0, 1, 2]] @ model(b)[[3, 4]].t()).exp().sum().backward()
    assert_equal(ours, gradients(model, a, b))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_bf16(inside: bool) -> None:
    model, x = mlp(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gk.infer(model, x, chunk_size=5)
        picked = out[[1, 7, 8]]
        assert picked.dtype is torch.bfloat16
        if inside:
            picked.float().square().sum().backward()
    if not inside:
        picked.float().square().sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert torch.equal(out.values, y)
    y[[1, 7, 8]].float().square().sum().backward()
    assert_equal(ours, gradients(model, x), rtol=2e-2, atol=2e-2)


def test_L22_a_no_grad_pass_before_in_one_autocast_region() -> None:
    model, x = mlp(), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            model(x)
        out = gk.infer(model, x)
        out[[1]].float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_under_grad_scaler_scale_counts_once() -> None:
    model, x = mlp(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = gk.infer(model, x, chunk_size=5)
    scaler.scale(out[[1, 2]].sum()).backward()
    scaler.unscale_(optimizer)
    ours = gradients(model)
    model.zero_grad()
    model(x)[[1, 2]].sum().backward()
    assert_equal(ours, gradients(model))


# --- inputs and hooks ------------------------------------------------------------------------------------------------------


def test_gradients_of_the_inputs_row_by_row() -> None:
    model, x = mlp(), torch.randn(100, 6, requires_grad=True)
    out = gk.infer(model, x, chunk_size=10)
    assert x.grad is None
    out[[3, 50]].square().sum().backward()
    assert x.grad.layout is torch.strided
    assert (x.grad.abs().sum(1) > 0).nonzero()[:, 0].tolist() == [3, 50]
    first = x.grad
    out[[50, 51]].square().sum().backward()
    assert x.grad is first  # the same memory: a batch costs its own rows
    torch.testing.assert_close(out.input_grad([3, 51]), x.grad[[3, 51]])
    assert out.input_grad(3).shape == (6,)
    plain = x.detach().clone().requires_grad_()
    y = model(plain)
    (y[[3, 50]].square().sum() + y[[50, 51]].square().sum()).backward()
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.parametrize("how", ["grad", "hook", "non-leaf", "retain_grad"])
def test_gradients_of_the_inputs_are_dense_where_somebody_sees_them(how: str) -> None:
    model, leaf = mlp(), torch.randn(100, 6, requires_grad=True)
    x = leaf if how in ("grad", "hook") else leaf * 1
    seen: list[torch.Tensor] = []
    if how == "hook":
        x.register_hook(lambda g: seen.append(g.clone()))
    if how == "retain_grad":
        x.retain_grad()
    out = gk.infer(model, x, chunk_size=10)
    loss = out[[3]].square().sum()
    if how == "grad":
        (gradient,) = torch.autograd.grad(loss, x)
        assert x.grad is None
    else:
        loss.backward()
        gradient = {"hook": lambda: seen[0], "non-leaf": lambda: leaf.grad, "retain_grad": lambda: x.grad}[how]()
    assert gradient.layout is torch.strided
    assert gradient.shape == (100, 6)


def test_hooks_of_parameters_fire_once_a_backward_with_the_whole_sum() -> None:
    model, x = mlp(), batch()
    weight = model[0].weight
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda g: seen.append(g.clone()))
    weight.register_hook(lambda g: g * 0.5)
    accumulated: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _p: accumulated.append(1))
    out = gk.infer(model, x, chunk_size=3)
    out[:].square().sum().backward()  # four chunks
    assert len(seen) == len(accumulated) == 1
    ours = weight.grad.clone()
    torch.testing.assert_close(ours, 0.5 * seen[0])
    weight.grad = None
    model(x).square().sum().backward()
    torch.testing.assert_close(ours, weight.grad)


def test_retain_graph_runs_the_same_rows_again() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=5)
    loss = out[[1, 2]].square().sum()
    loss.backward(retain_graph=True)
    once = gradients(model, x)
    loss.backward()
    assert_equal(gradients(model, x), [2 * g for g in once])


# --- changes in between ----------------------------------------------------------------------------------------------------


def test_weights_changed_in_between_are_refused_at_once_and_named() -> None:
    model, x = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = gk.infer(model, x, chunk_size=5)
    waiting = out[[3]].sum()
    out[[0]].sum().backward()
    optimizer.step()
    with pytest.raises(gk.ChangedGraphError, match=r"`\d\.(weight|bias)` of Sequential"):
        out[[1]]
    with pytest.raises(gk.ChangedGraphError, match=r"gk\.infer again after optimizer\.step"):
        waiting.backward()


@pytest.mark.parametrize("keep", KEEPS)
def test_stale_ok_uses_the_new_weights(keep: str) -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=5, stale_ok=True, keep=keep)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    out[[1]].sum().backward()
    ours = gradients(model, x)
    model.zero_grad()
    x.grad = None
    model(x)[[1]].sum().backward()
    assert_equal(ours, gradients(model, x))


def test_an_argument_changed_in_between_and_a_frozen_weight_are_refused() -> None:
    model, x = mlp(), torch.randn(N, 6)
    out = gk.infer(model, x)
    x.add_(1)
    with pytest.raises(gk.ChangedGraphError, match="argument"):
        out[[1]]
    out = gk.infer(model, x)
    model[0].weight.requires_grad_(False)
    with pytest.raises(gk.ChangedGraphError, match="frozen"):
        out[[1]]


def test_eval_in_between_does_not_change_a_replay() -> None:
    model, x = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), batch()
    out = gk.infer(model, x)
    model.eval()
    out[[1, 2]].sum().backward()
    assert not model.training
    assert not model[1].training


def test_a_failing_forward_leaves_nothing_behind(no_collector: None) -> None:
    model = mlp()

    def failing(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        held.append(weakref.ref(y.untyped_storage()))
        if len(held) == 3:
            raise ZeroDivisionError
        return y

    held: list[Any] = []
    x = batch()
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        gk.infer(failing, x, chunk_size=4, keep="everything")
    assert torch.equal(state, torch.get_rng_state())
    assert [ref() for ref in held[:2]] == [None, None]


def test_an_exception_in_a_replay_leaves_modules_and_generator_as_they_were() -> None:
    model, x = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)), batch()
    out = gk.infer(model, x)
    mean, state = model[0].running_mean, torch.get_rng_state()
    value = mean.clone()

    def fail(*_args: Any) -> None:
        raise ZeroDivisionError

    handle = model[2].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        out[[1]].sum().backward()
    handle.remove()
    assert model[0].running_mean is mean
    assert torch.equal(mean, value)
    assert torch.equal(state, torch.get_rng_state())
    out[[1]].sum().backward()


# --- lifetimes -------------------------------------------------------------------------------------------------------------


def test_L26_values_carry_no_graph_and_dropping_it_frees_all(no_collector: None) -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=5, keep="everything")
    assert gk.explain(out.values).nodes == 0
    held = [weakref.ref(kept.outputs[0].untyped_storage()) for kept in out._first.kept.values()]
    assert out.plan.kept_chunks == 3
    assert out.plan.kept_bytes > 0
    values = out.values
    del out
    assert [ref() for ref in held] == [None] * 3
    assert values.shape == (N, 3)


def test_keep_everything_frees_a_chunk_when_its_rows_have_been_used(no_collector: None) -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=4, keep="everything")
    out[[0, 1]].sum().backward()
    assert out.plan.kept_chunks == 2
    assert out.plan.replays == 0
    out[[2, 3]].sum().backward()  # the same chunk, asked for again
    assert out.plan.replays == 1


def test_a_byte_budget_keeps_as_many_chunks_as_fit() -> None:
    model, x = mlp(), batch()
    one = gk.infer(model, x, chunk_size=4, keep="everything").plan.kept_bytes // 3
    assert gk.infer(model, x, chunk_size=4, keep=2 * one).plan.kept_chunks == 2
    assert gk.infer(model, x, chunk_size=4, keep=one - 1).plan.kept_chunks == 0
    assert gk.infer(model, x, chunk_size=4, keep="auto", budget=one).plan.kept_chunks <= 1


def test_discard_and_the_context_manager_end_it() -> None:
    model, x = mlp(), batch()
    with gk.infer(model, x, keep="everything") as out:
        waiting = out[[1]].sum()
        kept = weakref.ref(out._first)
    gc.collect()
    assert kept() is None
    assert out.values.shape == (N, 3)
    with pytest.raises(gk.FreedGraphError, match="discarded"):
        out[[1]]
    with pytest.raises(gk.FreedGraphError, match="discarded"):
        waiting.backward()


@pytest.mark.parametrize("progress", [True, False])
def test_batches(progress: bool) -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=5)
    for rows in out.batches([[0, 1], [2]], progress=progress):
        rows.sum().backward()
    assert (x.grad.abs().sum(1) > 0).tolist() == [i < 3 for i in range(N)]


def test_no_growth_over_many_steps(no_collector: None) -> None:
    model, x = mlp(), torch.randn(N, 6)
    before = None
    for step in range(50):
        out = gk.infer(model, x, chunk_size=5)
        out[[1, 2]].sum().backward()
        del out
        count = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        if step == 10:
            before = count
    assert count == before


# --- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_outputs_of_one_number_a_sample(keep: str, chunk_size: int | None) -> None:
    net, x = mlp(), batch()

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = net(x)
        return y.square().sum(1), y

    for function in model, lambda x: model(x)[0]:
        for rows in [0, 7, 7, 4], [], slice(None), 3:
            found, wanted = [], []
            for output, into in (gk.infer(function, x, chunk_size=chunk_size, keep=keep), found), (function(x), wanted):
                net.zero_grad()
                x.grad = None
                picked = (
                    output[rows] if function is not model or isinstance(output, gk.Inference) else [o[rows] for o in output]
                )
                sum(part.sin().sum() for part in (picked if function is model else [picked])).backward()
                into += gradients(net, x)
            assert_equal(found, wanted)


def test_all_rows_rejected_gives_an_empty_differentiable_result_and_zero_gradients() -> None:
    model, x = mlp(), batch()
    out = gk.infer(model, x, chunk_size=5)
    none = out[torch.zeros(N, dtype=torch.bool)]
    assert none.shape == (0, 3)
    none.sum().backward()
    for gradient in gradients(model, x):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert out[[]].requires_grad


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        (N, gk.ArgumentError, f"row {N} of a batch of {N}"),
        ([0, -N - 1], gk.ArgumentError, f"row {-N - 1}"),
        (torch.ones(N - 1, dtype=torch.bool), gk.ArgumentError, "a mask of 11 rows"),
        (torch.ones(2, 2, dtype=torch.int64), gk.ArgumentTypeError, r"shape \[2, 2\]"),
        (torch.ones(2), gk.ArgumentTypeError, "float32"),
        (1.0, gk.ArgumentTypeError, "float"),
        ("x", gk.ArgumentTypeError, "type str"),
        ((0, 1), gk.ArgumentTypeError, "one index"),
        (torch.ones(N, dtype=torch.uint8), gk.ArgumentTypeError, "uint8"),
        (None, gk.ArgumentTypeError, "NoneType"),
    ],
)
def test_bad_rows(rows: Any, error: type[Exception], says: str) -> None:
    out = gk.infer(mlp(), batch())
    with pytest.raises(error, match=says):
        out[rows]


@pytest.mark.parametrize(
    ("model", "args", "options", "error", "says"),
    [
        (lambda x: x.sum(), (torch.ones(4, 2),), {}, gk.ArgumentError, "one row a sample"),
        (lambda x: (x, x[:2]), (torch.ones(4, 2),), {}, gk.ArgumentError, "member 1"),
        (lambda x: x, (torch.ones(0, 2),), {}, gk.ArgumentError, "the batch is empty"),
        (lambda x: x, (3,), {}, gk.ArgumentTypeError, "no batch"),
        (lambda: None, (), {}, gk.ArgumentTypeError, "no batch"),
        (7, (torch.ones(4, 2),), {}, gk.ArgumentTypeError, "type int"),
        (lambda x: x, (torch.ones(4, 2),), {"chunk_size": 0}, gk.ArgumentError, "chunk_size=0"),
        (lambda x: x, (torch.ones(4, 2),), {"chunk_size": 2.0}, gk.ArgumentError, "chunk_size=2.0"),
        (lambda x: x, (torch.ones(4, 2),), {"keep": "some"}, gk.ArgumentError, "keep='some'"),
        (lambda x: x, (torch.ones(4, 2),), {"keep": -1}, gk.ArgumentError, "keep=-1"),
        (lambda x: x, (torch.ones(4, 2),), {"budget": "1GiB"}, gk.ArgumentError, 'keep="auto"'),
        (lambda x: x, (torch.ones(4, 2),), {"batch_dim": 5}, gk.ArgumentTypeError, "dimension 5"),
        (lambda x: [x, len(x)], (torch.ones(5, 2),), {"chunk_size": 2}, gk.ArgumentError, "differs from chunk to chunk"),
        (lambda x: x.add_(1), (torch.ones(4, 2),), {}, gk.ArgumentError, "in place"),
    ],
)
def test_bad_calls(model: Any, args: Any, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        gk.infer(model, *args, **options)
    assert "write instead" in str(caught.value)


def test_a_tensor_from_outside_the_arguments_is_refused() -> None:
    scale = torch.ones(6, requires_grad=True) * 2
    with pytest.raises(gk.ArgumentError, match="computed before, by mul"):
        gk.infer(lambda x: x * scale, batch())
    out = gk.infer(lambda x, scale: x * scale, batch(), scale)
    out[[1]].sum().backward()


def test_a_second_backward_is_refused_as_in_plain_torch() -> None:
    loss = gk.infer(mlp(), batch())[:3].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_values_changed_in_place_are_said_to_be() -> None:
    out = gk.infer(mlp(), batch())
    waiting = out[[1]].sum()
    out.values.zero_()
    with pytest.raises(gk.ChangedGraphError, match=r"out\.values was changed in place"):
        waiting.backward()


def test_a_forward_hook_that_hooks_its_output_works() -> None:
    model, x = mlp(), batch()
    model.register_forward_hook(lambda _m, _a, output: output.register_hook(lambda _g: None) and None)
    gk.infer(model, x, chunk_size=4)[[1]].sum().backward()
    assert x.grad is not None


def test_a_mask_for_all_that_is_as_large_as_the_batch() -> None:
    x, mask = torch.randn(N, N, requires_grad=True), torch.randn(N, N)

    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x @ mask

    with pytest.raises(gk.ArgumentError, match=r"shape \[12, 12\] may be one row for each"):
        gk.infer(model, x, mask, chunk_size=5)
    out = gk.infer(model, x, mask)
    out[[1, 2]].sum().backward()
    assert "whole chunks are replayed" in str(out.plan)
    expected = torch.zeros(N, N)
    expected[[1, 2]] = mask.sum(1)
    torch.testing.assert_close(x.grad, expected)
    gk.infer(lambda x: model(x, mask), x, chunk_size=5)


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.11")
def test_an_error_of_the_model_says_what_was_split() -> None:
    weights = torch.randn(N)  # one for each class, and as many classes as samples
    with pytest.raises(RuntimeError) as caught:
        gk.infer(lambda x, w: x @ w[:6, None], batch(), weights, chunk_size=4)
    assert "split these as one row a sample" in caught.value.__notes__[0]


def test_second_derivatives_are_refused() -> None:
    x = batch()
    out = gk.infer(mlp(), x)
    with pytest.raises(gk.ArgumentError, match="second derivatives"):
        torch.autograd.grad(out[[1]].sum(), x, create_graph=True)


def test_under_no_grad_nothing_is_differentiable() -> None:
    with torch.no_grad():
        out = gk.infer(mlp(), batch(), chunk_size=5)
        assert not out[[1]].requires_grad
    assert not out[[1]].requires_grad


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("keep", ["nothing", "everything"])
def test_a_copy_of_a_module_that_holds_an_inference_has_a_discarded_one(copied: Any, keep: str) -> None:
    module, x = nn.Linear(3, 2), torch.randn(6, 3)
    module.out = gk.infer(module, x, chunk_size=2, keep=keep)
    other = copied(module)
    assert torch.equal(other.out.values, module.out.values)
    assert (len(other.out), other.out.plan.kept_bytes, other.out.plan.chunks) == (6, 0, 3)
    with pytest.raises(gk.FreedGraphError, match="has been discarded"):
        other.out[[0]]
    other.out.discard()
    module.out[[1, 4]].square().sum().backward()  # the one that was copied is as it was
    other(x)[[1, 4]].square().sum().backward()
    torch.testing.assert_close(module.weight.grad, other.weight.grad)


def test_a_value_next_to_zero_that_is_all_rounding_is_no_difference() -> None:
    """After a ReLU it may be the only one that differs."""
    from graphkeep._replay import near_values

    torch.manual_seed(0)
    a = torch.rand(10, 8) + 0.1
    a[3, 3] = 0
    b = a.clone()
    b[3, 3] = 1e-8
    assert near_values(a, b)
    b[3, 3] = 1e-3
    assert not near_values(a, b)
    assert not near_values(a * 1e-6, a * 1e-6 + 1e-9)
    masked = torch.full((10, 8), -1e9)
    masked[:, 0] = torch.rand(10)
    other = masked.clone()
    other[0, 0] += 1e-3
    assert not near_values(masked, other)
