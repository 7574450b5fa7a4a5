"""A Sequential without detours: layers in the order that is fastest, and what they call is called directly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

from fedbayes.model.convolution import FEW, conv2d
from fedbayes.model.tracing import alone

Function = Callable[..., Tensor]
Options = tuple[Any, ...]
NONE = ""  # in place of the name of a bias that a layer has not


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
            if not _is_direct(layer):
                input = layer(input)
                continue
            (function, options), own = DIRECT[type(layer)](layer), layer._parameters
            input = function(input, own["weight"], own["bias"], *options) if own else function(input, *options)
        return input


def straight(module: nn.Module) -> nn.Module:
    """The module, each plain Sequential in it without detours, but for those with hooks on gradients."""
    for layer in module.modules():
        if type(layer) is nn.Sequential and not any(m._backward_hooks or m._backward_pre_hooks for m in layer):
            layer.__class__ = Straight
            layer.order = _in_order(layer)  # type: ignore[assignment]
    return module


def as_written(module: nn.Module) -> nn.Module:
    """The module with its Sequentials as the user wrote them, in place."""
    for layer in module.modules():
        if type(layer) is Straight:
            layer.__class__ = nn.Sequential  # type: ignore[assignment]
            del layer.order
    return module


class Direct(NamedTuple):
    """The functions that a network calls one after another, with the names of their weights and biases."""

    calls: tuple[tuple[Function, tuple[str, ...], Options], ...]
    own: dict[str, Any]  # the module's own weights, for those that a call is not given

    @classmethod
    def of(cls, module: nn.Module) -> Direct | None:
        """None where the module calls anything that is not in DIRECT, or has buffers, which somebody may look at."""
        layers, own = list(_layers(module)), dict(module.named_parameters())
        if not all(_is_direct(layer) for layer in layers) or any(True for _ in module.buffers()):
            return None
        names = {id(p): name for name, p in own.items()}
        tables = [layer._parameters for layer in layers]  # in the order of registration, which pruning changes
        places = [tuple(names.get(id(t[key]), NONE) for key in ("weight", "bias")) if t else () for t in tables]
        functions = [DIRECT[type(layer)](layer) for layer in layers]
        return cls(tuple((f, at, options) for (f, options), at in zip(functions, places)), {**own, NONE: None})

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """What the module gives with these weights, without the calls of modules."""
        known = {**self.own, **tensors}
        for function, at, options in self.calls:
            x = function(x, known[at[0]], known[at[1]], *options) if at else function(x, *options)
        return x


def _layers(module: Any) -> Iterator[Any]:
    """In the order of their calls."""
    if type(module) is not Straight or is_hooked(module):
        yield module
        return
    layers = list(module)
    for layer in layers if module.order is None else [layers[place] for place in module.order]:
        yield from _layers(layer)


def is_hooked(layer: Any) -> bool:
    """Whether a call of the layer does more than the forward of its class."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in layer.__dict__


def _is_direct(layer: Any) -> bool:
    """Whether a function in DIRECT does all that a call of the layer does."""
    kind = type(layer)
    if kind not in DIRECT or is_hooked(layer):
        return False
    if kind is nn.Conv2d:
        return bool(layer.padding_mode == "zeros")
    return kind is not nn.MaxPool2d or not layer.return_indices


def _in_order(layers: Iterable[nn.Module]) -> list[int]:
    layers = list(layers)
    order = list(range(len(layers)))
    for i, (a, b) in enumerate(pairwise(layers)):
        if _may_swap(a, b):
            order[i : i + 2] = i + 1, i
    return order


def _may_swap(first: nn.Module, second: nn.Module) -> bool:
    fits = type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices
    return fits and not is_hooked(first) and not is_hooked(second)


def _conv2d(layer: Any) -> tuple[Function, Options]:
    few = layer.in_channels <= FEW * layer.groups  # others are PyTorch's own, in the steps of one client
    return conv2d if few else F.conv2d, (layer.stride, layer.padding, layer.dilation, layer.groups)


def _max_pool2d(layer: Any) -> tuple[Function, Options]:
    return torch.max_pool2d, (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)


# What layers call with their input, their weight and bias where they have them, and options.
DIRECT: dict[type, Callable[[Any], tuple[Function, Options]]] = {
    nn.Linear: lambda layer: (F.linear, ()),
    nn.Conv2d: _conv2d,
    nn.MaxPool2d: _max_pool2d,
    nn.Flatten: lambda layer: (torch.flatten, (layer.start_dim, layer.end_dim)),
    nn.ReLU: lambda layer: (torch.relu_ if layer.inplace else torch.relu, ()),
    nn.Tanh: lambda layer: (torch.tanh, ()),
    nn.Sigmoid: lambda layer: (torch.sigmoid, ()),
}
