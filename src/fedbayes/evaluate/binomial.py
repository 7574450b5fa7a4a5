"""Exact binomial intervals: what a share of few rows says, and which shares a promise allows."""

from __future__ import annotations

import numpy as np


def exact_interval(hits: np.ndarray, rows: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper ends for the chance behind `hits` of `rows` (Clopper and Pearson, 1934); nan without rows."""
    from scipy.special import betaincinv

    hits, rows = (np.asarray(v, dtype=np.float64) for v in (hits, rows))
    tail = (1 - confidence) / 2
    some = np.maximum(rows, 1)
    low = np.where(hits > 0, betaincinv(np.maximum(hits, 1e-9), some - np.minimum(hits, some) + 1, tail), 0.0)
    high = np.where(hits < rows, betaincinv(hits + 1, np.maximum(some - hits, 1e-9), 1 - tail), 1.0)
    return np.where(rows > 0, low, np.nan), np.where(rows > 0, high, np.nan)


def exact_band(chance: float, rows: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """The shares between which those of `rows` draws lie so often, if their chance is as promised; nan without rows."""
    from scipy.stats import binom

    rows = np.asarray(rows, dtype=np.int64)
    tail = (1 - confidence) / 2
    some = np.maximum(rows, 1)
    low, high = binom.ppf(tail, some, chance) / some, binom.isf(tail, some, chance) / some
    return np.where(rows > 0, low, np.nan), np.where(rows > 0, high, np.nan)
