"""The gradient of convolutional chains by hand: layers one after another on a CPU, without a graph.

Autograd, modes and conversions between formats are a third of a step on a client's small batch. A max-pool goes before
the increasing function that it follows: value and gradient stay the same, for a fraction of the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedbayes.model.convolution import FEW
from fedbayes.model.likelihood import log_prob_of_classes
from fedbayes.model.model import Model
from fedbayes.posterior.values import LOG_2PI

Gradient = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
aten = torch.ops.aten
MEAN = (None, 1, -(2**62))  # of the cross-entropy: no weights of classes, the mean of rows, no class left out

# What stands between two layers, and its slope by its own output: d loss / d input from d loss / d output.
BETWEEN: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda d, h: aten.threshold_backward(d, h, 0)),
    nn.Tanh: (torch.tanh, lambda d, h: d * (1 - h.square())),
    nn.Sigmoid: (torch.sigmoid, lambda d, h: d * (h - h.square())),
}


class Link(NamedTuple):
    """One layer: `ahead(x, weights)` gives its output and what it keeps; `back(d, kept, weights, slopes)` writes the
    gradients of its weights and gives that of its input, which the first layer has none of."""

    ahead: Callable[[Tensor, list[Tensor]], tuple[Tensor, Any]]
    back: Callable[[Tensor, Any, list[Tensor], list[Tensor]], Tensor]
    weights: int = 0


def by_hand(model: Model) -> Gradient | None:
    """f(vector, x, y, mask) -> (mean NLL of the live rows, its gradient [P]), where the model is such a chain.

    That is a Sequential of convolutions, max-pools and functions between them, flattened, then linear maps, all weights
    in one vector in that order, under a categorical likelihood or a normal of fixed scale.
    """
    chain = list(layers(model.module))
    own = [p for layer in chain for p in layer.parameters()]
    if not (_is_chain(chain) and is_of(model, own)):
        return None
    links, scale = list(_links(chain)), model.likelihood.scale

    def views(vector: Tensor) -> list[list[Tensor]]:
        found = iter(torch._utils._unflatten_dense_tensors(vector, own))
        return [[next(found) for _ in range(link.weights)] for link in links]

    @torch.no_grad()
    def gradient(vector: Tensor, x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            x, y = x[mask], y[mask]  # what a padded row holds does not matter
        if not len(x):
            return vector.new_zeros(()), torch.zeros_like(vector)
        slope, kept = torch.empty_like(vector), []
        weights, slopes = views(vector), views(slope)
        out = model.prepare(x).to(model.dtype)
        for link, w in zip(links, weights):
            out, seen = link.ahead(out, w)
            kept.append(seen)
        nll, d = _head(out, y, scale)
        for link, seen, w, s in zip(reversed(links), reversed(kept), reversed(weights), reversed(slopes)):
            d = link.back(d, seen, w, s)
        return nll, slope

    return gradient


def _head(out: Tensor, y: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """The mean NLL of outputs [B, D] and its gradient; of classes where there is no scale."""
    if scale is None:
        logs = out.log_softmax(-1)
        nll, count = aten.nll_loss_forward(logs, y, *MEAN)
        d = aten.nll_loss_backward(torch.ones_like(nll), logs, y, *MEAN, count)
        return nll, aten._log_softmax_backward_data(d, logs, -1, logs.dtype)
    log = float(torch.tensor(scale).log())  # in float32, as the likelihood has it
    error = (out - y.to(out.dtype)) * math.exp(-log)
    nll = (0.5 * error.square() + log + 0.5 * LOG_2PI).sum(-1).mean()
    return nll, error.mul_(math.exp(-log) / len(out))


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that a module runs one after another."""
    if type(module) is nn.Sequential:
        for layer in module:
            yield from layers(layer)
    else:
        yield module


def is_of(model: Model, own: list[nn.Parameter]) -> bool:
    """Whether the model is these weights alone, each used once and in the vector's order, under a likelihood whose
    slope is known, and a call of it does no more than its layers' own."""
    ordered = [id(p) for p in model.module.parameters()] == [id(p) for p in own]
    whole = [layout.size for layout in model.layouts.values()] == [sum(p.numel() for p in own)]
    known = model.likelihood.scale is not None or model.likelihood.log_prob is log_prob_of_classes
    hooked = any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.module.modules())
    return ordered and whole and known and not hooked and not model.bfloat16


def _is_chain(chain: list[nn.Module]) -> bool:
    kinds = [type(layer) for layer in chain]
    if kinds.count(nn.Flatten) != 1 or kinds[0] is not nn.Conv2d or kinds[-1] is not nn.Linear:
        return False
    at = kinds.index(nn.Flatten)
    fits = {*kinds[:at]} <= {nn.Conv2d, nn.MaxPool2d, *BETWEEN} and {*kinds[at + 1 :]} <= {nn.Linear, *BETWEEN}
    return fits and all(_is_plain(layer) for layer in chain)


def _is_plain(layer: Any) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if type(layer) is nn.MaxPool2d:
        return layer.dilation in (1, (1, 1)) and not layer.ceil_mode and not layer.return_indices
    return type(layer) is not nn.Flatten or (layer.start_dim, layer.end_dim) == (1, -1)


