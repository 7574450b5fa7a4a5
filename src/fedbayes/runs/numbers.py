"""What the figures show, computed with NumPy from the arrays of a run folder."""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from fedbayes.runs.records import Arrays

BINS = 15
SLACK = 1e-6  # as in scores.bins
PARTS = {
    "entropy": "entropy",
    "aleatoric": "aleatoric part",
    "epistemic": "epistemic part",
    "mutual_information": "mutual information",
}


class Bins(NamedTuple):
    """The non-empty bins of a reliability diagram, each [B]."""

    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


class BySite(NamedTuple):
    """Scores by site: their names, values and errors [sites, scores], and those of all rows together."""

    sites: list[str]
    names: list[str]
    values: np.ndarray
    errors: np.ndarray
    all: np.ndarray
    all_errors: np.ndarray

    def worst(self, score: int, direction: str) -> int | None:
        """The site that a score serves worst; None where no direction is better, or there is one site."""
        values = self.values[:, score]
        if direction not in "↑↓" or not direction or np.isfinite(values).sum() < 2:
            return None
        return int(np.nanargmin(values) if direction == "↑" else np.nanargmax(values))

    def spread(self, score: int) -> float:
        """The largest difference of a score between two sites."""
        values = self.values[:, score]
        return float(np.nanmax(values) - np.nanmin(values)) if np.isfinite(values).any() else float("nan")


def by_site(arrays: Arrays) -> BySite | None:
    """The scores by site of an evaluation; None where sites have no names, are too many, or have no test rows."""
    if "client_errors" not in arrays or "client_names" not in arrays or np.isnan(arrays["client_scores"]).all():
        return None
    names = arrays["score_names"].tolist()
    return BySite(
        arrays["client_names"].tolist(),
        names,
        arrays["client_scores"].astype(float),
        arrays["client_errors"].astype(float),
        arrays["scores"].astype(float),
        arrays["score_errors"].astype(float),
    )


def kind_of(arrays: Arrays) -> str:
    """What is predicted; files of earlier versions do not say it, but hold probabilities only for classes."""
    if "kind" in arrays:
        return str(arrays["kind"])
    return "classes" if "probs" in arrays else "real"


def kaplan_meier(time: np.ndarray, event: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The times at which events came, and the share without one after each."""
    times = np.unique(time[event > 0])
    dead = ((time == times[:, None]) & (event > 0)).sum(1)
    at_risk = (time >= times[:, None]).sum(1)
    return times, np.cumprod(1 - dead / np.maximum(at_risk, 1))


def right(arrays: Arrays) -> np.ndarray:
    """Whether each prediction is right: the class, all labels, or inside its 90 % interval."""
    labels = arrays["labels"]
    match kind_of(arrays):
        case "classes":
            hit = arrays["probs"].argmax(-1) == labels
        case "labels":
            hit = ((arrays["probs"] > 0.5) == (labels > 0.5)).all(-1)
        case _:
            hit = (np.abs(deviations(arrays)) <= NormalDist().inv_cdf(0.95)).all(-1)
    return np.asarray(hit)


def uncertainty(arrays: Arrays) -> Arrays:
    """The measures of uncertainty that there are, one number per row: the parts are traces."""
    measures = {part: arrays[part].astype(float) for part in PARTS if part in arrays}
    return {part: v.sum(-1) if v.ndim > 1 else v for part, v in measures.items()}


def confidences(arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and correctness: of the likeliest class, or of every label."""
    if kind_of(arrays) == "labels":
        return arrays["probs"].ravel(), arrays["labels"].ravel() > 0.5
    return arrays["probs"].max(-1), right(arrays)


def reliability(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> Bins:
    """Accuracy against confidence by bins of equal width (b / B, (b + 1) / B], which end 1e-6 higher as all bins do."""
    index = np.clip(np.ceil((confidence.astype(float) - SLACK) * bins).astype(int) - 1, 0, bins - 1)
    rows = np.bincount(index, minlength=bins)
    filled = rows > 0
    sure, hits = (np.bincount(index, v.astype(float), bins)[filled] / rows[filled] for v in (confidence, correct))
    edges = np.arange(bins + 1) / bins
    return Bins(edges[:-1][filled], edges[1:][filled], rows[filled], sure, hits)


def retention(measure: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share retained k / N, and the mean of `value` over the k most certain rows; ties count as their mean."""
    _, group = np.unique(measure, return_inverse=True)
    mean = np.bincount(group, value.astype(float)) / np.bincount(group)
    count = np.arange(1, len(measure) + 1)
    return count / len(measure), np.cumsum(mean[np.sort(group)]) / count


def roc(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Share of inside flagged, share of outside flagged, and the area; a higher score means outside."""
    values = np.unique(np.concatenate([inside, outside]))[::-1]
    shares = []
    for group in (inside, outside):
        ordered = np.sort(group)
        shares.append(np.r_[0.0, 1 - np.searchsorted(ordered, values, side="left") / len(group)])
    false, true = shares
    return false, true, float(np.trapezoid(true, false))


def confusion(arrays: Arrays) -> np.ndarray:
    """How many rows of each true class were taken for each class, [true, taken for]."""
    classes = arrays["probs"].shape[1]
    pairs = arrays["labels"].astype(int) * classes + arrays["probs"].argmax(1)
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def total_scale(arrays: Arrays) -> np.ndarray:
    """Standard deviation of each predicted target."""
    return np.sqrt(np.maximum(arrays["aleatoric"] + arrays["epistemic"], 1e-30))


def deviations(arrays: Arrays) -> np.ndarray:
    """(target - mean) / scale of a regression, [N, D]."""
    return (arrays["labels"].reshape(arrays["mean"].shape) - arrays["mean"]) / total_scale(arrays)


def coverage(arrays: Arrays, levels: np.ndarray) -> np.ndarray:
    """Share of targets inside central normal intervals of each level; right when it equals the level."""
    widths = np.array([NormalDist().inv_cdf(0.5 + level / 2) for level in levels])
    return (np.abs(deviations(arrays)).ravel()[:, None] <= widths).mean(0)


def extremes(arrays: Arrays, most: int, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Row numbers of the most certain, most aleatoric, most epistemic and most wrong predictions of a classification.

    `rows` are those to choose from. Most wrong are the wrong ones whose true class has the least probability. Groups
    that a posterior lacks (a point has no epistemic part) are left out.
    """
    rows = np.arange(len(arrays["labels"])) if rows is None else rows
    measures = uncertainty(arrays)
    groups: dict[str, np.ndarray] = {}
    if "entropy" in measures:
        groups["certain"] = rows[np.argsort(measures["entropy"][rows], kind="stable")][:most]
    for part in ("aleatoric", "epistemic"):
        if part in measures and measures[part].max() > 1e-9:
            groups[part] = rows[np.argsort(-measures[part][rows], kind="stable")][:most]
    truth = np.take_along_axis(arrays["probs"], arrays["labels"][:, None].astype(int), 1)[:, 0]
    order = rows[np.argsort(truth[rows], kind="stable")]
    groups["wrong"] = order[~right(arrays)[order]][:most]
    return {name: chosen for name, chosen in groups.items() if len(chosen)}
