"""Conformal sets and intervals: the promise holds for every list of scores, and sets are hardly larger than need be."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import scores

COVERAGE = [0.5, 0.8, 0.9, 0.95]


def _threshold(values: torch.Tensor, edges: torch.Tensor, coverage: float) -> float:
    """From three sites of unequal size."""
    sites = values.tensor_split([len(values) // 5, len(values) // 2])
    return scores.conformal_threshold(sum(scores.histogram(site, edges) for site in sites), edges, coverage)


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-9, 0.25, 1.0])), min_size=2, max_size=40),
    st.sampled_from(COVERAGE),
)
def test_leaving_each_row_out_in_turn_covers_as_often_as_promised(values, coverage):
    # The finite-sample theorem without its expectation: among n + 1 rows, each held against the others' threshold.
    rows = torch.tensor(values, dtype=torch.float64)
    covered = 0
    for i in range(len(rows)):
        others = torch.cat([rows[:i], rows[i + 1 :]])
        covered += bool(rows[i] <= _threshold(others, scores.PROBABILITY_EDGES, coverage))
    assert covered >= math.ceil(len(rows) * coverage - 1e-9)


@pytest.mark.parametrize("coverage", COVERAGE)
def test_the_threshold_is_the_order_statistic_rounded_up(coverage):
    edges = scores.RESIDUAL_EDGES
    values = np.abs(np.random.default_rng(0).standard_normal(200))
    exact = np.sort(values)[math.ceil(201 * coverage - 1e-9) - 1]
    found = _threshold(torch.from_numpy(values), edges, coverage)
    assert exact <= found <= exact * 1.005


def test_the_rank_is_not_raised_by_rounding():
    edges = torch.arange(1, 100, dtype=torch.float64)
    assert scores.conformal_threshold(scores.histogram(edges, edges), edges, 0.55) == 55  # (99 + 1) * 0.55, exactly.


def test_too_few_rows_give_the_whole_set():
    assert math.isinf(_threshold(torch.full((8,), 0.1), scores.PROBABILITY_EDGES, 0.9))
    assert math.isfinite(_threshold(torch.full((9,), 0.1), scores.PROBABILITY_EDGES, 0.9))
    assert scores.prediction_sets(torch.rand(3, 4), math.inf).all()


@pytest.mark.parametrize("score", [scores.least_ambiguous_scores, scores.adaptive_scores])
def test_sets_cover_on_exchangeable_data(score):
    generator = torch.Generator().manual_seed(1)
    covered, sizes = [], []
    for _ in range(100):
        logits = 3 * torch.randn(600, 5, generator=generator)
        labels = (logits / 1.7).softmax(1).multinomial(1, generator=generator)[:, 0]  # An overconfident network.
        strange = score(logits.softmax(1))
        limit = _threshold(scores.label_scores(strange[:100], labels[:100]), scores.PROBABILITY_EDGES, 0.9)
        sets = scores.prediction_sets(strange[100:], limit)
        covered.append(float(sets.gather(1, labels[100:, None]).double().mean()))
        sizes.append(float(sets.double().sum(1).mean()))
    error = np.std(covered) / 10
    assert np.mean(covered) >= 0.9 - 3 * error
    # 1 / 101 for the correction, and what binning adds: a set that is nearly everything would pass the line above.
    assert np.mean(covered) <= 0.9 + 1 / 101 + 0.002 + 3 * error
    assert np.mean(sizes) < 4


def test_adaptive_scores_are_the_mass_down_to_the_class():
    probs = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(scores.adaptive_scores(probs), torch.tensor([[1.0, 0.5, 0.8]], dtype=torch.float64))


def test_scores_close_to_either_end_are_told_apart():
    # Networks put 97 % of 1 - p below 0.001: coarse bins there would promise 90 % and give 97.
    small = torch.logspace(-7, -3, 400, dtype=torch.float64)
    limit = _threshold(small, scores.PROBABILITY_EDGES, 0.5)
    assert float((small <= limit).double().mean()) == pytest.approx(0.5, abs=0.01)
    limit = _threshold(1 - small, scores.PROBABILITY_EDGES, 0.5)
    assert float((1 - small <= limit).double().mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("outputs", [1, 3])
def test_intervals_cover_whatever_the_scale_says(outputs):
    generator = torch.Generator().manual_seed(2)
    covered = []
    for _ in range(100):
        scale = 0.5 + torch.rand(600, outputs, generator=generator)
        target = 7 * scale * torch.randn(600, outputs, generator=generator)  # Seven times wider than claimed.
        mean = torch.zeros(600, outputs)
        limit = _threshold(
            scores.normalised_residual(mean[:100], scale[:100], target[:100]), scores.RESIDUAL_EDGES, 0.9
        )
        low, high = scores.prediction_interval(mean[100:], scale[100:], limit)
        assert low.shape == high.shape
        held = (low.reshape(500, -1) <= target[100:]) & (target[100:] <= high.reshape(500, -1))
        covered.append(float(held.all(1).double().mean()))
    error = np.std(covered) / 10
    assert 0.9 - 3 * error <= np.mean(covered) <= 0.9 + 1 / 101 + 0.002 + 3 * error


def test_histograms_add_and_leave_masked_rows_out():
    values, edges = torch.tensor([-5.0, 0.0, 0.5, 1.0, 9.0, torch.nan]), torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert scores.histogram(values, edges).tolist() == [2, 2, 2]
    assert scores.histogram(values, edges, torch.tensor([1, 1, 0, 1, 0, 0])).tolist() == [2, 1, 0]
    stacked = torch.func.vmap(lambda v: scores.histogram(v, edges))(values.reshape(2, 3))
    assert stacked.sum(0).tolist() == [2, 2, 2]
