"""Layers in the order that is fastest: a max-pool goes before the ReLU that it follows."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor, nn


class PoolsFirst(nn.Sequential):
    """A Sequential whose max-pools are called before the ReLUs that stand in front of them.

    A ReLU keeps the order of its inputs, so the largest of a window comes out the same, and so does its gradient; the
    ReLU is left with a fraction of the numbers. Layers keep their places and names.
    """

    order: list[int] | None = None  # in which its layers are called; None: as they stand, in a slice of one

    def forward(self, input: Tensor) -> Tensor:
        layers = list(self)
        for place in self.order or range(len(layers)):
            input = layers[place](input)
        return input


def pools_first(module: nn.Module) -> nn.Module:
    """The module, each plain Sequential in it with its pools first."""
    for layer in module.modules():
        if type(layer) is nn.Sequential and (order := _in_order(layer)) != list(range(len(layer))):
            layer.__class__ = PoolsFirst
            layer.order = order  # type: ignore[assignment]
    return module


def _in_order(layers: Iterable[nn.Module]) -> list[int]:
    layers = list(layers)
    order = list(range(len(layers)))
    for i, (a, b) in enumerate(pairwise(layers)):
        if _may_swap(a, b):
            order[i : i + 2] = i + 1, i
    return order


def _may_swap(first: nn.Module, second: nn.Module) -> bool:
    fits = type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices
    return fits and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (first, second))
