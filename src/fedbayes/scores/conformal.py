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


SIGNED_EDGES = torch.sinh(torch.linspace(-18, 18, 4097, dtype=torch.float64)) * 1e-4
"""On both sides of 0, even in the logarithm beyond 1e-4: for scores that are below 0 inside an interval."""


def least_ambiguous_scores(probs: Tensor) -> Tensor:
    """Scores [N, C], 1 - p_c: the smallest sets on average, empty where nothing fits (Sadinle et al., 2019)."""
    return 1 - inputs.distribution("probs", probs)


def adaptive_scores(probs: Tensor) -> Tensor:
    """Scores [N, C], the mass of the classes at least as probable as c: sets are larger for harder rows.

    Without randomisation (Romano et al., 2020). Empty where the likeliest class alone weighs more than the threshold.
    """
    ordered, order = inputs.distribution("probs", probs).sort(stable=True, dim=1, descending=True)
    return torch.zeros_like(ordered).scatter(1, order, ordered.cumsum(1))


def regularised_scores(probs: Tensor, penalty: float = 0.01, free: int = 2) -> Tensor:
    """Scores [N, C]: the adaptive ones plus `penalty` for each rank beyond the first `free`: smaller largest sets.

    RAPS of Angelopoulos et al. (2021), without randomisation.
    """
    scores = adaptive_scores(probs)
    ranks = scores.argsort(stable=True, dim=1).argsort(dim=1) + 1
    return scores + penalty * (ranks - free).clamp_min(0)


def regularised_edges(classes: int, penalty: float = 0.01, free: int = 2) -> Tensor:
    """Edges for regularised scores: those of probabilities, and even steps up to the largest score there is."""
    most = 1 + penalty * max(classes - free, 0)
    beyond = torch.linspace(1, most, 1025, dtype=torch.float64)[1:] if most > 1 else torch.zeros(0).double()
    return torch.cat([PROBABILITY_EDGES[PROBABILITY_EDGES < 1], torch.ones(1).double(), beyond])


def label_scores(scores: Tensor, labels: Tensor) -> Tensor:
    """The scores [N] of the true classes: what a site puts into its histogram."""
    return scores.gather(1, labels.long()[:, None])[:, 0]


def normalised_residual(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Scores [N], |target - mean| / scale; over several outputs the largest, so that a box holds them all at once."""
    mean, scale, target = inputs.normal(mean, scale, target)
    return ((target - mean).abs() / scale).amax(1)


def quantile_residual(low: Tensor, high: Tensor, spread: Tensor, target: Tensor) -> Tensor:
    """Scores [N], max(low - target, target - high) / spread; over several outputs the largest; below 0 inside.

    Conformalised quantile regression (Romano et al., 2019): predicted quantiles are moved outwards by one length.
    """
    low, high, target = (t.double().reshape(len(t), -1) for t in (low, high, target))
    return (torch.maximum(low - target, target - high) / spread.double()).amax(1)


def survival_residual(survival: Tensor, times: Tensor, observed: Tensor) -> Tensor:
    """Scores [N], the predicted chance S(t) of living on at the observed time; high: earlier than was thought.

    Curves [N, T] are joined by lines from S(0) = 1, and hold their last value after the last time.
    """
    grid = torch.cat([times.new_zeros(1), times]).double().to(survival.device)
    curves = torch.cat([torch.ones_like(survival[:, :1]), survival], 1).double()
    t = observed.double().to(survival.device).clamp(0, float(grid[-1]))
    place = torch.searchsorted(grid, t).clamp(1, len(grid) - 1)
    share = (t - grid[place - 1]) / (grid[place] - grid[place - 1])
    before, after = (curves.gather(1, p[:, None])[:, 0] for p in (place - 1, place))
    return before + share * (after - before)


def survival_lower(survival: Tensor, times: Tensor, threshold: float) -> Tensor:
    """Times [N] that are outlived as often as promised: where the curves first fall to the threshold.

    0 where nothing can be promised; the last time where a curve stays above. The event is after it whenever
    `survival_residual` is at most the threshold (Candes et al., 2023).
    """
    grid = torch.cat([times.new_zeros(1), times]).double().to(survival.device)
    curves = torch.cat([torch.ones_like(survival[:, :1]), survival], 1).double()
    if threshold >= 1:
        return torch.zeros(len(survival), dtype=torch.float64)
    place = (curves > threshold).long().cumprod(1).sum(1)  # the first point at or below it
    inside = place.clamp(1, len(grid) - 1)
    before, after = (curves.gather(1, p[:, None])[:, 0] for p in (inside - 1, inside))
    share = ((before - threshold) / (before - after).clamp_min(1e-300)).clamp(0, 1)
    found = grid[inside - 1] + share * (grid[inside] - grid[inside - 1])
    return torch.where(place > len(times), grid[-1], found).cpu()


def survival_histogram(scores: Tensor, weights: Tensor, edges: Tensor, last: Tensor) -> Tensor:
    """Counts [B + 1] of n rows of which events stand for who was censored before: weights 1 / G at events, else 0.

    Of what is left of n rows it is known that they outlived the last time that any was seen at: their scores are at
    most `last` [N], those of all rows at that time, each of which stands for as many as its curve lets live till then.
    """
    from fedbayes.scores.bins import histogram

    rest = max(0.0, len(scores) - float(weights.sum()))
    share = last.clamp_min(1e-12)
    return histogram(scores, edges, weights) + histogram(last, edges, share * (rest / share.sum()))


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
