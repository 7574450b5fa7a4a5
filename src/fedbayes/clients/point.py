"""The point client: plain training from the broadcast mean (FedAvg), optionally held near it (FedProx)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Learner, Own, Phase, Upload, falling_rate
from fedbayes.clients.ghost import of_points
from fedbayes.clients.optimisers import Optimiser
from fedbayes.clients.private_rows import RowsOf, by_row, private_gradients
from fedbayes.model.chain import Chain
from fedbayes.model.gradient import gradients, weight_gradients
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.values import Parts, Point

LINEAR = "linear"  # among what a client is told: the linear term of its loss, by part


@dataclass(frozen=True, eq=False)
class PointStep:
    """A step down  mean NLL + proximal / 2 * |w - broadcast|^2 + weight_decay / 2 * |w|^2 + linear . w.

    Scalar options read each round: `lr`, those of `weight_decay` and `proximal` that `pull` names (a term that is off
    costs nothing; `linear` is a vector that a client around this one tells), and with `clip` the largest norm of a
    gradient. `falling`: the learning rate goes linearly from `lr` to 0 within a round of so many epochs. `adversarial`:
    the loss of x and that of x + option adversarial * sign(d loss / d x), half each, x as the network sees it
    (Lakshminarayanan et al., 2017). Private steps have noise, and do not tell their loss.
    """

    model: Model
    optimiser: Optimiser
    epochs: int
    pull: tuple[str, ...] = ()
    clip: bool = False
    falling: bool = False
    adversarial: bool = False
    private: int | None = None  # normals that the network reads for a row, where the steps are private
    chain: Chain | None = None  # of such steps, where the network is one: they need no gradient for each row

    def __call__(self, state: Learner, b: Batch, tape: Tape, info: Info) -> Learner:
        if self.private is None:
            unchanged = self.model.weights(self._unchanged(state, info))
            loss = _loss_of_weights(self.model)
            slopes, (static, nll) = weight_gradients(loss, self.model, state.vectors, unchanged, b, tape)
        else:
            static, nll = state.static, state.loss.new_zeros(())
            slopes = private_gradients(self._rows(state, b, info), state.vectors, b, tape, info, self.private)
        if self.adversarial:
            others = self._uphill(state, b, tape, info)
            slopes = {p: 0.5 * (g + others[p]) for p, g in slopes.items()}
        if "weight_decay" in self.pull:
            slopes = {p: g + info.options["weight_decay"] * state.vectors[p] for p, g in slopes.items()}
        if "proximal" in self.pull:
            away = {p: v - info.broadcast[p].mean for p, v in state.vectors.items()}
            slopes = {p: g + info.options["proximal"] * away[p] for p, g in slopes.items()}
        if LINEAR in self.pull:
            slopes = {p: g + info.constants[LINEAR][p] for p, g in slopes.items()}
        if self.clip:
            slopes = clipped(slopes, info.options["clip"])
        rate = falling_rate(b, info, self.epochs) if self.falling else info.options["lr"]
        moved, vectors = self.optimiser.update(state.optimiser, state.vectors, slopes, rate)
        return Learner(vectors, static, moved, state.loss + nll, state.steps + 1)

    def _rows(self, state: Learner, b: Batch, info: Info) -> RowsOf:
        """How the gradients of rows are found."""
        known = self._unchanged(state, info)
        if self.chain is not None:
            return of_points(self.chain, next(iter(state.vectors)))
        return by_row(_loss(self.model), lambda row, z: (known, row, z), b.step)

    def _unchanged(self, state: Learner, info: Info) -> dict[str, Any]:
        """What a step does not differentiate: buffers, and frozen weights."""
        return {**state.static, **self.model.frozen_in(info.constants)}

    def _uphill(self, state: Learner, b: Batch, tape: Tape, info: Info) -> dict[str, Tensor]:
        """The gradient at inputs that are a step uphill from the batch's."""
        loss, unchanged = _loss(self.model.as_seen), self._unchanged(state, info)
        seen = b._replace(x=self.model.inputs(b.x))

        def of_input(inputs: dict[str, Tensor]) -> Any:
            return loss(state.vectors, unchanged, seen._replace(x=inputs["x"]), tape)

        up = gradients(of_input, {"x": seen.x})[0]["x"].sign()
        worse = seen._replace(x=seen.x + info.options["adversarial"] * up)
        return gradients(loss, state.vectors, unchanged, worse, tape)[0]


def point(step: PointStep, batch: int) -> Client:
    """The client that goes from the broadcast mean by these steps (McMahan et al., 2017; Li et al., 2020)."""
    model = step.model

    def start(own: Own, info: Info) -> Learner:
        vectors = {part: info.broadcast[part].mean for part in model.layouts}
        static = {part: vectors.pop(part) for part in model.static}
        zero = torch.zeros((), device=next(iter(vectors.values())).device)
        return Learner(vectors, static, step.optimiser.init(vectors), zero, zero)

    def finish(state: Learner, info: Info) -> Upload:
        parts: Parts = {part: Point(v, model.layouts[part]) for part, v in {**state.vectors, **state.static}.items()}
        return Upload(parts, {}, {"loss": state.loss / state.steps.clamp(min=1)})

    return Client(start, (Phase(step, step.epochs, batch, private=step.private is not None),), finish)


def _loss(model: Model) -> Callable[..., Any]:
    of_weights = _loss_of_weights(model)

    def loss(vectors: dict[str, Tensor], static: dict[str, Any], b: Batch, tape: Tape) -> Any:
        return of_weights(model.weights(vectors), model.weights(static), b, tape)

    return loss


def _loss_of_weights(model: Model) -> Callable[..., Any]:
    def loss(weights: dict[str, Tensor], unchanged: dict[str, Tensor], b: Batch, tape: Tape) -> Any:
        weights = {**weights, **unchanged}
        output, static = model.train_output(weights, b.x, tape, b.mask)
        nll = model.nll(output, b.y, b.mask, weights)
        return nll, (static, nll.detach())

    return loss


def clipped(slopes: dict[str, Tensor], most: Tensor) -> dict[str, Tensor]:
    """The gradient, shortened to length `most` where it is longer."""
    length = torch.stack([g.square().sum() for g in slopes.values()]).sum().sqrt()
    factor = (most / length.clamp(min=1e-12)).clamp(max=1)
    return {part: g * factor for part, g in slopes.items()}
