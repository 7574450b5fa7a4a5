"""A client that also sends SWAG's diagonal posterior of its classifier: moments of iterates on cached features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.cached import Cache
from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.clients.laplace import CLASSIFIER, Finish, inside, log_likelihood, means
from fedbayes.model.classifier import Group
from fedbayes.model.gradient import gradients
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian

LEAST = 1e-6  # a scale of weights that did not move


class Looking(NamedTuple):
    """The inner client's state, and its rows as the classifier sees them."""

    inner: Any
    cache: Cache


class Walking(NamedTuple):
    """Where the classifier is, and number, mean and sum of squared deviations of where it has been."""

    inner: Any
    cache: Cache
    vector: Tensor
    number: Tensor
    mean: Tensor
    square: Tensor


def with_swag(
    inner: Client, whole: Finish, group: Group, *, target: Tensor, rows: int, epochs: int, batch: int
) -> Client:
    """`inner`, then gradient descent of the classifier alone, whose iterates have the uploaded mean and variance.

    Maddox et al. (2019), diagonal: each step of size `walk_lr` on a batch's mean NLL counts. The features are those of
    the network that the inner client found. `target` [1, ...] is shaped as a target, `rows` the most of a client.
    """

    def start(own: Own, info: Info) -> Looking:
        return Looking(inner.start(own, info), Cache.empty(group, target, rows, batch))

    def look(state: Looking, b: Batch, tape: Tape, info: Info) -> Looking:
        seen = group.look(means(group, whole(state.inner, info).parts, info), b.x)
        return state._replace(cache=state.cache.add(seen, b))

    def begin(state: Looking, info: Info) -> Walking:
        vector = group.of(means(group, whole(state.inner, info).parts, info))
        zero = torch.zeros_like(vector)
        return Walking(state.inner, state.cache, vector, vector.new_zeros(()), zero, zero)

    def loss(vectors: dict[str, Tensor], seen: Tensor, y: Tensor, others: dict[str, Any]) -> Any:
        return -log_likelihood(vectors["own"], group, seen, y, None, others) / len(y), ()

    def step(state: Walking, b: Batch, tape: Tape, info: Info) -> Walking:
        seen, y = state.cache.draw(batch, tape, info)
        others = means(group, whole(state.inner, info).parts, info)
        slopes, _ = gradients(loss, {"own": state.vector}, seen, y, others)
        vector = state.vector - info.options["walk_lr"] * slopes["own"]
        # Welford's recursion: a difference of sums would lose small variances.
        number, away = state.number + 1, vector - state.mean
        mean = state.mean + away / number
        return state._replace(vector=vector, number=number, mean=mean, square=state.square + away * (vector - mean))

    def finish(state: Walking, info: Info) -> Upload:
        done = inner.finish(state.inner, info)
        scale = (state.square / state.number.clamp(min=1)).sqrt().clamp(min=LEAST)
        return done._replace(parts={**done.parts, CLASSIFIER: Gaussian(state.mean, scale, group.layout)})

    own = (Phase(look, 1, batch), Phase(step, epochs, batch, begin=begin))
    return Client(start, (*(inside(phase) for phase in inner.phases), *own), finish, inner.first)
