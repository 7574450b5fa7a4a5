"""The client of FedLap-Cov: a point trained near a normal, then Laplace's approximation there: a normal of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Learner, Own, Phase, Upload, falling_rate
from fedbayes.clients.optimisers import Optimiser
from fedbayes.clients.variational import KL_WEIGHTS, TILT
from fedbayes.errors import InputError
from fedbayes.model.gradient import gradients
from fedbayes.model.likelihood import Likelihood
from fedbayes.model.model import Model
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian, Parts, Point

LEAST = 0.1  # of the broadcast's precision: what a client's has at least
KINDS = ("classes", "labels", "real")  # of targets whose curvature in the outputs is known


class Trained(NamedTuple):
    """Where training is, and the sum of squared projections of the curvature."""

    learner: Learner
    square: Tensor


def anchored(model: Model, optimiser: Optimiser, *, epochs: int, batch: int, falling: bool, probe: int) -> Client:
    """Minimises  mean NLL at w + weight * (-log prior at w),  then takes the diagonal of the Gauss-Newton matrix there.

    Swaroop et al. (2025); the prior is the broadcast, tilted where a client around this one says so. For outputs f with
    curvature L of the loss in them, (J^T L^(1/2) noise)^2 of a batch of `probe` rows has the diagonal of J^T L J as its
    mean: one backward pass for each. Scalar options: `lr`, `kl_weight`.
    """
    points = [part for part in model.trainable if part != "model"]

    def start(own: Own, info: Info) -> Trained:
        vectors = {part: info.broadcast[part].mean for part in model.trainable}
        static = {part: info.broadcast[part].mean for part in model.static}
        zero = vectors["model"].new_zeros(())
        return Trained(
            Learner(vectors, static, optimiser.init(vectors), zero, zero), torch.zeros_like(vectors["model"])
        )

    def loss(vectors: dict[str, Tensor], static: dict[str, Any], b: Batch, tape: Tape) -> Any:
        weights = model.weights({**vectors, **static})
        output, static = model.train_output(weights, b.x, tape, b.mask)
        nll = model.nll(output, b.y, b.mask, weights)
        return nll, (static, nll.detach())

    def train(state: Trained, b: Batch, tape: Tape, info: Info) -> Trained:
        at = state.learner
        slopes, (static, nll) = gradients(loss, at.vectors, _beside(model, at, info), b, tape)
        _, precision, pull = held(info)
        away = at.vectors["model"] - info.broadcast["model"].mean
        slopes["model"] = slopes["model"] + KL_WEIGHTS["1/n"](b, info) * (precision * away + pull)
        rate = falling_rate(b, info, epochs) if falling else info.options["lr"]
        moved, vectors = optimiser.update(at.optimiser, at.vectors, slopes, rate)
        return state._replace(learner=Learner(vectors, static, moved, at.loss + nll, at.steps + 1))

    def projected(vectors: dict[str, Tensor], others: dict[str, Any], b: Batch, tape: Tape) -> Any:
        weights = model.weights({**others, **vectors})
        output = model.output(weights, b.x)
        thrown = root_noise(model.likelihood, output.detach(), weights, tape)
        if b.mask is not None:
            thrown = torch.where(b.mask[:, None], thrown, 0)
        return (output * thrown).sum(), ()

    def curve(state: Trained, b: Batch, tape: Tape, info: Info) -> Trained:
        at = state.learner
        others = {**{part: at.vectors[part] for part in points}, **_beside(model, at, info)}
        slopes, _ = gradients(projected, {"model": at.vectors["model"]}, others, b, tape)
        return state._replace(square=state.square + slopes["model"].square())

    def finish(state: Trained, info: Info) -> Upload:
        at, q = state.learner, info.broadcast["model"]
        assert isinstance(q, Gaussian)
        least = LEAST * q.scale.square().reciprocal()
        precision = torch.maximum(held(info)[0] + state.square / info.options["kl_weight"], least)
        found = Gaussian(at.vectors["model"], precision.rsqrt(), model.layouts["model"])
        parts: Parts = {"model": found}
        parts |= {part: Point(at.vectors[part], model.layouts[part]) for part in points}
        parts |= {part: Point(v, model.layouts[part]) for part, v in at.static.items()}
        return Upload(parts, {}, {"loss": at.loss / at.steps.clamp(min=1), "kl": found.kl(q)})

    return Client(start, (Phase(train, epochs, batch), Phase(curve, 1, probe)), finish)


def held(info: Info) -> tuple[Tensor, Tensor, Tensor]:
    """The prior's precision for scales and for means, and the slope of its negative log at the broadcast's mean."""
    q = info.broadcast["model"]
    assert isinstance(q, Gaussian)
    precision = q.scale.square().reciprocal()
    if TILT not in info.constants:
        return precision, precision, torch.zeros_like(precision)
    tilt = info.constants[TILT]
    return precision - tilt.precision, precision - tilt.held, tilt.pull


def root_noise(likelihood: Likelihood, output: Tensor, weights: Mapping[str, Tensor], tape: Tape) -> Tensor:
    """Draws [B, C] whose covariance is the curvature of the negative log-likelihood in the outputs [B, C]."""
    mean, variance = likelihood.moments(output, weights)
    if likelihood.kind == "classes":
        noise = mean.sqrt() * tape(output)
        return noise - mean * noise.sum(-1, keepdim=True)
    return tape(output) * (variance if likelihood.kind == "labels" else variance.reciprocal()).sqrt()


def check_known(likelihood: Likelihood) -> None:
    """Refuse a likelihood whose curvature is not known."""
    if likelihood.kind not in KINDS or (likelihood.kind == "real" and likelihood.width != 1):
        raise InputError("fedlap_cov: this likelihood's curvature is not known; use classes, labels or a normal")


def _beside(model: Model, at: Learner, info: Info) -> dict[str, Any]:
    return {**at.static, **model.frozen_in(info.constants)}
