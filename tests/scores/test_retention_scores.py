"""Retention curves against all orders of the tied predictions."""

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import scores

rows = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.5]), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=40)
@given(rows)
def test_the_curve_is_the_mean_over_all_orders_of_ties(cases):
    curves = []
    for order in permutations(cases):
        if all(a[0] <= b[0] for a, b in pairwise(order)):
            right = np.array([hit for _, hit in order], dtype=float)
            curves.append(right.cumsum() / np.arange(1, len(right) + 1))
    uncertainty, correct = torch.tensor([u for u, _ in cases]), torch.tensor([hit for _, hit in cases])
    curve = scores.retention_curve(uncertainty, correct)
    np.testing.assert_allclose(curve.accuracy.numpy(), np.mean(curves, 0), atol=1e-12)
    np.testing.assert_allclose(curve.fraction.numpy(), np.arange(1, len(cases) + 1) / len(cases))
    assert scores.retention_area(uncertainty, correct) == pytest.approx(np.mean(curves), abs=1e-12)


def test_an_oracle_beats_constant_uncertainty_beats_its_reverse():
    correct = torch.arange(100) % 5 > 0
    oracle = scores.retention_area((~correct).double(), correct)
    constant = scores.retention_area(torch.zeros(100), correct)
    reverse = scores.retention_area(correct.double(), correct)
    assert constant == pytest.approx(0.8)
    assert reverse < constant < oracle
    curve = scores.retention_curve((~correct).double(), correct)
    assert curve.accuracy[:80].eq(1).all()
    assert curve.accuracy[-1] == pytest.approx(0.8)
