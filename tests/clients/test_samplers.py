"""Samplers against the law they must have, and against each other where they coincide."""

import pytest
import torch

from fedbayes.clients.samplers import SAMPLERS, psgld, sghmc, sgld

MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
CURVATURE = torch.tensor([0.5, 0.8, 1.0], dtype=torch.float64)  # of U, the mean negative log-density of an example
N, CHAINS = 50, 4000


def _chains(sampler, lr, steps, heat, settle=False):
    """The last state of many independent chains, started off the mean."""
    g = torch.Generator().manual_seed(0)
    vectors = {"w": (MEAN + 0.2).expand(CHAINS, 3)}
    state = sampler.init(vectors)
    if settle:
        square = (CURVATURE * heat).expand(CHAINS, 3)  # the mean square of gradients under the law
        state = {"square": {"w": square}, "weight": torch.ones((), dtype=torch.float64)}
    lr, heat = (torch.tensor(v, dtype=torch.float64) for v in (lr, heat))
    for _ in range(steps):
        normals = {"w": torch.randn(CHAINS, 3, generator=g, dtype=torch.float64)}
        slopes = {"w": CURVATURE * (vectors["w"] - MEAN)}
        state, vectors = sampler.update(state, vectors, slopes, normals, lr, heat)
    return vectors["w"]


# Each run is at least six of the longest time constants of its chain: 4 / lr steps for SGLD.
LAWS = {
    "sgld": (sgld(), 0.04, 600, False),
    "psgld": (psgld(memory=0.9999), 0.004, 600, True),
    "sghmc": (sghmc(friction=0.1), 0.004, 600, False),
}


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_gaussian_target_is_recovered_within_monte_carlo_error(name, temperature):
    sampler, lr, steps, settle = LAWS[name]
    found = _chains(sampler, lr, steps, temperature / N, settle)
    variance = temperature / (N * CURVATURE)
    assert ((found.mean(0) - MEAN) / (variance / CHAINS).sqrt()).abs().max() < 4
    # The estimate's own error is sqrt(2 / chains) = 2.2 %; finite steps add at most 1 % (SGLD: lr * curvature / 4).
    assert (found.var(0) / variance - 1).abs().max() < 4 * 0.0224 + 0.01


def _variance_after(steps, curvature, lr, heat, friction, start):
    """Var(theta) under a quadratic U by the recursion of the covariance of (theta, v), v of its own law at first."""
    pull, keep = 0.5 * lr * curvature, 1 - friction
    move = torch.tensor([[1 - pull, keep], [-pull, keep]], dtype=torch.float64)
    noise = torch.full((2, 2), friction * heat * lr, dtype=torch.float64)
    covariance = torch.tensor([[start, 0.0], [0.0, heat * lr / (2 - friction)]], dtype=torch.float64)
    for _ in range(steps):
        covariance = move @ covariance @ move.T + noise
    return float(covariance[0, 0])


@pytest.mark.parametrize("begin", ["a point", "the target"])
@pytest.mark.parametrize("friction", [0.1, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 10, 25])
def test_short_chains_of_hamiltonian_sampling_have_their_exact_variance(steps, friction, begin):
    """From rest it was .23, .53 and .80 of the exact one after 2, 10 and 25 steps from a point."""
    heat, lr, chains = 1 / N, 0.004, 20_000
    sampler, g = sghmc(friction), torch.Generator().manual_seed(steps)
    target = heat / CURVATURE
    start = target if begin == "the target" else torch.zeros_like(target)
    vectors = {"w": MEAN + start.sqrt() * torch.randn(chains, 3, generator=g, dtype=torch.float64)}
    state = sampler.init(vectors)
    scalars = [torch.tensor(v, dtype=torch.float64) for v in (lr, heat)]
    for _ in range(steps):
        normals = {"w": torch.randn(chains, 3, generator=g, dtype=torch.float64)}
        slopes = {"w": CURVATURE * (vectors["w"] - MEAN)}
        state, vectors = sampler.update(state, vectors, slopes, normals, *scalars)
    found = vectors["w"].var(0)
    pairs = zip(CURVATURE.tolist(), start.tolist())
    exact = torch.tensor([_variance_after(steps, c, lr, heat, friction, s) for c, s in pairs]).double()
    assert (found / exact - 1).abs().max() < 4 * (2 / chains) ** 0.5
    if begin == "the target":  # which a chain does not leave
        assert (found / target - 1).abs().max() < 4 * (2 / chains) ** 0.5 + 0.015


def test_with_full_friction_hamiltonian_sampling_is_langevin_sampling():
    a, b = _chains(sghmc(friction=1.0), 0.1, 30, 0.02), _chains(sgld(), 0.1, 30, 0.02)
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_without_heat_sgld_is_gradient_descent_with_half_the_rate():
    got = _chains(sgld(), 0.1, 20, 0.0)[0]
    torch.testing.assert_close(got, MEAN + 0.2 * (1 - 0.05 * CURVATURE) ** 20, rtol=1e-12, atol=0)


def test_the_preconditioner_equalises_the_scales_of_gradients():
    """The first step has length lr / 2 in every direction, whatever the gradient's size."""
    sampler = psgld(least=0.0)
    vectors, slopes = {"w": torch.zeros(3)}, {"w": torch.tensor([1e-3, 1.0, 1e3])}
    zero = {"w": torch.zeros(3)}
    _, moved = sampler.update(sampler.init(vectors), vectors, slopes, zero, torch.tensor(0.1), torch.tensor(0.0))
    torch.testing.assert_close(moved["w"], torch.full((3,), -0.05))
