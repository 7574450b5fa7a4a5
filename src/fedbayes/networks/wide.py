"""pFedPF's networks: LeNet-5, and wide residual networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError


class LeNet(nn.Module):
    """Two 5x5 convolutions with 2x2 max-pools, hidden layers of 120 and 84, ReLU, and a linear head."""

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        height, width = ((n // 2 - 4) // 2 for n in shape[1:])
        self.hidden1 = nn.Linear(16 * height * width, 120)
        self.hidden2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(F.relu(self.hidden2(F.relu(self.hidden1(x.flatten(1))))))


def lenet(shape: Sequence[int], outputs: int) -> nn.Module:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pools: pFedPF's for MNIST (61,706 weights)."""
    if len(shape) != 3 or min(shape[1:]) < 12:
        raise InputError(f"network lenet needs images [C, H, W] of at least 12 x 12, not {list(shape)}; try mlp")
    return LeNet(shape, outputs)


class WideBlock(nn.Module):
    """x + conv(drop(relu(norm(conv(relu(norm(x))))))), 3x3; a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        changes = stride > 1 or before != channels
        self.project = nn.Conv2d(before, channels, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(x))
        way = x if self.project is None else self.project(y)
        return way + self.conv2(self.drop(F.relu(self.norm2(self.conv1(y)))))


class WideResNet(nn.Module):
    """A 3x3 convolution, three stages of wide blocks, norm, ReLU, the mean over positions, and a linear head."""

    def __init__(self, channels: int, outputs: int, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        blocks, before = [], 16
        for level in range(3):
            for number in range((depth - 4) // 6):
                after = 16 * width * 2**level
                blocks.append(WideBlock(before, after, 2 if level and not number else 1, dropout))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(before)
        self.head = nn.Linear(before, outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.blocks(self.conv(x))))
        return self.head(x.mean((-2, -1)))


def wide_resnet(shape: Sequence[int], outputs: int, depth: int = 40, width: int = 2, dropout: float = 0.0) -> nn.Module:
    """A wide residual network (Zagoruyko & Komodakis, 2016): depth 6n + 4; 40-2 is pFedPF's for table I."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise InputError(f"network wide_resnet needs images [C, H, W] of at least 8 x 8, not {list(shape)}; try mlp")
    if depth < 10 or (depth - 4) % 6:
        raise InputError(f"depth of a wide_resnet must be 6n + 4, such as 16, 28 or 40, not {depth}")
    return WideResNet(shape[0], outputs, depth, width, dropout)
