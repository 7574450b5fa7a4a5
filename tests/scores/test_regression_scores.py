"""Regression scores against scoringrules and SciPy."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedbayes import scores

scoringrules = pytest.importorskip("scoringrules", reason="scoringrules, the oracle of these scores, is not installed")


@pytest.fixture(params=[(), (3,)], ids=["one output", "three outputs"])
def case(request) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    shape = (200, *request.param)
    mean, scale = 5 * generator.standard_normal(shape), np.exp(2 * generator.standard_normal(shape))
    return mean, scale, mean + 2 * scale * generator.standard_normal(shape)


def _tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(a) for a in arrays]


def test_crps_equals_scoringrules(case):
    mean, scale, target = case
    assert scores.crps(*_tensors(*case)) == pytest.approx(
        scoringrules.crps_normal(target, mean, scale).mean(), rel=1e-9
    )


def test_nll_equals_scipy_and_is_summed_over_outputs(case):
    mean, scale, target = case
    expected = -stats.norm(mean, scale).logpdf(target).reshape(200, -1).sum(1).mean()
    assert scores.normal_nll(*_tensors(*case)) == pytest.approx(expected, rel=1e-12)


def test_rmse_and_coverage_count_entries(case):
    mean, scale, target = case
    assert scores.rmse(*_tensors(*case)) == pytest.approx(np.sqrt(np.mean((mean - target) ** 2)))
    for level in (0.5, 0.9, 0.99):
        low, high = stats.norm(mean, scale).interval(level)
        expected = np.mean((low <= target) & (target <= high))
        assert scores.coverage(*_tensors(*case), level) == pytest.approx(expected)


def test_coverage_of_a_true_model_is_its_level():
    target = torch.from_numpy(np.random.default_rng(1).standard_normal(20_000))
    mean, scale = torch.zeros(20_000), torch.ones(20_000)
    for level in (0.1, 0.5, 0.9):
        assert scores.coverage(mean, scale, target, level) == pytest.approx(level, abs=4 * 0.5 / 20_000**0.5)


def test_sharpness_is_the_root_of_the_determinant(case):
    wide = case[1].reshape(200, -1)
    outputs = wide.shape[1]
    diagonal = np.stack([np.diag(s**2) for s in wide])
    expected = np.mean(np.linalg.det(diagonal) ** (1 / (2 * outputs)))
    assert scores.sharpness(*_tensors(*case)) == pytest.approx(expected, rel=1e-9)
    mixed = np.random.default_rng(2).standard_normal((20, outputs, outputs + 2))
    full = mixed @ mixed.swapaxes(1, 2)
    expected = np.mean(np.linalg.det(full) ** (1 / (2 * outputs)))
    assert scores.covariance_sharpness(torch.from_numpy(full)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("draws", [1, 2, 25])
def test_energy_score_equals_scoringrules(draws):
    generator = np.random.default_rng(3)
    ensemble, target = generator.standard_normal((draws, 40, 3)), generator.standard_normal((40, 3))
    expected = scoringrules.es_ensemble(target, ensemble.swapaxes(0, 1)).mean()
    assert scores.energy_score(*_tensors(ensemble, target)) == pytest.approx(expected, rel=1e-9)


def test_energy_score_of_many_draws_of_one_output_is_the_crps():
    generator = np.random.default_rng(4)
    mean, scale, target = np.zeros(5), np.ones(5), np.linspace(-2, 2, 5)
    draws = generator.standard_normal((2000, 5, 1))
    found = scores.energy_score(*_tensors(draws, target[:, None]))
    assert found == pytest.approx(scores.crps(*_tensors(mean, scale, target)), abs=0.02)
