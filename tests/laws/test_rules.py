"""Laws that every aggregation rule must keep; a new row of the table is tested by existing."""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes import FullGaussian, Gaussian, Point, pool
from fedbayes.federation.rules import RULES

P = 5
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
SUMS = [name for name, rule in RULES.items() if rule.combine is None]
ROBUST = [name for name, rule in RULES.items() if rule.robust]


def _values(name: str, seed: int, k: int) -> list:
    g = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(k, P, generator=g, dtype=torch.float64)
    scales = 0.3 * torch.randn(k, P, generator=g, dtype=torch.float64).exp()
    if FullGaussian in RULES[name].takes:
        turns = torch.randn(k, P, P, generator=g, dtype=torch.float64)
        return [
            FullGaussian.from_covariance(m, t @ t.T + s.square().diag())
            for m, s, t in zip(means, scales, turns, strict=True)
        ]
    if Gaussian in RULES[name].takes and name != "fedag":
        return [Gaussian(m, s) for m, s in zip(means, scales, strict=True)]
    return [Point(m) for m in means]


def _weights(seed: int, k: int, name: str = "lp") -> torch.Tensor:
    if not RULES[name].weighted:  # products of densities and robust rules refuse others
        return torch.ones(k, dtype=torch.float64)
    return torch.rand(k, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64) + 0.1


def _reference(seed: int = 99) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(P, generator=g, dtype=torch.float64)
    return Gaussian(mean, 8 + torch.rand(P, generator=g, dtype=torch.float64))  # wide: dwc floors nothing


def _same(a, b) -> None:
    assert type(a) is type(b)
    torch.testing.assert_close(a.mean, b.mean, **CLOSE)
    if isinstance(a, Gaussian):
        torch.testing.assert_close(a.scale**2, b.scale**2, rtol=1e-9, atol=1e-12)
    if isinstance(a, FullGaussian):
        torch.testing.assert_close(a.covariance, b.covariance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), k=st.integers(2, 7), data=st.data())
def test_the_order_of_clients_does_not_matter(name, seed, k, data):
    order = data.draw(st.permutations(range(k)))
    qs, w = _values(name, seed, k), _weights(seed, k, name)
    _same(pool(name, qs, w, _reference()), pool(name, [qs[i] for i in order], w[order], _reference()))


@pytest.mark.parametrize("name", SUMS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), k=st.integers(2, 7), data=st.data())
def test_a_tree_of_sums_equals_the_flat_sum(name, seed, k, data):
    rule, reference = RULES[name], _reference()
    terms = [rule.encode(q, w, reference) for q, w in zip(_values(name, seed, k), _weights(seed, k), strict=True)]
    cut = data.draw(st.integers(1, k - 1))
    tree = rule.add(reduce(rule.add, terms[:cut]), reduce(rule.add, terms[cut:]))
    _same(rule.decode(tree, reference), rule.decode(reduce(rule.add, terms), reference))


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), k=st.integers(1, 6), factor=st.floats(1e-3, 1e3))
def test_only_the_ratios_of_weights_matter(name, seed, k, factor):
    qs, w = _values(name, seed, k), _weights(seed, k, name)
    _same(pool(name, qs, w, _reference()), pool(name, qs, factor * w, _reference()))


@pytest.mark.parametrize("name", [n for n in RULES if not RULES[n].needs_reference])
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), k=st.integers(1, 6))
def test_the_reference_changes_nothing_but_rounding(name, seed, k):
    qs, w = _values(name, seed, k), _weights(seed, k, name)
    plain = pool(name, qs, w)
    _same(pool(name, qs, w, _reference()), plain)
    _same(pool(name, qs, w, Point(_reference().mean)), plain)


