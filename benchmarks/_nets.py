"""Networks for `infer`: one batch of samples, a loss of some rows, and gradients of inputs and weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


@dataclass
class Batch:
    """A network and its samples. Inputs and weights require gradients, which exist from the start, as zeros."""

    net: nn.Module
    inputs: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        self.inputs.requires_grad_()
        self.zero_grad()

    def __len__(self) -> int:
        return len(self.inputs)

    def loss(self, outputs: Tensor, rows: Tensor | slice) -> Tensor:
        return F.cross_entropy(outputs, self.target[rows], reduction="sum")

    def leaves(self) -> list[Tensor]:
        return [self.inputs, *self.net.parameters()]

    def gradients(self) -> list[Tensor]:
        return [leaf.grad for leaf in self.leaves() if leaf.grad is not None]

    def zero_grad(self) -> None:
        for leaf in self.leaves():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
            leaf.grad.zero_()

    def apart(self) -> list[Tensor]:
        """What is there in every variant and before it: weights, inputs, their gradients, targets."""
        return [*self.leaves(), *self.gradients(), self.target]


def tutorial_net(scale: int) -> nn.Module:
    """The network of PyTorch's CIFAR-10 tutorial, with `scale` times as many channels and features."""
    a, b, c, d = (scale * width for width in (6, 16, 120, 84))
    convs = [nn.Conv2d(3, a, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convs, nn.Linear(b * 25, c), nn.ReLU(), nn.Linear(c, d), nn.ReLU(), nn.Linear(d, CLASSES))


class Encoder(nn.Module):
    """Two transformer layers of width 128 on 32 vectors, and the mean of what comes out."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        # no dropout: the gradients of all variants are compared
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(128, out)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.last(self.layers(self.first(vectors)).mean(1))


def images(samples: int, scale: int = 4) -> Batch:
    torch.manual_seed(0)
    return Batch(tutorial_net(scale), torch.randn(samples, 3, 32, 32), torch.randint(CLASSES, (samples,)))


def sequences(samples: int) -> Batch:
    torch.manual_seed(0)
    return Batch(Encoder(CLASSES), torch.randn(samples, 32, 64), torch.randint(CLASSES, (samples,)))
