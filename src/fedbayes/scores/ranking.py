"""How well a score tells outside from inside: f(inside, outside), where a higher score means more likely outside.

All depend on the order alone, so any real range will do (energies as well as probabilities), and ties count exactly.
Each is decoded from counts at rising scores; counts over common edges (`histogram`) add over sites.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.scores import inputs


class Resampled(NamedTuple):
    """A score over equal-number resamples: mean, standard deviation (n - 1) and the values."""

    mean: float
    spread: float
    values: tuple[float, ...]


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Area under the ROC, P(outside > inside) + P(equal) / 2; higher is better, 0.5 for constant scores."""
    return auroc_of_counts(*_tally(inside, outside))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Average precision, outside positive, sum_t (recall_t - recall_{t-1}) precision_t; higher is better.

    Constant scores give the share of outside samples.
    """
    return aupr_of_counts(*_tally(inside, outside))


def aupr_in(inside: Tensor, outside: Tensor) -> float:
    """Average precision with inside as the positive class, ranked from the lowest score; higher is better."""
    insides, outsides = _tally(inside, outside)
    return aupr_of_counts(outsides.flip(0), insides.flip(0))


def fpr95(inside: Tensor, outside: Tensor) -> float:
    """Share of outside samples that pass when the threshold keeps 95 % of the inside ones; lower is better.

    Samples tied at the threshold are kept in the proportion that makes it 95 % exactly (0.95 for constant scores), so
    0.95 (1 - FPR95) <= AUROC <= 1 - 0.05 FPR95 holds for every sample. Without ties it is the usual first crossing.
    """
    return fpr95_of_counts(*_tally(inside, outside))


def misclassification_auroc(uncertainty: Tensor, correct: Tensor) -> float:
    """AUROC of uncertainty for telling wrong predictions from right ones; higher is better (FedPPD, table 4)."""
    uncertainty = inputs.ranked("uncertainty", uncertainty)
    right = inputs.hits(correct, uncertainty) > 0
    if right.all() or not right.any():
        which = "right" if right.all() else "wrong"
        raise ValueError(f"correct is constant: all predictions are {which}, so there is nothing to tell apart.")
    return auroc(uncertainty[right], uncertainty[~right])


def resampled(
    score: Callable[[Tensor, Tensor], float],
    inside: Tensor,
    outside: Tensor,
    times: int = 5,
    seed: int = 0,
    *,
    number: int | None = None,
) -> Resampled:
    """A ranking score over `times` draws of equally many inside and outside samples, as FedPPD reports it.

    Draws `number` of each without replacement (default: the smaller side's size). At equal sizes every draw is the
    whole sample and the spread is 0; so it is for times = 1.
    """
    inside, outside = inputs.ranked("inside", inside), inputs.ranked("outside", outside)
    most = min(len(inside), len(outside))
    number = most if number is None else number
    if not 1 <= number <= most:
        raise ValueError(f"number must lie in 1..{most}, the smaller side's size, not {number}.")
    if times < 1:
        raise ValueError(f"times must be at least 1, not {times}.")
    generator = torch.Generator().manual_seed(seed)

    def draw(values: Tensor) -> Tensor:
        return values[torch.randperm(len(values), generator=generator)[:number].to(values.device)]

    values = torch.tensor([score(draw(inside), draw(outside)) for _ in range(times)], dtype=torch.float64)
    return Resampled(float(values.mean()), float(values.std()) if times > 1 else 0.0, tuple(values.tolist()))


def auroc_of_counts(inside: Tensor, outside: Tensor) -> float:
    """AUROC from counts [B] at rising scores, such as sums of histograms; off by at most auroc_resolution."""
    inside, outside = _counts(inside, outside)
    below = inside.cumsum(0) - inside
    return float((outside * (below + inside / 2)).sum() / inside.sum() / outside.sum())


def auroc_resolution(inside: Tensor, outside: Tensor) -> float:
    """How far binning can have moved the AUROC: half the share of pairs that fell into one bin."""
    inside, outside = _counts(inside, outside)
    return float((inside * outside).sum() / inside.sum() / outside.sum() / 2)


def aupr_of_counts(inside: Tensor, outside: Tensor) -> float:
    """Average precision, outside positive, from counts [B] at rising scores."""
    inside, outside = (c.flip(0) for c in _counts(inside, outside))
    hits = outside.cumsum(0)
    precision = hits / (hits + inside.cumsum(0)).clamp_min(1)
    return float((outside * precision).sum() / outside.sum())


def fpr95_of_counts(inside: Tensor, outside: Tensor) -> float:
    """FPR95 from counts [B] at rising scores; a bin is shared in proportion."""
    inside, outside = _counts(inside, outside)
    below = inside.cumsum(0)
    needed = below[-1] * 95 / 100  # In this order: 0.95 * n is not exact where 95 n / 100 is.
    at = int((below < needed).sum())
    part = (needed - (below[at] - inside[at])) / inside[at]
    return float((outside[:at].sum() + part * outside[at]) / outside.sum())


def _tally(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """How many inside and outside samples sit at each distinct score, scores rising."""
    inside, outside = inputs.ranked("inside", inside), inputs.ranked("outside", outside)
    values, order = torch.cat([inside, outside]).sort()
    last = torch.cat([values[1:] != values[:-1], torch.ones_like(values[:1], dtype=torch.bool)])
    ends = last.nonzero()[:, 0]
    outsides = (order >= len(inside)).cumsum(0)[ends]
    return _steps(ends + 1 - outsides), _steps(outsides)


def _steps(cumulative: Tensor) -> Tensor:
    return cumulative.diff(prepend=cumulative.new_zeros(1)).double()


def _counts(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    inside, outside = inside.double(), outside.double()
    if inside.shape != outside.shape or inside.ndim != 1:
        raise ValueError(
            f"inside and outside counts must be [B] over the same edges, not {list(inside.shape)} "
            f"and {list(outside.shape)}."
        )
    for name, counts in (("inside", inside), ("outside", outside)):
        if not (bool((counts >= 0).all()) and float(counts.sum()) > 0):
            raise ValueError(f"{name} counts must be non-negative and not all 0. Did a site send an empty histogram?")
    return inside, outside
