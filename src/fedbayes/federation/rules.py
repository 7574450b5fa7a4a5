"""Aggregation rules as sums: each client encodes its posterior, statistics add, the total is decoded once.

Statistics are in units of the reference q_0 (what the client started from): d = (m - m_0) / s_0, v = s^2 / s_0^2, and
precision l = s_0^2 / s^2, in float64, with the unnormalised weight and the number of clients beside them. A point has
unit scale. Centred so, small variances survive large means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.errors import InputError, unknown
from fedbayes.federation import robust
from fedbayes.federation.moves import Move, moved_mean, moved_moments, moved_naturals, unit_scale
from fedbayes.federation.products import full_naturals, full_product
from fedbayes.federation.robust import OUTLIERS
from fedbayes.posterior.full import FullGaussian, triangle
from fedbayes.posterior.values import Gaussian, Point, Posterior, softplus_inverse

Statistics = dict[str, Tensor]
Encode = Callable[[Posterior, Tensor, Posterior], Statistics]
Decode = Callable[[Statistics, Posterior], Posterior]


class Rule(NamedTuple):
    """`encode(q, weight, reference)`, then a sum over clients (a max for the keys in `maxima`), then `decode`.

    A rule that combines in another way overrides `add`, which must not depend on the order.
    """

    encode: Encode
    decode: Decode
    about: str
    takes: tuple[type, ...] = (Gaussian,)
    maxima: tuple[str, ...] = ()
    needs_reference: bool = False  # whether the answer depends on the reference, not only its rounding
    # How terms of an older broadcast become changes to a newer one, so that those of several versions add; None: they
    # don't (`moves.py`).
    change: Callable[[Statistics, Move], Statistics] | None = None
    narrows: bool = False  # whether several copies of one posterior pool to a narrower one
    weighted: bool = True  # whether the answer depends on the clients' weights
    robust: bool = False  # whether a minority of clients can't move the answer at will
    weighs_precision: bool = False  # whether a client counts by the precision that it claims
    report: Callable[[Statistics, Posterior], dict[str, float]] = lambda total, reference: {}
    # Or no sum at all: from all posteriors, their weights [K] and the reference (a median, say). Costs memory
    # O(clients * weights); `encode` and `decode` are not used then.
    combine: Callable[[Sequence[Posterior], Tensor, Posterior], Posterior] | None = None

    def add(self, a: Statistics, b: Statistics) -> Statistics:
        """The statistics of two groups of clients as those of their union."""
        return {key: torch.maximum(a[key], b[key]) if key in self.maxima else a[key] + b[key] for key in a}

    @property
    def adds(self) -> bool:
        """Whether statistics are summed, or combined in a way of the rule's own."""
        return type(self).add is Rule.add

    def stacked(self, rows: Statistics) -> Statistics:
        """The statistics of clients [K, ...] as those of their union."""
        if self.adds:
            return {key: t.amax(0) if key in self.maxima else t.sum(0) for key, t in rows.items()}
        count = len(next(iter(rows.values())))
        return reduce(self.add, ({key: t[k] for key, t in rows.items()} for k in range(count)))

    def add_into(self, total: Statistics, more: Statistics) -> None:
        """The same in the memory of `total`, at the speed at which memory is read and written."""
        for key, t in more.items():
            if key in self.maxima:
                torch.maximum(total[key], t, out=total[key])
            else:
                total[key].add_(t)


def combining(
    combine: Callable[[Sequence[Posterior], Tensor, Posterior], Posterior],
    about: str,
    takes: tuple[type, ...] = (Gaussian,),
    *,
    robust: bool = False,
) -> Rule:
    """A rule that is no sum: `combine(posteriors, weights [K], reference)` sees every upload, as a median does.

    `robust`: a minority of clients can't move it at will, and every client counts once.
    """

    def decode(total: Statistics, reference: Posterior) -> Posterior:
        raise TypeError("this rule combines all posteriors; there is no sum to decode")

    return Rule(
        lambda q, weight, reference: {}, decode, about, takes, weighted=not robust, robust=robust, combine=combine
    )


def in_units(q: Posterior, reference: Posterior) -> tuple[Tensor, Tensor]:
    """Mean and variance of q in units of the reference."""
    scale = unit_scale(reference)
    mean, variance = q.moments()
    return (mean.double() - reference.mean.double()) / scale, variance.double() / scale.square()


