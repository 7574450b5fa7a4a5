"""Networks that are linear maps with functions between them: their gradients can be written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbayes.model.likelihood import log_prob_of_classes
from fedbayes.model.model import Model
from fedbayes.model.order import Straight, is_hooked
from fedbayes.posterior.values import LOG_2PI

BETWEEN: dict[type, str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


class Chain(NamedTuple):
    """Linear maps, and what stands between them."""

    layers: tuple[tuple[int, int, bool], ...]  # inputs, outputs, whether it has a bias; in the order of the vector
    between: tuple[str, ...]  # "relu", "tanh" or "sigmoid", after each layer but the last
    inputs: Callable[[Tensor], Tensor]  # stored rows as the network sees them
    scale: float | None  # of the normal likelihood; None: classes


class Layer(NamedTuple):
    """Views of the weights [..., outputs, inputs] and biases [..., outputs] of one layer in vectors [..., P]."""

    weight: Tensor
    bias: Tensor | None


def chain_of(model: Model) -> Chain | None:
    """The chain that a model is; None where it is any other network."""
    chain = list(_layers(model.module))
    if chain and type(chain[0]) is nn.Flatten and (chain[0].start_dim, chain[0].end_dim) == (1, -1):
        chain = chain[1:]
    linear: list[Any] = chain[::2]
    between = chain[1::2]
    fits = len(linear) == len(between) + 1 and all(type(a) is nn.Linear for a in linear)
    if not (fits and all(type(b) in BETWEEN for b in between) and _is_of(model, linear)):
        return None

    def inputs(x: Tensor) -> Tensor:
        return model.prepare(x).to(model.dtype)

    layers = tuple((a.in_features, a.out_features, a.bias is not None) for a in linear)
    return Chain(layers, tuple(BETWEEN[type(b)] for b in between), inputs, model.likelihood.scale)


def layers_in(layers: tuple[tuple[int, int, bool], ...], vectors: Tensor) -> list[Layer]:
    """Each layer's part of vectors [..., P]."""
    views, start = [], 0
    for inputs, outputs, has_bias in layers:
        end = start + inputs * outputs
        bias = vectors[..., end : end + outputs] if has_bias else None
        views.append(Layer(vectors[..., start:end].unflatten(-1, (outputs, inputs)), bias))
        start = end + outputs * has_bias
    return views


def head(scale: float | None, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The NLL of each row [..., B] of a chain's last outputs, and its slope [..., B, outputs]."""
    if scale is None:
        logs, at = out.log_softmax(-1), y[..., None]
        nll = -logs.gather(-1, at).squeeze(-1)
        return nll, logs.exp().scatter_add_(-1, at, logs.new_full((), -1.0).expand(at.shape))
    log = float(torch.tensor(scale).log())  # in float32, as the likelihood has it
    error = (out - y.to(out.dtype)) * math.exp(-log)
    nll = (0.5 * error.square() + log + 0.5 * LOG_2PI).sum(-1)
    return nll, error * math.exp(-log)


def _layers(module: nn.Module) -> Iterator[Any]:
    """The layers that a module runs one after another."""
    if isinstance(module, nn.Sequential) and type(module) in (nn.Sequential, Straight):
        for layer in module:
            yield from _layers(layer)
    else:
        yield module


def _is_of(model: Model, layers: list[nn.Module]) -> bool:
    """Whether the model is these layers' weights alone, each used once and in the vector's order, under a likelihood
    whose slope is known, and a call of it does no more than its layers' own."""
    own = [p for layer in layers for p in layer.parameters()]
    ordered = [id(p) for p in model.module.parameters()] == [id(p) for p in own]
    whole = {part: layout.size for part, layout in model.layouts.items()} == {"model": sum(p.numel() for p in own)}
    known = model.likelihood.scale is not None or model.likelihood.log_prob is log_prob_of_classes
    usual = all([*layer._parameters] == ["weight", "bias"] for layer in layers)
    hooked = any(is_hooked(layer) for layer in model.module.modules())
    return ordered and usual and whole and known and not hooked and not model.bfloat16 and model.augment is None
