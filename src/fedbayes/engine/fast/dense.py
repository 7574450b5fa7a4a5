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
    """The clients that still have steps to take: vectors [K, P], their gradient, the optimiser's memory, the sums of
    their losses, and views."""

    vectors: Tensor
    slopes: Tensor
    velocity: Tensor | None
    loss: Tensor
    layers: list[Layer]
    gradients: list[Layer]

    @classmethod
    def of(cls, form: Dense, vectors: Tensor, velocity: Tensor | None, loss: Tensor, first: Tensor | None) -> Group:
        slopes, layers = torch.empty_like(vectors), layers_in(form.layers, vectors)
        if first is not None:
            layers[0] = layers[0]._replace(weight=first)
        return cls(vectors, slopes, velocity, loss, layers, layers_in(form.layers, slopes))

    def some(self, form: Dense, count: int) -> Group:
        """The first ones of them."""
        memory = None if self.velocity is None else self.velocity[:count]
        return Group.of(form, self.vectors[:count], memory, self.loss[:count], self.layers[0].weight[:count])


def run(
    form: Dense, rows: Tensor, live: Tensor | None, x: Tensor, y: Tensor, info: Info, state: Any, noise: Noise
) -> Any:
    """The state after the steps of a table [steps, clients, 1, B] of rows, clients with more steps first.

    `noise(first, steps)` are the normals [steps, clients, ...] of private steps, which read one for each weight.
    """
    ((part, start),) = state.vectors.items()
    vectors, loss = start.clone(memory_format=torch.contiguous_format), state.loss.clone()
    velocity = state.optimiser[part].clone() if form.momentum else None
    plain = not (form.momentum or form.pull or form.clip or form.private)
    # Few rows are multiplied faster by weights that lie [inputs, outputs]: the first layer's, the largest as a rule.
    own = layers_in(form.layers, vectors)[0].weight
    first = own.mT.contiguous().mT if plain else None
    group, centre = Group.of(form, vectors, velocity, loss, first), info.broadcast[part].mean
    rate, size = _rate(form, info, 0), rows.shape[-1]
    counts = torch.full(rows.shape[:2], size) if live is None else live[:, :, 0].sum(-1)
    full = ((counts == size) | (counts == 0)).all(1).tolist()
    places, targets = rows.flatten(1).unbind(0), taken(y, rows[:, :, 0]).unbind(0)
    for s, working in enumerate(_working(counts)):
        if working < len(group.vectors):
            group = group.some(form, working)
        at, target = places[s][: working * size], targets[s][:working]
        mask = None if live is None or full[s] else live[s, :working, 0]
        inputs = form.inputs(x.index_select(0, at)).reshape(working, size, -1)
        if form.falling or len(rate) != working:
            rate = _rate(form, info, s)[:working]
        if plain:
            group.loss.add_(_gradient(form, group, inputs, target, mask, rate))
            continue
        if form.private:
            _private_gradient(form, group, inputs, target, mask, info, noise(s, 1)[0, :working])
        else:
            group.loss.add_(_gradient(form, group, inputs, target, mask))
        _descend(form, group, rate, info.options, centre)
    if first is not None:
        own.copy_(first)
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
    form: Dense, group: Group, x: Tensor, y: Tensor, mask: Tensor | None, rate: Tensor | None = None
) -> Tensor:
    """The mean NLL [K] of the live rows; its gradient is written into the group's slopes.

    With a rate [K, 1], so many times it is taken off the weights themselves: it is never stored.
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
    if rate is not None:  # all below is linear in it
        d = d.mul_(rate[..., None])
    for place, (layer, slope) in reversed(list(enumerate(zip(group.layers, group.gradients)))):
        # Before the weights change.
        lower = BETWEEN[form.between[place - 1]][1](torch.bmm(d, layer.weight), seen[place]) if place else d
        if rate is None:
            slope.weight.baddbmm_(d.mT, seen[place], beta=0)
        else:
            layer.weight.baddbmm_(d.mT, seen[place], alpha=-1)
        if slope.bias is not None and layer.bias is not None:
            torch.sum(d, 1, out=slope.bias)
            if rate is not None:
                layer.bias.sub_(slope.bias)
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
