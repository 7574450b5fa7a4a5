"""Scores as sums: what a site sends, and what the sum over sites decodes to. Never average sites' calibration errors.

`*_sums` are pure tensor programs in float64: they run under vmap, make no GPU wait, and check nothing.
Rows with mask 0 may hold anything, NaN too. `*_scores` decode once, and refuse a sum that is empty or not finite.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedbayes.errors import NotFinite
from fedbayes.scores import calibration, regression, survival
from fedbayes.scores.bins import width_index
from fedbayes.scores.proper import FLOOR

Sums = dict[str, Tensor]

VARIANCE_FLOOR = 1e-12
"""Predictive variances are taken no smaller than this, so that a likelihood is finite in float32."""


def classification_sums(probs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Sums:
    """Sums over live rows of probs [N, C] and labels [N]; -log max(p, 1e-12) for the NLL, 15 equal-width bins."""
    classes = probs.shape[-1]
    live = _live(probs, mask)
    probs = torch.where(live[:, None] > 0, probs.double(), 1.0 / classes)
    of_label = probs.gather(1, labels.long().clamp(0, classes - 1)[:, None])[:, 0]
    confidence, predicted = probs.max(1)
    correct = (predicted == labels).double()
    return {
        "count": live.sum(),
        "correct": (live * correct).sum(),
        "nll": -(live * of_label.clamp_min(FLOOR).log()).sum(),
        # sum_c (p_c - y_c)^2 without the one-hot rows.
        "brier": (live * (probs.square().sum(1) - 2 * of_label + 1)).sum(),
        **_bins(confidence, correct, live),
    }


def classification_scores(sums: Sums) -> dict[str, float]:
    """Accuracy, NLL, Brier, ECE and MCE, as the direct scores define them, and the count."""
    count = _count(sums)
    return {
        "count": count,
        "accuracy": float(sums["correct"]) / count,
        "nll": float(sums["nll"]) / count,
        "brier": float(sums["brier"]) / count,
        "ece": float(calibration.expected_gap(*_bin_sums(sums))),
        "mce": float(calibration.largest_gap(*_bin_sums(sums))),
    }


def multilabel_sums(probs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Sums:
    """Sums over live rows of label probabilities and targets [N, C]; -log max(p, 1e-12) for the NLL."""
    live = _live(probs, mask)
    probs = torch.where(live[:, None] > 0, probs.double(), 0.5)
    truth = torch.where(live[:, None] > 0, targets.double(), 0.0)
    right = ((probs > 0.5) == (truth > 0.5)).double()
    of_truth = torch.where(truth > 0.5, probs, 1 - probs).clamp_min(FLOOR)
    cells = live[:, None].expand_as(probs)
    return {
        "count": live.sum(),
        "correct": (live * right.mean(1)).sum(),
        "exact_match": (live * right.amin(1)).sum(),
        "nll": -(live * of_truth.log().sum(1)).sum(),
        "brier": (live * (probs - truth).square().sum(1)).sum(),
        **_bins(probs.reshape(-1), truth.reshape(-1), cells.reshape(-1)),
    }


def multilabel_scores(sums: Sums) -> dict[str, float]:
    """Accuracy per label, exact match, NLL and Brier summed over labels, ECE over all labels, and the count."""
    count = _count(sums)
    return {
        "count": count,
        "accuracy": float(sums["correct"]) / count,
        "exact_match": float(sums["exact_match"]) / count,
        "nll": float(sums["nll"]) / count,
        "brier": float(sums["brier"]) / count,
        "ece": float(calibration.expected_gap(*_bin_sums(sums))),
    }


def regression_sums(mean: Tensor, variance: Tensor, target: Tensor, mask: Tensor | None = None) -> Sums:
    """Sums over live rows of a normal's moments and its target, each [N] or [N, D]; variances from 1e-12 up."""
    live = _live(mean, mask)[:, None]
    # Means over the D outputs of a row, so that every sum is one over rows.
    rows = (t.double() if t.ndim > 1 else t.double()[:, None] for t in (mean, variance, target))
    mean, variance, target = (torch.where(live > 0, t, 1.0) for t in rows)
    scale = variance.clamp_min(VARIANCE_FLOOR).sqrt()
    distance = (target - mean).abs() / scale
    return {
        "count": live.sum(),
        "squared_error": (live * (target - mean).square()).mean(1).sum(),
        "nll": (live * regression.nll_terms(mean, scale, target)).sum(),
        "crps": (live * regression.crps_terms(mean, scale, target)).mean(1).sum(),
        "inside50": (live * (distance <= regression.central(0.5)).double()).mean(1).sum(),
        "inside90": (live * (distance <= regression.central(0.9)).double()).mean(1).sum(),
    }


def regression_scores(sums: Sums) -> dict[str, float]:
    """RMSE, NLL (summed over outputs), CRPS, coverage of the central 50 % and 90 % intervals, and the count."""
    count = _count(sums)
    return {
        "count": count,
        "rmse": (float(sums["squared_error"]) / count) ** 0.5,
        "nll": float(sums["nll"]) / count,
        "crps": float(sums["crps"]) / count,
        "coverage50": float(sums["inside50"]) / count,
        "coverage90": float(sums["inside90"]) / count,
    }


def survival_scores(sums: Sums) -> dict[str, float]:
    """Concordance within sites, NLL by interval, integrated Brier score, and the count."""
    return survival.survival_scores(sums, _count(sums))


SUMS: dict[str, tuple[Callable[..., Sums], Callable[[Sums], dict[str, float]]]] = {
    "classes": (classification_sums, classification_scores),
    "labels": (multilabel_sums, multilabel_scores),
    "real": (regression_sums, regression_scores),
    "survival": (survival.survival_sums, survival_scores),
}
"""How rows become sums, and sums scores, by the kind of target."""


def _live(rows: Tensor, mask: Tensor | None) -> Tensor:
    return torch.ones(rows.shape[0], dtype=torch.float64, device=rows.device) if mask is None else mask.double()


def _bins(confidence: Tensor, correct: Tensor, live: Tensor) -> Sums:
    bins = torch.arange(calibration.BINS, device=confidence.device)
    member = (width_index(confidence, calibration.BINS)[:, None] == bins).double() * live[:, None]
    count, sure, right = (weight @ member for weight in (torch.ones_like(live), confidence, correct))
    return {"bin_count": count, "bin_confidence": sure, "bin_correct": right}


def _bin_sums(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    return sums["bin_count"], sums["bin_confidence"], sums["bin_correct"]


def _count(sums: Sums) -> float:
    for name, value in sums.items():
        if not bool(value.isfinite().all()):
            raise NotFinite(f"{name} is not finite in the sum over sites. Leave out the site whose model diverged.")
    count = float(sums["count"])
    if not count > 0:
        raise ValueError("count is 0: no live row was scored. Is the test split empty, or every row masked?")
    return count
