"""Client weights against the papers' formulas, pair by pair."""

import pytest
import torch

from fedbayes.federation.weighting import WEIGHTINGS, pairwise_kl, weighting_named
from fedbayes.posterior.values import Gaussian, Point


def _gaussians(k: int, seed: int = 0, offset: float = 0.0) -> list[Gaussian]:
    g = torch.Generator().manual_seed(seed)
    means = offset + torch.randn(k, 7, generator=g, dtype=torch.float64)
    return [Gaussian(m, (0.5 * torch.randn(7, generator=g, dtype=torch.float64)).exp()) for m in means]


def _kl(q: Gaussian, p: Gaussian) -> float:
    normal = torch.distributions.Normal
    return float(torch.distributions.kl_divergence(normal(q.mean, q.scale), normal(p.mean, p.scale)).sum())


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_pairwise_kl_by_products_equals_the_double_loop(offset):
    qs = _gaussians(5, offset=offset)
    loop = torch.tensor([[_kl(q, p) for p in qs] for q in qs], dtype=torch.float64)
    torch.testing.assert_close(pairwise_kl(qs), loop, rtol=1e-9, atol=1e-9)


def test_pairwise_kl_of_float32_uploads_does_not_lose_small_differences():
    q = Gaussian(torch.full((1000,), 50.0), torch.full((1000,), 1e-3))
    p = Gaussian(q.mean, q.scale * 1.01)
    exact = _kl(Gaussian(q.mean.double(), q.scale.double()), Gaussian(p.mean.double(), p.scale.double()))
    assert float(pairwise_kl([q, p])[0, 1]) == pytest.approx(exact, rel=1e-6)


def test_points_are_compared_by_distance():
    qs = [Point(torch.tensor([0.0, 0.0])), Point(torch.tensor([3.0, 4.0])), Point(torch.tensor([6.0, 8.0]))]
    torch.testing.assert_close(pairwise_kl(qs), torch.tensor([[0.0, 5, 10], [5, 0, 5], [10, 5, 0]]).double())
    assert WEIGHTINGS["discrepancy"].compare(qs).tolist() == pytest.approx([0.2, 0.2, 0.2])
    assert WEIGHTINGS["discrepancy_max"].compare(qs).tolist() == pytest.approx([0.1, 0.2, 0.1])


def test_discrepancy_weighs_by_the_nearest_other_client():
    qs = _gaussians(5)
    want = [max(1 / _kl(q, p) for p in qs if p is not q) for q in qs]
    assert WEIGHTINGS["discrepancy"].compare(qs).tolist() == pytest.approx(want, rel=1e-9)


def test_discrepancy_max_weighs_by_the_farthest_other_client():
    qs = _gaussians(5)
    want = [1 / max(_kl(q, p) for p in qs if p is not q) for q in qs]
    assert WEIGHTINGS["discrepancy_max"].compare(qs).tolist() == pytest.approx(want, rel=1e-9)


def test_distance_weighs_by_the_kl_from_the_broadcast():
    q, broadcast = _gaussians(2)
    n = torch.tensor(4)
    assert float(WEIGHTINGS["distance"].weigh(q, broadcast, n)) == pytest.approx(1 / _kl(broadcast, q), rel=1e-12)


@pytest.mark.parametrize("move", [1e-2, 1e-4, 1e-6])
def test_distance_of_float32_posteriors_does_not_lose_small_moves(move):
    """Of equal scales s: KL = sum of (d / s)^2 / 2; moves d of 1e-4 s were off by a quarter."""
    g = torch.Generator().manual_seed(0)
    broadcast = Gaussian(torch.zeros(2000), torch.full((2000,), 2**-6))
    q = Gaussian(move * broadcast.scale * torch.randn(2000, generator=g), broadcast.scale)
    exact = 0.5 * (q.mean.double() / broadcast.scale.double()).square().sum()
    weigh = WEIGHTINGS["distance"].weigh
    assert float(weigh(q, broadcast, torch.tensor(4))) == pytest.approx(
        float(1 / exact), rel=1e-3 if move < 1e-5 else 1e-6
    )


def test_distance_of_points_is_euclidean():
    q, broadcast = Point(torch.tensor([3.0, 4.0])), Point(torch.zeros(2))
    assert float(WEIGHTINGS["distance"].weigh(q, broadcast, torch.tensor(4))) == pytest.approx(0.2)


def test_size_and_equal_weights():
    q, broadcast = _gaussians(2)
    assert float(WEIGHTINGS["size"].weigh(q, broadcast, torch.tensor(17))) == 17
    assert float(WEIGHTINGS["equal"].weigh(q, broadcast, torch.tensor(17))) == 1


@pytest.mark.parametrize("name", ["discrepancy", "discrepancy_max"])
def test_equal_clients_get_equal_finite_weights(name):
    q = _gaussians(1)[0]
    weights = WEIGHTINGS[name].compare([q, q, q])
    assert torch.isfinite(weights).all()
    assert (weights == weights[0]).all()
    assert weights[0] > 0


@pytest.mark.parametrize("name", ["discrepancy", "discrepancy_max"])
def test_a_single_client_has_weight_one(name):
    assert WEIGHTINGS[name].compare(_gaussians(1)).tolist() == [1.0]


def test_a_client_that_did_not_move_gets_a_finite_weight():
    q = _gaussians(1)[0]
    for value in (q, Gaussian(q.mean.float(), q.scale.float()), Point(q.mean)):
        weight = WEIGHTINGS["distance"].weigh(value, value, torch.tensor(4))
        assert torch.isfinite(weight)
        assert weight > 0


def test_an_unknown_weighting_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'discrepancy'"):
        weighting_named("discrepency")
