"""The point client: plain training from the broadcast mean (FedAvg), optionally held near it (FedProx)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Known, Learner, Own, Phase, Upload, falling_rate
from fedbayes.clients.known import dense, rowwise
from fedbayes.clients.optimisers import Optimiser
from fedbayes.model.chain import by_hand
from fedbayes.model.gradient import gradients
from fedbayes.model.model import Model
from fedbayes.model.tracing import alone, traced
from fedbayes.noise import Tape
from fedbayes.posterior.values import Parts, Point


def point(
    model: Model,
    *,
    optimiser: Optimiser,
    epochs: int,
    batch: int,
    pull: tuple[str, ...] = (),
    clip: bool = False,
    falling: bool = False,
    adversarial: bool = False,
) -> Client:
    """Minimises  mean NLL + proximal / 2 * |w - broadcast|^2 + weight_decay / 2 * |w|^2.

    McMahan et al. (2017); Li et al. (2020). Scalar options read each round: `lr`, those of `weight_decay` and
    `proximal` that `pull` names (a term that is off costs nothing), and with `clip` the largest norm of a gradient.
    `falling`: the learning rate goes linearly from `lr` to 0 within the round. `adversarial`: the loss of x and that
    of x + option adversarial * sign(d loss / d x), half each, x as the network sees it (Lakshminarayanan et al., 2017).
    """

    def start(own: Own, info: Info) -> Learner:
        vectors = {part: info.broadcast[part].mean for part in model.layouts}
        static = {part: vectors.pop(part) for part in model.static}
        zero = torch.zeros((), device=next(iter(vectors.values())).device)
        return Learner(vectors, static, optimiser.init(vectors), zero, zero)

    def loss_by(model: Model) -> Callable[..., Any]:
        def loss(vectors: dict[str, Tensor], static: dict[str, Any], b: Batch, tape: Tape) -> Any:
            weights = model.weights({**vectors, **static})
            output, static = model.train_output(weights, b.x, tape, b.mask)
            nll = model.nll(output, b.y, b.mask, weights)
            return nll, (static, nll.detach())

        return loss

    loss, loss_of_seen = loss_by(model), loss_by(model.as_seen)

    def unchanged(state: Learner, info: Info) -> dict[str, Any]:
        """What a step does not differentiate: buffers, and frozen weights."""
        return {**state.static, **model.frozen_in(info.constants)}

    def uphill(state: Learner, b: Batch, tape: Tape, info: Info) -> Tensor:
        def of_input(inputs: dict[str, Tensor]) -> Any:
            return loss_of_seen(state.vectors, unchanged(state, info), b._replace(x=inputs["x"]), tape)

        return gradients(of_input, {"x": b.x})[0]["x"]

    def descent(state: Learner, b: Batch, tape: Tape, info: Info) -> tuple[dict[str, Tensor], Any]:
        if hand is None or traced() or not alone() or b.x.device.type != "cpu":
            return gradients(loss, state.vectors, unchanged(state, info), b, tape)
        ((part, vector),) = state.vectors.items()
        nll, slope = hand(vector, model.augmented(b.x, tape), b.y, b.mask)
        return {part: slope}, (state.static, nll)

    def step(state: Learner, b: Batch, tape: Tape, info: Info) -> Learner:
        slopes, (static, nll) = descent(state, b, tape, info)
        if adversarial:
            seen = b._replace(x=model.inputs(b.x))
            worse = seen._replace(x=seen.x + info.options["adversarial"] * uphill(state, seen, tape, info).sign())
            others, _ = gradients(loss_of_seen, state.vectors, unchanged(state, info), worse, tape)
            slopes = {p: 0.5 * (g + others[p]) for p, g in slopes.items()}
        if "weight_decay" in pull:
            slopes = {p: g + info.options["weight_decay"] * state.vectors[p] for p, g in slopes.items()}
        if "proximal" in pull:
            away = {p: v - info.broadcast[p].mean for p, v in state.vectors.items()}
            slopes = {p: g + info.options["proximal"] * away[p] for p, g in slopes.items()}
        if clip:
            slopes = clipped(slopes, info.options["clip"])
        rate = falling_rate(b, info, epochs) if falling else info.options["lr"]
        moved, vectors = optimiser.update(state.optimiser, state.vectors, slopes, rate)
        return Learner(vectors, static, moved, state.loss + nll, state.steps + 1)

    def finish(state: Learner, info: Info) -> Upload:
        parts: Parts = {part: Point(v, model.layouts[part]) for part, v in {**state.vectors, **state.static}.items()}
        return Upload(parts, {}, {"loss": state.loss / state.steps.clamp(min=1)})

    hand = None if adversarial else by_hand(model)
    form = None if adversarial or optimiser.momentum is None else dense(model, optimiser.momentum, pull, clip, falling)
    single = rowwise(form) if form is not None and batch == 1 and model.dtype == torch.float32 else None
    return Client(start, (Phase(step, epochs, batch, known=Known(step, single, form, hand is not None)),), finish)


def clipped(slopes: dict[str, Tensor], most: Tensor) -> dict[str, Tensor]:
    """The gradient, shortened to length `most` where it is longer."""
    length = torch.stack([g.square().sum() for g in slopes.values()]).sum().sqrt()
    factor = (most / length.clamp(min=1e-12)).clamp(max=1)
    return {part: g * factor for part, g in slopes.items()}
