"""OOD scores: hand-made answers, one direction for all, and sites that add up to a Mahalanobis fit."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import logsumexp, softmax
from sklearn.covariance import EmpiricalCovariance

from fedbayes import scores


def _draws(seed: int) -> torch.Tensor:
    return (3 * torch.randn(6, 20, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).softmax(-1)


def test_scores_of_one_prediction_equal_their_formulas():
    logits = 40 * torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs, x = logits.softmax(1), logits.numpy()
    np.testing.assert_allclose(scores.msp(probs), 1 - softmax(x, 1).max(1), atol=1e-12)
    np.testing.assert_allclose(scores.max_logit(logits), -x.max(1))
    np.testing.assert_allclose(scores.entropy(probs), stats.entropy(softmax(x, 1), axis=1), atol=1e-12)
    for temperature in (0.5, 1.0, 10.0):
        expected = -temperature * logsumexp(x / temperature, axis=1)
        np.testing.assert_allclose(scores.energy(logits, temperature), expected, rtol=1e-12)


def test_disagreement_of_draws_equals_its_formula():
    draws = _draws(1)
    p = draws.numpy()
    expected = stats.entropy(p.mean(0), axis=-1) - stats.entropy(p, axis=-1).mean(0)
    np.testing.assert_allclose(scores.mutual_information(draws), expected, atol=1e-12)
    assert scores.mutual_information(draws[:1]).eq(0).all()
    assert scores.epistemic_trace(draws[:1]).eq(0).all()


def test_epistemic_and_aleatoric_parts_sum_to_the_variance_of_the_mixture():
    p = _draws(2).numpy()
    aleatoric = np.mean([[np.trace(np.diag(row) - np.outer(row, row)) for row in draw] for draw in p], axis=0)
    mean = p.mean(0)
    total = (mean * (1 - mean)).sum(-1)
    np.testing.assert_allclose(scores.epistemic_trace(_draws(2)).numpy() + aleatoric, total, rtol=1e-12)


@pytest.mark.parametrize("score", [scores.msp, scores.entropy])
def test_an_unsure_prediction_is_more_likely_out(score):
    sure, unsure = score(torch.tensor([[0.98, 0.01, 0.01], [0.35, 0.33, 0.32]]))
    assert sure < unsure


@pytest.mark.parametrize("score", [scores.max_logit, scores.energy])
def test_small_logits_are_more_likely_out(score):
    large, small = score(torch.tensor([[9.0, 0.0], [1.0, 0.0]]))
    assert large < small


@pytest.mark.parametrize("score", [scores.mutual_information, scores.epistemic_trace])
def test_draws_that_disagree_are_more_likely_out_however_sure_each_is(score):
    agree, disagree = score(torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[0.5, 0.5], [0.1, 0.9]]]))
    assert agree == pytest.approx(0, abs=1e-12)
    assert disagree > 0.1


@pytest.mark.parametrize("temperature", [1.0, 1000.0])
def test_odin_of_a_linear_network_equals_its_closed_form(temperature):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 4, generator=generator, requires_grad=True)
    x = torch.randn(12, 7, generator=generator)
    w, inputs = weight.detach().double().numpy(), x.double().numpy()
    probs = softmax(inputs @ w / temperature, 1)
    slope = (w[:, probs.argmax(1)].T - probs @ w.T) / temperature
    expected = 1 - softmax((inputs + 0.05 * np.sign(slope)) @ w / temperature, 1).max(1)
    with torch.no_grad():  # As a predictor runs; ODIN needs the slope all the same.
        found = scores.odin(lambda rows: rows @ weight, x, temperature=temperature, epsilon=0.05)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(np.argsort(found.numpy()), np.argsort(expected))
    assert weight.grad is None
    plain = 1 - softmax(inputs @ w / temperature, 1).max(1)
    assert (found.numpy() <= plain + 1e-12).all()  # The step is towards more confidence.


def _features(seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, 300)
    spread = generator.standard_normal((5, 5))
    features = 100 + 4 * generator.standard_normal((3, 5))[labels] + generator.standard_normal((300, 5)) @ spread
    return torch.from_numpy(features), torch.from_numpy(labels)


def _summed(features: torch.Tensor, labels: torch.Tensor, classes: int) -> dict[str, torch.Tensor]:
    pieces = zip(features.tensor_split([20, 130]), labels.tensor_split([20, 130]))
    sites = [scores.mahalanobis_sums(f, y, classes) for f, y in pieces]
    return {name: sum(site[name] for site in sites) for name in sites[0]}


def test_mahalanobis_from_sites_equals_scikit_learn():
    features, labels = _features()
    x, y = features.numpy(), labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(3)])
    covariance = EmpiricalCovariance(assume_centered=True).fit(x - means[y])
    fresh = 100 + 6 * np.random.default_rng(5).standard_normal((50, 5))
    expected = np.min([covariance.mahalanobis(fresh - m) for m in means], axis=0)
    fit = scores.mahalanobis_fit(_summed(features, labels, 4), shrinkage=0.0)  # The fourth class has no sample.
    np.testing.assert_allclose(scores.mahalanobis(fit, torch.from_numpy(fresh)), expected, rtol=1e-6)


def test_mahalanobis_bears_dead_features_and_finds_what_wakes_them():
    features, labels = _features()
    dead = torch.cat([features, torch.zeros(300, 1)], 1)
    fit = scores.mahalanobis_fit(_summed(dead, labels, 3))
    awake = dead.clone()
    awake[:, -1] = 5
    assert scores.auroc(scores.mahalanobis(fit, dead), scores.mahalanobis(fit, awake)) == 1


def test_mahalanobis_sums_leave_masked_rows_out_and_vmap():
    features, labels = _features()
    mask = torch.arange(300) < 200
    noisy = torch.where(mask[:, None], features, torch.nan)
    masked = scores.mahalanobis_sums(noisy, labels, 3, mask)
    alone = scores.mahalanobis_sums(features[:200], labels[:200], 3)
    stacked = torch.func.vmap(lambda f, y: scores.mahalanobis_sums(f, y, 3))(
        features[:200].reshape(2, 100, 5), labels[:200].reshape(2, 100)
    )
    for name in alone:
        torch.testing.assert_close(masked[name], alone[name])
        torch.testing.assert_close(stacked[name].sum(0), alone[name])
