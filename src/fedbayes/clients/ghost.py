"""Lengths of rows' gradients, and their sums, without a gradient for each row (Goodfellow, 2015; Li et al., 2022).

In a chain of linear maps the gradient of one row in a layer's weights is d h^T, of its slopes d at the outputs and its
inputs h: its length is |d| |h|. Under local reparameterisation with scales s and noise e the gradient in the scales is
s * (u (h^2)^T) with u = d e / deviation, and its squared length one more product: u^2 . (s^2 h^4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedbayes.clients.private_rows import Rows, RowsOf, Vectors
from fedbayes.model.chain import Chain, Layer, head, layers_in

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
# d output / d input, by the output.
SLOPES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda h: (h > 0).to(h.dtype),
    "tanh": lambda h: 1 - h.square(),
    "sigmoid": lambda h: h - h.square(),
}
TINY = 1e-16  # in variances, as the estimator has it


def of_points(chain: Chain, part: str) -> RowsOf:
    """The rows of a chain whose weights are points."""

    def rows_of(vectors: Vectors, x: Tensor, y: Tensor, z: Tensor) -> Rows:
        return point_rows(chain, part, vectors[part], chain.inputs(x).flatten(1), y)

    return rows_of


def point_rows(chain: Chain, part: str, vector: Tensor, x: Tensor, y: Tensor) -> Rows:
    """Of x [..., B, inputs] as the first map sees it, and vectors [..., P]."""
    layers = layers_in(chain.layers, vector)
    inputs = [x]
    for place, layer in enumerate(layers):
        out = _mapped(inputs[-1], layer)
        if place < len(chain.between):
            inputs.append(FUNCTIONS[chain.between[place]](out))
    slopes = [head(chain.scale, out, y)[1]]
    for place in range(len(layers) - 1, 0, -1):
        slopes.insert(0, slopes[0] @ layers[place].weight * SLOPES[chain.between[place - 1]](inputs[place]))
    square = sum(_square(d, h, layer) for d, h, layer in zip(slopes, inputs, layers))
    assert isinstance(square, Tensor)

    def total(factor: Tensor) -> Vectors:
        pieces = [_summed(factor, d, h, layer) for d, h, layer in zip(slopes, inputs, layers)]
        return {part: torch.cat(pieces, -1)}

    return Rows(square, total)


def of_normals(chain: Chain, unit: Tensor) -> RowsOf:
    """The rows of a chain under local reparameterisation by one draw; gradients in scales are in this unit."""

    def rows_of(vectors: Vectors, x: Tensor, y: Tensor, z: Tensor) -> Rows:
        layers, spreads, told = (
            layers_in(chain.layers, v) for v in (vectors["mean"], vectors["scale"], vectors["scale"] * unit)
        )
        noise = z.split([outputs for _, outputs, _ in chain.layers], -1)
        inputs, deviations = [chain.inputs(x).flatten(1)], []
        for place, (layer, spread) in enumerate(zip(layers, spreads)):
            deviations.append((_mapped(inputs[-1].square(), _squared(spread)) + TINY).sqrt())
            out = _mapped(inputs[-1], layer) + deviations[-1] * noise[place]
            if place < len(chain.between):
                inputs.append(FUNCTIONS[chain.between[place]](out))
        slopes = [head(chain.scale, out, y)[1]]  # by the means of outputs
        leans: list[Tensor] = []  # by their variances, twice
        for place in reversed(range(len(layers))):
            leans.insert(0, slopes[0] * noise[place] / deviations[place])
            if place:
                down = slopes[0] @ layers[place].weight
                down = down + leans[0] @ spreads[place].weight.square() * inputs[place]
                slopes.insert(0, down * SLOPES[chain.between[place - 1]](inputs[place]))
        square = sum(
            _square(d, h, layer) + (u.square() * _mapped(h.square().square(), _squared(s))).sum(-1)
            for d, u, h, layer, s in zip(slopes, leans, inputs, layers, told)
        )
        assert isinstance(square, Tensor)

        def total(factor: Tensor) -> Vectors:
            means = [_summed(factor, d, h, layer) for d, h, layer in zip(slopes, inputs, layers)]
            scales = [_summed(factor, u, h.square(), layer) for u, h, layer in zip(leans, inputs, layers)]
            return {"mean": torch.cat(means, -1), "scale": torch.cat(scales, -1) * vectors["scale"] * unit}

        return Rows(square, total)

    return rows_of


def _mapped(x: Tensor, layer: Layer) -> Tensor:
    out = x @ layer.weight.mT
    return out if layer.bias is None else out + layer.bias[..., None, :]


def _squared(layer: Layer) -> Layer:
    return Layer(layer.weight.square(), None if layer.bias is None else layer.bias.square())


def _square(d: Tensor, h: Tensor, layer: Layer) -> Tensor:
    """The squared length of each row's d h^T, and of d for a bias."""
    return (h.square().sum(-1) + (layer.bias is not None)) * d.square().sum(-1)


def _summed(factor: Tensor, d: Tensor, h: Tensor, layer: Layer) -> Tensor:
    """The sum of factor * d h^T over rows as one vector, that of factor * d behind it for a bias."""
    live = (factor > 0)[..., None]
    d, h = torch.where(live, d, 0.0) * factor[..., None], torch.where(live, h, 0.0)
    weight = (d.mT @ h).flatten(-2)
    return weight if layer.bias is None else torch.cat([weight, d.sum(-2)], -1)
