"""Seven networks for `budget`, and a training step of each.

Each is written out of blocks, and runs them through `Net.around`, so that a peer can put a checkpoint around every block. A
step is forward, backward and an optimizer's step with a learning rate of 0: it writes to every parameter, as training does,
and all variants go on from the same weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A network of blocks.

    Attributes:
        around: runs one block; a peer puts something else here.
        at_once: how many blocks in a row count as one.
    """

    around: Callable[..., Any]
    at_once: int

    def __init__(self) -> None:
        super().__init__()
        self.around = _just_run
        self.at_once = 1

    def chain(self, x: Any, blocks: Sequence[Callable[..., Any]]) -> Any:
        """One block after the other, `at_once` of them inside one `around`."""
        for i in range(0, len(blocks), self.at_once):
            x = self.around(_Run(blocks[i : i + self.at_once]), x)
        return x


def _just_run(block: Callable[..., Any], *args: Any) -> Any:
    return block(*args)


class _Run:
    def __init__(self, blocks: Sequence[Callable[..., Any]]) -> None:
        self.blocks = blocks

    def __call__(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


# a GPT --------------------------------------------------------------------------------------------------------------------


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(a.transpose(1, 2).reshape(b, t, c)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class GPT(Net):
    def __init__(self, layers: int, width: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, 0.1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.words(tokens) + self.places.weight[: tokens.shape[1]], 0.1)
        return self.head(self.norm(self.chain(x, list(self.blocks)))).flatten(0, 1)


# images -------------------------------------------------------------------------------------------------------------------


def conv(channels: int, out: int, size: int = 3, stride: int = 1, relu: bool = True) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Conv2d(channels, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out)]
    return nn.Sequential(*parts, *([nn.ReLU(inplace=True)] if relu else []))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(conv(channels, width, 1), conv(width, width, 3, stride), conv(width, out, 1, relu=False))
        same = stride == 1 and channels == out
        self.side = nn.Identity() if same else conv(channels, out, 1, stride, relu=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.side(x), inplace=True)


class ResNet(Net):
    """He et al. 2016, with bottlenecks; ResNet-50 with the default depths."""

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), classes: int = 100) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], 64
        for i, depth in enumerate(depths):
            for j in range(depth):
                blocks.append(Bottleneck(channels, 64 << i, 2 if i and not j else 1))
                channels = 4 * (64 << i)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.chain(self.stem(x), list(self.blocks)).mean((2, 3)))


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(F.relu(self.norm2(new), inplace=True))], 1)


class DenseNet(Net):
    """Huang et al. 2017; DenseNet-121 with the default depths."""

    def __init__(self, depths: Sequence[int] = (6, 12, 24, 16), growth: int = 32, classes: int = 100) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Sequential(conv(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        for i, depth in enumerate(depths):
            if i:
                norm = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
                blocks.append(nn.Sequential(*norm, nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)))
                channels //= 2
            for _ in range(depth):
                blocks.append(DenseLayer(channels, growth))
                channels += growth
        self.blocks, self.norm, self.head = nn.ModuleList(blocks), nn.BatchNorm2d(channels), nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.chain(self.stem(x), list(self.blocks)))).mean((2, 3)))


