"""Thresholds for a site's own label mix: known truth, the pooled threshold as a special case, unknown classes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from fedbayes import scores

EDGES = scores.PROBABILITY_EDGES
# Scores of class c are Beta(1, HARD[c]): F_c(t) = 1 - (1 - t)^HARD[c] is known.
HARD = torch.tensor([1.5, 4.0, 20.0], dtype=torch.float64)


def drawn(labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return 1 - torch.rand(len(labels), generator=generator, dtype=torch.float64) ** (1 / HARD[labels])


def truth(mix: torch.Tensor, thresholds: torch.Tensor) -> float:
    """The coverage of a site, exactly."""
    return float((mix * (1 - (1 - thresholds.clamp(0, 1)) ** HARD)).sum())


def counted(labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return scores.class_histograms(drawn(labels, generator), labels, 3, EDGES)


@pytest.mark.parametrize("mix", [[1.0, 0, 0], [0, 0, 1.0], [0.2, 0.5, 0.3], [0.9, 0.1, 0]])
@pytest.mark.parametrize("rows", [12, 90, 1500])
def test_a_site_is_covered_as_promised_whatever_its_mix(mix, rows):
    generator = torch.Generator().manual_seed(rows)
    mix = torch.tensor(mix, dtype=torch.float64)
    labels = torch.arange(rows) % 3
    covered = [truth(mix, scores.shifted_thresholds(counted(labels, generator), EDGES, mix, 0.8)) for _ in range(300)]
    error = np.std(covered) / math.sqrt(300)
    assert np.mean(covered) >= 0.8 - 3 * error
    assert np.mean(covered) <= 0.8 + 4 / rows * 3 + 0.004 + 3 * error  # not by giving everything


def test_the_pooled_threshold_fails_the_same_sites():
    generator = torch.Generator().manual_seed(0)
    counts = counted(torch.arange(3000) % 3, generator)
    pooled = torch.full((3,), scores.conformal_threshold(counts.sum(0), EDGES, 0.8), dtype=torch.float64)
    assert truth(torch.tensor([1.0, 0, 0]).double(), pooled) < 0.65
    assert truth(torch.tensor([0, 0, 1.0]).double(), pooled) > 0.95


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2)), min_size=1, max_size=60), st.sampled_from([0.5, 0.9]))
def test_with_the_mix_of_the_rows_it_is_the_pooled_threshold(rows, coverage):
    values = torch.tensor([v for v, _ in rows], dtype=torch.float64)
    labels = torch.tensor([c for _, c in rows])
    counts = scores.class_histograms(values, labels, 3, EDGES)
    found = scores.shifted_thresholds(counts, EDGES, counts.sum(1) / counts.sum(), coverage)
    pooled = scores.conformal_threshold(scores.histogram(values, EDGES), EDGES, coverage)
    assert all(float(t) == pooled for c, t in enumerate(found) if counts[c].sum())


def test_histograms_by_class_add_up_to_those_of_all():
    generator = torch.Generator().manual_seed(1)
    values, labels = torch.rand(50, generator=generator), torch.randint(0, 3, (50,), generator=generator)
    counts = scores.class_histograms(values, labels, 3, EDGES)
    assert torch.equal(counts.sum(0), scores.histogram(values, EDGES))
    halves = [scores.class_histograms(values[a], labels[a], 3, EDGES) for a in (slice(20), slice(20, None))]
    assert torch.equal(sum(halves), counts)


@pytest.mark.parametrize("rows", [60, 400])
def test_with_confidence_nearly_every_calibration_keeps_the_promise(rows):
    generator = torch.Generator().manual_seed(3)
    mix = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    labels = torch.arange(rows) % 3
    covered = np.array(
        [truth(mix, scores.shifted_thresholds(counted(labels, generator), EDGES, mix, 0.8, 0.9)) for _ in range(300)]
    )
    assert binom.cdf((covered >= 0.8).sum(), 300, 0.9) > 0.005
    assert covered.mean() < 0.8 + 4 * math.sqrt(0.16 / (rows / 3))


@pytest.mark.parametrize("rows", [30, 300])
def test_the_confident_share_is_that_of_the_beta_law(rows):
    share = scores.confident_share(rows, 0.8, 0.95)
    assert beta.sf(0.8, share * rows, rows + 1 - share * rows) == pytest.approx(0.95, abs=1e-6)
    assert scores.confident_share(5, 0.9, 0.95) == math.inf


def test_em_finds_the_mix_that_made_the_rows():
    generator = torch.Generator().manual_seed(4)
    source, mix = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.05, 0.15, 0.8])
    labels = mix.multinomial(4000, replacement=True, generator=generator)
    x = 1.5 * labels + torch.randn(4000, generator=generator)
    likelihood = torch.exp(-0.5 * (x[:, None] - 1.5 * torch.arange(3)) ** 2)
    probs = source * likelihood / (source * likelihood).sum(1, keepdim=True)
    torch.testing.assert_close(scores.mix_by_em(probs, source), mix.double(), atol=0.03, rtol=0)
    # The summit of the likelihood: no step in any direction that sums to one climbs from it.
    found = scores.mix_by_em(probs, source)

    def height(p):
        return float(((probs.double() / source.double()) @ p).log().sum() + (source.double() * p.log()).sum())

    for step in ([1, -1, 0], [0, 1, -1], [-1, 0, 1]):
        assert height(found) >= height(found + 1e-4 * torch.tensor(step)) - 1e-6
    predicted = torch.bincount(probs.argmax(1), minlength=3)
    teach = source.multinomial(6000, replacement=True, generator=generator)
    z = 1.5 * teach + torch.randn(6000, generator=generator)
    posterior = source * torch.exp(-0.5 * (z[:, None] - 1.5 * torch.arange(3)) ** 2)
    confusion = torch.zeros(3, 3).index_put((teach, posterior.argmax(1)), torch.ones(6000), accumulate=True)
    torch.testing.assert_close(scores.mix_by_confusion(predicted, confusion), mix.double(), atol=0.05, rtol=0)


def test_a_site_without_rows_has_the_mix_of_all():
    everywhere = torch.tensor([30.0, 10.0, 0.0])
    assert scores.mix_of_labels(torch.zeros(3), everywhere).tolist() == [0.75, 0.25, 0]
    assert scores.mix_of_labels(torch.tensor([0.0, 7, 0]), everywhere).tolist() == [0.75 / 8, 7.25 / 8, 0]


def test_a_class_that_nobody_has_shown_is_never_ruled_out():
    counts = scores.class_histograms(torch.full((50,), 0.2), torch.zeros(50).long(), 2, EDGES)
    found = scores.shifted_thresholds(counts, EDGES, torch.tensor([0.95, 0.05]), 0.9)
    assert math.isfinite(found[0])
    assert math.isinf(found[1])
    assert scores.effective_rows(counts, torch.tensor([0.95, 0.05])) == 0


@pytest.mark.parametrize("sizes", [[20] * 12, [5, 9, 30, 30, 80, 200]])
def test_the_quantile_of_quantiles_covers_as_promised(sizes):
    random = np.random.default_rng(5)
    covered, ranks = [], [math.ceil((n + 1) * 0.8 - 1e-9) for n in sizes]
    for _ in range(400):
        # Scores are uniform, so that a threshold is its own coverage.
        quantiles = [np.sort(random.random(n))[r - 1] if r <= n else 1.0 for n, r in zip(sizes, ranks)]
        covered.append(min(1.0, scores.quantile_of_quantiles(torch.tensor(quantiles), torch.tensor(sizes), 0.8)))
    error = np.std(covered) / 20
    assert 0.8 - 3 * error <= np.mean(covered) <= 0.88


def test_one_site_alone_sends_its_own_threshold():
    assert scores.quantile_of_quantiles(torch.tensor([0.7]), torch.tensor([40]), 0.9) == pytest.approx(0.7)
    assert math.isinf(scores.quantile_of_quantiles(torch.tensor([0.7]), torch.tensor([5]), 0.9))


def test_wrong_inputs_are_named():
    counts = torch.ones(3, len(EDGES) + 1)
    with pytest.raises(ValueError, match="mix must be shares"):
        scores.shifted_thresholds(counts, EDGES, torch.tensor([3.0, 1, 1]))
    with pytest.raises(ValueError, match="by class and bin"):
        scores.shifted_thresholds(counts.sum(0), EDGES, torch.tensor([0.5, 0.3, 0.2]))
    with pytest.raises(ValueError, match="counts are all 0"):
        scores.shifted_thresholds(0 * counts, EDGES, torch.tensor([0.5, 0.3, 0.2]))
