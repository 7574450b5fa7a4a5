"""Scores of survival curves under weights of the rows, in NumPy: `scores.survival_sums` for many weights at once."""

from __future__ import annotations

import numpy as np

from fedbayes.runs.records import Arrays

FLOOR = 1e-12  # as in scores.survival
BLOCK = 2048  # events that are compared with all others at once


def scores_of_curves(arrays: Arrays, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Concordance, NLL and integrated Brier score of curves under weights [R, N] that add up to one: [R] each."""
    curves, times = arrays["survival"].astype(float), arrays["times"].astype(float)
    time, event = arrays["labels"].astype(float).reshape(-1, 2).T
    return {
        **_concordance(curves, time, event, weights),
        "nll": weights @ _nll_terms(curves, time, event, times),
        "brier": _integrated_brier(curves, time, event, times, weights),
    }


def _concordance(curves: np.ndarray, time: np.ndarray, event: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Harrell's C, a pair weighed by both its rows; none where some weights leave no pair to compare."""
    risk, first = -curves.mean(1), np.flatnonzero(event)
    right, pairs = (np.zeros(len(weights)) for _ in range(2))
    for start in range(0, len(first), BLOCK):
        rows = first[start : start + BLOCK]
        mine, when = risk[rows, None], time[rows, None]
        later = (when < time) | ((when == time) & (event == 0))
        ahead = (later & (mine > risk)).astype(np.float32)
        ahead[later & (mine == risk)] = 0.5
        for total, compared in ((pairs, later.astype(np.float32)), (right, ahead)):
            total += ((weights[:, rows] @ compared) * weights).sum(1)
    return {"concordance": right / pairs} if pairs.all() else {}


def _nll_terms(curves: np.ndarray, time: np.ndarray, event: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Minus the log chance [N] of the interval of each event, or of living through those a row was seen in."""
    row, last = np.arange(len(time)), len(times)
    place = (time[:, None] > times).sum(1)
    here = np.minimum(place, last - 1)
    starts = np.r_[0.0, times]
    through = (time - starts[here]) / (starts[here + 1] - starts[here]) >= 0.5
    whole = np.c_[np.ones(len(time)), curves]
    death = whole[row, here] - whole[row, here + 1]
    alive = whole[row, np.minimum(place + through, last)]
    return -np.log(np.maximum(np.where((event > 0) & (place < last), death, alive), FLOOR))


def _integrated_brier(
    curves: np.ndarray, time: np.ndarray, event: np.ndarray, times: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """The Brier score [R], whose weights for censoring are those of the weighed rows."""
    widths = _trapezia(times)
    dead = (curves**2 * (time[:, None] <= times) * event[:, None]) @ widths
    alive = (1 - curves) ** 2 * (time[:, None] > times) * widths
    lost, left = _uncensored(time, event, weights)
    own = left[:, np.searchsorted(lost, time, side="left")]
    there = left[:, np.searchsorted(lost, times, side="right")]
    ended: np.ndarray = (weights * dead / np.maximum(own, FLOOR)).sum(1)
    return ended + ((weights @ alive) / np.maximum(there, FLOOR)).sum(1)


def _uncensored(time: np.ndarray, event: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times [J] at which rows were censored, and the share [R, J + 1] that is not by then: first before all of them.

    Where an event and a censoring share a time, the event comes first.
    """
    order = np.argsort(time, kind="stable")
    drawn, when, censored = weights[:, order].astype(float), time[order], event[order] == 0
    lost, first = np.unique(when[censored], return_index=True)
    beside = np.add.reduceat(drawn[:, censored], first, axis=1)
    later = np.c_[drawn[:, ::-1].cumsum(1)[:, ::-1], np.zeros(len(drawn))]  # summed from the end: nobody left is 0
    at_risk = later[:, np.searchsorted(when, lost, side="right")] + beside
    stays = 1 - beside / np.where(at_risk > 0, at_risk, 1)
    return lost, np.cumprod(np.c_[np.ones(len(weights)), stays], axis=1)


def _trapezia(times: np.ndarray) -> np.ndarray:
    """Weights [T] by which a function's values at the times make its mean between them."""
    if len(times) == 1:
        return np.ones(1)
    widths = np.r_[0.0, np.diff(times), 0.0]
    mean: np.ndarray = (widths[1:] + widths[:-1]) / 2 / (times[-1] - times[0])
    return mean