def _with_weight(statistics: Statistics, weight: Tensor) -> Statistics:
    weight = weight.double()
    return {**statistics, "weight": weight, "count": torch.ones_like(weight)}


def moments(*keys: str) -> Encode:
    """Weighted first and second moments, of them those that a rule decodes."""

    def encode(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
        d, v = in_units(q, reference)
        w = weight.double()
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


def _unweighted(encode: Encode) -> Encode:
    return lambda q, w, reference: encode(q, torch.ones_like(w), reference)


def _gaussian(d: Tensor, variance: Tensor, reference: Posterior) -> Gaussian:
    """From units of the reference back to the reference's own dtype; a scale never rounds to zero."""
    unit, dtype = unit_scale(reference), reference.mean.dtype
    scale = (unit * variance.sqrt()).to(dtype).clamp(min=1e-12)
    return Gaussian((reference.mean.double() + unit * d).to(dtype), scale, reference.layout)


def _point(total: Statistics, reference: Posterior) -> Point:
    mean = reference.mean.double() + unit_scale(reference) * total["mean"] / total["weight"]
    return Point(mean.to(reference.mean.dtype), reference.layout)


def _nwa(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["mean"] / t["weight"], t["variance"] / t["weight"], reference)


def _ws(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["mean"] / t["weight"], t["variance2"] / t["weight"].square(), reference)


def _linear_pool(t: Statistics, reference: Posterior) -> Gaussian:
    mean = t["mean"] / t["weight"]
    disagreement = (t["square"] / t["weight"] - mean.square()).clamp(min=0)  # rounding can make it -1e-16
    return _gaussian(mean, t["variance"] / t["weight"] + disagreement, reference)


def _moment_matching(t: Statistics, reference: Posterior) -> FullGaussian:
    unit, dtype = unit_scale(reference), reference.mean.dtype
    mean = t["mean"] / t["weight"]
    tril = triangle(t["within"] / t["weight"], t["square"] / t["weight"] - mean[:, None] * mean)
    return FullGaussian(
        (reference.mean.double() + unit * mean).to(dtype), (unit[:, None] * tril).to(dtype), reference.layout
    )


def _log_pool(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["shift"] / t["precision"], t["weight"] / t["precision"], reference)


def _conflation(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["shift"] / t["precision"], t["precision"].reciprocal(), reference)


def _wc(t: Statistics, reference: Posterior) -> Gaussian:
    return _gaussian(t["shift"] / t["precision"], t["heaviest"] / t["precision"], reference)


def _encode_wc(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
    return {**naturals(q, weight, reference), "heaviest": weight.double()}


# A precision below this share of the reference's is floored: the posterior is at most ten times as wide.
DWC_FLOOR = 0.01


def _dwc(t: Statistics, reference: Posterior) -> Gaussian:
    precision = t["precision"] - (t["count"] - 1)  # the reference has precision 1 and mean 0 in its own units
    floored = precision < DWC_FLOOR
    precision = torch.where(floored, DWC_FLOOR, precision)
    # Flooring alone would throw the mean far off: such a weight keeps the reference's.
    mean = torch.where(floored, 0.0, t["shift"] / precision)
    return _gaussian(mean, precision.reciprocal(), reference)


def _dwc_report(t: Statistics, reference: Posterior) -> dict[str, float]:
    return {"floored": float((t["precision"] - (t["count"] - 1) < DWC_FLOOR).sum())}


def _encode_rho(q: Posterior, weight: Tensor, reference: Posterior) -> Statistics:
    assert isinstance(q, Gaussian)
    w = weight.double()
    d, _ = in_units(q, reference)
    return _with_weight({"mean": w * d, "rho": w * softplus_inverse(q.scale.double())}, weight)


def _mean_rho(t: Statistics, reference: Posterior) -> Gaussian:
    scale = F.softplus(t["rho"] / t["weight"])
    return _gaussian(t["mean"] / t["weight"], (scale / unit_scale(reference)).square(), reference)


linear_pool = Rule(
    moments("mean", "square", "variance"),
    _linear_pool,
    "moments of the mixture: mean of s^2 plus the spread of the means (linear pool, moment matching)",
    takes=(Gaussian, Point),
)

# Counters, such as the number of batches that BatchNorm has seen: the largest.
largest = Rule(
    lambda q, w, reference: {"largest": q.mean},
    lambda total, reference: Point(total["largest"], reference.layout),
    "entrywise maximum",
    takes=(Point,),
    maxima=("largest",),
)

# What is counted over clients beside their posteriors; there is nothing to decode.
counted = Rule(
    lambda q, w, reference: {}, lambda total, reference: reference, "sums of counts, of no posterior", takes=()
)

RULES: dict[str, Rule] = {
    "fedavg": Rule(
        moments("mean"), _point, "weighted mean of points (McMahan et al., 2017)", takes=(Point,), change=moved_mean
    ),
    "fedag": linear_pool._replace(about="the linear pool of points: normal with the clients' spread (FedAG)"),
    "nwa": Rule(moments("mean", "variance"), _nwa, "weighted means of mean and variance", change=moved_moments),
    "ws": Rule(moments("mean", "variance2"), _ws, "the weighted sum of independent normals", narrows=True),
    "lp": linear_pool,
    "conflation": Rule(
        _unweighted(naturals),
        _conflation,
        "product of the densities (Hill, 2011)",
        narrows=True,
        weighted=False,
        weighs_precision=True,
    ),
    "wc": Rule(
        _encode_wc,
        _wc,
        "weighted conflation; the variance follows the heaviest client",
        maxima=("heaviest",),
        narrows=True,
        weighs_precision=True,
    ),
    "log_pool": Rule(
        naturals,
        _log_pool,
        "weighted geometric mean of the densities (FedUAB eq. 8)",
        weighs_precision=True,
        change=moved_naturals,
    ),
    "dwc": Rule(
        _unweighted(naturals),
        _dwc,
        "product of the densities over (K-1) reference posteriors (McClure et al., 2018)",
        needs_reference=True,
        weighted=False,
        weighs_precision=True,
        change=moved_naturals,
        report=_dwc_report,
    ),
    "moment_matching": Rule(
        full_moments,
        _moment_matching,
        "moments of the mixture with full covariances (pFedPF eq. 15)",
        takes=(FullGaussian,),
    ),
    "full_product": Rule(
        full_naturals,
        full_product,
        "product of densities with full covariances over (K-1) reference posteriors",
        takes=(FullGaussian,),
        needs_reference=True,
        weighted=False,
        weighs_precision=True,
    ),
    "mean_rho": Rule(_encode_rho, _mean_rho, "weighted means of (mean, rho), scale = softplus(rho)"),
}


@lru_cache
def robust_rules(outliers: float = OUTLIERS, mixing: bool = False) -> dict[str, Rule]:
    """Rules that a minority of clients can't move at will: `outliers`, the share that may lie; over means of neighbours
    where `mixing`."""
    rows: dict[str, tuple[robust.Combine, str]] = {
        "median": (robust.median, "robust: median of each mean and log scale"),
        "trimmed_mean": (robust.trimmed_mean(outliers), "robust: trimmed mean of each natural parameter"),
        "geometric_median": (robust.geometric_median, "robust: nearest to all by the sum of Wasserstein distances"),
        "multi_krum": (robust.multi_krum(outliers), "robust: mean of those with the nearest neighbours"),
    }
    return {
        name: combining(robust.mixing(f, outliers) if mixing else f, about, (Gaussian, Point), robust=True)
        for name, (f, about) in rows.items()
    }


RULES |= robust_rules()


def rule_named(rule: str | Rule, outliers: float = OUTLIERS, mixing: bool = False) -> Rule:
    """A rule by its name in the table, or itself; robust ones for a share of clients that may lie."""
    if isinstance(rule, str) and rule not in RULES:
        raise unknown("rule", rule, RULES)
    rules = robust_rules(outliers, mixing)
    if isinstance(rule, str) and rule in rules:
        return rules[rule]
    if mixing:
        raise InputError(f"mixing: it stands in front of a robust rule ({', '.join(rules)}); set one, or leave it out")
    return RULES[rule] if isinstance(rule, str) else rule


def added(rule: Rule, total: Statistics | None, more: Statistics) -> Statistics:
    """A running sum with one more term, or sum, in its own memory; the first is copied, for it may be a client's."""
    if total is None:
        return {key: t.clone() for key, t in more.items()}
    if not rule.adds:
        return rule.add(total, more)
    rule.add_into(total, more)
    return total
