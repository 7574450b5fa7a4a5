"""Which steps of the point client have a form that an engine has code of its own for."""

from __future__ import annotations

import math

from torch import Tensor, nn

from fedbayes.clients.client import Dense, Rowwise
from fedbayes.model.chain import is_of, layers
from fedbayes.model.model import Model
from fedbayes.posterior.values import LOG_2PI

BETWEEN: dict[type, str] = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}


def dense(model: Model, momentum: float, pull: tuple[str, ...], clip: bool, falling: bool) -> Dense | None:
    """What the step is, where the model is a chain of linear maps under a categorical or normal likelihood."""
    chain = list(layers(model.module))
    if chain and type(chain[0]) is nn.Flatten and (chain[0].start_dim, chain[0].end_dim) == (1, -1):
        chain = chain[1:]
    linear, between = chain[::2], chain[1::2]
    fits = (
        len(chain) % 2 == 1 and all(type(a) is nn.Linear for a in linear) and all(type(b) in BETWEEN for b in between)
    )
    own = [p for layer in linear for p in layer.parameters()]
    if not (fits and is_of(model, own) and "model" in model.layouts) or model.augment:
        return None

    def inputs(x: Tensor) -> Tensor:
        return model.prepare(x).to(model.dtype)

    sizes = tuple((a.in_features, a.out_features, a.bias is not None) for a in linear if isinstance(a, nn.Linear))
    names = tuple(BETWEEN[type(b)] for b in between)
    return Dense(sizes, names, inputs, model.likelihood.scale, momentum, pull, clip, falling)


def rowwise(form: Dense) -> Rowwise | None:
    """What the step on one row is, where the chain has at most one hidden layer, of ReLU, and a squared error."""
    plain = form.momentum == 0 and not form.pull and all(bias for _, _, bias in form.layers)
    if form.between not in ((), ("relu",)) or form.layers[-1][1] != 1 or form.scale is None:
        return None
    if not plain:
        return None
    constant = math.log(form.scale) + 0.5 * LOG_2PI
    hidden = form.layers[0][1] if form.between else 0
    return Rowwise(hidden, form.inputs, form.scale**-2, constant, form.clip, form.falling)
