"""Dropout given to a network that has none, so that MC dropout (Gal and Ghahramani, 2016) is a treatment of any."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fedbayes.errors import InputError
from fedbayes.posterior.layout import matches


def with_dropout(network: nn.Module, rate: float, *, but: Sequence[str] = ()) -> nn.Module:
    """A copy with dropout after every linear map and convolution, save the layers whose names match `but`.

    Weights keep their names. Each layer gets a dropout of its own as a child, called by a hook on its output.

    >>> dropping = with_dropout(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 0.2, but=["2"])
    >>> [name for name, layer in dropping.named_modules() if isinstance(layer, nn.Dropout)]
    ['0.dropout']
    """
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
        raise InputError(f"dropout is the share of outputs set to zero, in (0, 1), not {rate!r}")
    dropping = copy.deepcopy(network)
    layers = {
        n: layer for n, layer in dropping.named_modules() if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    }
    for pattern in but:
        if not any(matches(name, [pattern]) for name in layers):
            raise InputError(f"undropped: no layer matches {pattern!r}; there are {', '.join(list(layers)[:8])}")
    targets = [layer for name, layer in layers.items() if not matches(name, but)]
    if not targets:
        raise InputError("dropout: there is no linear map or convolution that it could follow")
    for layer in targets:
        layer.add_module("dropout", nn.Dropout(rate))
        layer.register_forward_hook(_drop)
    return dropping


def _drop(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    # By the layer that is called, not the one that was hooked: copies of a network have dropouts of their own.
    return layer.dropout(output)  # type: ignore[operator]


def has_dropout(network: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.dropout._DropoutNd) for layer in network.modules())
