"""Plans of `budget` beside the optimum: seconds that run again, over the least that any schedule takes.

For one step of each network, at limits that are shares of what it needs without one; seconds are those that the ops took when
the step was recorded, the median over some steps. The optimum is that of an integer program (`benchmarks/_optimum.py`) on the
same accounting. Where the solver did not finish in time, the ratio is to its bound: no schedule takes less, and maybe none
takes that little. Where not even the optimum fits there is no row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphkeep as gk
from benchmarks import _measure
from benchmarks._measure import Row
from benchmarks._optimum import optimum
from graphkeep._budget._plan import plan
from graphkeep._budget._trace import Trace

SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2)
STEPS = 7
PATIENCE = 10.0  # seconds that the solver may take
WANTED = 1.1

Step = Callable[[], object]


def rows(quick: bool = False) -> Iterator[Row]:
    for model in ("MLP, 8 layers",) if quick else MODELS:
        torch.manual_seed(0)
        trace = trace_of(MODELS[model]())
        for share in (0.6,) if quick else SHARES:
            yield from _rows(model, trace, share)


def trace_of(step: Step) -> Trace:
    """The trace of a step, with the median seconds of each op."""
    traces = []
    with gk.budget(1 << 50) as b:
        for _ in range(STEPS):
            step()
            last = b._holdings.steps.last
            assert last is not None
            traces.append(last)
    trace = traces[-1]
    runs = zip(*(trace.ops for trace in traces[1:]), strict=True)
    trace.ops = [ops[-1]._replace(seconds=statistics.median(op.seconds for op in ops)) for ops in runs]
    return trace


def _rows(model: str, trace: Trace, share: float) -> Iterator[Row]:
    limit = int(share * trace.simulate(set(), 1 << 50).most)
    found, made = optimum(trace, limit, PATIENCE), plan(trace, limit)
    if found.bound == float("inf"):
        if made.fits:
            raise AssertionError(f"{model}, {share:.0%}: a plan fits where none can")
        return
    least = found.bound if found.seconds is None or found.bound < found.seconds * (1 - 1e-3) else found.seconds
    if made.fits and made.seconds < least * (1 - 1e-3):
        raise AssertionError(f"{model}, {share:.0%}: a plan of {made.seconds} s is under the optimum, {least} s")
    forward = sum(op.seconds for op in trace.ops)
    note = f"{made.seconds / forward:.3f} over {least / forward:.3f} of a forward"
    if least is not found.seconds:
        note += " (a bound" + (f"; found: {found.seconds / forward:.3f})" if found.seconds is not None else ")")
    ratio = made.seconds / least if least else float(made.seconds > 0) + 1.0
    if not made.fits:
        ratio, note = float("inf"), f"{note}; the plan does not fit"
    yield Row("budget_optimum", model, f"{share:.0%} of the bytes", ratio, wanted=WANTED, note=note)


def _mlp() -> Step:
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.ReLU())), nn.Linear(256, 10))
    x, y = torch.randn(512, 256), torch.randint(10, (512,))
    return lambda: F.cross_entropy(net(x), y).backward()


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + F.dropout(self.out(mixed), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


def _gpt() -> Step:
    tokens, places = nn.Embedding(100, 128), nn.Embedding(64, 128)
    net = nn.Sequential(*(_Block(128, 4, 0.1) for _ in range(2)), nn.LayerNorm(128), nn.Linear(128, 100))
    x = torch.randint(100, (4, 65))

    def step() -> None:
        h = F.dropout(tokens(x[:, :-1]) + places(torch.arange(64)), 0.1)
        F.cross_entropy(net(h).flatten(0, 1), x[:, 1:].flatten()).backward()

    return step


def _conv(channels: int, out: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(*_conv(channels, channels), *_conv(channels, channels)[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.inner(x))


def _resnet() -> Step:
    body = (*_conv(3, 16), _Residual(16), _Residual(16), *_conv(16, 32, stride=2), _Residual(32))
    net = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    return lambda: F.cross_entropy(net(x), y).backward()


def _densenet() -> Step:
    first, last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(56, 10)
    layers = [nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 8, 3, padding=1)) for c in range(16, 56, 8)]
    x, y = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

    def step() -> None:
        features = [first(x)]
        for layer in layers:
            features.append(layer(torch.cat(features, 1)))
        F.cross_entropy(last(torch.cat(features, 1).mean((2, 3))), y).backward()

    return step


def _lstm() -> Step:
    gates, head = nn.Linear(64 + 128, 4 * 128), nn.Linear(128, 10)
    x, y = torch.randn(8, 64, 64), torch.randint(10, (64,))

    def step() -> None:
        h = c = torch.zeros(64, 128)
        for part in x:
            i, f, g, o = gates(torch.cat((part, h), 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        F.cross_entropy(head(h), y).backward()

    return step


class _UNet(nn.Module):
    def __init__(self, channels: int, out: int, inner: nn.Module | None, within: int) -> None:
        super().__init__()
        self.down = nn.Sequential(*_twice(channels, out))
        self.inner = inner
        if inner is not None:
            self.up, self.join = nn.ConvTranspose2d(within, out, 2, 2), nn.Sequential(*_twice(2 * out, out))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        if self.inner is None:
            return x
        y: Tensor = self.join(torch.cat((x, self.up(self.inner(F.max_pool2d(x, 2)))), 1))
        return y


def _twice(channels: int, out: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.Conv2d(out, out, 3, padding=1), nn.ReLU()]


def _unet() -> Step:
    inner: nn.Module = _UNet(16, 32, None, 0)
    net = nn.Sequential(_UNet(3, 8, _UNet(8, 16, inner, 32), 16), nn.Conv2d(8, 2, 1))
    x, y = torch.randn(4, 3, 32, 32), torch.randn(4, 2, 32, 32)
    return lambda: F.mse_loss(net(x), y).backward()


MODELS: dict[str, Callable[[], Step]] = {
    "MLP, 8 layers": _mlp,
    "GPT, 2 blocks": _gpt,
    "residual conv net": _resnet,
    "DenseNet block": _densenet,
    "LSTM, 8 steps": _lstm,
    "UNet": _unet,
}

if __name__ == "__main__":
    _measure.main(rows)
