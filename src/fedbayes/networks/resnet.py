"""Residual networks for small images (He et al., 2016): CIFAR's by depth 6n + 2, and four stages of basic blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.errors import InputError, unknown

# By name: a normalisation of so many channels. Groups of GroupNorm: 8, or as many as divide the channels.
NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "group": lambda channels: nn.GroupNorm(math.gcd(8, channels), channels),
}
SHORTCUTS = ("pad", "project")  # where a block changes the shape: zeros beside the old channels, or a 1 x 1 convolution


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x)), two 3 x 3 convolutions, the first of them strided."""

    def __init__(self, before: int, channels: int, stride: int, norm: str, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.norm1 = NORMS[norm](channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = NORMS[norm](channels)
        self.stride, self.more = stride, channels - before
        changes = stride > 1 or before != channels
        self.project: nn.Module | None = None
        if changes and shortcut == "project":
            self.project = nn.Sequential(nn.Conv2d(before, channels, 1, stride, bias=False), NORMS[norm](channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        if self.project is not None:
            return self.project(x)
        if self.stride == 1 and not self.more:
            return x
        low = self.more // 2
        return F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, low, self.more - low))


class ResNet(nn.Module):
    """A 3 x 3 convolution, stages of blocks (each halves the image, doubles the channels), the mean, one linear map."""

    def __init__(
        self, channels: int, outputs: int, width: int, stages: Sequence[int], norm: str, shortcut: str
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.norm = NORMS[norm](width)
        blocks, before = [], width
        for level, count in enumerate(stages):
            for number in range(count):
                after = width * 2**level
                blocks.append(Block(before, after, 2 if level and not number else 1, norm, shortcut))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.blocks(x).mean((-2, -1)))


def resnet(
    shape: Sequence[int],
    outputs: int,
    depth: int = 20,
    width: int = 16,
    norm: str = "batch",
    shortcut: str = "pad",
) -> nn.Module:
    """CIFAR's ResNet of depth 6n + 2 (8, 20, 44, ...) in three stages; 20 has 269,722 weights for ten classes."""
    if depth < 8 or (depth - 2) % 6:
        raise InputError(f"network resnet: depth must be 6n + 2, such as 8, 20 or 44, not {depth}")
    return _resnet(shape, outputs, width, [(depth - 2) // 6] * 3, norm, shortcut)


def resnet18(shape: Sequence[int], outputs: int, width: int = 64, norm: str = "batch") -> nn.Module:
    """Four stages of two basic blocks behind a 3 x 3 stem: ResNet-18 for 32 x 32 images (11,173,962 weights)."""
    return _resnet(shape, outputs, width, (2, 2, 2, 2), norm, "project")


def resnet34(shape: Sequence[int], outputs: int, width: int = 64, norm: str = "batch") -> nn.Module:
    """Four stages of 3, 4, 6, 3 basic blocks: ResNet-34 for 32 x 32 images (21,282,122 weights)."""
    return _resnet(shape, outputs, width, (3, 4, 6, 3), norm, "project")


def _resnet(
    shape: Sequence[int], outputs: int, width: int, stages: Sequence[int], norm: str, shortcut: str
) -> nn.Module:
    if len(shape) != 3:
        raise InputError(f"a residual network needs images [C, H, W], not {list(shape)}; try mlp")
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if shortcut not in SHORTCUTS:
        raise unknown("shortcut", shortcut, SHORTCUTS)
    return ResNet(shape[0], outputs, width, stages, norm, shortcut)
