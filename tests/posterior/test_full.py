"""The full Gaussian against torch.distributions."""

import pytest
import torch
from torch import distributions as D
from torch.func import vmap

from fedbayes.posterior.full import FullGaussian, from_precision, triangle
from fedbayes.posterior.values import Gaussian, check, map_tensors

P = 5


def _full(seed: int, *lead: int) -> FullGaussian:
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(*lead, P, P, generator=g, dtype=torch.float64)
    covariance = root @ root.mT + 0.3 * torch.eye(P, dtype=torch.float64)
    return FullGaussian.from_covariance(torch.randn(*lead, P, generator=g, dtype=torch.float64), covariance)


def _torch(q: FullGaussian) -> D.MultivariateNormal:
    return D.MultivariateNormal(q.mean, scale_tril=q.tril)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_log_prob_and_kl_equal_torch_distributions(lead):
    q, p = _full(0, *lead), _full(1, *lead)
    torch.testing.assert_close(q.log_prob(p.mean), _torch(q).log_prob(p.mean), rtol=1e-10, atol=0)
    torch.testing.assert_close(q.kl(p), D.kl_divergence(_torch(q), _torch(p)), rtol=1e-10, atol=0)
    diagonal = Gaussian(p.mean, p.moments()[1].sqrt())
    wide = D.MultivariateNormal(p.mean, torch.diag_embed(p.moments()[1]))
    torch.testing.assert_close(q.kl(diagonal), D.kl_divergence(_torch(q), wide), rtol=1e-10, atol=0)


def test_draws_have_its_mean_and_covariance():
    q = _full(0)
    draws = q.sample(200_000, torch.Generator().manual_seed(0))
    error = q.moments()[1].sqrt() / 200_000**0.5
    assert ((draws.mean(0) - q.mean).abs() < 5 * error).all()
    spread = (q.moments()[1][:, None] * q.moments()[1]).sqrt() * (2 / 200_000) ** 0.5
    assert ((draws.T.cov() - q.covariance).abs() < 5 * spread).all()


def test_moments_are_marginal_and_naturals_are_the_inverse():
    q = _full(0)
    torch.testing.assert_close(q.moments()[1], torch.diagonal(q.covariance))
    shift, precision = q.naturals()
    torch.testing.assert_close(precision @ q.covariance, torch.eye(P).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.linalg.solve(precision, shift), q.mean)


def test_it_passes_vmap_and_a_bad_triangle_is_refused():
    many = _full(0, 4)
    noise = torch.randn(4, P).double()
    together = vmap(lambda q, z: q.log_prob(q.at(z)))(many, noise)
    alone = [map_tensors(many, lambda t, k=k: t[k]) for k in range(4)]
    torch.testing.assert_close(together, torch.stack([q.log_prob(q.at(z)) for q, z in zip(alone, noise, strict=True)]))
    with pytest.raises(ValueError, match="positive"):
        check(FullGaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, -1.0]))))
    with pytest.raises(ValueError, match="tril"):
        check(FullGaussian(torch.zeros(2), torch.full((2, 2), torch.nan)))
    with pytest.raises(TypeError, match="covariance"):
        alone[0].named()


def test_the_factor_of_an_inverse_needs_no_second_inversion():
    precision = _full(0, 3).covariance
    tril = from_precision(precision)
    assert torch.equal(tril, tril.tril())
    torch.testing.assert_close(tril @ tril.mT @ precision, torch.eye(P).double().expand(3, P, P), rtol=0, atol=1e-10)


def test_rounding_does_not_make_a_covariance_indefinite_but_nonsense_is_refused():
    column = torch.randn(P, 1).double()
    between = 1e9 * column @ column.T  # rank one: half of its eigenvalues are rounding errors below zero
    between = between - 1e-6 * torch.eye(P).double()
    tril = triangle(1e-8 * torch.eye(P).double(), between)
    torch.testing.assert_close(tril @ tril.T, between, rtol=1e-6, atol=1e-3)
    with pytest.raises(ValueError, match="positive definite"):
        triangle(-torch.eye(P).double(), torch.zeros(P, P).double())
