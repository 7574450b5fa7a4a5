"""Which steps an engine has code of its own for, read off a phase: its step, and the network that it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedbayes.clients.client import Phase
from fedbayes.clients.point import PointStep
from fedbayes.clients.variational import VariationalStep
from fedbayes.model.estimators import ESTIMATORS
from fedbayes.model.likelihood import log_prob_of_classes
from fedbayes.model.model import Model
from fedbayes.posterior.values import LOG_2PI


class Dense(NamedTuple):
    """Gradient descent on the mean NLL of linear maps with functions between them."""

    layers: tuple[tuple[int, int, bool], ...]  # inputs, outputs, whether it has a bias; in the order of the vector
    between: tuple[str, ...]  # "relu", "tanh" or "sigmoid", after each layer but the last
    inputs: Callable[[Tensor], Tensor]  # stored rows as the network sees them
    dtype: torch.dtype  # of the weights
    scale: float | None  # of the normal likelihood; None: classes
    momentum: float
    pull: tuple[str, ...]
    clip: bool
    falling: int  # epochs within which the learning rate falls to 0; 0: it does not
    private: bool = False  # whether rows' gradients are shortened and noise is added


class Bayes(NamedTuple):
    """Descent on the expected NLL of normals over linear maps with functions between them, and their KL to a prior.

    By local reparameterisation: the noise is that of the layers' outputs.
    """

    layers: tuple[tuple[int, int, bool], ...]  # as of Dense
    between: tuple[str, ...]
    inputs: Callable[[Tensor], Tensor]
    scale: float | None
    momentum: float
    draws: int
    kl: str
    prior: str
    epochs: int
    falling: bool


class Rowwise(NamedTuple):
    """Plain gradient descent on one row's squared error, of a network with at most one hidden layer, of ReLU."""

    hidden: int  # units of the hidden layer; 0: a linear map
    inputs: Callable[[Tensor], Tensor]  # stored rows as the network sees them
    sharpness: float  # 1 / scale^2: the loss is sharpness / 2 * (target - output)^2 + constant
    constant: float
    clip: bool
    falling: bool  # whether the learning rate falls to 0 within the phase


BETWEEN: dict[type, str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def dense(phase: Phase) -> Dense | None:
    """The form of a point client's step on linear maps; None for any other."""
    step = phase.step
    if not isinstance(step, PointStep) or phase.batches != 1 or step.adversarial or step.optimiser.momentum is None:
        return None
    chain = _chain(step.model)
    if chain is None:
        return None
    layers, between, inputs = chain
    model = step.model
    return Dense(
        layers,
        between,
        inputs,
        model.dtype,
        model.likelihood.scale,
        step.optimiser.momentum,
        step.pull,
        step.clip,
        step.epochs if step.falling else 0,
        phase.private,
    )


def bayes(phase: Phase) -> Bayes | None:
    """The form of a variational client's step on linear maps; None for any other."""
    step = phase.step
    if not isinstance(step, VariationalStep) or phase.batches != 1 or step.optimiser.momentum is None or phase.private:
        return None
    chain = _chain(step.model)
    local = step.estimation.estimate is ESTIMATORS["local"]
    taken = step.estimation.taken == frozenset(step.model.layouts["model"].names)
    if chain is None or not (local and taken) or step.model.dtype != torch.float32:
        return None
    scale, momentum = step.model.likelihood.scale, step.optimiser.momentum
    return Bayes(*chain, scale, momentum, step.draws, step.kl, step.prior, step.epochs, step.falling)


def rowwise(phase: Phase) -> Rowwise | None:
    """The form of such a step on single rows, where the network is small and the error squared; None for any other."""
    form = dense(phase)
    if form is None or form.private or form.scale is None or (phase.batch, form.dtype) != (1, torch.float32):
        return None
    plain = not form.momentum and not form.pull and form.falling in (0, phase.epochs)
    small = form.between in ((), ("relu",)) and form.layers[-1][1] == 1 and all(bias for _, _, bias in form.layers)
    if not (plain and small):
        return None
    constant = math.log(form.scale) + 0.5 * LOG_2PI
    hidden = form.layers[0][1] if form.between else 0
    return Rowwise(hidden, form.inputs, form.scale**-2, constant, form.clip, form.falling > 0)


Chain = tuple[tuple[tuple[int, int, bool], ...], tuple[str, ...], Callable[[Tensor], Tensor]]


def _chain(model: Model) -> Chain | None:
    """Linear maps, the functions between them, and stored rows as the first sees them; None for any other network."""
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
    return layers, tuple(BETWEEN[type(b)] for b in between), inputs


def _layers(module: nn.Module) -> Iterator[Any]:
    """The layers that a module runs one after another."""
    if type(module) is nn.Sequential:
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
    hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.module.modules())
    return ordered and whole and known and not hooked and not model.bfloat16 and model.augment is None
