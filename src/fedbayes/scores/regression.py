"""Scores of normal predictions, f(mean, scale, target) with each [N] or [N, D]; `scale` is a standard deviation.

All take the same three, so that a table can run over them. Over D outputs the likelihood is the joint one, a sum; the
others are means over the N x D entries.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from fedbayes.scores import inputs


def rmse(mean: Tensor, scale: Tensor, target: Tensor) -> float:
    """Root mean square error, sqrt mean (target - mean)^2; lower is better. The scale does not matter."""
    mean, scale, target = inputs.normal(mean, scale, target)
    return math.sqrt(float((target - mean).square().mean()))


def normal_nll(mean: Tensor, scale: Tensor, target: Tensor) -> float:
    """Negative log density in nats, mean over rows of sum_d [z^2 + log(2 pi scale^2)] / 2; lower is better."""
    return float(nll_terms(*inputs.normal(mean, scale, target)).sum(1).mean())


def crps(mean: Tensor, scale: Tensor, target: Tensor) -> float:
    """Continuous ranked probability score of a normal, in the target's units; lower is better.

    scale [z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)], z = (target - mean) / scale (Gneiting and Raftery, 2007).
    """
    return float(crps_terms(*inputs.normal(mean, scale, target)).mean())


def sharpness(mean: Tensor, scale: Tensor, target: Tensor) -> float:
    """Determinant sharpness with independent outputs, mean over rows of det(Sigma)^(1/2D) (FedAG, eq. 8).

    Lower is sharper, which is better only among calibrated predictions. For D = 1 the mean scale.
    """
    mean, scale, target = inputs.normal(mean, scale, target)
    return float(scale.log().mean(1).exp().mean())


def covariance_sharpness(covariance: Tensor) -> float:
    """Determinant sharpness of covariances [N, D, D], mean of det(Sigma)^(1/2D) (FedAG, eq. 8); lower is sharper."""
    covariance = inputs.real("covariance", covariance)
    if covariance.ndim != 3 or covariance.shape[1] != covariance.shape[2]:
        raise ValueError(f"covariance must be [N, D, D], not {list(covariance.shape)}. Use sharpness for scales.")
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if failed.any():
        raise ValueError(f"covariance must be positive definite: {int((failed > 0).sum())} of {len(failed)} are not.")
    return float(factor.diagonal(dim1=1, dim2=2).log().mean(1).exp().mean())


def coverage(mean: Tensor, scale: Tensor, target: Tensor, level: float = 0.9) -> float:
    """Share of targets in the central interval of that level; the nearer to `level` the better."""
    z = central(inputs.share("level", level))
    mean, scale, target = inputs.normal(mean, scale, target)
    return float(((target - mean).abs() <= z * scale).double().mean())


def energy_score(draws: Tensor, target: Tensor) -> float:
    """Energy score of draws [S, N, D] at targets [N, D], mean over rows; lower is better (Gneiting and Raftery, 2007).

    mean_s |x_s - y| - 1 / (2 S^2) sum_{s,t} |x_s - x_t|: the exact score of the ensemble as it is.
    """
    draws, target = inputs.real("draws", draws), inputs.real("target", target)
    if draws.ndim != 3 or draws.shape[1:] != target.shape:
        raise ValueError(
            f"draws must be [S, N, D] and target [N, D], not {list(draws.shape)} and {list(target.shape)}. "
            "Give a single output a last axis of 1."
        )
    error = (draws - target).norm(dim=-1).mean(0)
    # One draw against the later ones at a time: all S^2 pairs at once would be gigabytes.
    pairs = torch.stack([(draws[s] - draws[s + 1 :]).norm(dim=-1).sum(0) for s in range(len(draws))]).sum(0)
    return float((error - pairs / len(draws) ** 2).mean())


def nll_terms(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Negative log density of each entry."""
    return 0.5 * ((target - mean) / scale).square() + scale.log() + 0.5 * math.log(2 * math.pi)


def crps_terms(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """CRPS of each entry."""
    z = (target - mean) / scale
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return scale * (z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))


def central(level: float) -> float:
    """Half-width, in scales, of a normal's central interval of that level."""
    return NormalDist().inv_cdf((1 + level) / 2)
