"""How far closing scores may be off, and which of several runs are within that of the best. Needs no torch.

A score on a test set has two kinds of noise that one run shows by itself: the rows could have been others (resampled
here, the same rows for all runs, so that differences are compared in pairs), and training could have ended a round
earlier or later (how much the score moves from one evaluated round to the next). A third, of the draws of the weights,
is known where `fedbayes evaluate` has measured it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedbayes.runs.numbers import BINS, SLACK, confidences, deviations, kind_of, right, total_scale
from fedbayes.runs.records import Arrays, RunFiles
from fedbayes.runs.weighted_survival import scores_of_curves

RESAMPLES = 200
TAIL = 0.25  # share of the evaluated rounds at whose end a score's movement is measured
LEAST = 4  # evaluated rounds that it takes
BEYOND = 2.0  # standard errors
FLOOR = 1e-12  # as in scores.proper


class Measured(NamedTuple):
    """Errors of a score by `fedbayes evaluate`: of having so few test rows, and of so few draws."""

    rows: float
    draws: float


class Margin(NamedTuple):
    """The noise of one score of one run."""

    rounds: float  # standard deviation between rounds
    rows: np.ndarray  # the score under each resample; empty where it is not known
    labels: np.ndarray
    measured: Measured = Measured(0.0, 0.0)

    @property
    def of_rows(self) -> float:
        """One standard error over test rows."""
        return self.measured.rows or (float(self.rows.std(ddof=1)) if len(self.rows) else 0.0)

    @property
    def error(self) -> float:
        """One standard error, all in all."""
        return math.hypot(self.rounds, self.of_rows, self.measured.draws)

    def apart(self, other: Margin) -> float:
        """One standard error of the difference to another run's score: in pairs where both saw the same rows."""
        if len(self.rows) and len(other.rows) and np.array_equal(self.labels, other.labels):
            rows = float((self.rows - other.rows).std(ddof=1))
        else:
            rows = math.hypot(self.of_rows, other.of_rows)
        return math.hypot(rows, self.rounds, other.rounds, self.measured.draws, other.measured.draws)


def margins(run: RunFiles, measured: Mapping[str, Measured] | None = None) -> dict[str, Margin]:
    """The noise of each of a run's closing scores."""
    arrays = run.evaluation
    known = "labels" in arrays and not {"probs", "mean", "survival"}.isdisjoint(arrays)
    drawn = resampled(arrays) if known else {}
    labels, none = (arrays["labels"] if known else np.zeros(0)), np.zeros(0)
    measured = {**_by_site(arrays, drawn), **(measured or {})}
    moves = {name: between_rounds(run.curve(name)[1]) for name in run.scores}
    return {
        name: Margin(move, drawn.get(name, none), labels, measured.get(name, Measured(0.0, 0.0)))
        for name, move in moves.items()
    }


def _by_site(arrays: Arrays, drawn: Mapping[str, np.ndarray]) -> dict[str, Measured]:
    """Errors over test rows, as scores by site have them, of what is not resampled here: ranks of very few rows."""
    if not {"score_names", "score_errors"} <= {*arrays}:
        return {}
    errors = zip(arrays["score_names"].tolist(), arrays["score_errors"].astype(float).tolist())
    return {name: Measured(error, 0.0) for name, error in errors if name not in drawn and math.isfinite(error)}


def over_last_rounds(run: RunFiles, noise: Mapping[str, Margin]) -> dict[str, tuple[float, Margin]]:
    """Each score's mean over the last rounds with its noise, which is smaller: one unlucky round counts little."""
    tails = {name: last_rounds(run.curve(name)[1]) for name in run.scores}
    return {
        name: (float(tail.mean()), noise[name]._replace(rounds=noise[name].rounds / math.sqrt(len(tail))))
        for name, tail in tails.items()
        if len(tail)
    }


def within(figures: Sequence[tuple[float, Margin] | None], best: float | None) -> list[bool]:
    """Which figures are the best, or no further from it than two standard errors of the difference."""
    leader = next((figure for figure in figures if figure and figure[0] == best), None)
    if leader is None:
        return [False] * len(figures)
    value, margin = leader
    return [
        figure is not None and (figure[0] == value or abs(figure[0] - value) <= BEYOND * figure[1].apart(margin))
        for figure in figures
    ]


def between_rounds(values: Sequence[float]) -> float:
    """Standard deviation of a score about its path over the last rounds: successive differences, over sqrt(2)."""
    tail = last_rounds(values)
    return float(np.sqrt((np.diff(tail) ** 2).mean() / 2)) if len(tail) else 0.0


