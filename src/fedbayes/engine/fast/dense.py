"""The point client's steps on chains of linear maps, for all clients at once: batched products, gradients by hand.

The weights of K clients are one tensor [K, P] that the steps change in place; no graph is recorded and nothing is
traced, which for small networks is most of the cost. Equal to the point client's own step up to rounding. The length of
a row's gradient follows from its inputs and slopes at each layer (Goodfellow, 2015), so that private steps need no
gradient for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Info
from fedbayes.clients.private_rows import ROW_BATCH, ROW_CLIP, ROW_NOISE, WITHIN
from fedbayes.engine.fast.forms import Dense
from fedbayes.posterior.values import LOG_2PI

# What stands between two layers, in place, and its slope by its own output: d loss / d input from d loss / d output.
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (torch.relu_, lambda d, h: d.mul_(h > 0)),
    "tanh": (torch.tanh_, lambda d, h: d.mul_(1 - h.square())),
    "sigmoid": (torch.sigmoid_, lambda d, h: d.mul_(h - h.square())),
}


Noise = Callable[[int, int], Tensor]


class Layer(NamedTuple):
    """Views of the weights [K, outputs, inputs] and biases [K, outputs] of one layer in vectors [K, P]."""

    weight: Tensor
    bias: Tensor | None


class Group(NamedTuple):
    """The clients that still have steps to take: vectors [K, P], their gradient, the optimiser's memory, and views."""

    vectors: Tensor
    slopes: Tensor
    velocity: Tensor | None
    layers: list[Layer]
    gradients: list[Layer]

    @classmethod
    def of(cls, form: Dense, vectors: Tensor, slopes: Tensor, velocity: Tensor | None) -> Group:
        return cls(vectors, slopes, velocity, _layers(form, vectors), _layers(form, slopes))


def run(
    form: Dense, rows: Tensor, live: Tensor | None, x: Tensor, y: Tensor, info: Info, state: Any, noise: Noise
) -> Any:
    """The state after the steps of a table [steps, clients, 1, B] of rows, clients with more steps first.

    `noise(first, steps)` are the normals [steps, clients, ...] of private steps, which read one for each weight.
    """
    ((part, start),) = state.vectors.items()
    vectors, loss = start.clone(memory_format=torch.contiguous_format), state.loss.clone()
    slopes, velocity = torch.empty_like(vectors), state.optimiser[part].clone() if form.momentum else None
    counts = torch.full(rows.shape[:2], rows.shape[-1]) if live is None else live[:, :, 0].sum(-1)
    group, centre = Group.of(form, vectors, slopes, velocity), info.broadcast[part].mean
    full = ((counts == rows.shape[-1]) | (counts == 0)).all(1).tolist()
    for s, working in enumerate(_working(counts)):
        if working < len(group.vectors):
            memory = None if velocity is None else velocity[:working]
            group = Group.of(form, vectors[:working], slopes[:working], memory)
        at = rows[s, :working, 0]
        flat, mask = at.flatten(), None if live is None or full[s] else live[s, :working, 0]
        inputs, targets = form.inputs(x[flat]).reshape(*at.shape, -1), y[flat].reshape(*at.shape, *y.shape[1:])
        if form.private:
            _private_gradient(form, group, inputs, targets, mask, info, noise(s, 1)[0, :working])
        else:
            loss[:working] += _gradient(form, group, inputs, targets, mask)
        _descend(form, group, _rate(form, info, s)[:working], info.options, centre)
    return state._replace(
        vectors={part: vectors},
        optimiser={part: velocity} if velocity is not None else state.optimiser,
        loss=loss,
        steps=state.steps + (counts > 0).sum(0).to(state.steps),
    )


def _working(counts: Tensor) -> list[int]:
    """How many clients have live rows at each step: always the first ones."""
    some = counts > 0
    if not bool((some[:, :-1] >= some[:, 1:]).all()):
        raise ValueError("clients must be sorted by their number of steps")
    return some.sum(1).tolist()


def _layers(form: Dense, vectors: Tensor) -> list[Layer]:
    layers, start = [], 0
    for inputs, outputs, has_bias in form.layers:
        end = start + inputs * outputs
        bias = vectors[:, end : end + outputs] if has_bias else None
        layers.append(Layer(vectors[:, start:end].unflatten(1, (outputs, inputs)), bias))
        start = end + outputs * has_bias
    return layers


