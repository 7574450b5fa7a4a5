"""Histograms under noise: the law of the noise, what one row can change, and promises that stay."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedbayes import scores as of
from fedbayes.errors import InputError
from fedbayes.evaluate import noised
from fedbayes.evaluate.conformal import THRESHOLDS, Gathered

EDGES = noised.coarse(of.PROBABILITY_EDGES)


def test_noise_is_two_sided_geometric():
    e, draws = 0.7, noised.geometric((200_000,), 0.7, noised.source_of(0)).numpy()
    low, high = int(draws.min()), int(draws.max())
    seen = np.bincount((draws - low).astype(int), minlength=high - low + 1)
    law = stats.dlaplace.pmf(np.arange(low, high + 1), e)
    likely = law * len(draws) > 20
    assert stats.chisquare(seen[likely], law[likely] / law[likely].sum() * seen[likely].sum()).pvalue > 0.001
    assert draws.var() == pytest.approx(noised.variance(e), rel=0.03)
    assert noised.variance(e) == pytest.approx(stats.dlaplace.var(e))
    assert not torch.equal(*(noised.geometric((50,), e, noised.source_of()) for _ in range(2)))  # the system's


def test_no_row_can_be_told_from_another():
    """The exact ratio of chances of what is sent, for the two rows that differ most: at most exp(epsilon)."""
    epsilon = 0.8
    one, other = torch.zeros(2, 4), torch.zeros(2, 4)
    one[0, 1], other[1, 2] = 1, 1
    shifts = [(torch.cat([c, c.sum(1, keepdim=True)], 1)) for c in (one, other)]
    sent = noised.noised(one, epsilon, noised.source_of(1)).numpy()
    assert sent.shape == (2, 5)
    worst = 0.0
    for outcome in (sent, shifts[0].numpy(), shifts[1].numpy()):
        a, b = (stats.dlaplace.logpmf(outcome - s.numpy(), epsilon / 4).sum() for s in shifts)
        worst = max(worst, abs(a - b))
    assert worst == pytest.approx(epsilon)


@pytest.mark.parametrize("epsilon", [2.0, 0.5])
def test_promises_stay_under_noise_and_sets_shrink_with_epsilon(epsilon):
    """Two classes, 20 sites of 500 rows: the coverage over noise is at least as promised for every way."""
    random, sites, rows = np.random.default_rng(0), 20, 500
    own, mixes = [], []
    for _ in range(sites):
        share = random.uniform(0.2, 0.8)
        labels = torch.from_numpy((random.random(rows) < share).astype(np.int64))
        values = torch.from_numpy(random.beta(np.where(labels == 1, 2, 1), 5))
        own.append(of.class_histograms(values, labels, 2, EDGES))
        mixes.append([1 - share, share])
    for way in noised.ABLE:
        covered, wide = [], []
        for seed in range(40):
            source = noised.source_of(seed)
            sent = [noised.noised(n, epsilon, source) for n in own]
            counts = noised.cautious(torch.stack(sent).sum(0), sites, epsilon)
            assert bool((counts >= 0).all())
            mix = torch.stack([of.mix_of_labels(one[:, -1].clamp_min(0), counts.sum(1)) for one in sent])
            t, _ = THRESHOLDS[way](Gathered(counts, [], EDGES), mix, 0.9, None)
            true = sum(np.array(mixes)[:, c] * stats.beta(1 + c, 5).cdf(t[:, c].clamp_max(1)) for c in range(2))
            covered.append(true.mean())
            wide.append(float(t.clamp_max(1).mean()))
        assert min(covered) > 0.89
        assert np.mean(wide) < (0.75 if epsilon == 2.0 else 0.98)


def test_without_rows_that_stand_out_nothing_is_promised():
    sums = torch.cat([torch.tensor([[400.0, 100, 0], [0, 0, 0]]), torch.tensor([[500.0], [3]])], 1)
    counts = noised.cautious(sums, 4, 1.0)
    assert float(counts[0].sum()) < 500
    assert float(counts[1].sum()) == 0  # three rows may be noise
    assert bool(
        THRESHOLDS["by_class"](Gathered(counts, [], torch.tensor([0.2, 0.6])), torch.ones(1, 2) / 2, 0.5, None)[1][
            1
        ].isinf()
    )


def test_noise_alone_is_rarely_taken_for_rows():
    source, refused = noised.source_of(0), 0
    for _ in range(400):
        sums = noised.geometric((10, 12), 0.01 / 4, source)  # ten classes without a row
        try:
            noised.cautious(sums, 1, 0.01)
        except InputError:
            refused += 1
    assert refused > 0.92 * 400  # 95 % by its confidence
