"""The point client's steps on chains of linear maps, for all clients at once: batched products, gradients by hand.

The weights of K clients are one tensor [K, P] that the steps change in place; no graph is recorded and nothing is
traced, which for small networks is most of the cost. Equal to the point client's own step up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Info
from fedbayes.clients.ghost import point_rows
from fedbayes.clients.private_rows import noisy_sum
from fedbayes.engine.batches import taken
from fedbayes.engine.fast.forms import Dense
from fedbayes.model.chain import Chain, Layer, head, layers_in

# What stands between two layers, in place, and its slope by its own output: d loss / d input from d loss / d output.
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "relu": (torch.relu_, lambda d, h: torch.ops.aten.threshold_backward(d, h, 0)),
    "tanh": (torch.tanh_, lambda d, h: d.mul_(1 - h.square())),
    "sigmoid": (torch.sigmoid_, lambda d, h: d.mul_(h - h.square())),
}


Noise = Callable[[int, int], Tensor]


class Group(NamedTuple):
    """The clients that still have steps to take: vectors [K, P], their gradient, the optimiser's memory, and views."""

    vectors: Tensor
    slopes: Tensor
    velocity: Tensor | None
    layers: list[Layer]
    gradients: list[Layer]

    @classmethod
    def of(cls, form: Dense, vectors: Tensor, slopes: Tensor, velocity: Tensor | None) -> Group:
        return cls(vectors, slopes, velocity, layers_in(form.layers, vectors), layers_in(form.layers, slopes))


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
    plain = not (form.momentum or form.pull or form.clip or form.private)
    full = ((counts == rows.shape[-1]) | (counts == 0)).all(1).tolist()
    for s, working in enumerate(_working(counts)):
        if working < len(group.vectors):
            memory = None if velocity is None else velocity[:working]
            group = Group.of(form, vectors[:working], slopes[:working], memory)
        at = rows[s, :working, 0]
        mask = None if live is None or full[s] else live[s, :working, 0]
        inputs, targets = form.inputs(x.index_select(0, at.flatten())).reshape(*at.shape, -1), taken(y, at)
        rate = _rate(form, info, s)[:working]
        if plain:
            loss[:working] += _gradient(form, group, inputs, targets, mask, -rate)
            continue
        if form.private:
            _private_gradient(form, group, inputs, targets, mask, info, noise(s, 1)[0, :working])
        else:
            loss[:working] += _gradient(form, group, inputs, targets, mask)
        _descend(form, group, rate, info.options, centre)
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


def _gradient(
    form: Dense, group: Group, x: Tensor, y: Tensor, mask: Tensor | None, factor: Tensor | None = None
) -> Tensor:
    """The mean NLL [K] of the live rows; its gradient is written into the group's slopes.

    With a factor [K, 1], so many times it is added to the weights themselves: it is never stored.
    """
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)  # a padded row may hold anything, and 0 * inf is nan
    seen = [x]
    for place, layer in enumerate(group.layers):
        out = _apply(layer, seen[-1])
        if place < len(form.between):
            seen.append(BETWEEN[form.between[place]][0](out))
    nll, d = head(form.scale, out, y)
    if mask is None:
        d, nll = d.div_(x.shape[1]), nll.mean(1)
    else:
        count = mask.sum(1, keepdim=True).to(d.dtype)
        d = d.masked_fill_(~mask[..., None], 0).div_(count[..., None])
        nll = nll.masked_fill(~mask, 0).sum(1) / count[:, 0]
    into = group.gradients
    if factor is not None:
        d, into = d.mul_(factor[..., None]), group.layers
    for place, (layer, slope) in reversed(list(enumerate(zip(group.layers, into)))):
        # Before the weights change.
        lower = BETWEEN[form.between[place - 1]][1](torch.bmm(d, layer.weight), seen[place]) if place else d
        slope.weight.baddbmm_(d.mT, seen[place], beta=0 if factor is None else 1)
        if slope.bias is not None:
            bias = torch.sum(d, 1)
            slope.bias.copy_(bias) if factor is None else slope.bias.add_(bias)
        d = lower
    return nll


def _private_gradient(
    form: Dense, group: Group, x: Tensor, y: Tensor, mask: Tensor | None, info: Info, noise: Tensor
) -> None:
    """The noisy sum of shortened gradients over the rows expected, into the slopes."""
    clients = len(x)
    live = None if mask is None else mask[:, :-1]  # the last place is nobody's
    chain = Chain(form.layers, form.between, form.inputs, form.scale)
    rows = point_rows(chain, "", group.vectors, x[:, :-1], y[:, :-1])
    options = {name: t.reshape(-1, 1)[:clients] for name, t in info.options.items()}
    noises = {"": noise[:, : group.slopes.shape[1]]}
    group.slopes.copy_(noisy_sum(rows, noises, live, options, info.n[:clients, None])[""])


def _apply(layer: Layer, x: Tensor) -> Tensor:
    if layer.bias is None:
        return torch.bmm(x, layer.weight.mT)
    return torch.baddbmm(layer.bias[:, None], x, layer.weight.mT)


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
