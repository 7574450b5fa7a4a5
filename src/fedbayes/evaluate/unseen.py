"""Flags for rows that are unlike all that a run has seen, at a rate of false alarms that is stated.

A threshold is a conformal quantile of the run's test rows: a new row that is like them lies above it with the chance
stated, at most. `usual` asks two measures, each at half the rate: how far a row's features are from every class (which
sees inputs far out, of which a network may be certain), and how undecided the prediction is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedbayes.errors import InputError, unknown
from fedbayes.evaluate import ood
from fedbayes.model.predictive import Predictive
from fedbayes.training.private import check_public
from fedbayes.training.run import Run

FALSE_ALARMS = 0.05
USUAL, DISTANCE = "usual", "distance"
MEASURES = (USUAL, DISTANCE, "entropy", "epistemic")

Measure = Callable[[Tensor, Predictive], np.ndarray]


class Flags(NamedTuple):
    """Flags of unfamiliar rows [N]: the thresholds by measure, and how often a familiar row is flagged, at most."""

    thresholds: Mapping[str, float]
    outside: np.ndarray
    rate: float

    def __str__(self) -> str:
        by = " or ".join(f"{name} > {value:.6g}" for name, value in self.thresholds.items())
        return (
            f"never seen: {self.outside.sum()} of {len(self.outside)} rows ({by}; "
            f"false alarms: {self.rate:.0%} of rows that are like the test set)"
        )


def flagged(
    run: Run, x: Tensor, p: Predictive, by: str = USUAL, *, draws: int | None = None, rate: float = FALSE_ALARMS
) -> Flags:
    """Which rows lie above the thresholds; `p` is the run's prediction of x."""
    if by not in MEASURES:
        raise unknown("measure of --ood", by, MEASURES)
    check_public(run.task.privacy, "thresholds", mend="")
    data = run.task.clients.data
    if not len(data.test_x):
        raise InputError(f"--ood needs test rows to set its threshold by, and {data.name} has none")
    familiar = run.predict(data.test_x, draws=draws)
    measures = _usual(run, familiar) if by == USUAL else {by: _measure(run, by, familiar)}
    thresholds, outside = {}, np.zeros(len(x), bool)
    for name, measure in measures.items():
        thresholds[name] = quantile(measure(data.test_x, familiar), rate / len(measures))
        outside |= measure(x, p) > thresholds[name]
    return Flags(thresholds, outside, rate)


def quantile(usual: np.ndarray, rate: float) -> float:
    """The least threshold that one more row like `usual` exceeds with a chance of at most `rate`."""
    place = math.ceil((len(usual) + 1) * (1 - rate))
    if place > len(usual):
        raise InputError(
            f"--ood: {len(usual)} test rows are too few for a rate of {rate:.3g}; at least {math.ceil(1 / rate) - 1}"
        )
    return float(np.sort(usual)[place - 1])


def _usual(run: Run, familiar: Predictive) -> dict[str, Measure]:
    """Distance and the prediction's own doubt, where the run has them."""
    doubt = "epistemic" if familiar.kind in ("real", "survival") else "entropy"
    measures, lacking = {}, []
    for name in (DISTANCE, doubt):
        try:
            measures[name] = _measure(run, name, familiar)
        except InputError as error:
            lacking.append(str(error))
    if not measures:
        raise InputError(f"--ood: nothing to go by: {'; '.join(lacking)}")
    return measures


def _measure(run: Run, name: str, familiar: Predictive) -> Measure:
    """A measure of rows and their prediction; an InputError says why a run has none of this name."""
    kind = familiar.kind
    if name == DISTANCE:
        fitted = ood.fit_distance(run)
        return lambda x, p: ood.scores(run, x, only=("mahalanobis",), distance=fitted)["mahalanobis"].numpy()
    if name == "entropy":
        if kind in ("real", "survival"):
            raise InputError(f"--ood by entropy needs classes; {kind} targets are flagged by epistemic")
        return lambda x, p: p.entropy.cpu().double().numpy()
    if not bool(familiar.epistemic.any()):
        raise InputError("--ood by epistemic needs a posterior; this run is a point estimate: use distance")
    return lambda x, p: p.epistemic.sum(-1).cpu().double().numpy()