def last_rounds(values: Sequence[float]) -> np.ndarray:
    """The last quarter of a score's values by round, at least four; none where there are fewer."""
    tail = np.array(values[-max(LEAST, math.ceil(TAIL * len(values))) :], float)
    return tail if len(tail) >= LEAST and np.isfinite(tail).all() else np.zeros(0)


@lru_cache(maxsize=2)
def _weights(rows: int) -> np.ndarray:
    """How often each row is drawn in each resample, [resamples, rows]; rows of a resample add up to one."""
    drawn = np.random.default_rng(0).poisson(1.0, (RESAMPLES, rows)).astype(np.float32)
    return drawn / np.maximum(drawn.sum(1, keepdims=True), 1)


def resampled(arrays: Arrays) -> dict[str, np.ndarray]:
    """Scores of a prediction under resamples of its rows: [resamples] each."""
    return scores_under(arrays, _weights(len(arrays["labels"])))


def scores_under(arrays: Arrays, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Scores under weights [R, N] of the rows, each of which adds up to one."""
    match kind_of(arrays):
        case "real":
            means = {name: weights @ rows for name, rows in _of_normals(arrays).items()}
            return means | {"rmse": np.sqrt(means["rmse"])}
        case "classes" | "labels":
            means = {name: weights @ rows for name, rows in _of_chances(arrays).items()}
            return means | _by_bins(arrays, weights) | _by_rank(arrays, weights)
        case _:
            return scores_of_curves(arrays, weights)


def _of_normals(arrays: Arrays) -> dict[str, np.ndarray]:
    """Terms of each row of a regression: the squared error, and NLL and CRPS of a normal."""
    z, scale = deviations(arrays), total_scale(arrays)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    inside = np.vectorize(math.erf)(z / math.sqrt(2))  # 2 Phi(z) - 1
    return {
        "rmse": ((z * scale) ** 2).mean(1),
        "nll": (z**2 / 2 + np.log(scale) + math.log(2 * math.pi) / 2).sum(1),
        "crps": (scale * (z * inside + 2 * density - 1 / math.sqrt(math.pi))).mean(1),
    }


def _of_chances(arrays: Arrays) -> dict[str, np.ndarray]:
    """Terms of each row of a classification."""
    probs, labels = arrays["probs"].astype(float), arrays["labels"]
    if kind_of(arrays) == "classes":
        truth = np.eye(probs.shape[1])[labels.astype(int)]
        of_truth = (probs * truth).sum(1, keepdims=True)
        hits = {"accuracy": right(arrays)}
    else:
        truth = labels.reshape(probs.shape) > 0.5
        of_truth = np.where(truth, probs, 1 - probs)
        hits = {"exact_match": right(arrays), "accuracy": ((probs > 0.5) == truth).mean(1)}
    nll = -np.log(np.maximum(of_truth, FLOOR)).sum(1)
    return {**hits, "nll": nll, "brier": ((probs - truth) ** 2).sum(1)}


def _by_bins(arrays: Arrays, weights: np.ndarray) -> dict[str, np.ndarray]:
    """ECE and MCE; a row with several labels counts in parts."""
    sure, hit = (v.astype(float) for v in confidences(arrays))
    each = len(sure) // weights.shape[1]
    weights = np.repeat(weights, each, axis=1) / each
    bins = np.eye(BINS)[np.clip(np.ceil((sure - SLACK) * BINS).astype(int) - 1, 0, BINS - 1)]
    count = weights @ bins
    gap = np.abs(weights @ (bins * (sure - hit)[:, None]))
    widest = np.where(count > 0, gap / np.maximum(count, FLOOR), 0.0).max(1)
    return {"ece": gap.sum(1), "mce": widest}


def _by_rank(arrays: Arrays, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Of two classes AUROC and AUPR of the second, ties shared; none where a resample has rows of one class alone."""
    if kind_of(arrays) != "classes" or arrays["probs"].shape[1] != 2 or not len(arrays["labels"]):
        return {}
    second = arrays["probs"][:, 1].astype(float)
    order = np.argsort(-second, kind="stable")  # the most probable first
    tied = np.flatnonzero(np.diff(second[order], prepend=np.inf))  # where another probability begins
    positive = arrays["labels"][order] == 1
    drawn = weights[:, order].astype(float)
    hits, misses = (np.add.reduceat(drawn * side, tied, axis=1) for side in (positive, ~positive))
    if not (hits.sum(1) * misses.sum(1)).all():
        return {}
    hit, missed = hits.cumsum(1), misses.cumsum(1)
    auroc = (misses * (hit - hits / 2)).sum(1) / hit[:, -1] / missed[:, -1]
    aupr = (hits * hit / np.maximum(hit + missed, FLOOR)).sum(1) / hit[:, -1]
    return {"auroc": auroc, "aupr": aupr}
