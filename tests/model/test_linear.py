"""Bayesian linear regression against scikit-learn and against its own definition."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import BayesianRidge

from fedbayes.errors import InputError
from fedbayes.model.linear import bayesian_linear


def some_rows(n=60, features=4, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, features))
    return x, x @ random.normal(size=features) + 0.3 + 0.5 * random.normal(size=n)


def test_the_posterior_is_the_conjugate_one():
    x, y = some_rows()
    made = bayesian_linear(torch.tensor(x), torch.tensor(y), prior_precision=2.0, noise_precision=4.0)
    phi = np.c_[x, np.ones(len(x))]
    covariance = np.linalg.inv(2.0 * np.eye(5) + 4.0 * phi.T @ phi)
    np.testing.assert_allclose(made.covariance.numpy(), covariance, atol=1e-12)
    np.testing.assert_allclose(made.mean.numpy(), 4.0 * covariance @ phi.T @ y, atol=1e-12)
    mean, variance = made.predict(torch.tensor(x))
    np.testing.assert_allclose(variance.numpy(), np.einsum("na,ab,nb->n", phi, covariance, phi) + 0.25, atol=1e-12)
    np.testing.assert_allclose(mean.numpy(), phi @ made.mean.numpy(), atol=1e-12)


def test_precisions_by_the_evidence_are_scikit_learns():
    x, y = some_rows()
    made = bayesian_linear(torch.tensor(x), torch.tensor(y), evidence=True)
    theirs = BayesianRidge(alpha_1=0, alpha_2=0, lambda_1=0, lambda_2=0, fit_intercept=False, tol=1e-12, max_iter=2000)
    theirs.fit(np.c_[x, np.ones(len(x))], y)
    assert made.noise_precision == pytest.approx(theirs.alpha_, rel=1e-4)
    assert made.prior_precision == pytest.approx(theirs.lambda_, rel=1e-4)
    np.testing.assert_allclose(made.mean.numpy(), theirs.coef_, rtol=1e-4)
    mean, variance = made.predict(torch.tensor(x))
    expected, scale = theirs.predict(np.c_[x, np.ones(len(x))], return_std=True)
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(variance.sqrt().numpy(), scale, rtol=1e-4)


def test_the_noise_is_the_residual_variance_unless_given():
    x, y = (torch.tensor(t) for t in some_rows(2000))
    made = bayesian_linear(x, y)
    mean, _ = made.predict(x)
    assert 1 / made.noise_precision == pytest.approx(float((y - mean).square().mean()), rel=1e-8)
    assert made.prior_precision == 1.0


@pytest.mark.parametrize("evidence", [False, True])
def test_constant_columns_and_constant_targets_are_finite(evidence):
    x = torch.tensor(some_rows()[0])
    x[:, 2] = 0.0
    for target in (torch.zeros(60), torch.full((60,), 3.0)):
        mean, variance = bayesian_linear(x, target, evidence=evidence).predict(x)
        assert torch.isfinite(mean).all()
        assert (torch.isfinite(variance) & (variance > 0)).all()
        torch.testing.assert_close(mean.float(), target, atol=0.1, rtol=0)


def test_rows_and_targets_must_pair_up():
    with pytest.raises(InputError, match="3 rows"):
        bayesian_linear(torch.zeros(3, 1), torch.zeros(2))
