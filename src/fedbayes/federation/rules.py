"""Aggregation rules by name: sums of what clients encode, decoded once, and robust ones that see every posterior."""

from __future__ import annotations

from functools import lru_cache

from fedbayes.errors import InputError, unknown
from fedbayes.federation import encodings, robust
from fedbayes.federation.encodings import moments, naturals, unweighted
from fedbayes.federation.moves import moved_mean, moved_moments, moved_naturals
from fedbayes.federation.products import full_naturals, full_product
from fedbayes.federation.robust import OUTLIERS
from fedbayes.federation.rule import Rule, combining
from fedbayes.federation.twins import once
from fedbayes.posterior.full import FullGaussian
from fedbayes.posterior.values import Gaussian, Point

linear_pool = Rule(
    moments("mean", "square", "variance"),
    encodings.decode_linear_pool,
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
        moments("mean"),
        encodings.decode_point,
        "weighted mean of points (McMahan et al., 2017)",
        takes=(Point,),
        change=moved_mean,
    ),
    "fedag": linear_pool._replace(about="the linear pool of points: normal with the clients' spread (FedAG)"),
    "nwa": Rule(
        moments("mean", "variance"), encodings.decode_nwa, "weighted means of mean and variance", change=moved_moments
    ),
    "ws": Rule(
        moments("mean", "variance2"), encodings.decode_ws, "the weighted sum of independent normals", narrows=True
    ),
    "lp": linear_pool,
    "conflation": Rule(
        unweighted(naturals),
        encodings.decode_conflation,
        "product of the densities (Hill, 2011)",
        narrows=True,
        weighted=False,
        weighs_precision=True,
    ),
    "wc": Rule(
        encodings.naturals_and_heaviest,
        encodings.decode_wc,
        "weighted conflation; the variance follows the heaviest client",
        maxima=("heaviest",),
        narrows=True,
        weighs_precision=True,
    ),
    "log_pool": Rule(
        naturals,
        encodings.decode_log_pool,
        "weighted geometric mean of the densities (FedUAB eq. 8)",
        weighs_precision=True,
        change=moved_naturals,
    ),
    "dwc": Rule(
        unweighted(naturals),
        encodings.decode_dwc,
        "product of the densities over (K-1) reference posteriors (McClure et al., 2018)",
        needs_reference=True,
        weighted=False,
        weighs_precision=True,
        change=moved_naturals,
        report=encodings.floored,
    ),
    "moment_matching": Rule(
        encodings.full_moments,
        encodings.decode_moment_matching,
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
    "mean_rho": Rule(
        encodings.means_of_rho, encodings.decode_mean_rho, "weighted means of (mean, rho), scale = softplus(rho)"
    ),
}


@lru_cache
def robust_rules(outliers: float = OUTLIERS, mixing: bool = False, twins: float = 0.0) -> dict[str, Rule]:
    """Rules that a minority of clients can't move at will: `outliers`, the share that may lie; over means of neighbours
    where `mixing`, and before that over groups of those that are alike where `twins`."""
    rows: dict[str, tuple[robust.Combine, str]] = {
        "median": (robust.median, "robust: median of each mean and log scale"),
        "trimmed_mean": (robust.trimmed_mean(outliers), "robust: trimmed mean of each natural parameter"),
        "geometric_median": (robust.geometric_median, "robust: nearest to all by the sum of Wasserstein distances"),
        "multi_krum": (robust.multi_krum(outliers), "robust: mean of those with the nearest neighbours"),
    }
    rules = {
        name: combining(robust.mixing(f, outliers) if mixing else f, about, (Gaussian, Point), robust=True)
        for name, (f, about) in rows.items()
    }
    return {
        name: _without_twins(name, rule, outliers, mixing, twins) if twins else rule for name, rule in rules.items()
    }


def _without_twins(name: str, rule: Rule, outliers: float, mixing: bool, twins: float) -> Rule:
    def rule_for(share: float) -> robust.Combine:
        combine = robust_rules(share, mixing)[name].combine
        assert combine is not None
        return combine

    together = once(rule_for, outliers, twins)
    return rule._replace(combine=lambda qs, weights, reference: together(qs, reference)[0], together=together)


RULES |= robust_rules()


def rule_named(rule: str | Rule, outliers: float = OUTLIERS, mixing: bool = False, twins: float = 0.0) -> Rule:
    """A rule by its name in the table, or itself; robust ones for a share of clients that may lie."""
    if isinstance(rule, str) and rule not in RULES:
        raise unknown("rule", rule, RULES)
    rules = robust_rules(outliers, mixing, twins)
    if isinstance(rule, str) and rule in rules:
        return rules[rule]
    for name, is_set in (("mixing", mixing), ("twins", twins)):
        if is_set:
            known = ", ".join(rules)
            raise InputError(f"{name}: it stands in front of a robust rule ({known}); set one, or leave it out")
    return RULES[rule] if isinstance(rule, str) else rule
