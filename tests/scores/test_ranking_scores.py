"""Ranking scores against scikit-learn, ties and all, and the inequalities that every ROC obeys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor

from fedbayes import scores

values = st.one_of(st.integers(-4, 4).map(float), st.floats(-1e9, 1e9, allow_subnormal=False))
samples = st.lists(values, min_size=1, max_size=60).map(lambda v: torch.tensor(v, dtype=torch.float64))


def _roc(inside: Tensor, outside: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Shares of outside and inside samples kept, threshold rising."""
    truth = np.r_[np.ones(len(inside)), np.zeros(len(outside))]
    passed, kept, _ = metrics.roc_curve(truth, -np.r_[inside.numpy(), outside.numpy()], drop_intermediate=False)
    return passed, kept


@settings(max_examples=80)
@given(samples, samples)
def test_areas_equal_scikit_learn(inside, outside):
    truth, score = np.r_[np.zeros(len(inside)), np.ones(len(outside))], np.r_[inside.numpy(), outside.numpy()]
    assert scores.auroc(inside, outside) == pytest.approx(metrics.roc_auc_score(truth, score), abs=1e-12)
    assert scores.aupr(inside, outside) == pytest.approx(metrics.average_precision_score(truth, score), abs=1e-12)
    turned = metrics.average_precision_score(1 - truth, -score)
    assert scores.aupr_in(inside, outside) == pytest.approx(turned, abs=1e-12)


@settings(max_examples=80)
@given(samples, samples)
def test_fpr95_is_where_the_roc_crosses_95_percent(inside, outside):
    passed, kept = _roc(inside, outside)
    at = int(np.argmax(kept >= 0.95 - 1e-12))
    part = (0.95 - kept[at - 1]) / (kept[at] - kept[at - 1])
    crossing = passed[at - 1] + part * (passed[at] - passed[at - 1])
    assert scores.fpr95(inside, outside) == pytest.approx(crossing, abs=1e-9)


@pytest.mark.parametrize("n", [1, 19, 20, 21, 100, 1000])
def test_without_ties_fpr95_is_the_usual_first_threshold(n):
    generator = torch.Generator().manual_seed(n)
    inside, outside = torch.randn(n, generator=generator), 1 + torch.randn(77, generator=generator)
    passed, kept = _roc(inside, outside)
    assert scores.fpr95(inside, outside) == pytest.approx(passed[kept >= 0.95 - 1e-12].min(), abs=1e-12)


@settings(max_examples=120)
@given(samples, samples)
def test_every_roc_obeys_both_inequalities(inside, outside):
    area, passed = scores.auroc(inside, outside), scores.fpr95(inside, outside)
    assert 0.95 * (1 - passed) <= area + 1e-12
    assert area <= 1 - 0.05 * passed + 1e-12


def test_the_inequality_holds_where_the_first_threshold_would_break_it():
    # The smallest threshold that keeps 95 of these lets every outside sample pass: FPR95 1, AUROC .97 > 1 - .05.
    inside, outside = torch.tensor([0.0] * 94 + [1.0] * 6), torch.ones(10)
    assert scores.auroc(inside, outside) == pytest.approx(0.97)
    assert scores.fpr95(inside, outside) == pytest.approx(1 / 6)


def test_constant_and_perfect_scores_have_their_documented_values():
    same = torch.zeros(30), torch.zeros(10)
    assert (scores.auroc(*same), scores.aupr(*same), scores.fpr95(*same)) == pytest.approx((0.5, 0.25, 0.95))
    best = torch.arange(30.0), 100 + torch.arange(10.0)
    assert (scores.auroc(*best), scores.aupr(*best), scores.aupr_in(*best), scores.fpr95(*best)) == (1, 1, 1, 0)
    ends = torch.tensor([-torch.inf, 0.0]), torch.tensor([0.0, torch.inf])
    assert scores.auroc(*ends) == pytest.approx(7 / 8)


@pytest.mark.parametrize("score", [scores.auroc, scores.aupr, scores.aupr_in, scores.fpr95])
def test_energies_far_outside_the_unit_interval_rank_like_any_others(score):
    generator = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(500, generator=generator).double(), 1 + torch.randn(300, generator=generator).double()
    expected = score(inside, outside)
    assert 0.01 < expected < 0.99
    assert score(1e5 * inside - 3e7, 1e5 * outside - 3e7) == pytest.approx(expected, abs=1e-12)


def test_misclassification_auroc_equals_scikit_learn():
    generator = np.random.default_rng(1)
    correct, uncertainty = generator.integers(0, 2, 200), generator.integers(0, 9, 200).astype(float)
    expected = metrics.roc_auc_score(1 - correct, uncertainty)
    found = scores.misclassification_auroc(torch.from_numpy(uncertainty), torch.from_numpy(correct))
    assert found == pytest.approx(expected, abs=1e-12)


def test_resampling_draws_equal_numbers_and_repeats_with_its_seed():
    generator = torch.Generator().manual_seed(2)
    inside, outside = torch.randn(1000, generator=generator), 1 + torch.randn(80, generator=generator)
    sizes = []

    def score(a: Tensor, b: Tensor) -> float:
        sizes.append((len(a), len(a.unique()), len(b)))
        return scores.auroc(a, b)

    first, again, other = (scores.resampled(score, inside, outside, seed=seed) for seed in (0, 0, 1))
    assert set(sizes) == {(80, 80, 80)}
    assert first == again
    assert first.values != other.values
    assert len(first.values) == 5
    assert first.mean == pytest.approx(np.mean(first.values))
    assert first.spread == pytest.approx(np.std(first.values, ddof=1))
    assert 0 < first.spread < 0.1
    assert first.mean == pytest.approx(scores.auroc(inside, outside), abs=0.05)


def test_histograms_of_sites_give_the_auroc_within_its_resolution():
    generator = torch.Generator().manual_seed(3)
    inside, outside = 20 * torch.randn(400, generator=generator), 15 + 20 * torch.randn(300, generator=generator)
    for bins in (5, 50, 2000):
        edges = torch.linspace(-60, 70, bins, dtype=torch.float64)
        counts = [sum(scores.histogram(site, edges) for site in part.tensor_split(3)) for part in (inside, outside)]
        slack = scores.auroc_resolution(*counts)
        assert abs(scores.auroc_of_counts(*counts) - scores.auroc(inside, outside)) <= slack + 1e-12
    assert slack < 1e-3
    assert scores.aupr_of_counts(*counts) == pytest.approx(scores.aupr(inside, outside), abs=5e-3)
    assert scores.fpr95_of_counts(*counts) == pytest.approx(scores.fpr95(inside, outside), abs=5e-3)