@pytest.mark.parametrize("name", ["dwc", "full_product"])
def test_only_products_over_references_depend_on_it_and_they_do(name):
    assert [n for n in RULES if RULES[n].needs_reference] == ["dwc", "full_product"]
    qs = _values(name, 0, 3)
    a, b = (pool(name, qs, reference=_reference(seed)) for seed in (1, 2))
    assert not torch.allclose(a.mean, b.mean)


@pytest.mark.parametrize(
    "name", ["nwa", "lp", "log_pool", "mean_rho", "dwc", "moment_matching", "full_product", *ROBUST]
)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_copies_of_one_posterior_give_it_back(name, k):
    (q,) = _values(name, 3, 1)
    _same(pool(name, [q] * k, _weights(0, k, name), q), q)


@pytest.mark.parametrize("name", ["ws", "wc", "conflation"])
@pytest.mark.parametrize("k", [2, 5])
def test_copies_of_one_posterior_come_back_narrower(name, k):
    (q,) = _values(name, 3, 1)
    out = pool(name, [q] * k, reference=q)
    torch.testing.assert_close(out.mean, q.mean, **CLOSE)
    torch.testing.assert_close(out.scale, q.scale / k**0.5, **CLOSE)


@pytest.mark.parametrize("name", ["fedavg", "fedag"])
def test_copies_of_one_point_give_it_back_without_spread(name):
    (q,) = _values(name, 3, 1)
    out = pool(name, [q] * 4)
    torch.testing.assert_close(out.mean, q.mean, **CLOSE)
    if isinstance(out, Gaussian):
        assert (out.scale < 1e-6).all()


seeds = given(seed=st.integers(0, 1000), k=st.integers(1, 6))


@settings(max_examples=25)
@seeds
def test_weighted_conflation_with_equal_weights_is_conflation(seed, k):
    qs = _values("wc", seed, k)
    _same(pool("wc", qs, [3.0] * k), pool("conflation", qs))


@settings(max_examples=25)
@seeds
def test_the_log_pool_with_equal_weights_has_k_times_the_variance_of_conflation(seed, k):
    qs = _values("wc", seed, k)
    pooled, product = pool("log_pool", qs), pool("conflation", qs)
    torch.testing.assert_close(pooled.mean, product.mean, **CLOSE)
    torch.testing.assert_close(pooled.scale**2, k * product.scale**2, **CLOSE)


@settings(max_examples=25)
@seeds
def test_variances_rise_from_ws_to_nwa_to_lp(seed, k):
    qs, w = _values("lp", seed, k), _weights(seed, k)
    narrow, middle, wide = (pool(name, qs, w) for name in ("ws", "nwa", "lp"))
    assert (narrow.scale <= middle.scale * (1 + 1e-12)).all()
    assert (middle.scale <= wide.scale * (1 + 1e-12)).all()
    assert torch.allclose(narrow.mean, wide.mean)


@settings(max_examples=25)
@seeds
def test_weighted_conflation_is_no_wider_than_the_heaviest_client(seed, k):
    qs, w = _values("wc", seed, k), _weights(seed, k)
    heaviest = qs[int(w.argmax())]
    assert (pool("wc", qs, w).scale <= heaviest.scale * (1 + 1e-12)).all()


@settings(max_examples=25)
@seeds
def test_a_client_of_weight_zero_does_not_change_weighted_rules(seed, k):
    for name in ("nwa", "ws", "lp", "wc", "log_pool", "mean_rho", "moment_matching", "fedavg", "fedag"):
        qs, w = _values(name, seed, k + 1), _weights(seed, k + 1)
        w[-1] = 0
        _same(pool(name, qs, w), pool(name, qs[:-1], w[:-1]))


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.takes == (Gaussian,)] + ["lp"])
def test_a_rule_says_whether_copies_pool_to_something_narrower(name):
    q = _values(name, 0, 1)[0]
    pooled = pool(name, [q] * 4, reference=q)
    assert bool((pooled.scale < 0.9 * q.scale).all()) == RULES[name].narrows
    if not RULES[name].narrows:
        _same(pooled, q)