class UNet(Net):
    """Ronneberger et al. 2015, with batch norm. A block is one convolution with what follows it; a level has two."""

    def __init__(self, width: int, depth: int, classes: int = 4) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]

        def level(channels: int, out: int) -> nn.ModuleList:
            return nn.ModuleList([conv(channels, out), conv(out, out)])

        self.down = nn.ModuleList(level(a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[1:], widths, strict=False))[::-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(level(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, level in enumerate(self.down):
            if i:
                skips.append(x)
                x = F.max_pool2d(x, 2)
            x = self.chain(x, list(level.children()))
        for widen, level in zip(self.widen, self.up, strict=True):
            x = self.chain(torch.cat([skips.pop(), widen(x)], 1), list(level.children()))
        return self.head(x).permute(0, 2, 3, 1).flatten(0, 2)


# over time, and over trees ------------------------------------------------------------------------------------------------

State = tuple[Tensor, Tensor]


class Cell(nn.Module):
    """An LSTM's cell, with one forget gate for each state that goes in."""

    def __init__(self, inputs: int, width: int, states: int = 1) -> None:
        super().__init__()
        self.states = states
        self.linear = nn.Linear(inputs + states * width, (3 + states) * width)

    def forward(self, x: Tensor | None, *states: State) -> State:
        parts = [h for h, _ in states] if x is None else [x, *(h for h, _ in states)]
        i, o, u, *forget = self.linear(torch.cat(parts, 1)).chunk(3 + self.states, 1)
        c = i.sigmoid() * u.tanh()
        for f, (_, before) in zip(forget, states, strict=True):
            c = c + f.sigmoid() * before
        return o.sigmoid() * c.tanh(), c


class LSTM(Net):
    """A loop in Python over the steps of a sequence. A block is ten of them."""

    BLOCK = 10

    def __init__(self, inputs: int, width: int, classes: int = 10) -> None:
        super().__init__()
        self.cell, self.head = Cell(inputs, width), nn.Linear(width, classes)
        self.width = width

    def forward(self, sequence: Tensor) -> Tensor:
        def block(steps: Sequence[Tensor]) -> Callable[[State], State]:
            def run(state: State) -> State:
                for x in steps:
                    state = self.cell(x, state)
                return state

            return run

        steps = sequence.unbind(1)
        zeros = sequence.new_zeros(len(sequence), self.width)
        h, _ = self.chain((zeros, zeros), [block(steps[i : i + self.BLOCK]) for i in range(0, len(steps), self.BLOCK)])
        return self.head(h)


class TreeLSTM(Net):
    """Tai et al. 2015, over binary trees, here of a batch of vectors. A block is one inner node."""

    def __init__(self, inputs: int, width: int, classes: int = 10) -> None:
        super().__init__()
        self.leaf, self.inner, self.head = nn.Linear(inputs, 2 * width), Cell(0, width, states=2), nn.Linear(width, classes)

    def forward(self, words: Tensor, order: Sequence[int]) -> Tensor:
        states: list[State] = [self._leaf(word) for word in words]
        for place in order:  # the two neighbours there become one
            states[place : place + 2] = [self.around(self._inner, *states[place], *states[place + 1])]
        return self.head(states[0][0])

    def _leaf(self, word: Tensor) -> State:
        h, c = self.leaf(word).tanh().chunk(2, 1)
        return h, c

    def _inner(self, h1: Tensor, c1: Tensor, h2: Tensor, c2: Tensor) -> State:
        return self.inner(None, (h1, c1), (h2, c2))


# a GAN --------------------------------------------------------------------------------------------------------------------


class Generator(Net):
    """Radford et al. 2016 (DCGAN)."""

    def __init__(self, noise: int, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << i for i in range(depth)][::-1]
        first = nn.Sequential(nn.ConvTranspose2d(noise, widths[0], 4), nn.BatchNorm2d(widths[0]), nn.ReLU())
        blocks: list[nn.Module] = [first]
        for a, b in itertools.pairwise(widths):
            blocks.append(nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()))
        self.blocks = nn.ModuleList([*blocks, nn.Sequential(nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())])

    def forward(self, noise: Tensor) -> Tensor:
        return self.chain(noise, list(self.blocks))


class Discriminator(Net):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width << i for i in range(depth)]
        blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2))]
        for a, b in itertools.pairwise(widths):
            blocks.append(nn.Sequential(nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)))
        self.blocks = nn.ModuleList([*blocks, nn.Sequential(nn.Conv2d(widths[-1], 1, 4), nn.Flatten(0))])

    def forward(self, images: Tensor) -> Tensor:
        return self.chain(images, list(self.blocks))


