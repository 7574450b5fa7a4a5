"""Scores of survival against lifelines' figures and against loops over pairs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedbayes import scores

KEPT = json.loads((Path(__file__).parent / "survival_oracle.json").read_text())


def _target(time: str = "time") -> torch.Tensor:
    return torch.tensor([KEPT[time], KEPT["event"]], dtype=torch.float64).T


RISK = torch.tensor(KEPT["risk"], dtype=torch.float64)
GRID = torch.tensor(KEPT["grid"], dtype=torch.float64)


def _curves() -> torch.Tensor:
    return torch.exp(-GRID * torch.exp(RISK)[:, None])


def test_figures_of_lifelines():
    assert scores.concordance(RISK, _target()) == pytest.approx(KEPT["concordance"], abs=1e-12)
    assert scores.concordance(RISK, _target("rough")) == pytest.approx(KEPT["concordance_ties"], abs=1e-12)
    alive = scores.kaplan_meier(_target("rough")).at(GRID)
    torch.testing.assert_close(alive, torch.tensor(KEPT["kaplan_meier"], dtype=torch.float64), rtol=0, atol=1e-9)
    flipped = _target() * torch.tensor([1.0, -1.0]) + torch.tensor([0.0, 1.0])
    left = scores.kaplan_meier(flipped).at(GRID)
    expected = torch.tensor(KEPT["kaplan_meier_censoring"], dtype=torch.float64)
    torch.testing.assert_close(left, expected, rtol=0, atol=1e-9)


def _uncensored(time, event, t, before):
    """G by a loop over the times of censoring, events first at ties."""
    chance = 1.0
    for c in np.unique(time[event == 0]):
        if c < t or (c == t and not before):
            gone = ((time == c) & (event == 0)).sum()
            chance *= 1 - gone / ((time > c).sum() + gone)
    return chance


@pytest.mark.parametrize("which", ["time", "rough"])
@pytest.mark.parametrize("horizon", [None, 0.8])
def test_unos_concordance_by_a_loop_over_pairs(which, horizon):
    time, event = _target(which).numpy().T
    risk, right, pairs = RISK.numpy(), 0.0, 0.0
    for i in np.flatnonzero(event):
        weight = _uncensored(time, event, time[i], True) ** -2
        if horizon is not None and time[i] >= horizon:
            continue
        for j in range(len(time)):
            if time[i] < time[j] or (time[i] == time[j] and event[j] == 0):
                pairs += weight
                right += weight * (1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0)
    found = scores.concordance_ipcw(RISK, _target(which), horizon)
    assert found == pytest.approx(right / pairs, abs=1e-10)


@pytest.mark.parametrize("which", ["time", "rough"])
def test_brier_scores_by_a_loop(which):
    time, event = _target(which).numpy().T
    curves, expected = _curves().numpy(), []
    for k, t in enumerate(KEPT["grid"]):
        terms = []
        for i in range(len(time)):
            if time[i] <= t and event[i]:
                terms.append(curves[i, k] ** 2 / _uncensored(time, event, time[i], True))
            elif time[i] > t:
                terms.append((1 - curves[i, k]) ** 2 / _uncensored(time, event, t, False))
        expected.append(sum(terms) / len(time))
    found = scores.survival_brier(_curves(), _target(which), GRID)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
    area = np.trapezoid(expected, KEPT["grid"]) / (KEPT["grid"][-1] - KEPT["grid"][0])
    assert scores.integrated_brier(_curves(), _target(which), GRID) == pytest.approx(area, abs=1e-10)


def test_weights_of_other_rows_end_where_the_last_of_them_was_censored():
    """All of `known` are lost from sight at 2: G is 0 from there on, and nothing can be weighed by it."""
    known = torch.tensor([[0.5, 0], [1.0, 1], [1.5, 0], [2.0, 1], [2.0, 0]]).double()
    target = torch.tensor([[0.7, 1], [1.2, 1], [2.0, 1], [2.5, 1], [3.0, 0]]).double()
    risk, curves = torch.tensor([2.0, 3, 1, 5, 4]), torch.full((5, 3), 0.6).double()
    with pytest.raises(ValueError, match="at most 2, the last time in censoring: 1 of 4 events come later"):
        scores.concordance_ipcw(risk, target, censoring=known)
    with pytest.raises(ValueError, match="horizon must be at most 2"):
        scores.concordance_ipcw(risk, target, horizon=2.6, censoring=known)
    time, event = known.numpy().T
    weights = [_uncensored(time, event, t, True) ** -2 for t in (0.7, 1.2, 2.0)]
    for horizon, counted in ((2.5, 3), (2.0, 2)):  # right of all pairs with later rows: 1/4, 1/3, 0/2
        w, right, pairs = weights[:counted], (1, 1, 0), (4, 3, 2)
        expected = sum(a * b for a, b in zip(w, right)) / sum(a * b for a, b in zip(w, pairs))
        assert scores.concordance_ipcw(risk, target, horizon, known) == pytest.approx(expected, abs=1e-12)
    for times in ([0.5, 1.0, 2.0], [0.5, 1.0, 4.0]):
        with pytest.raises(ValueError, match=f"times must be below 2, the last time in censoring: {times[-1]:g} is"):
            scores.survival_brier(curves, target, torch.tensor(times), known)
        with pytest.raises(ValueError, match="times must be below 2"):
            scores.integrated_brier(curves, target, torch.tensor(times), known)
    cuts = torch.tensor([0.5, 1.0, 1.99])
    assert scores.survival_brier(curves, target, cuts, known).max() < 2
    gone = target.clamp(max=2.0)  # nobody is alive beyond the end, and no event comes after it
    assert torch.isfinite(scores.survival_brier(curves, gone, torch.tensor([1.0, 2.0, 4.0]), known)).all()
    assert torch.isfinite(scores.survival_brier(curves, target, torch.tensor([1.0, 2.0, 4.0]))).all()  # its own G


def test_without_censoring_the_brier_score_is_the_usual_one():
    target = torch.stack([_target()[:, 0], torch.ones(len(RISK))], 1)
    alive = (target[:, :1] > GRID).double()
    usual = (_curves() - alive).square().mean(0)
    torch.testing.assert_close(scores.survival_brier(_curves(), target, GRID), usual)
    assert scores.concordance_ipcw(RISK, target) == pytest.approx(scores.concordance(RISK, target))


def test_sums_decode_to_the_direct_scores():
    curves, target = _curves(), _target("rough")
    found = scores.survival_scores(scores.survival_sums(curves, target, times=GRID))
    assert found["concordance"] == pytest.approx(scores.concordance(scores.risk_of(curves), target), abs=1e-12)
    assert found["brier"] == pytest.approx(scores.integrated_brier(curves, target, GRID), abs=1e-12)
    assert found["count"] == len(target)
    one = scores.survival_sums(curves[:1], target[:1], times=GRID)
    assert "concordance" not in scores.survival_scores(one)  # nobody to compare with


def test_the_nll_is_that_of_intervals():
    curve = torch.tensor([[0.9, 0.6, 0.3]], dtype=torch.float64).expand(5, 3)
    target = torch.tensor([[0.5, 1], [2.0, 1], [1.4, 0], [1.5, 0], [9.0, 1]], dtype=torch.float64)
    expected = -np.log([0.1, 0.3, 0.9, 0.6, 0.3])
    sums = scores.survival_sums(curve, target)
    assert float(sums["nll"]) == pytest.approx(expected.sum())


def test_calibration_at_a_horizon():
    target = torch.tensor([[1.0, 1], [3, 1], [1, 1], [3, 0], [3, 0], [1, 0]])
    chances = torch.tensor([0.1, 0.2, 0.3, 0.7, 0.8, 0.9])
    groups = scores.survival_calibration(chances, target, 2.0, groups=2)
    assert groups.rows.tolist() == [3, 3]
    torch.testing.assert_close(groups.predicted, torch.tensor([0.2, 0.8]).double())
    torch.testing.assert_close(groups.observed, torch.tensor([1 / 3, 1.0]).double())
    assert groups.error == pytest.approx((1 / 3 - 0.2 + 0.2) / 2)


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="a time and an event"):
        scores.concordance(RISK, RISK)
    with pytest.raises(ValueError, match="swapped"):
        scores.concordance(RISK, _target().flip(1))
    with pytest.raises(ValueError, match="no two rows can be compared"):
        scores.concordance(RISK, _target() * torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match="rows by times"):
        scores.survival_brier(_curves()[:, :2], _target(), GRID)
    with pytest.raises(ValueError, match="times must rise"):
        scores.survival_brier(_curves(), _target(), GRID.flip(0))
