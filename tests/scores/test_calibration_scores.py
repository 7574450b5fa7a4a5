"""Calibration errors against a brute-force count over bins, and temperature scaling against a numerical optimum."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch import Tensor

from fedbayes import scores


def _gaps(confidence: np.ndarray, correct: np.ndarray, bins: int) -> tuple[float, float]:
    """ECE and MCE, one sample and one bin at a time."""
    expected, largest = 0.0, 0.0
    for b in range(bins):
        lower, upper = (b / bins + 1e-6, (b + 1) / bins + 1e-6)
        members = [i for i, c in enumerate(confidence) if lower < c <= upper or (b == 0 and c <= lower)]
        if members:
            gap = abs(np.mean([correct[i] for i in members]) - np.mean([confidence[i] for i in members]))
            expected += len(members) / len(confidence) * gap
            largest = max(largest, gap)
    return expected, largest


@st.composite
def predictions(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Probabilities from flat to sure, with labels that follow them, go against them, or ignore them."""
    rows, classes = draw(st.integers(1, 60)), draw(st.integers(2, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = draw(st.sampled_from([0.0, 0.3, 2.0, 50.0])) * generator.standard_normal((rows, classes))
    probs = torch.from_numpy(logits).softmax(1)
    kind = draw(st.sampled_from(["right", "wrong", "any"]))
    chosen = {
        "right": probs.argmax(1),
        "wrong": probs.argmin(1),
        "any": torch.from_numpy(generator.integers(0, classes, rows)),
    }
    return probs, chosen[kind]


@settings(max_examples=60)
@given(predictions(), st.sampled_from([1, 2, 8, 15, 16]))
def test_ece_and_mce_equal_a_count_by_hand(case, bins):
    probs, labels = case
    p = probs.numpy()
    expected, largest = _gaps(p.max(1), p.argmax(1) == labels.numpy(), bins)
    assert scores.ece(probs, labels, bins=bins) == pytest.approx(expected, abs=1e-12)
    assert scores.mce(probs, labels, bins=bins) == pytest.approx(largest, abs=1e-12)


@settings(max_examples=30)
@given(predictions())
def test_classwise_ece_equals_a_count_by_hand(case):
    probs, labels = case
    p, y = probs.numpy(), labels.numpy()
    gaps = [_gaps(p[:, c], y == c, 15)[0] for c in range(p.shape[1])]
    assert scores.classwise_ece(probs, labels) == pytest.approx(np.mean(gaps), abs=1e-12)


@settings(max_examples=60)
@given(predictions(), st.sampled_from(["width", "mass"]))
def test_ece_is_at_most_nll_plus_error(case, binning):
    probs, labels = case
    bound = scores.nll(probs, labels) + 1 - scores.accuracy(probs, labels)
    assert scores.ece(probs, labels, binning=binning) <= bound + 1e-12
    assert scores.ece(probs, labels, binning=binning) <= scores.mce(probs, labels, binning=binning) + 1e-12


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    probs = torch.tensor([[0.75, 0.25], [0.75001, 0.24999]], dtype=torch.float64)
    table = scores.reliability(probs, torch.tensor([0, 1]), bins=4)
    assert table.upper.tolist() == [0.75, 1.0]
    assert table.accuracy.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("binning", ["width", "mass"])
@pytest.mark.parametrize("bins", [5, 10, 15, 20])
def test_confidences_on_edges_are_binned_alike_in_every_precision(bins, binning):
    """Confidences k / bins, of which float32 keeps a neighbour; every second one is right."""
    top = torch.arange(bins // 2 + 1, bins + 1, dtype=torch.float64).repeat_interleave(3) / bins
    probs, labels = torch.stack([top, 1 - top], 1), torch.arange(len(top)) % 2
    rounded = probs.float()
    exact, single = (scores.reliability(p, labels, bins=bins, binning=binning) for p in (probs, rounded))
    assert exact.rows.tolist() == single.rows.tolist()
    torch.testing.assert_close(exact.accuracy, single.accuracy, rtol=0, atol=0)
    wanted = scores.ece(probs, labels, bins=bins, binning=binning)
    assert scores.ece(rounded, labels, bins=bins, binning=binning) == pytest.approx(wanted, abs=1e-6)


def test_the_additive_form_bins_edges_as_the_direct_one_in_every_precision():
    top = torch.arange(8, 16, dtype=torch.float64).repeat_interleave(3) / 15
    probs, labels = torch.stack([top, 1 - top], 1), torch.arange(len(top)) % 2
    for rows in (probs, probs.float()):
        sums = scores.classification_sums(rows, labels)
        assert sums["bin_count"].tolist() == [0.0] * 7 + [3.0] * 8
        assert scores.classification_scores(sums)["ece"] == pytest.approx(scores.ece(probs, labels), abs=1e-6)


def test_equal_mass_bins_hold_equal_numbers():
    generator = np.random.default_rng(3)
    top = np.sort(generator.uniform(0.5, 1, 60))
    probs, labels = torch.from_numpy(np.stack([top, 1 - top], 1)), torch.from_numpy(generator.integers(0, 2, 60))
    parts = np.array_split(np.arange(60), 6)
    gaps = [abs(np.mean(labels.numpy()[part] == 0) - top[part].mean()) for part in parts]
    assert scores.reliability(probs, labels, bins=6, binning="mass").rows.tolist() == [10] * 6
    assert scores.ece(probs, labels, bins=6, binning="mass") == pytest.approx(np.mean(gaps), abs=1e-12)
    assert scores.mce(probs, labels, bins=6, binning="mass") == pytest.approx(np.max(gaps), abs=1e-12)


def test_equal_mass_bins_do_not_depend_on_the_order_of_ties():
    top = torch.tensor([0.6] * 7 + [0.8] * 6 + [0.9], dtype=torch.float64)
    probs, labels = torch.stack([top, 1 - top], 1), torch.tensor([0, 1] * 7)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    shuffled = scores.ece(probs[order], labels[order], bins=5, binning="mass")
    assert shuffled == pytest.approx(scores.ece(probs, labels, bins=5, binning="mass"), abs=1e-12)
    assert scores.reliability(probs, labels, bins=5, binning="mass").rows.tolist() == [7, 6, 1]


def test_the_reliability_table_accounts_for_every_row():
    generator = torch.Generator().manual_seed(4)
    probs, labels = torch.rand(300, 3, generator=generator).softmax(1), torch.randint(3, (300,), generator=generator)
    table = scores.reliability(probs, labels)
    assert table.rows.sum() == 300
    assert ((table.lower < table.confidence) & (table.confidence <= table.upper)).all()
    assert (table.rows * table.accuracy).sum() / 300 == pytest.approx(scores.accuracy(probs, labels))
    sums = scores.classification_sums(probs, labels)
    again = scores.reliability_of_sums(sums["bin_count"], sums["bin_confidence"], sums["bin_correct"])
    for one, other in zip(table, again):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("truth", [0.3, 1.0, 4.0])
def test_temperature_from_summed_sites_equals_the_numerical_optimum(truth):
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(600, 4, generator=generator, dtype=torch.float64)
    labels = (logits / truth).softmax(1).multinomial(1, generator=generator)[:, 0]
    sites = [scores.temperature_sums(x, y) for x, y in zip(logits.split(250), labels.split(250))]
    found = scores.temperature({name: sum(site[name] for site in sites) for name in sites[0]})

    def nll(log_t: float) -> float:
        return -log_softmax(logits.numpy() / np.exp(log_t), 1)[np.arange(600), labels.numpy()].mean()

    best = minimize_scalar(nll, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
    assert found == pytest.approx(np.exp(best.x), rel=2e-3)
    assert nll(np.log(found)) <= best.fun + 1e-6


def test_temperature_at_its_limits():
    sure = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    assert scores.temperature(scores.temperature_sums(sure, torch.tensor([0, 1]))) == scores.TEMPERATURES[0]
    assert scores.temperature(scores.temperature_sums(sure, torch.tensor([1, 0]))) == scores.TEMPERATURES[-1]
    assert scores.temperature(scores.temperature_sums(torch.zeros(4, 3), torch.tensor([0, 1, 2, 0]))) == 1.0
    torch.testing.assert_close(scores.tempered(sure, 2.0), torch.softmax(sure / 2, 1))


def test_masked_rows_do_not_move_the_temperature():
    generator = torch.Generator().manual_seed(6)
    logits, labels = torch.randn(40, 3, generator=generator), torch.randint(3, (40,), generator=generator)
    padded = torch.cat([logits, torch.full((5, 3), torch.nan)]), torch.cat([labels, torch.full((5,), -1)])
    whole, masked = scores.temperature_sums(logits, labels), scores.temperature_sums(*padded, torch.arange(45) < 40)
    for name in whole:
        torch.testing.assert_close(masked[name], whole[name])
