"""The client that learns soft targets by stochastic weight averaging: what a server does that distils an ensemble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Learner, Own, Phase, Upload
from fedbayes.clients.optimisers import Optimiser
from fedbayes.model.gradient import gradients
from fedbayes.model.model import Model
from fedbayes.model.soft_targets import cross_entropy, mean_over_live
from fedbayes.noise import Tape
from fedbayes.posterior.values import Parts, Point

Vectors = dict[str, Tensor]


class State(NamedTuple):
    """For each network its learner, and the sum of the iterates that are averaged; and how many those are."""

    learners: tuple[Learner, ...]
    sums: tuple[Vectors, ...]
    number: Tensor


def soft(
    models: Mapping[str, Model],
    *,
    optimiser: Optimiser,
    epochs: int,
    batch: int,
    start: int,
    every: int,
    decay: float = 0.0,
) -> Client:
    """Stochastic weight averaging (Izmailov et al., 2018) on the cross-entropy to soft targets + decay / 2 |w|^2.

    `models` are networks by the name of the option that is their learning rate; the targets of a batch,
    [B, network, S, C], stand in place of its y. From step `start` on every `every`-th iterate is averaged; where
    training ends before, the last one is sent. BatchNorm's buffers are then made anew by a pass with the average.
    """
    networks = list(models.values())

    def begin(own: Own, info: Info) -> State:
        learners = []
        for model in networks:
            vectors = {part: info.broadcast[part].mean for part in model.trainable}
            zero = next(iter(vectors.values())).new_zeros(())
            static = {part: info.broadcast[part].mean for part in model.static}
            learners.append(Learner(vectors, static, optimiser.init(vectors), zero, zero))
        sums = tuple({p: torch.zeros_like(v) for p, v in at.vectors.items()} for at in learners)
        return State(tuple(learners), sums, learners[0].loss)

    def loss(vectors: Vectors, model: Model, static: dict[str, Any], b: Batch, tape: Tape) -> Any:
        weights = model.weights({**vectors, **static})
        output, static = model.train_output(weights, b.x, tape, b.mask)
        value = mean_over_live(cross_entropy(model.likelihood, output, weights, b.y), b.mask)
        return value, (static, value.detach())

    def step(state: State, b: Batch, tape: Tape, info: Info) -> State:
        wanted = ((b.step >= start) & ((b.step - start) % every == 0)).to(state.number.dtype)
        learners, sums = [], []
        for i, (rate, model) in enumerate(models.items()):
            at, own = state.learners[i], b._replace(y=b.y[:, i])
            fixed = {**at.static, **model.frozen_in(info.constants)}
            slopes, (static, value) = gradients(loss, at.vectors, model, fixed, own, tape)
            if decay:
                slopes = {p: g + decay * at.vectors[p] for p, g in slopes.items()}
            moved, vectors = optimiser.update(at.optimiser, at.vectors, slopes, info.options[rate])
            learners.append(Learner(vectors, static, moved, at.loss + value, at.steps + 1))
            sums.append({p: total + wanted * vectors[p] for p, total in state.sums[i].items()})
        return State(tuple(learners), tuple(sums), state.number + wanted)

    def averaged(state: State, i: int) -> Vectors:
        last, count = state.learners[i].vectors, state.number
        return {p: torch.where(count > 0, total / count.clamp(min=1), last[p]) for p, total in state.sums[i].items()}

    def refresh(state: State, b: Batch, tape: Tape, info: Info) -> State:
        learners = []
        for i, model in enumerate(networks):
            at = state.learners[i]
            weights = model.weights({**averaged(state, i), **at.static, **model.frozen_in(info.constants)})
            _, static = model.train_output(weights, b.x, tape, b.mask)
            learners.append(at._replace(static=static))
        return state._replace(learners=tuple(learners))

    def finish(state: State, info: Info) -> Upload:
        parts: Parts = {}
        for i, model in enumerate(networks):
            final = {**averaged(state, i), **state.learners[i].static}
            parts |= {part: Point(v, model.layouts[part]) for part, v in final.items()}
        lasts = [at.loss / at.steps.clamp(min=1) for at in state.learners]
        return Upload(parts, {}, {"loss": torch.stack(lasts).mean()})

    normed = any(model.static for model in networks)
    phases = (Phase(step, epochs, batch), *((Phase(refresh, 1, batch),) if normed else ()))
    return Client(begin, phases, finish)
