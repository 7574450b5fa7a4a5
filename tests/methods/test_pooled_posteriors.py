"""Bayesian logistic regression across sites equals that of all rows in one place, by solvers written here in numpy."""

import warnings

import numpy as np
import pytest
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.networks.papers import network_named

WIDTH = 0.8  # of the prior


def chance(z):
    return 1 / (1 + np.exp(-z))


def sites(seed=0):
    """Three small tables whose columns hang together, with labels that a line does not part."""
    random = np.random.default_rng(seed)
    tables = {}
    for name, rows, shift in (("aachen", 40, 0.0), ("basel", 25, 1.0), ("cadiz", 60, -0.7)):
        a = random.normal(shift, 1, rows)
        b = 0.6 * a + random.normal(0, 1, rows)
        ill = random.random(rows) < chance(0.8 * a - 1.1 * b + 0.3)
        tables[name] = {"a": a, "b": b, "ill": np.where(ill, "yes", "no").astype(object)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they differ
        return fb.data.from_tables(tables, "ill", test=0.0)


def rows_of(clients):
    """The rows as the network sees them with a column of ones, and labels of -1 and 1."""
    x = clients.data.prepare(clients.data.x).numpy()
    return np.column_stack([x, np.ones(len(x))]), 2 * clients.data.y.numpy() - 1


def in_order(vector, columns):
    """Weights [2, F] and biases [2] of the network as one array [2, F + 1]."""
    return np.column_stack([vector[: 2 * columns].reshape(2, columns), vector[2 * columns :]])


def mean_field(x, sign, width, rounds=300):
    """The factorised normal nearest to the posterior of two outputs per row, by its fixed-point equations.

    With d = w_1 - w_0, a row's log-odds are normal with mean x . E d and variance x^2 . (s_0^2 + s_1^2); the precision
    of a weight is that of the prior plus the sum over rows of x^2 E[p (1 - p)], its mean a zero of the slope.
    """
    points, weights = hermegauss(60)
    weights = weights / weights.sum()
    mean, variance = np.zeros(x.shape[1]), np.full(x.shape[1], width**2)  # half of E d, and of one output's weight
    for _ in range(rounds):
        spread = np.sqrt(2 * x**2 @ variance)
        odds = (2 * x @ mean)[:, None] + spread[:, None] * points
        p = chance(odds)
        curved = (p * (1 - p)) @ weights
        variance = 1 / (width**-2 + x.T**2 @ curved)
        slope = x.T @ ((sign > 0) - p @ weights) - mean / width**2
        bend = 2 * (x.T * curved) @ x + np.eye(len(mean)) / width**2
        mean = mean + 0.5 * np.linalg.solve(bend, slope)
    return np.array([-mean, mean]), np.sqrt(np.array([variance, variance]))


def newton(x, sign, width):
    """Maximum and inverse curvature of the posterior of w_1 - w_0, whose prior has twice the variance."""
    w, precision = np.zeros(x.shape[1]), 0.5 / width**2
    for _ in range(50):
        p = chance(x @ w)
        bend = (x.T * (p * (1 - p))) @ x + precision * np.eye(len(w))
        w = w + np.linalg.solve(bend, x.T @ ((sign > 0) - p) - precision * w)
    return w, np.linalg.inv(bend)


def test_laplace_equals_the_pooled_maximum_and_its_curvature():
    clients = sites()
    x, sign = rows_of(clients)
    w, covariance = newton(x, sign, WIDTH)
    q = fb.fit("linear", clients, method=fb.methods.laplace(prior="fixed", prior_scale=WIDTH), rounds=7).posterior
    columns = x.shape[1] - 1
    apart = np.array([in_order(row, columns)[1] - in_order(row, columns)[0] for row in np.eye(len(q.mean))]).T
    np.testing.assert_allclose(apart @ q.mean.numpy(), w, atol=1e-5)
    np.testing.assert_allclose(apart @ q.covariance.numpy() @ apart.T, covariance, atol=1e-5)


def test_pvi_equals_the_pooled_mean_field_posterior():
    clients = sites()
    x, sign = rows_of(clients)
    mean, scale = mean_field(x, sign, WIDTH)
    method = fb.methods.pvi(
        **{"optimiser": "adam", "lr": 0.03, "epochs": 12, "batch": 64, "train_draws": 32, "damping": 0.5},
        **{"prior_scale": WIDTH, "lr_across": "cosine"},
    )
    # From zeros: the sum of both outputs' weights, of which rows say nothing, would go there slowly.
    network = nn.Linear(2, 2)
    for weight in network.parameters():
        nn.init.zeros_(weight)
    q = fb.fit(network, clients, method=method, rounds=24, evaluate_every=24).posterior
    np.testing.assert_allclose(in_order(q.mean.numpy(), 2), mean, atol=5e-3)
    np.testing.assert_allclose(in_order(q.scale.numpy(), 2), scale, atol=5e-3)


def test_the_evidence_chooses_the_prior_that_a_search_finds():
    clients = sites()
    x, sign = rows_of(clients)
    columns = x.shape[1] - 1

    def log_evidence(scales):
        """Of the difference of both outputs, each column with its own precision."""
        precision = 0.5 / np.repeat(scales, [columns, 1]) ** 2
        w = np.zeros(len(precision))
        for _ in range(60):
            p = chance(x @ w)
            bend = (x.T * (p * (1 - p))) @ x + np.diag(precision)
            w = w + np.linalg.solve(bend, x.T @ ((sign > 0) - p) - precision * w)
        likelihood = -np.logaddexp(0, -sign * (x @ w)).sum()
        determinants = np.log(precision).sum() - np.linalg.slogdet(bend)[1]
        return likelihood + 0.5 * (determinants - (precision * w**2).sum())

    run = fb.fit("linear", clients, method="laplace", rounds=15, evaluate_every=15)
    names = ("prior_precision.1.weight", "prior_precision.1.bias")
    weight, bias = (run.journal[-1][name] ** -0.5 for name in names)
    grid = weight * np.exp(np.linspace(-1.5, 1.5, 61))
    best = grid[np.argmax([log_evidence(np.array([one, bias])) for one in grid])]
    assert abs(np.log(best / weight)) < 0.15  # updates hold the curvature fixed, the search does not


def test_each_site_deviates_from_what_is_common():
    random = np.random.default_rng(1)
    tables = {}
    for name, slope in (("aachen", 3.0), ("basel", -3.0)):
        a, b = random.normal(size=(2, 80))
        ill = random.random(80) < chance(slope * a + b)
        tables[name] = {"a": a, "b": b, "ill": np.where(ill, "yes", "no").astype(object)}
    clients = fb.data.from_tables(tables, "ill", site_effects=True)
    alone = fb.fit("linear", clients, method="laplace", rounds=8, evaluate_every=8).scores()
    apart = fb.fit("by_site", clients, method="laplace", rounds=8, evaluate_every=8).scores()
    assert apart["nll"] < 0.7 * alone["nll"]


def test_shifts_alone_are_a_regression_with_the_sites_as_columns():
    random = np.random.default_rng(2)
    tables = {}
    for name, shift in (("aachen", 2.0), ("basel", -2.0)):
        a = random.normal(size=50)
        ill = random.random(50) < chance(a + shift)
        tables[name] = {"a": a, "ill": np.where(ill, "yes", "no").astype(object)}
    clients = fb.data.from_tables(tables, "ill", site_effects=True, test=0.0)
    shifted = network_named("by_site", clients.data.seen_shape, 2, sites=2, slopes=False)
    q = fb.fit(shifted, clients, method=fb.methods.laplace(prior="fixed", prior_scale=WIDTH), rounds=7).posterior
    x, sign = rows_of(clients)  # the column, one for each site, ones
    w, _ = newton(x, sign, WIDTH)
    ends = {name: t.numpy() for name, t in q.layout.split(q.mean).items()}
    found = [ends[name][1] - ends[name][0] for name in ("common.weight", "shift.weight", "common.bias")]
    np.testing.assert_allclose(np.concatenate([np.atleast_1d(t) for t in found]), w, atol=1e-5)


def test_what_has_no_such_posterior_is_refused_in_one_line():
    clients = sites()
    with pytest.raises(InputError, match="laplace holds a matrix of 3402 x 3402 weights, at most 3000"):
        fb.fit(network(2, 680), clients, method="laplace", rounds=1)
    with pytest.raises(InputError, match="by_site needs rows whose last columns are those of the sites"):
        fb.fit("by_site", clients, method="laplace", rounds=1)


def test_loop_and_stacked_engines_agree():
    clients = sites()
    ends = [
        fb.fit(network(2, 3), clients, method=fb.methods.laplace(step=0.5), rounds=4, cohort=2, engine=engine).posterior
        for engine in ("loop", "stacked")
    ]
    torch.testing.assert_close(ends[0].mean, ends[1].mean, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(ends[0].covariance, ends[1].covariance, atol=1e-8, rtol=1e-8)


def alike(count, last=1.0):
    """Clients that all have the same rows, but that those of the last are multiplied."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, generator=random)
    y = (x.sum(1) + torch.randn(30, generator=random) > 0).long()
    return fb.data.from_clients([*[(x, y)] * (count - 1), (last * x, y)], (x, y))


@pytest.mark.parametrize("prior", ["fixed", "evidence"])
@pytest.mark.parametrize("options", [{"cohort": 4}, {"dropout": 0.5}, {"cohort": 6, "dropout": 0.4}], ids=str)
def test_clients_that_came_stand_for_those_that_did_not(prior, options):
    method = fb.methods.laplace(prior=prior)
    whole = fb.fit(linear(), alike(8), method=method, rounds=6)
    some = fb.fit(linear(), alike(8), method=method, rounds=6, **options)
    assert any(record["cohort"] < 8 for record in some.journal)
    torch.testing.assert_close(some.posterior.mean, whole.posterior.mean, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(some.posterior.covariance, whole.posterior.covariance, atol=1e-5, rtol=1e-4)


def test_clients_that_are_left_out_are_stood_for_too():
    method = fb.methods.laplace(prior="fixed")
    whole = fb.fit(linear(), alike(4), method=method, rounds=1)
    with pytest.warns(UserWarning, match="left out"):
        some = fb.fit(linear(), alike(4, 1e38), method=method, rounds=1)
    assert len(some.journal[0]["left_out"]) == 1
    torch.testing.assert_close(some.posterior.covariance, whole.posterior.covariance, atol=1e-5, rtol=1e-4)


def test_a_personal_model_is_of_the_clients_own_rows_whatever_the_cohort():
    method = fb.methods.laplace(prior="fixed")
    ends = [fb.fit(linear(), alike(6), method=method, cohort=cohort, rounds=0).personal(0) for cohort in (6, 2, 1)]
    for other in ends[1:]:
        torch.testing.assert_close(other.parts["model"].covariance, ends[0].parts["model"].covariance)
        torch.testing.assert_close(other.parts["model"].mean, ends[0].parts["model"].mean)


def test_a_personal_model_is_under_the_prior_that_the_evidence_chose():
    def end(**options):
        torch.manual_seed(0)
        return fb.fit(nn.Linear(2, 2, bias=False), alike(6), method=fb.methods.laplace(**options), rounds=12)

    chosen = end()
    precision = chosen.journal[-1]["prior_precision.weight"]
    assert not 0.9 < precision < 1.1
    fixed = end(prior="fixed", prior_scale=precision**-0.5)
    ours, theirs = (run.personal(0).parts["model"].covariance for run in (chosen, fixed))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=1e-3)


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def network(columns, hidden):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(columns, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()
