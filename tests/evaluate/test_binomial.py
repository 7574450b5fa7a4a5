"""Exact binomial intervals against the binomial distribution itself."""

import numpy as np
import pytest
from scipy.stats import binom

from fedbayes.evaluate.binomial import exact_band, exact_interval


@pytest.mark.parametrize("rows", [1, 25, 400])
def test_binomial_intervals_are_exact(rows):
    hits = np.arange(rows + 1)
    low, high = exact_interval(hits, np.full(rows + 1, rows))
    # The definition: at its ends the observed count is as far out as the tail allows.
    for h in hits[1:]:
        assert binom.sf(h - 1, rows, low[h]) == pytest.approx(0.025, abs=1e-8)
    for h in hits[:-1]:
        assert binom.cdf(h, rows, high[h]) == pytest.approx(0.025, abs=1e-8)
    assert low[0] == 0
    assert high[-1] == 1
    low, high = exact_band(0.9, np.array([rows, 0]))
    inside = binom.cdf(round(high[0] * rows), rows, 0.9) - binom.cdf(round(low[0] * rows) - 1, rows, 0.9)
    assert inside >= 0.95
    assert np.isnan(low[1])
