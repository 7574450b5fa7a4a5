"""Likelihoods: what a network's output says of a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.data import Dataset
from fedbayes.data.survival import check_times
from fedbayes.errors import InputError, unknown
from fedbayes.model import survival
from fedbayes.posterior.values import LOG_2PI

Weights = Mapping[str, Tensor]


class Likelihood(NamedTuple):
    """How outputs explain targets.

    `log_prob(output, target, parameters)` gives one number for each row. `moments(output, parameters)` gives mean and
    variance of the target under one set of weights; `kind` says how to score ("classes", "labels", "real", "survival").
    `parameters` are learned beside the network, as entries `likelihood.*`. The mean of a survival time is its curve at
    `times`. `absent` is the target of a row that is not there, where rows of a batch are compared with one another.
    `named` are the name in `LIKELIHOODS` and the options that make it again; of a user's own there are none.
    """

    kind: str
    log_prob: Callable[[Tensor, Tensor, Weights], Tensor]
    moments: Callable[[Tensor, Weights], tuple[Tensor, Tensor]]
    parameters: dict[str, Tensor] = {}  # noqa: RUF012  (never changed in place)
    width: int = 1  # outputs of the network for each output of the target
    scale: float | None = None  # of a normal whose scale is fixed: its loss is a squared error
    times: tuple[float, ...] = ()
    absent: tuple[float, ...] | None = None
    on: Callable[[torch.device], Likelihood] | None = None  # the same with its constants on a device
    named: tuple[str, dict[str, Any]] | None = None


def categorical() -> Likelihood:
    """One of C classes; output [B, C] are logits, targets [B] class numbers."""

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        probs = output.softmax(-1)
        return probs, probs - probs.square()

    return Likelihood("classes", log_prob_of_classes, moments, named=("classes", {}))


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

    return Likelihood("labels", log_prob, moments, named=("labels", {}))


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
    named = ("real", {"scale": float(scale), "learn": learn})
    return Likelihood("real", log_prob, moments, learned, scale=None if learn else float(scale), named=named)


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

    return Likelihood("real", log_prob, moments, width=2, named=("mean_variance", {"least": least}))


def custom(log_prob: Callable[[Tensor, Tensor], Tensor]) -> Likelihood:
    """A user's own: log_prob(output [B, D], target) -> [B]. Predictions are the outputs, without aleatoric part."""
    return Likelihood("real", lambda out, y, _: log_prob(out, y), lambda out, _: (out, torch.zeros_like(out)))


def hazard(
    times: Sequence[float],
    *,
    chances: Sequence[float] | None = None,
    proportional: bool = True,
    device: torch.device | None = None,
) -> Likelihood:
    """Discrete time: in each interval that a row is seen in, the event comes with a chance of its own.

    logit h_j(x) = a_j + f(x), targets [B, 2] = (time, event); log p = sum_j log(1 - h_j) over the intervals survived,
    plus log h_j of the one with the event: a sum over rows, so that every rule holds (Andreux et al., 2020). A censored
    row survives its last interval where it was seen through half of it. `times` are the ends of the intervals,
    `chances` their first h_j. Without `proportional` the network has one output for each interval.
    """
    cuts = check_times(times)
    first = survival.first_chances(chances, len(cuts))
    gain, intervals = len(cuts) ** 0.5, survival.Cuts.of(cuts, device)

    def logits(output: Tensor, parameters: Weights) -> Tensor:
        return output + gain * parameters["likelihood.baseline"]

    def log_prob(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
        dies, survives = survival.seen(target, intervals)
        z = logits(output, parameters)
        return (dies * F.logsigmoid(z) + survives * F.logsigmoid(-z)).sum(-1)

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        alive = F.logsigmoid(-logits(output, parameters)).cumsum(-1).exp()
        return alive, alive - alive.square()

    learned = {"baseline": first.logit() / gain}
    on = partial(_bound, hazard, cuts, chances=chances, proportional=proportional)
    width, named = 1 if proportional else len(cuts), ("hazard", {"times": cuts, "proportional": proportional})
    return Likelihood("survival", log_prob, moments, learned, width, times=cuts, on=on, named=named)


def _bound(make: Callable[..., Likelihood], times: Sequence[float], device: torch.device, **options: Any) -> Likelihood:
    return make(times, device=device, **options)


def cox(
    times: Sequence[float], *, chances: Sequence[float] | None = None, device: torch.device | None = None
) -> Likelihood:
    """Proportional hazards by the partial likelihood of a batch: the event came to this row, of those still at risk.

    log p_i = event_i (f_i - log sum_{j: t_j >= t_i} exp f_j), over the rows of the batch (Cox, 1972; Breslow's way with
    ties). It is no sum over rows: risk sets are those of a client's batch. The baseline, by which curves are predicted,
    is learned beside it, as a constant hazard in each interval, by the likelihood at the given f:
    S(t | x) = exp(-H_0(t) exp f(x)). `times` are the ends of the intervals, `chances` the first chances of an event.
    """
    cuts = check_times(times)
    first = survival.first_chances(chances, len(cuts))
    gain, intervals = len(cuts) ** 0.5, survival.Cuts.of(cuts, device)

    def log_masses(parameters: Weights) -> Tensor:
        return gain * parameters["likelihood.baseline"]

    def log_prob(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
        risk = output.squeeze(-1)
        ranks = survival.partial_log_likelihood(risk, target)
        # The baseline follows the network, and not the other way round.
        return ranks + survival.exponential_log_likelihood(risk.detach(), log_masses(parameters), target, intervals)

    def moments(output: Tensor, parameters: Weights) -> tuple[Tensor, Tensor]:
        alive = (-log_masses(parameters).exp().cumsum(-1) * output.exp()).exp()
        return alive, alive - alive.square()

    learned = {"baseline": (-torch.log1p(-first)).log() / gain}
    on = partial(_bound, cox, cuts, chances=chances)
    absent, named = (-1.0, 0.0), ("cox", {"times": cuts})
    return Likelihood("survival", log_prob, moments, learned, times=cuts, absent=absent, on=on, named=named)


LIKELIHOODS: dict[str, Callable[..., Likelihood]] = {
    "classes": categorical,
    "labels": bernoulli,
    "real": normal,
    "mean_variance": mean_variance,
    "hazard": hazard,
    "cox": cox,
}
OF_SURVIVAL = ("hazard", "cox")
BY_KIND = {"survival": "hazard"}  # of targets whose likelihood has another name


def name_and_options(data: Dataset, name: str | None, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The likelihood that these targets ask for where none is named, and its options: survival is cut as data are."""
    name = name or BY_KIND.get(data.kind, data.kind)
    if name not in LIKELIHOODS:
        raise unknown("likelihood", name, LIKELIHOODS)
    survives = data.kind == "survival"
    if survives != (name in OF_SURVIVAL):
        fitting = OF_SURVIVAL if survives else [n for n in LIKELIHOODS if n not in OF_SURVIVAL]
        raise InputError(f"likelihood: {name} is not for {data.kind} targets; use one of {', '.join(fitting)}")
    if not survives:
        return name, dict(options)
    times = check_times(options.get("times", data.times))
    return name, {"chances": survival.chances_in(data.y, times), **options, "times": times}


def likelihood_for(data: Dataset, name: str | None = None) -> Likelihood:
    """The likelihood of this name for a set, or the one that its targets ask for."""
    name, options = name_and_options(data, name, {})
    return LIKELIHOODS[name](**options)