def _gradient(form: Dense, group: Group, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """The mean NLL [K] of the live rows; its gradient is written into the group's slopes."""
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)  # a padded row may hold anything, and 0 * inf is nan
    seen = [x]
    for place, layer in enumerate(group.layers):
        out = _apply(layer, seen[-1])
        if place < len(form.between):
            seen.append(BETWEEN[form.between[place]][0](out))
    nll, d = _head(form, out, y)
    if mask is None:
        d, nll = d.div_(x.shape[1]), nll.mean(1)
    else:
        count = mask.sum(1, keepdim=True).to(d.dtype)
        d = d.masked_fill_(~mask[..., None], 0).div_(count[..., None])
        nll = nll.masked_fill(~mask, 0).sum(1) / count[:, 0]
    for place, (layer, slope) in reversed(list(enumerate(zip(group.layers, group.gradients)))):
        slope.weight.baddbmm_(d.mT, seen[place], beta=0)
        if slope.bias is not None:
            torch.sum(d, 1, out=slope.bias)
        if place:
            d = BETWEEN[form.between[place - 1]][1](torch.bmm(d, layer.weight), seen[place])
    return nll


def _private_gradient(
    form: Dense, group: Group, x: Tensor, y: Tensor, mask: Tensor | None, info: Info, noise: Tensor
) -> None:
    """The noisy sum of shortened gradients over the rows expected, into the slopes; as `clients.private_rows`."""
    x, y = x[:, :-1], y[:, :-1]  # the last place is nobody's
    if mask is not None:
        x = x.masked_fill(~mask[:, :-1, None], 0)
    seen = [x]
    for place, layer in enumerate(group.layers):
        out = _apply(layer, seen[-1])
        if place < len(form.between):
            seen.append(BETWEEN[form.between[place]][0](out))
    slopes = [_head(form, out, y)[1]]
    for place in range(len(group.layers) - 1, 0, -1):
        down = torch.bmm(slopes[0], group.layers[place].weight)
        slopes.insert(0, BETWEEN[form.between[place - 1]][1](down, seen[place]))
    square = torch.zeros(x.shape[:2], dtype=x.dtype, device=x.device)
    for layer, h, d in zip(group.layers, seen, slopes):
        square += (h.square().sum(-1) + (layer.bias is not None)) * d.square().sum(-1)

    def told(name: str) -> Tensor:
        return info.options[name].reshape(-1, 1)[: len(x)]

    length, clip = square.sqrt(), told(ROW_CLIP)
    known = torch.isfinite(length)
    factor = torch.where(known, (WITHIN * clip / length.clamp(min=1e-30)).clamp(max=1), 0.0)
    factor = factor if mask is None else factor * mask[:, :-1]
    for gradient, h, d in zip(group.gradients, seen, slopes):
        d = torch.where(known[..., None], d, 0.0).mul_(factor[..., None])
        gradient.weight.baddbmm_(d.mT, torch.where(known[..., None], h, 0.0), beta=0)
        if gradient.bias is not None:
            torch.sum(d, 1, out=gradient.bias)
    rows = torch.minimum(told(ROW_BATCH).expand(len(x), 1), info.n[: len(x), None].to(x))
    group.slopes.add_(told(ROW_NOISE) * clip * noise[:, : group.slopes.shape[1]]).div_(rows)


def _apply(layer: Layer, x: Tensor) -> Tensor:
    if layer.bias is None:
        return torch.bmm(x, layer.weight.mT)
    return torch.baddbmm(layer.bias[:, None], x, layer.weight.mT)


def _head(form: Dense, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The NLL of each row [K, B], and its gradient [K, B, outputs]."""
    if form.scale is None:
        logs, at = out.log_softmax(-1), y[..., None]
        nll = -logs.gather(-1, at).squeeze(-1)
        return nll, logs.exp_().scatter_add_(-1, at, logs.new_full((), -1.0).expand(at.shape))
    log = float(torch.tensor(form.scale).log())  # in float32, as the likelihood has it
    error = (out - y.to(out.dtype)) * math.exp(-log)
    nll = (0.5 * error.square() + log + 0.5 * LOG_2PI).sum(-1)
    return nll, error.mul_(math.exp(-log))


def _rate(form: Dense, info: Info, step: int) -> Tensor:
    rate = info.options["lr"].reshape(-1, 1).expand(len(info.n), 1)
    if not form.falling:
        return rate
    return rate * (1 - torch.tensor(step) / (form.falling * info.batches[0][:, None])).to(rate)


def _descend(form: Dense, group: Group, rate: Tensor, options: Mapping[str, Tensor], centre: Tensor) -> None:
    """One step of gradient descent in place, pulls, clipping and momentum included."""
    vectors, slopes = group.vectors, group.slopes

    def option(name: str) -> Tensor:
        return options[name].reshape(-1, 1)[: len(vectors)]  # of one row where all clients share it

    if "weight_decay" in form.pull:
        slopes.addcmul_(vectors, option("weight_decay"))
    if "proximal" in form.pull:
        slopes.addcmul_(vectors - (centre[: len(vectors)] if centre.dim() > 1 else centre), option("proximal"))
    if form.clip:
        length = slopes.square().sum(-1, keepdim=True).sqrt()
        slopes.mul_((option("clip") / length.clamp(min=1e-12)).clamp(max=1))
    if group.velocity is not None:
        slopes = group.velocity.mul_(form.momentum).add_(slopes)
    vectors.addcmul_(slopes, rate, value=-1)
