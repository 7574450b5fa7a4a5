"""Conformal sets and intervals of pooled rows against MAPIE, and what regularised, quantile and survival scores are."""

import math

import numpy as np
import pytest
import torch

from fedbayes import scores


class Known:
    """A classifier whose probabilities are given: inputs are row numbers."""

    def __init__(self, probs: np.ndarray) -> None:
        self.probs, self.classes_ = probs, np.arange(probs.shape[1])
        self.n_features_in_ = 1

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return self.probs[np.asarray(x)[:, 0].astype(int)]

    def predict(self, x):
        return self.predict_proba(x).argmax(1)

    def __sklearn_is_fitted__(self):
        return True

    def __sklearn_tags__(self):
        from sklearn.base import BaseEstimator, ClassifierMixin

        class Both(ClassifierMixin, BaseEstimator):
            pass

        return Both().__sklearn_tags__()


def rows(seed: int = 0, count: int = 700):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, 6, generator=generator, dtype=torch.float64)
    labels = (logits / 1.5).softmax(1).multinomial(1, generator=generator)[:, 0]
    return logits.softmax(1), labels


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_pooled_sets_are_mapies(coverage):
    mapie = pytest.importorskip("mapie.classification", reason="MAPIE, the oracle of these sets, is not installed")
    probs, labels = rows()
    at = np.arange(len(probs), dtype=float)[:, None]
    theirs = mapie.SplitConformalClassifier(Known(probs.numpy()), coverage, conformity_score="lac", prefit=True)
    theirs.conformalize(at[:300], labels[:300].numpy())
    expected = theirs.predict_set(at[300:])[1][:, :, 0]
    values, edges = scores.least_ambiguous_scores(probs), scores.PROBABILITY_EDGES
    sites = scores.label_scores(values[:300], labels[:300]).tensor_split([50, 120])
    limit = scores.conformal_threshold(sum(scores.histogram(own, edges) for own in sites), edges, coverage)
    ours = scores.prediction_sets(values[300:], limit).numpy()
    # Ours round a threshold up to its edge. MAPIE's adaptive sets are drawn by chance, and can't be compared by row.
    assert (ours != expected).mean() < 0.01
    assert (ours >= expected).all()


def test_adaptive_sets_are_those_of_the_definition():
    probs, labels = rows()
    p = probs.numpy()
    values = np.array([[row[row >= row[c]].sum() for c in range(6)] for row in p])  # no two are equal
    np.testing.assert_allclose(scores.adaptive_scores(probs).numpy(), values)
    limit = np.sort(values[np.arange(300), labels[:300].numpy()])[math.ceil(301 * 0.9) - 1]
    edges = scores.PROBABILITY_EDGES
    counts = scores.histogram(scores.label_scores(scores.adaptive_scores(probs)[:300], labels[:300]), edges)
    ours = scores.prediction_sets(torch.from_numpy(values), scores.conformal_threshold(counts, edges, 0.9)).numpy()
    assert ((values <= limit) != ours).mean() < 0.005


@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_pooled_intervals_are_mapies(coverage):
    mapie = pytest.importorskip("mapie.regression", reason="MAPIE, the oracle of these intervals, is not installed")
    from sklearn.linear_model import LinearRegression

    random = np.random.default_rng(1)
    x = random.standard_normal((500, 2))
    y = x @ [1.0, -2] + random.standard_normal(500)
    fit = LinearRegression().fit(x[:100], y[:100])
    theirs = mapie.SplitConformalRegressor(fit, confidence_level=coverage, prefit=True).conformalize(
        x[100:300], y[100:300]
    )
    expected = theirs.predict_interval(x[300:])[1][:, :, 0]
    mean, one = torch.from_numpy(fit.predict(x)), torch.ones(500).double()
    edges = scores.RESIDUAL_EDGES
    values = scores.normalised_residual(mean[100:300], one[100:300], torch.from_numpy(y[100:300]))
    low, high = scores.prediction_interval(
        mean[300:], one[300:], scores.conformal_threshold(scores.histogram(values, edges), edges, coverage)
    )
    width = expected[:, 1] - expected[:, 0]
    np.testing.assert_allclose((high - low).numpy(), width, rtol=5e-3)
    np.testing.assert_allclose(((high + low) / 2).numpy(), expected.mean(1))


def test_regularised_scores_add_a_penalty_by_rank():
    probs = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64)
    expected = torch.tensor([[1.0 + 0.2, 0.6, 0.9 + 0.1]], dtype=torch.float64)
    torch.testing.assert_close(scores.regularised_scores(probs, penalty=0.1, free=1), expected)
    edges = scores.regularised_edges(3, 0.1, 1)
    assert bool((edges.diff() > 0).all())
    assert float(edges[-1]) == pytest.approx(1.2)


