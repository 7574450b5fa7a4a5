"""FedPPD's networks (supplement, tables 1 and 2): a teacher, which its baselines share, and a student for each set."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fedbayes.errors import InputError

Shape = Sequence[int]


def fedppd_mnist(shape: Shape, outputs: int) -> nn.Module:
    """FedPPD's teacher for MNIST: convolutions of 10 and 20, hidden 50, dropout (21,840 weights)."""
    return _network(shape, outputs, (10, 20), (50,), dropout=0.5)


def fedppd_mnist_student(shape: Shape, outputs: int) -> nn.Module:
    """FedPPD's student for MNIST: twice as wide (85,670)."""
    return _network(shape, outputs, (20, 40), (100,), dropout=0.5)


def fedppd_femnist(shape: Shape, outputs: int) -> nn.Module:
    """FedPPD's teacher for FEMNIST: convolutions of 32 and 64, hidden 128, dropout."""
    return _network(shape, outputs, (32, 64), (128,), dropout=0.5)


def fedppd_femnist_student(shape: Shape, outputs: int) -> nn.Module:
    """FedPPD's student for FEMNIST: three convolutions, hidden 1600 and 180, dropout.

    Padded by 2, our reading: a third 5 x 5 convolution does not fit otherwise.
    """
    return _network(shape, outputs, (50, 100, 200), (1600, 180), dropout=0.5, padding=2)


def fedppd_cifar(shape: Shape, outputs: int) -> nn.Module:
    """FedPPD's teacher for CIFAR-10: convolutions of 6 and 16, hidden 120 and 84 (62,006 weights)."""
    return _network(shape, outputs, (6, 16), (120, 84))


def fedppd_cifar_student(shape: Shape, outputs: int) -> nn.Module:
    """FedPPD's student for CIFAR-10: convolutions of 16 and 16, hidden 256 and 128 (144,474)."""
    return _network(shape, outputs, (16, 16), (256, 128))


def _network(
    shape: Shape,
    outputs: int,
    channels: Sequence[int],
    hidden: Sequence[int],
    *,
    dropout: float = 0.0,
    padding: int = 0,
) -> nn.Module:
    """5 x 5 convolutions, each max-pooled and rectified, then hidden layers; Xavier's initial weights.

    Dropout stands after every convolution but the first, and after every hidden layer.
    """
    if len(shape) != 3:
        raise InputError(f"this network needs images [C, H, W], not {list(shape)}; try mlp")
    layers: list[nn.Module] = []
    height, width = shape[1:]
    for place, (before, after) in enumerate(pairwise((shape[0], *channels))):
        layers.append(nn.Conv2d(before, after, 5, padding=padding))
        layers += [nn.Dropout2d(dropout)] if dropout and place else []
        layers += [nn.MaxPool2d(2), nn.ReLU()]
        height, width = ((n + 2 * padding - 4) // 2 for n in (height, width))
    if min(height, width) < 1:
        raise InputError(f"images of {shape[1]} x {shape[2]} are too small for this network; try mlp")
    layers.append(nn.Flatten())
    for a, b in pairwise((channels[-1] * height * width, *hidden)):
        layers += [nn.Linear(a, b), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    layers.append(nn.Linear(hidden[-1], outputs))
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return nn.Sequential(*layers)
