"""Split conformal prediction across sites: sets and intervals that hold the truth as often as promised.

A site turns its calibration rows into scores (higher = stranger) and sends their `histogram`; histograms add, and the
sum is decoded once into a threshold. Rounding every score up to its bin's upper edge is a fixed monotone map, so that
P(truth in set) >= coverage stays exact in finite samples (Vovk et al., 2005; Lei et al., 2018); sets grow a little.
It holds for a row exchangeable with the pooled calibration rows: over all sites, not for each site under label skew.
"""

import math

import torch
from torch import Tensor

from fedbayes.scores import inputs

PROBABILITY_EDGES = torch.linspace(-18, 18, 4097, dtype=torch.float64).sigmoid()
"""Even in the log-odds, for scores in [0, 1]: good networks put nearly all of theirs near the ends."""

RESIDUAL_EDGES = torch.linspace(math.log(1e-4), math.log(1e4), 4097, dtype=torch.float64).exp()
"""Even in the logarithm, for normalised residuals: rounding up widens an interval by less than 0.5 %."""


def least_ambiguous_scores(probs: Tensor) -> Tensor:
    """Scores [N, C], 1 - p_c: the smallest sets on average, empty where nothing fits (Sadinle et al., 2019)."""
    return 1 - inputs.distribution("probs", probs)


def adaptive_scores(probs: Tensor) -> Tensor:
    """Scores [N, C], the mass of the classes at least as probable as c: sets are larger for harder rows.

    Without randomisation (Romano et al., 2020). Empty where the likeliest class alone weighs more than the threshold.
    """
    ordered, order = inputs.distribution("probs", probs).sort(stable=True, dim=1, descending=True)
    return torch.zeros_like(ordered).scatter(1, order, ordered.cumsum(1))


def label_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """The scores [N] of the true classes: what a site puts into its histogram."""
    return scores.gather(1, labels.long()[:, None])[:, 0]


def normalised_residual(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Scores [N], |target - mean| / scale; over several outputs the largest, so that a box holds them all at once."""
    mean, scale, target = inputs.normal(mean, scale, target)
    return ((target - mean).abs() / scale).amax(1)


def conformal_threshold(counts: Tensor, edges: Tensor, coverage: float = 0.9) -> float:
    """The ceil((n + 1) coverage)-th smallest score, rounded up to its edge, from summed counts [B + 1] over edges [B].

    The n + 1 is the finite-sample correction: with too few rows, n < coverage / (1 - coverage), the threshold is
    infinite and every class or value is in the set.
    """
    inputs.share("coverage", coverage)
    if counts.shape != (len(edges) + 1,):
        raise ValueError(f"counts must be [{len(edges) + 1}] for {len(edges)} edges, not {list(counts.shape)}.")
    total = float(counts.sum())
    if not total > 0:
        raise ValueError("counts are all 0: conformal prediction needs calibration rows. Were all sites masked out?")
    rank = math.ceil((total + 1) * coverage - 1e-9)  # 100 * 0.55 is 55.00000000000001, and means 55.
    bin = int((counts.cumsum(0) < rank).sum())
    return float(edges[bin]) if bin < len(edges) else math.inf


def prediction_sets(scores: Tensor, threshold: float) -> Tensor:
    """Membership [N, C]: the classes whose score does not exceed the threshold."""
    return scores <= threshold


def prediction_interval(mean: Tensor, scale: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """The interval mean -+ threshold * scale for normalised residuals."""
    mean, scale, _ = inputs.normal(mean, scale, mean)
    half = threshold * scale
    return (mean - half).squeeze(1), (mean + half).squeeze(1)