def _links(chain: list[Any]) -> Iterator[Link]:
    rest = list(chain)
    for i, (a, b) in enumerate(pairwise(chain)):
        if type(a) in BETWEEN and type(b) is nn.MaxPool2d:
            rest[i : i + 2] = b, a
    while rest:
        layer = rest.pop(0)
        if type(layer) is nn.Conv2d:
            pool = _pool(rest.pop(0)) if type(rest[0]) is nn.MaxPool2d else None
            few = layer.in_channels <= FEW and layer.groups == 1 and layer.dilation == (1, 1)
            first = layer is chain[0]
            yield _pooled(_product(layer) if few and first else _convolution(layer, first), pool)
        elif type(layer) is nn.Linear:
            yield _linear(layer)
        elif type(layer) is nn.Flatten:
            yield Link(lambda x, _: (x.flatten(1), x.shape), lambda d, shape, *_: d.reshape(shape))
        else:
            yield _pool(layer) if type(layer) is nn.MaxPool2d else _between(*BETWEEN[type(layer)])


def _pooled(convolution: Link, pool: Link | None) -> Link:
    """A convolution and the max-pool of its output. What comes back to the pool it spreads: the bias's gradient is the
    same sum before and after, of fewer numbers before."""

    def ahead(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Any]:
        out, seen = convolution.ahead(x, weights)
        out, places = (out, None) if pool is None else pool.ahead(out, weights)
        return out, (seen, places)

    def back(d: Tensor, kept: Any, weights: list[Tensor], slopes: list[Tensor]) -> Tensor:
        seen, places = kept
        if len(slopes) > 1:
            torch.sum(d, (0, 2, 3), out=slopes[1])
        if pool is not None:
            d = pool.back(d, places, weights, slopes)
        return convolution.back(d, seen, weights, slopes)

    return Link(ahead, back, convolution.weights)


def _product(layer: Any) -> Link:
    """The first convolution, of few channels, as one product of all patches: its output has channels last."""
    (down, right), (top, left), (rows, columns) = layer.stride, layer.padding, layer.kernel_size

    def ahead(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        if top or left:
            x = F.pad(x, (left, left, top, top))
        count, channels, height, width = x.shape
        high, wide = (height - rows) // down + 1, (width - columns) // right + 1
        image, channel, row, column = x.stride()
        strides = (channel, row, column, image, row * down, column * right)
        seen = x.as_strided((channels, rows, columns, count, high, wide), strides)
        patches = seen.reshape(channels * rows * columns, -1)
        out = F.linear(patches.T, weights[0].flatten(1), *weights[1:])
        return out.view(count, high, wide, -1).permute(0, 3, 1, 2), patches

    def back(d: Tensor, patches: Tensor, weights: list[Tensor], slopes: list[Tensor]) -> Tensor:
        slopes[0].flatten(1).copy_(torch.mm(patches, d.permute(0, 2, 3, 1).flatten(0, 2)).T)
        return d

    return Link(ahead, back, len(list(layer.parameters())))


def _convolution(layer: Any, first: bool) -> Link:
    options = (layer.stride, layer.padding, layer.dilation)
    rest = (False, (0, 0), layer.groups, (not first, True, False))
    form = torch.contiguous_format if layer.in_channels <= FEW else torch.channels_last

    def ahead(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        x, bias = x.contiguous(memory_format=form), weights[1] if len(weights) > 1 else None
        return torch.conv2d(x, weights[0], bias, *options, layer.groups), x

    def back(d: Tensor, x: Tensor, weights: list[Tensor], slopes: list[Tensor]) -> Tensor:
        d, slope, _ = aten.convolution_backward(d, x, weights[0], None, *options, *rest)
        slopes[0].copy_(slope)
        return d

    return Link(ahead, back, len(list(layer.parameters())))


def _pool(layer: Any) -> Link:
    kernel, stride, padding = (
        [n, n] if isinstance(n, int) else n for n in (layer.kernel_size, layer.stride, layer.padding)
    )

    def ahead(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, places = F.max_pool2d(x, kernel, stride, padding, return_indices=True)
        return out, (x, places)

    def back(d: Tensor, kept: tuple[Tensor, Tensor], *_: Any) -> Tensor:
        x, places = kept
        return aten.max_pool2d_with_indices_backward(d, x, kernel, stride, padding, [1, 1], False, places)

    return Link(ahead, back)


def _linear(layer: Any) -> Link:
    def back(d: Tensor, x: Tensor, weights: list[Tensor], slopes: list[Tensor]) -> Tensor:
        torch.mm(d.T, x, out=slopes[0])
        if len(slopes) > 1:
            torch.sum(d, 0, out=slopes[1])
        return d @ weights[0]

    return Link(lambda x, weights: (F.linear(x, *weights), x), back, len(list(layer.parameters())))


def _between(f: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor]) -> Link:
    def ahead(x: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
        out = f(x)
        return out, out

    return Link(ahead, lambda d, out, *_: slope(d, out))
