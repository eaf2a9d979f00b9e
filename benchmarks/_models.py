"""Two trunks with eight heads each, of ops that take some milliseconds on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 8
CLASSES = 10


@dataclass
class Job:
    """A trunk, its heads, a batch and its targets, one row of targets a head. Gradients exist from the start, as zeros."""

    trunk: nn.Module
    heads: list[nn.Module]
    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        self.zero_grad()

    def loss(self, head: int, h: Tensor) -> Tensor:
        return F.cross_entropy(self.heads[head](h), self.targets[head])

    def parameters(self) -> Iterator[nn.Parameter]:
        for module in (self.trunk, *self.heads):
            yield from module.parameters()

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def zero_grad(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.zero_()

    def apart(self) -> list[Tensor]:
        """What is there in every variant and before it: parameters, gradients, the batch."""
        return [*self.parameters(), *self.gradients(), self.inputs, self.targets]


def build(name: str) -> Job:
    torch.manual_seed(0)
    return _BUILD[name]()


def _conv(channels: int, out: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(8, out), nn.SiLU())


def _conv_net() -> Job:
    """Convolutions on 3 x 64 x 64 images; the last head is twice as deep as the others."""
    trunk = nn.Sequential(_conv(3, 32), _conv(32, 64, stride=2), *(_conv(64, 64) for _ in range(3)))

    def head(depth: int) -> nn.Module:
        pool = (nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, CLASSES))
        return nn.Sequential(*(_conv(64, 64) for _ in range(depth)), *pool)

    heads = [head(1) for _ in range(HEADS - 1)] + [head(2)]
    return Job(trunk, heads, torch.randn(4, 3, 64, 64), torch.randint(CLASSES, (HEADS, 4)))


class _LastToken(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h[:, -1]


def _transformer() -> Job:
    """Encoder layers of width 128 on 128 vectors; the last head has two layers, the others one."""

    def layer() -> nn.Module:
        # no dropout: the gradients of all variants are compared
        return nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def head(depth: int) -> nn.Module:
        return nn.Sequential(*(layer() for _ in range(depth)), _LastToken(), nn.Linear(128, CLASSES))

    trunk = nn.Sequential(nn.Linear(64, 128), *(layer() for _ in range(4)))
    heads = [head(1) for _ in range(HEADS - 1)] + [head(2)]
    return Job(trunk, heads, torch.randn(6, 128, 64), torch.randint(CLASSES, (HEADS, 6)))


_BUILD = {"conv": _conv_net, "transformer": _transformer}
MODELS = tuple(_BUILD)
