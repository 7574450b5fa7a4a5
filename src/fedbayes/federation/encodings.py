"""How the rules that are sums encode a posterior, and decode the total.

Statistics are in units of the reference q_0 (what the client started from): d = (m - m_0) / s_0, v = s^2 / s_0^2, and
precision l = s_0^2 / s^2, in float64, with the unnormalised weight and the number of clients beside them. A point has
unit scale. Centred so, small variances survive large means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.federation.moves import unit_scale
from fedbayes.federation.rule import Encode, Statistics
from fedbayes.posterior.full import FullGaussian, triangle
from fedbayes.posterior.values import Gaussian, Point, Posterior, softplus_inverse


def in_units(q: Posterior, reference: Posterior) -> tuple[Tensor, Tensor]:
    """Mean and variance of q in units of the reference."""
    scale = unit_scale(reference)
    mean, variance = q.moments()
    return (mean.double() - reference.mean.double()) / scale, variance.double() / scale.square()


def mean_in_units(q: Posterior, reference: Posterior) -> Tensor:
    """The mean alone, at a third of the passes over the weights where the reference is a point."""
    d = q.mean.double() - reference.mean
    return d if isinstance(reference, Point) else d / unit_scale(reference)


def _with_weight(statistics: Statistics, weight: Tensor) -> Statistics:
    weight = weight.double()
    return {**statistics, "weight": weight, "count": torch.ones_like(weight)}


def moments(*keys: str) -> Encode:
    """Weighted first and second moments, of them those that a rule decodes."""
    spread = any(key.startswith("variance") for key in keys)

    def encode(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
        w = weight.double()
        d, v = in_units(q, reference) if spread else (mean_in_units(q, reference), torch.zeros_like(w))
        return _with_weight({key: MOMENTS[key](w, d, v) for key in keys}, weight)

    return encode


# Enough for FedAvg, NWA, WS and the linear pool, of mean d and variance v in units of the reference.
MOMENTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda w, d, v: w * d,
    "square": lambda w, d, v: w * d.square(),
    "variance": lambda w, d, v: w * v,
    "variance2": lambda w, d, v: w.square() * v,
}


def full_moments(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
    """Weighted means d, covariances S and products d d^T [P, P] about the reference's mean (pFedPF eq. 15)."""
    assert isinstance(q, FullGaussian)
    w, unit = weight.double(), unit_scale(reference)
    d = (q.mean.double() - reference.mean.double()) / unit
    tril = q.tril.double() / unit[:, None]
    # Apart, so that rounding of large products can't eat small covariances.
    return _with_weight({"mean": w * d, "within": w * (tril @ tril.mT), "square": w * (d[:, None] * d)}, weight)


def naturals(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
    """Precision, and precision times mean, each times the weight."""
    d, v = in_units(q, reference)
    precision = weight.double() * v.reciprocal()
    return _with_weight({"precision": precision, "shift": precision * d}, weight)


def unweighted(encode: Encode) -> Encode:
    return lambda q, w, reference: encode(q, torch.ones_like(w), reference)


def _gaussian(d: Tensor, variance: Tensor, reference: Posterior) -> Gaussian:
    """From units of the reference back to the reference's own dtype; a scale never rounds to zero."""
    unit, dtype = unit_scale(reference), reference.mean.dtype
    scale = (unit * variance.sqrt()).to(dtype).clamp(min=1e-12)
    return Gaussian((reference.mean.double() + unit * d).to(dtype), scale, reference.layout)


def decode_point(total: Statistics, reference: Posterior) -> Point:
    mean = reference.mean.double() + unit_scale(reference) * total["mean"] / total["weight"]
    return Point(mean.to(reference.mean.dtype), reference.layout)


def decode_nwa(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["mean"] / t["weight"], t["variance"] / t["weight"], reference)


def decode_ws(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["mean"] / t["weight"], t["variance2"] / t["weight"].square(), reference)


def decode_linear_pool(t: Statistics, reference: Posterior) -> Gaussian:
    mean = t["mean"] / t["weight"]
    disagreement = (t["square"] / t["weight"] - mean.square()).clamp(min=0)  # rounding can make it -1e-16
    return _gaussian(mean, t["variance"] / t["weight"] + disagreement, reference)


def decode_moment_matching(t: Statistics, reference: Posterior) -> FullGaussian:
    unit, dtype = unit_scale(reference), reference.mean.dtype
    mean = t["mean"] / t["weight"]
    tril = triangle(t["within"] / t["weight"], t["square"] / t["weight"] - mean[:, None] * mean)
    return FullGaussian(
        (reference.mean.double() + unit * mean).to(dtype), (unit[:, None] * tril).to(dtype), reference.layout
    )


def decode_log_pool(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["shift"] / t["precision"], t["weight"] / t["precision"], reference)


def decode_conflation(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["shift"] / t["precision"], t["precision"].reciprocal(), reference)


def decode_wc(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["shift"] / t["precision"], t["heaviest"] / t["precision"], reference)


def naturals_and_heaviest(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
    return {**naturals(q, weight, reference), "heaviest": weight.double()}


# A precision below this share of the reference's is floored: the posterior is at most ten times as wide.
DWC_FLOOR = 0.01


def decode_dwc(t: Statistics, reference: Posterior) -> Gaussian:
    precision = t["precision"] - (t["count"] - 1)  # the reference has precision 1 and mean 0 in its own units
    floored = precision < DWC_FLOOR
    precision = torch.where(floored, DWC_FLOOR, precision)
    # Flooring alone would throw the mean far off: such a weight keeps the reference's.
    mean = torch.where(floored, 0.0, t["shift"] / precision)
    return _gaussian(mean, precision.reciprocal(), reference)


def floored(t: Statistics, reference: Posterior) -> dict[str, float]:
    return {"floored": float((t["precision"] - (t["count"] - 1) < DWC_FLOOR).sum())}


def means_of_rho(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
    assert isinstance(q, Gaussian)
    w = weight.double()
    d = mean_in_units(q, reference)
    return _with_weight({"mean": w * d, "rho": w * softplus_inverse(q.scale.double())}, weight)


def decode_mean_rho(t: Statistics, reference: Posterior) -> Gaussian:
    scale = F.softplus(t["rho"] / t["weight"])
    return _gaussian(t["mean"] / t["weight"], (scale / unit_scale(reference)).square(), reference)
