"""A Sequential without detours: layers in the order that is fastest, and what they call is called directly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from fedbayes.model.convolution import conv2d
from fedbayes.model.tracing import alone


class Straight(nn.Sequential):
    """A Sequential whose max-pools are called before the ReLUs that stand in front of them.

    A ReLU keeps the order of its inputs, so the largest of a window comes out the same, and so does its gradient; the
    ReLU is left with a fraction of the numbers. Layers keep their places and names. In the steps of one client, usual
    layers are not called as modules: that takes longer than their functions on a small batch.
    """

    order: list[int] | None = None  # in which its layers are called; None: as they stand, in a slice of one

    def forward(self, input: Tensor) -> Tensor:
        layers: list[Any] = list(self._modules.values())
        ordered = layers if self.order is None else [layers[place] for place in self.order]
        if not alone() or has_torch_function((input,)):  # functions that are intercepted are those of modules
            for layer in ordered:
                input = layer(input)
            return input
        for layer in ordered:
            function = None if layer._forward_hooks or layer._forward_pre_hooks else DIRECT.get(type(layer))
            input = layer(input) if function is None else function(layer, input)
        return input


def straight(module: nn.Module) -> nn.Module:
    """The module, each plain Sequential in it without detours, but for those with hooks on gradients."""
    for layer in module.modules():
        if type(layer) is nn.Sequential and not any(m._backward_hooks or m._backward_pre_hooks for m in layer):
            layer.__class__ = Straight
            layer.order = _in_order(layer)  # type: ignore[assignment]
    return module


def calls_directly(module: nn.Module) -> bool:
    """Whether all that the module calls is in DIRECT: nothing has to be intercepted to be done our way."""
    if type(module) is not Straight:
        return False
    return all(type(layer) in DIRECT or calls_directly(layer) for layer in module)


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


def _linear(layer: Any, x: Tensor) -> Tensor:
    own = layer._parameters
    return F.linear(x, own["weight"], own["bias"])


def _conv2d(layer: Any, x: Tensor) -> Tensor:
    if layer.padding_mode != "zeros":
        return layer(x)
    own = layer._parameters
    return conv2d(x, own["weight"], own["bias"], layer.stride, layer.padding, layer.dilation, layer.groups)


def _max_pool2d(layer: Any, x: Tensor) -> Tensor:
    if layer.return_indices:
        return layer(x)
    return torch.max_pool2d(x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)


# What layers do, without a module's call around it.
DIRECT: dict[type, Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.MaxPool2d: _max_pool2d,
    nn.Flatten: lambda layer, x: x.flatten(layer.start_dim, layer.end_dim),
    nn.ReLU: lambda layer, x: torch.relu_(x) if layer.inplace else torch.relu(x),
    nn.Tanh: lambda layer, x: torch.tanh(x),
    nn.Sigmoid: lambda layer, x: torch.sigmoid(x),
}
