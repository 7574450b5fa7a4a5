"""Calibration: whether predictions of 80 % confidence are right 80 % of the time, and a temperature that mends it."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedbayes.scores import inputs
from fedbayes.scores.bins import SLACK, width_index

BINS = 15
TEMPERATURES: tuple[float, ...] = tuple(0.05 * 400 ** (i / 120) for i in range(121))
"""The grid on which sites report their NLL: 0.05 to 20, even in the logarithm."""

Binning = Literal["width", "mass"]


class Reliability(NamedTuple):
    """The non-empty bins of a reliability diagram: edges, rows in it, mean confidence and accuracy, each [B]."""

    lower: Tensor
    upper: Tensor
    rows: Tensor
    confidence: Tensor
    accuracy: Tensor


def reliability(probs: Tensor, labels: Tensor, *, bins: int = BINS, binning: Binning = "width") -> Reliability:
    """Accuracy against confidence max_c p_c by bin; empty bins are left out.

    Bins are closed above, and a confidence within 1e-6 above an edge lies on it: the same in every precision.
    `binning="mass"` cuts at quantiles of the confidence; equal confidences stay together, so masses differ under ties.
    """
    upper, sums = _binned(*_confidence(probs, labels), bins, binning)
    return reliability_of_sums(*sums, upper=upper)


def reliability_of_sums(count: Tensor, confidence: Tensor, correct: Tensor, upper: Tensor | None = None) -> Reliability:
    """The table from sums by bin, as added over sites; `upper` are the bins' upper edges (default: equal widths)."""
    if upper is None:
        upper = torch.arange(1, len(count) + 1, dtype=torch.float64, device=count.device) / len(count)
    lower = torch.cat([torch.zeros_like(upper[:1]), upper[:-1]])
    filled = count > 0
    n = count[filled]
    return Reliability(lower[filled], upper[filled], n, confidence[filled] / n, correct[filled] / n)


def ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, binning: Binning = "width") -> float:
    """Expected calibration error, sum_b n_b / n |accuracy_b - confidence_b|; lower is better (Guo et al., 2017)."""
    _, sums = _binned(*_confidence(probs, labels), bins, binning)
    return float(expected_gap(*sums))


def mce(probs: Tensor, labels: Tensor, *, bins: int = BINS, binning: Binning = "width") -> float:
    """Maximum calibration error, max_b |accuracy_b - confidence_b| over non-empty bins; lower is better."""
    _, sums = _binned(*_confidence(probs, labels), bins, binning)
    return float(largest_gap(*sums))


def classwise_ece(probs: Tensor, labels: Tensor, *, bins: int = BINS, binning: Binning = "width") -> float:
    """Mean over classes of the ECE of p_c against [label = c]; lower is better (Kull et al., 2019)."""
    probs, labels = inputs.class_probs(probs, labels)
    classes = range(probs.shape[1])
    gaps = [expected_gap(*_binned(probs[:, c], (labels == c).double(), bins, binning)[1]) for c in classes]
    return float(torch.stack(gaps).mean())


def multilabel_ece(probs: Tensor, targets: Tensor, *, bins: int = BINS, binning: Binning = "width") -> float:
    """ECE of all N x C labels at once, p_c against target_c; lower is better."""
    probs, targets = inputs.label_probs(probs, targets)
    return float(expected_gap(*_binned(probs.flatten(), targets.flatten(), bins, binning)[1]))


def expected_gap(count: Tensor, confidence: Tensor, correct: Tensor) -> Tensor:
    """ECE from sums by bin, each [..., B]."""
    return (confidence - correct).abs().sum(-1) / count.sum(-1)


def largest_gap(count: Tensor, confidence: Tensor, correct: Tensor) -> Tensor:
    """MCE from sums by bin, each [..., B]."""
    return ((confidence - correct).abs() / count.clamp_min(1)).amax(-1)


def temperature_sums(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """A site's part of temperature scaling: its row count and its summed NLL at each of TEMPERATURES.

    For a mixture of draws there are no logits: pass probs.clamp_min(1e-12).log().
    """
    live = logits.new_ones(logits.shape[0]).double() if mask is None else mask.double()
    logits = torch.where(live[:, None] > 0, logits.double(), 0.0)
    own = logits.gather(1, labels.long().clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    nll = [(live * ((logits / t).logsumexp(1) - own / t)).sum() for t in TEMPERATURES]
    return {"count": live.sum(), "nll": torch.stack(nll)}


def temperature(sums: dict[str, Tensor]) -> float:
    """The temperature of least NLL: the best of the grid, moved to the vertex of the parabola through its neighbours.

    NLL is convex in 1/T, so there is one valley (Guo et al., 2017). Where it lies beyond the grid, the grid's end;
    where no temperature matters (constant logits), 1.
    """
    nll = sums["nll"].double()
    if not float(sums["count"]) > 0:
        raise ValueError("count is 0: temperature scaling needs at least one labelled row. Were all sites masked out?")
    if not bool(nll.isfinite().all()):
        raise ValueError("nll is not finite: a logit is infinite or NaN. Clamp probabilities before the logarithm.")
    if float(nll.max() - nll.min()) <= 1e-12 * float(sums["count"]):
        return 1.0
    best = int(nll.argmin())
    if best in (0, len(nll) - 1):
        return TEMPERATURES[best]
    before, at, after = nll[best - 1 : best + 2].tolist()
    bend = before - 2 * at + after
    offset = 0.5 * (before - after) / bend if bend > 0 else 0.0
    return TEMPERATURES[best] * math.exp(offset * math.log(TEMPERATURES[1] / TEMPERATURES[0]))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities softmax(logits / temperature)."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}.")
    return (logits / temperature).softmax(-1)


def _confidence(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    probs, labels = inputs.class_probs(probs, labels)
    confidence, predicted = probs.max(1)
    return confidence, (predicted == labels).double()


def _binned(
    confidence: Tensor, correct: Tensor, bins: int, binning: Binning
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}.")
    if binning == "width":
        upper = torch.arange(1, bins + 1, dtype=torch.float64, device=confidence.device) / bins
        index = width_index(confidence, bins)
    elif binning == "mass":
        cuts = (torch.arange(1, bins, device=confidence.device) * len(confidence) + bins - 1) // bins - 1
        upper = torch.cat([confidence.sort().values[cuts.clamp_min(0)], confidence.new_ones(1)])
        index = torch.searchsorted(upper[:-1] + SLACK, confidence)
    else:
        raise ValueError(f'binning must be "width" or "mass", not {binning!r}.')
    count, sure, right = (index.bincount(w, minlength=bins) for w in (torch.ones_like(correct), confidence, correct))
    return upper, (count, sure, right)