def test_a_penalty_makes_the_largest_sets_smaller_and_keeps_the_promise():
    probs, labels = rows(2, 4000)
    covered, largest = {}, {}
    for penalty in (0.0, 0.3):
        edges = scores.regularised_edges(6, penalty, 1)
        values = scores.regularised_scores(probs, penalty, 1)
        counts = scores.histogram(scores.label_scores(values[:2000], labels[:2000]), edges)
        sets = scores.prediction_sets(values[2000:], scores.conformal_threshold(counts, edges, 0.9))
        covered[penalty] = float(sets.gather(1, labels[2000:, None]).double().mean())
        largest[penalty] = float(sets.sum(1).double().quantile(0.99))
    assert min(covered.values()) > 0.88
    assert largest[0.3] < largest[0.0]


def test_quantiles_that_are_wrong_are_moved_until_they_cover():
    random = torch.Generator().manual_seed(3)
    x = 1 + torch.rand(4000, 1, generator=random, dtype=torch.float64)
    y = x * torch.randn(4000, 1, generator=random, dtype=torch.float64)
    low, high = -0.4 * x, 0.4 * x
    spread = torch.ones(1)
    values = scores.quantile_residual(low[:2000], high[:2000], spread, y[:2000])
    edges = scores.SIGNED_EDGES
    move = scores.conformal_threshold(scores.histogram(values, edges), edges, 0.9)
    inside = (y[2000:] >= low[2000:] - move) & (y[2000:] <= high[2000:] + move)
    assert float(inside.double().mean()) == pytest.approx(0.9, abs=0.02)
    # Too wide quantiles are moved inwards.
    narrow = scores.quantile_residual(20 * low[:2000], 20 * high[:2000], spread, y[:2000])
    assert scores.conformal_threshold(scores.histogram(narrow, edges), edges, 0.9) < 0


def exponential(seed: int, count: int, end: float = math.inf):
    """Times of known rate, censored by others and at the end; curves that think the rate half as high."""
    random = np.random.default_rng(seed)
    rate = np.exp(random.uniform(-0.5, 0.5, count))
    time, censor = random.exponential(1 / rate), np.minimum(random.exponential(2.0, count), end)
    cuts = np.linspace(0.05, 6, 120)
    curves = np.exp(-0.5 * rate[:, None] * cuts)
    target = np.stack([np.minimum(time, censor), time <= censor], 1)
    return torch.from_numpy(curves), torch.from_numpy(cuts), torch.from_numpy(target), torch.from_numpy(time)


def weighted_counts(curves, cuts, target):
    values, last = (
        scores.survival_residual(curves, cuts, t) for t in (target[:, 0], target[:, 0].max() + 0 * curves[:, 0])
    )
    free = scores.kaplan_meier(torch.stack([target[:, 0], 1 - target[:, 1]], 1))  # of not being censored
    return scores.survival_histogram(
        values, target[:, 1] / free.at(target[:, 0] - 1e-9), scores.PROBABILITY_EDGES, last
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_times_are_outlived_as_often_as_promised(weighted):
    curves, cuts, target, _ = exponential(4, 3000)
    values = scores.survival_residual(curves, cuts, target[:, 0])
    edges = scores.PROBABILITY_EDGES
    if weighted:
        counts = weighted_counts(curves, cuts, target)
    else:
        counts = scores.histogram(values, edges)
    threshold = scores.conformal_threshold(counts, edges, 0.9)
    curves, cuts, _, time = exponential(5, 20000)
    outlived = float((time >= scores.survival_lower(curves, cuts, threshold)).double().mean())
    if weighted:
        assert outlived == pytest.approx(0.9, abs=0.015)
    else:  # of the times seen, which are not longer than the true ones: kept, and wide
        assert outlived > 0.92


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("end", [0.12, 0.5, math.inf])
def test_who_was_not_seen_to_die_is_not_taken_to_live_for_ever(end, coverage):
    """Follow-up that ends before the events: bounds reach no further than it was seen, and promises stay."""
    curves, cuts, target, _ = exponential(6, 3000, end)
    counts = weighted_counts(curves, cuts, target)
    assert float(counts.sum()) == pytest.approx(3000)
    threshold = scores.conformal_threshold(counts, scores.PROBABILITY_EDGES, coverage)
    curves, cuts, _, time = exponential(7, 20000)
    outlived = float((time >= scores.survival_lower(curves, cuts, threshold)).double().mean())
    assert outlived > coverage - 0.015
    if end > 1 and coverage > 0.5:  # events are seen as far as the threshold needs them
        assert outlived < coverage + 0.02


def test_the_bound_is_where_the_curve_falls_to_the_threshold():
    curves, cuts = torch.tensor([[0.8, 0.4], [0.95, 0.9]], dtype=torch.float64), torch.tensor([1.0, 3.0]).double()
    assert scores.survival_lower(curves, cuts, 0.6).tolist() == [2.0, 3.0]
    assert scores.survival_lower(curves, cuts, 0.9).tolist() == pytest.approx([0.5, 3.0])
    assert scores.survival_lower(curves, cuts, math.inf).tolist() == [0, 0]
    times = torch.tensor([2.0, 1.0]).double()
    torch.testing.assert_close(scores.survival_residual(curves, cuts, times), torch.tensor([0.6, 0.95]).double())
