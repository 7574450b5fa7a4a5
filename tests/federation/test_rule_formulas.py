"""Every rule against its paper's formula in plain numpy, and what `pool` refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedbayes import Draws, FullGaussian, Gaussian, Layout, Point, pool
from fedbayes.federation.encodings import DWC_FLOOR
from fedbayes.federation.rules import RULES, rule_named

# Formulas of the papers: m, s [K, P], w [K] normalised, (m0, s0) the broadcast -> mean, variance.


def nwa(m, s, w, m0, s0):
    return w @ m, w @ s**2


def ws(m, s, w, m0, s0):
    return w @ m, w**2 @ s**2


def lp(m, s, w, m0, s0):
    mean = w @ m
    return mean, w @ (s**2 + (m - mean) ** 2)


def conflation(m, s, w, m0, s0):
    total = (1 / s**2).sum(0)
    return (m / s**2).sum(0) / total, 1 / total


def wc(m, s, w, m0, s0):
    total = w @ (1 / s**2)
    return w @ (m / s**2) / total, w.max() / total


def log_pool(m, s, w, m0, s0):
    total = w @ (1 / s**2)
    return w @ (m / s**2) / total, 1 / total


def dwc(m, s, w, m0, s0):
    total = (1 / s**2).sum(0) - (len(w) - 1) / s0**2
    return ((m / s**2).sum(0) - (len(w) - 1) * m0 / s0**2) / total, 1 / total


def mean_rho(m, s, w, m0, s0):
    return w @ m, np.log1p(np.exp(w @ np.log(np.expm1(s)))) ** 2


FORMULAS = {f.__name__: f for f in (nwa, ws, lp, conflation, wc, log_pool, dwc, mean_rho)}
POINTS = ("fedavg", "fedag")
FULL = ("moment_matching", "full_product")
P = 6


@st.composite
def clients(draw):
    k = draw(st.integers(1, 6))
    m = draw(hnp.arrays(np.float64, (k, P), elements=st.floats(-10, 10)))
    s = 10 ** draw(hnp.arrays(np.float64, (k, P), elements=st.floats(-3, 1)))
    w = draw(hnp.arrays(np.float64, (k,), elements=st.floats(0.05, 5)))
    m0 = draw(hnp.arrays(np.float64, (P,), elements=st.floats(-10, 10)))
    return m, s, w, m0


def _gaussians(m, s):
    return [Gaussian(torch.tensor(a), torch.tensor(b)) for a, b in zip(m, s, strict=True)]


def test_every_rule_has_a_formula_here():  # robust ones: test_robust.py
    assert {*FORMULAS, *POINTS, *FULL} == {name for name, rule in RULES.items() if not rule.robust}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=40)
@given(case=clients())
def test_a_rule_of_gaussians_equals_its_formula(name, case):
    m, s, w, m0 = case
    s0 = 2 * s.max(0)  # wider than every client, so that the product over (K-1) references is proper
    mean, variance = FORMULAS[name](m, s, w / w.sum(), m0, s0)
    q = pool(name, _gaussians(m, s), w if RULES[name].weighted else None, Gaussian(torch.tensor(m0), torch.tensor(s0)))
    # Means near zero are differences of numbers of the size of the clients' means.
    size = np.abs(m).max(0) + np.abs(m0)
    np.testing.assert_allclose(q.mean.numpy(), mean, rtol=1e-6, atol=1e-8 * size.max() + 1e-300)
    np.testing.assert_allclose(q.scale.numpy() ** 2, variance, rtol=1e-6)


@settings(max_examples=40)
@given(case=clients())
def test_rules_of_points_are_the_weighted_mean_and_spread(case):
    m, _, w, m0 = case
    mean = w @ m / w.sum()
    points = [Point(torch.tensor(row)) for row in m]
    average, spread = (pool(name, points, w, Point(torch.tensor(m0))) for name in POINTS)
    assert isinstance(average, Point)
    assert isinstance(spread, Gaussian)
    for q in (average, spread):
        np.testing.assert_allclose(q.mean.numpy(), mean, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(spread.scale.numpy() ** 2, w @ (m - mean) ** 2 / w.sum(), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=30)
@given(data=st.data())
def test_float32_stays_finite_and_positive_over_many_orders_of_magnitude(name, data):
    k = data.draw(st.integers(1, 5))
    exponents = hnp.arrays(np.float32, (k + 1, P), elements=st.floats(-6, 2, width=32))
    means = hnp.arrays(np.float32, (k + 1, P), elements=st.floats(-1000, 1000, width=32))
    s, m = 10.0 ** data.draw(exponents), data.draw(means)
    qs = [Gaussian(torch.tensor(a), torch.tensor(b).float()) for a, b in zip(m, s, strict=True)]
    if name in POINTS:
        qs = [Point(q.mean) for q in qs]
    if name in FULL:
        qs = [FullGaussian(q.mean, q.scale.diag()) for q in qs]
    out = pool(name, qs[1:], reference=qs[0])
    assert out.mean.dtype == torch.float32
    assert torch.isfinite(out.mean).all()
    if isinstance(out, Gaussian):
        assert torch.isfinite(out.scale).all()
        assert (out.scale > 0).all()
    if isinstance(out, FullGaussian):
        assert torch.isfinite(out.tril).all()
        assert (out.tril.diagonal() > 0).all()


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 6))
def test_moment_matching_equals_its_formula_and_is_positive_definite(seed, k):
    """pFedPF eq. 15: sum_k w_k (S_k + m_k m_k^T - m m^T)."""
    g = np.random.default_rng(seed)
    m, w = 3 * g.normal(size=(k, P)), g.uniform(0.1, 2, k)
    # Rank-deficient but for 1e-6: what a client with few rows has.
    roots = g.normal(size=(k, P, 2))
    s = roots @ roots.transpose(0, 2, 1) + 1e-6 * np.eye(P)
    pi = w / w.sum()
    mean = pi @ m
    covariance = np.einsum("k,kij->ij", pi, s + np.einsum("ki,kj->kij", m, m)) - np.outer(mean, mean)
    qs = [FullGaussian.from_covariance(torch.tensor(a), torch.tensor(b)) for a, b in zip(m, s, strict=True)]
    reference = FullGaussian(torch.tensor(g.normal(size=P)), torch.tensor(np.diag(g.uniform(0.5, 2, P))))
    q = pool("moment_matching", qs, w, reference)
    np.testing.assert_allclose(q.mean.numpy(), mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(q.covariance.numpy(), covariance, rtol=1e-7, atol=1e-9)
    assert np.linalg.eigvalsh(q.covariance.numpy()).min() > 0


def test_moment_matching_of_points_nearly_equal_keeps_their_covariance():
    tril = 1e-3 * torch.eye(P) + 1e-4 * torch.ones(P, P).tril(-1)
    qs = [FullGaussian(torch.full((P,), 1000.0) + 1e-5 * k, tril) for k in range(3)]
    q = pool("moment_matching", qs)
    torch.testing.assert_close(q.covariance, qs[0].covariance, rtol=1e-3, atol=0)


def test_small_scales_survive_large_means_in_float32():
    q = Gaussian(torch.full((3,), 1000.0), torch.full((3,), 1e-6))
    for name in ("nwa", "lp", "log_pool", "mean_rho"):
        torch.testing.assert_close(pool(name, [q] * 4).scale, q.scale, rtol=1e-5, atol=0)


def test_the_weighted_sum_of_three_unit_normals_has_variance_038():
    q = Gaussian(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert float(pool("ws", [q] * 3, [0.5, 0.3, 0.2]).scale ** 2) == pytest.approx(0.38, rel=1e-12)


def test_dwc_floors_precisions_that_are_not_positive_and_keeps_the_reference_mean_there():
    reference = Gaussian(torch.tensor([5.0, 5.0]).double(), torch.ones(2).double())
    wide = Gaussian(torch.tensor([7.0, 7.0]).double(), torch.tensor([2.0, 0.5]).double())
    q = pool("dwc", [wide] * 3, reference=reference)
    # Precision 3/4 - 2 < 0 for the first weight; 12 - 2 = 10 for the second, with shift 12 * 7 - 2 * 5 = 74.
    assert q.mean.tolist() == pytest.approx([5.0, 7.4])
    assert (q.scale**-2).tolist() == pytest.approx([DWC_FLOOR, 10.0])


def test_dwc_reports_how_many_weights_it_floored():
    rule = RULES["dwc"]
    reference = Gaussian(torch.zeros(3), torch.ones(3))
    client = Gaussian(torch.zeros(3), torch.tensor([2.0, 0.5, 3.0]))
    one = rule.encode(client, torch.tensor(1.0), reference)
    assert rule.report(rule.add(one, one), reference) == {"floored": 2.0}


def test_dwc_of_exact_clients_recovers_the_pooled_posterior_of_a_conjugate_regression():
    # y = X b + noise. Each client's X has orthogonal columns, so every posterior is exactly a diagonal Gaussian.
    rng = np.random.default_rng(0)
    p, noise, prior_mean, prior_scale = 4, 0.7, np.full(4, 0.3), np.full(4, 1.5)
    rows = []
    for n in (6, 11, 20):
        basis, _ = np.linalg.qr(rng.normal(size=(n, p)))
        x = basis * rng.uniform(1, 4, size=p)
        rows.append((x, x @ rng.normal(size=p) + noise * rng.normal(size=n)))

    def posterior(x, y):
        precision = np.diag(prior_scale**-2) + x.T @ x / noise**2
        mean = np.linalg.solve(precision, prior_mean / prior_scale**2 + x.T @ y / noise**2)
        return mean, precision

    exact = []
    for x, y in rows:
        mean, precision = posterior(x, y)
        np.testing.assert_allclose(precision, np.diag(np.diag(precision)), atol=1e-9)
        exact.append(Gaussian(torch.tensor(mean), torch.tensor(np.diag(precision) ** -0.5)))
    prior = Gaussian(torch.tensor(prior_mean), torch.tensor(prior_scale))
    q = pool("dwc", exact, reference=prior)
    mean, precision = posterior(np.concatenate([x for x, _ in rows]), np.concatenate([y for _, y in rows]))
    np.testing.assert_allclose(q.mean.numpy(), mean, rtol=1e-10)
    np.testing.assert_allclose(q.scale.numpy(), np.diag(precision) ** -0.5, rtol=1e-10)


def test_the_pooled_value_keeps_layout_and_dtype():
    layout = Layout(("w",), ((2,),))
    q = Gaussian(torch.zeros(2), torch.ones(2), layout)
    for name in FORMULAS:
        out = pool(name, [q, q], reference=q)
        assert out.layout == layout
        assert out.scale.dtype == torch.float32


Q, W = Gaussian(torch.zeros(2), torch.ones(2)), Gaussian(torch.zeros(3), torch.ones(3))
REFUSED = {
    "unknown rule": (lambda: pool("log_poll", [Q]), "did you mean 'log_pool'"),
    "no posteriors": (lambda: pool("nwa", []), "posteriors: there are none"),
    "dwc without reference": (lambda: pool("dwc", [Q]), "reference=q_0"),
    "points in a rule of gaussians": (lambda: pool("nwa", [Q, Point(torch.zeros(2))]), "posterior 1 is a Point"),
    "gaussians in a rule of points": (lambda: pool("fedavg", [Q]), "posterior 0 is a Gaussian; this rule takes Point"),
    "draws": (lambda: pool("lp", [Draws(torch.zeros(2, 2))]), "posterior 0 is a Draws"),
    "another length": (lambda: pool("nwa", [Q, W]), r"posterior 1 has shape \(3,\), the first \(2,\)"),
    "not finite": (
        lambda: pool("nwa", [Q, Gaussian(torch.full((2,), torch.nan), torch.ones(2))]),
        "posterior 1: 2 of 2 entries of mean not finite",
    ),
    "negative scale": (lambda: pool("nwa", [Gaussian(torch.zeros(2), -torch.ones(2))]), "scale must be positive"),
    "another network": (
        lambda: pool("nwa", [Q, Gaussian(Q.mean, Q.scale, Layout(("w",), ((2,),)))]),
        "posterior 1 speaks of another network",
    ),
    "weights of a product": (
        lambda: pool("conflation", [Q, Q], [600, 200]),
        r"every posterior counts once; leave weights out, or take wc \(weighted conflation\) or log_pool",
    ),
    "weights of a robust rule": (
        lambda: pool("median", [Q, Q], [600, 200]),
        "a robust rule counts every posterior once, for who lies may claim any weight; leave weights out",
    ),
    "more attackers than honest clients": (
        lambda: pool("trimmed_mean", [Q, Q], outliers=0.5),
        r"outliers must be a share in \[0, 0.5\), not 0.5",
    ),
    "weights of dwc": (lambda: pool("dwc", [Q, Q], [1, 2], reference=Q), "every posterior counts once"),
    "too few weights": (lambda: pool("nwa", [Q, Q], [1.0]), "weights: 2 are needed"),
    "negative weights": (lambda: pool("nwa", [Q, Q], [1.0, -1.0]), "weights must be finite, not negative"),
    "no weight at all": (lambda: pool("nwa", [Q, Q], [0.0, 0.0]), "not all zero"),
    "weights not finite": (lambda: pool("nwa", [Q, Q], [1.0, float("nan")]), "weights must be finite"),
    "reference not finite": (
        lambda: pool("dwc", [Q], reference=Gaussian(Q.mean / 0, Q.scale)),
        "reference: 2 of 2 entries of mean not finite",
    ),
    "reference of another length": (lambda: pool("dwc", [Q], reference=W), r"reference has shape \(3,\)"),
    "a point as dwc's reference": (lambda: pool("dwc", [Q], reference=Point(Q.mean)), "reference is a Point"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pool_names_what_it_can_not_use(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_rule_may_be_given_itself():
    assert rule_named(RULES["nwa"]) is RULES["nwa"]
    assert torch.equal(pool(RULES["ws"], [Q, Q]).scale, pool("ws", [Q, Q]).scale)


def test_a_full_product_equals_its_formula_and_is_floored_where_nothing_would_be_left():
    random = torch.Generator().manual_seed(4)
    turns = torch.randn(3, 4, 4, generator=random, dtype=torch.float64)
    qs = [FullGaussian.from_covariance(t[0], t @ t.T + 0.1 * torch.eye(4)) for t in turns]
    wide = Gaussian(torch.ones(4, dtype=torch.float64), torch.full((4,), 9.0, dtype=torch.float64))
    precision = sum(q.covariance.inverse() for q in qs) - 2 * torch.eye(4) / 81
    shift = sum(q.covariance.inverse() @ q.mean for q in qs) - 2 * torch.ones(4) / 81
    q = pool("full_product", qs, reference=wide)
    torch.testing.assert_close(q.covariance, precision.inverse())
    torch.testing.assert_close(q.mean, precision.inverse() @ shift)
    narrow = Gaussian(torch.ones(4, dtype=torch.float64), torch.full((4,), 1e-3, dtype=torch.float64))
    q = pool("full_product", qs, reference=narrow)
    torch.testing.assert_close(q.covariance, 1e-4 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(q.mean, narrow.mean)
