"""Scores of how unfamiliar an input is. One convention: higher means more likely out of distribution.

Inputs carry classes last: logits and probs [..., C]; draws of probabilities are [S, ..., C]. Returns are [...] float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.scores import inputs


def msp(probs: Tensor) -> Tensor:
    """1 - max_c p_c, of the maximum softmax probability (Hendrycks and Gimpel, 2017); higher means more likely out."""
    return 1 - inputs.distribution("probs", probs).amax(-1)


def max_logit(logits: Tensor) -> Tensor:
    """-max_c logit_c (Hendrycks et al., 2022); higher means more likely out."""
    return -inputs.real("logits", logits).amax(-1)


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """-T log sum_c exp(logit_c / T) (Liu et al., 2020), any real number; higher means more likely out."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}.")
    return -temperature * (inputs.real("logits", logits) / temperature).logsumexp(-1)


def entropy(probs: Tensor) -> Tensor:
    """-sum_c p_c log p_c in nats; higher means more likely out."""
    return torch.special.entr(inputs.distribution("probs", probs)).sum(-1)


def mutual_information(draws: Tensor) -> Tensor:
    """H(mean_s p_s) - mean_s H(p_s) in nats: the draws' disagreement; higher means more likely out. 0 for one draw."""
    draws = _draws(draws)
    return (entropy(draws.mean(0)) - entropy(draws).mean(0)).clamp_min(0)


def epistemic_trace(draws: Tensor) -> Tensor:
    """sum_c mean_s (p_sc - mean_s p_sc)^2 (Kwon et al., 2020); higher means more likely out. 0 for one draw."""
    return _draws(draws).var(0, correction=0).sum(-1)


def odin(
    logits: Callable[[Tensor], Tensor], x: Tensor, *, temperature: float = 1000.0, epsilon: float = 0.0014
) -> Tensor:
    """1 - max softmax(f(x') / T) at x' = x + epsilon sign grad_x log max softmax(f(x) / T) (Liang et al., 2018).

    `logits` maps inputs [N, ...] to [N, C], each row on its own; higher means more likely out.
    """
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point, not {x.dtype}: ODIN moves the input. Cast it first.")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}.")
    with torch.enable_grad():
        moved = x.detach().clone().requires_grad_(True)
        # Float64: at T = 1000 all probabilities are 1 / C but for the fifth digit.
        top = (logits(moved).double() / temperature).log_softmax(-1).amax(-1)
        (slope,) = torch.autograd.grad(top.sum(), moved)
    with torch.no_grad():
        return msp((logits(x + epsilon * slope.sign()).double() / temperature).softmax(-1))


class Mahalanobis(NamedTuple):
    """Means [C, D] of the classes seen, in feature space, and the Cholesky factor [D, D] of their shared covariance."""

    means: Tensor
    factor: Tensor


def mahalanobis_sums(features: Tensor, labels: Tensor, classes: int, mask: Tensor | None = None) -> dict[str, Tensor]:
    """A site's part of the fit, from penultimate features [N, D]: counts [C], sums [C, D] and second moments [D, D]."""
    live = torch.ones_like(labels, dtype=torch.float64) if mask is None else mask.double()
    features = torch.where(live[:, None] > 0, features.double(), 0.0)
    member = live[:, None] * (labels[:, None] == torch.arange(classes, device=labels.device)).double()
    return {
        "count": member.sum(0),
        "total": member.mT @ features,
        "square": (features * member.sum(1, keepdim=True)).mT @ features,
    }


def mahalanobis_fit(sums: dict[str, Tensor], *, shrinkage: float = 1e-6) -> Mahalanobis:
    """Class means and the shared within-class covariance, shrunk towards its mean variance times the identity.

    Shrinkage keeps dead features invertible; a class without samples is left out.
    """
    count, total, square = (sums[name].double() for name in ("count", "total", "square"))
    if not float(count.sum()) > 0:
        raise ValueError("count is 0: the Mahalanobis fit needs labelled features. Were all sites masked out?")
    if not bool(total.isfinite().all() and square.isfinite().all()):
        raise ValueError("sums of features are not finite. Leave out the site whose network diverged.")
    seen = count > 0
    means = total[seen] / count[seen, None]
    covariance = (square - means.mT @ total[seen]) / count.sum()
    variance = covariance.diagonal().mean()
    # What is left of the second moment after subtraction is rounding when it is this small beside it.
    if not float(variance) > 1e-12 * float(square.diagonal().mean() / count.sum()):
        raise ValueError("features are constant within every class: a distance needs spread. Take an earlier layer.")
    ridge = shrinkage * variance * torch.eye(len(covariance), dtype=torch.float64, device=covariance.device)
    return Mahalanobis(means, torch.linalg.cholesky((1 - shrinkage) * covariance + ridge))


def mahalanobis(fit: Mahalanobis, features: Tensor) -> Tensor:
    """min_c (f - m_c)^T Sigma^-1 (f - m_c) (Lee et al., 2018), squared distance [N]; higher means more likely out."""
    features = inputs.real("features", features)
    if features.ndim != 2 or features.shape[1] != fit.means.shape[1]:
        raise ValueError(f"features must be [N, {fit.means.shape[1]}] as fitted, not {list(features.shape)}.")

    def whiten(rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(fit.factor, rows.mT, upper=False).mT

    centre = fit.means.mean(0)  # Distances between points far from the origin would cancel otherwise.
    points, means = whiten(features - centre), whiten(fit.means - centre)
    return torch.stack([(points - m).square().sum(1) for m in means]).amin(0)


def _draws(draws: Tensor) -> Tensor:
    draws = inputs.distribution("draws", draws)
    if draws.ndim < 3:
        raise ValueError(f"draws must be [S, ..., C], probabilities of S draws of N rows, not {list(draws.shape)}.")
    return draws
