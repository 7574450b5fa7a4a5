"""Likelihoods: what a network's output says of a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.posterior.values import LOG_2PI

Weights = Mapping[str, Tensor]


class Likelihood(NamedTuple):
    """How outputs explain targets.

    `log_prob(output, target, parameters)` gives one number for each row. `moments(output, parameters)` gives mean and
    variance of the target under one set of weights; `kind` says how to score ("classes", "labels", "real").
    `parameters` are learned beside the network, as entries `likelihood.*`.
    """

    kind: str
    log_prob: Callable[[Tensor, Tensor, Weights], Tensor]
    moments: Callable[[Tensor, Weights], tuple[Tensor, Tensor]]
    parameters: dict[str, Tensor] = {}  # noqa: RUF012  (never changed in place)
    width: int = 1  # outputs of the network for each output of the target
    scale: float | None = None  # of a normal whose scale is fixed: its loss is a squared error


def categorical() -> Likelihood:
    """One of C classes; output [B, C] are logits, targets [B] class numbers."""

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        probs = output.softmax(-1)
        return probs, probs - probs.square()

    return Likelihood("classes", log_prob_of_classes, moments)


def log_prob_of_classes(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
    """Log-probabilities [B] of the target classes under logits [B, C]."""
    # Not F.cross_entropy: under vmap its gather and its backward cost several times as much.
    return output.log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)


def bernoulli() -> Likelihood:
    """C independent labels; output [B, C] are logits, targets [B, C] are 0 or 1."""

    def log_prob(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
        return -F.binary_cross_entropy_with_logits(output, target.to(output.dtype), reduction="none").sum(-1)

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        probs = output.sigmoid()
        return probs, probs - probs.square()

    return Likelihood("labels", log_prob, moments)


def normal(scale: float = 1.0, *, learn: bool = False) -> Likelihood:
    """Targets [B, D] are the output plus normal noise of a fixed scale, or of one that is learned from `scale` on."""
    fixed = torch.tensor(float(scale)).log()

    def log_scale(output: Tensor, parameters: Weights) -> Tensor:
        return parameters["likelihood.log_scale"] if learn else fixed.to(output)

    def log_prob(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
        log = log_scale(output, parameters)
        z = (target - output) * torch.exp(-log)
        return -(0.5 * z.square() + log + 0.5 * LOG_2PI).sum(-1)

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        return output, torch.exp(2 * log_scale(output, parameters)).expand_as(output)

    learned = {"log_scale": fixed.clone()} if learn else {}
    return Likelihood("real", log_prob, moments, learned, scale=None if learn else float(scale))


def mean_variance(least: float = 1e-6) -> Likelihood:
    """The network gives mean and variance: outputs [B, 2 D], the second half by softplus, at least `least`.

    Lakshminarayanan et al. (2017), eq. 1.
    """

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        mean, raw = output.chunk(2, -1)
        return mean, F.softplus(raw) + least

    def log_prob(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
        mean, variance = moments(output, parameters)
        return -0.5 * ((target - mean).square() / variance + variance.log() + LOG_2PI).sum(-1)

    return Likelihood("real", log_prob, moments, width=2)


def custom(log_prob: Callable[[Tensor, Tensor], Tensor]) -> Likelihood:
    """A user's own: log_prob(output [B, D], target) -> [B]. Predictions are the outputs, without aleatoric part."""
    return Likelihood("real", lambda out, y, _: log_prob(out, y), lambda out, _: (out, torch.zeros_like(out)))


LIKELIHOODS: dict[str, Callable[..., Likelihood]] = {
    "classes": categorical,
    "labels": bernoulli,
    "real": normal,
    "mean_variance": mean_variance,
}
