"""Recalibration from sums by bin: scikit-learn's isotonic regression, sums that add, mended probabilities."""

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from fedbayes import scores
from fedbayes.scores import recalibrate


def overconfident(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return (3 * logits).softmax(1), logits.softmax(1).multinomial(1, generator=generator)[:, 0]


@pytest.mark.parametrize("how", recalibrate.EDGES)
def test_overconfidence_is_mended(how):
    probs, labels = overconfident(6000)
    new, truth = overconfident(6000, seed=1)
    edges = recalibrate.EDGES[how]
    values = scores.recalibration(scores.recalibration_sums(probs, labels, edges), how)
    mended = scores.recalibrated(new, values, edges)
    torch.testing.assert_close(mended.sum(1), torch.ones(6000).double())
    assert scores.ece(new, truth) > 0.1
    assert scores.ece(mended, truth) < 0.03
    assert scores.nll(mended, truth) < scores.nll(new, truth) - 0.2


def test_the_rising_map_is_scikit_learns():
    probs, labels = overconfident(4000)
    edges = recalibrate.ISOTONIC_EDGES
    sums = scores.recalibration_sums(probs, labels, edges)
    for c in range(3):
        count, hits = sums["count"][c].numpy(), sums["hits"][c].numpy()
        filled = count > 0
        shares = hits[filled] / count[filled]
        fit = IsotonicRegression().fit_transform(np.arange(filled.sum()), shares, sample_weight=count[filled])
        ours = scores.recalibration(sums, "isotonic")[c].numpy()[filled]
        off = 0.5 / (len(probs) + 1)  # ours are off 0 and 1 by half a row of all
        np.testing.assert_allclose(ours, fit.clip(off, 1 - off), atol=1e-9)


def test_a_first_row_that_misses_lifts_no_bin_above_it():
    """One miss in the lowest bin, then 1 hit of 1000, then 99 of 100: shares are those of the pooled blocks."""
    shape = (1, len(recalibrate.ISOTONIC_EDGES) + 1)
    count, hits = torch.zeros(shape).double(), torch.zeros(shape).double()
    count[0, [0, 1, 2, 900]] = torch.tensor([1.0, 1, 999, 100]).double()
    hits[0, [1, 900]] = torch.tensor([1.0, 99]).double()
    values = scores.recalibration({"count": count, "hits": hits, "mass": count}, "isotonic")[0]
    np.testing.assert_allclose(values[[0, 1, 2, 900]], [0.5 / 1102, 0.001, 0.001, 0.99])
    assert bool((values.diff() >= 0).all())


def test_maps_of_sums_are_as_good_as_scikit_learns_of_rows():
    """Ten classes, of which one label in a hundred is wrong: nearly all rows of a class lie far below its hits."""
    random = torch.Generator().manual_seed(3)

    def drawn(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels, others = (torch.randint(0, 10, (rows,), generator=random) for _ in range(2))
        logits = 1.5 * torch.randn(rows, 10, generator=random, dtype=torch.float64)
        logits[torch.arange(rows), labels] += 6
        return logits.softmax(1), torch.where(torch.rand(rows, generator=random) < 0.01, others, labels)

    probs, labels = drawn(1000)
    new, truth = drawn(5000)
    edges, off = recalibrate.ISOTONIC_EDGES, 0.5 / 1001
    halves = [scores.recalibration_sums(probs[own], labels[own], edges) for own in (slice(300), slice(300, None))]
    values = scores.recalibration({name: value + halves[1][name] for name, value in halves[0].items()}, "isotonic")
    ours = scores.recalibrated(new, values, edges)
    fits = [IsotonicRegression(out_of_bounds="clip").fit(probs[:, c], (labels == c).double()) for c in range(10)]
    theirs = torch.stack([torch.from_numpy(fit.predict(new[:, c])) for c, fit in enumerate(fits)], 1).clamp(
        off, 1 - off
    )
    theirs = theirs / theirs.sum(1, keepdim=True)
    assert scores.nll(ours, truth) < scores.nll(theirs, truth) + 0.005
    assert scores.ece(ours, truth) < scores.ece(theirs, truth) + 0.005


def test_sums_add_and_a_site_of_few_rows_leans_on_all():
    probs, labels = overconfident(500)
    edges = recalibrate.HISTOGRAM_EDGES
    whole = scores.recalibration_sums(probs, labels, edges)
    parts = [scores.recalibration_sums(probs[a], labels[a], edges) for a in (slice(100), slice(100, None))]
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value)
    nothing = {name: 0 * value for name, value in whole.items()}
    leant = scores.leaning(nothing, whole, rows=500)
    for name, value in whole.items():
        torch.testing.assert_close(leant[name], value)
    warm = scores.temperature_sums(probs.log(), labels)
    assert scores.temperature(scores.leaning({k: 0 * v for k, v in warm.items()}, warm, 5)) == pytest.approx(
        scores.temperature(warm)
    )


def test_bins_without_rows_keep_their_middle_and_wrong_names_are_told():
    empty = {name: torch.zeros(2, len(recalibrate.HISTOGRAM_EDGES) + 1).double() for name in ("count", "hits", "mass")}
    values = scores.recalibration(empty, "histogram")
    assert bool(((values > 0) & (values < 1)).all())
    with pytest.raises(ValueError, match="histogram"):
        scores.recalibration(empty, "platt")
    with pytest.raises(ValueError, match="at least one labelled row"):
        scores.leaning(empty, empty)