# training steps -----------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """One or more networks and a step that trains them. Gradients exist from the start, as zeros.

    Attributes:
        nets: those that it trains, by number.
        losses: one for each net, whose backward and optimizer's step come before the next.
        given: tensors of the batch.
        compiled: what runs in the place of a net.
        compilations: what was compiled for it so far, by budget.
    """

    nets: list[Net]
    losses: Sequence[Callable[[Job, int], Tensor]]
    given: list[Tensor]
    compiled: dict[int, Callable[..., Any]] = field(default_factory=dict)
    compilations: dict[float, dict[int, Callable[..., Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in self.nets]
        for net in self.nets:
            net.train()
        self.zero_grad()

    def __call__(self, net: int, *args: Any) -> Any:
        return self.compiled.get(net, self.nets[net])(*args)

    def step(self, number: int) -> None:
        """One training step; the same number gives the same gradients."""
        torch.manual_seed(number)
        for loss, optimizer in zip(self.losses, self.optimizers, strict=True):
            loss(self, number).backward()
            optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [parameter for net in self.nets for parameter in net.parameters()]

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()

    def apart(self) -> list[Tensor]:
        """What is there before a step in every variant: parameters, gradients, buffers, the batch."""
        buffers = [buffer for net in self.nets for buffer in net.buffers()]
        return [*self.parameters(), *self.gradients(), *buffers, *self.given]


def _classifier(net: Net, inputs: Tensor, target: Tensor) -> Job:
    return Job([net], [lambda job, _: F.cross_entropy(job(0, inputs), target)], [inputs, target])


def _gpt(quick: bool) -> Job:
    layers, width, length, words, batch = (2, 32, 16, 64, 2) if quick else (4, 256, 128, 1024, 4)
    net = GPT(layers, width, 4, length, words)
    return _classifier(net, torch.randint(words, (batch, length)), torch.randint(words, (batch * length,)))


def _images(net: Net, batch: int, size: int) -> Job:
    return _classifier(net, torch.randn(batch, 3, size, size), torch.randint(100, (batch,)))


def _resnet(quick: bool) -> Job:
    return _images(ResNet((1, 1)), 2, 32) if quick else _images(ResNet(), 4, 64)


def _densenet(quick: bool) -> Job:
    return _images(DenseNet((2, 2), 8), 2, 32) if quick else _images(DenseNet(), 6, 64)


def _unet(quick: bool) -> Job:
    width, depth, batch, size = (4, 2, 1, 32) if quick else (32, 4, 2, 80)
    return _classifier(UNet(width, depth), torch.randn(batch, 3, size, size), torch.randint(4, (batch * size * size,)))


def _lstm(quick: bool) -> Job:
    steps, batch, width = (20, 2, 8) if quick else (60, 48, 256)
    return _classifier(LSTM(width, width), torch.randn(batch, steps, width), torch.randint(10, (batch,)))


def _treelstm(quick: bool) -> Job:
    leaves, batch, width = (6, 2, 8) if quick else (24, 64, 256)
    net, words, target = TreeLSTM(width, width), torch.randn(leaves, batch, width), torch.randint(10, (batch,))

    def loss(job: Job, number: int) -> Tensor:
        draw = torch.Generator().manual_seed(number)
        order = [int(torch.randint(n, (), generator=draw)) for n in range(leaves - 1, 0, -1)]
        return F.cross_entropy(job(0, words, order), target)

    return Job([net], [loss], [words, target])


def _gan(quick: bool) -> Job:
    batch, width, depth = (2, 4, 2) if quick else (16, 32, 4)
    size = 4 << depth
    generator, discriminator = Generator(32, width, depth), Discriminator(width, depth)
    real, noise = torch.randn(batch, 3, size, size), torch.randn(batch, 32, 1, 1)

    def judged(job: Job, images: Tensor, real: bool) -> Tensor:
        scores = job(0, images)
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    def first(job: Job, _: int) -> Tensor:
        with torch.no_grad():
            fakes = job(1, noise)
        return judged(job, real, True) + judged(job, fakes, False)

    def second(job: Job, _: int) -> Tensor:
        return judged(job, job(1, noise), True)

    return Job([discriminator, generator], [first, second], [real, noise])


_BUILD = {
    "GPT": _gpt,
    "ResNet-50": _resnet,
    "DenseNet-121": _densenet,
    "UNet": _unet,
    "LSTM": _lstm,
    "TreeLSTM": _treelstm,
    "GAN": _gan,
}
MODELS = tuple(_BUILD)


def build(model: str, quick: bool = False) -> Job:
    torch.manual_seed(0)
    return _BUILD[model](quick)
