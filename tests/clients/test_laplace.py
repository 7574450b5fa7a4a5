"""Laplace's approximation against laplace-torch, exact Bayesian linear regression, and at its edges."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.func import hessian

from fedbayes import pool
from fedbayes.clients.laplace import CLASSIFIER, Laplace, with_laplace
from fedbayes.data import from_clients
from fedbayes.methods import fedavg
from fedbayes.model import curvature
from fedbayes.model.classifier import group_of
from fedbayes.model.likelihood import bernoulli, categorical, mean_variance, normal
from fedbayes.model.model import Model
from fedbayes.posterior.full import FullGaussian
from fedbayes.posterior.values import Gaussian

ORACLE = dict(np.load(Path(__file__).with_name("laplace_oracle.npz")))
STRUCTURES = ("diag", "kron", "full")


def _network() -> nn.Sequential:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    network.load_state_dict({n.removeprefix("network."): torch.tensor(v) for n, v in ORACLE.items() if "network" in n})
    return network


def _fixed(structure: str, patterns=("head",), batch: int = 40):
    """Group, sums over the oracle's rows in batches, and the log-likelihood."""
    network = _network()
    model = Model.of(network, categorical())
    x, y = torch.tensor(ORACLE["x"]), torch.tensor(ORACLE["y"])
    group = group_of(model, network, patterns, x[:1])
    vectors = model.initial()
    sums, fit = curvature.zeros(group, structure, vectors["model"]), torch.zeros(()).double()
    for a, b in zip(x.split(batch), y.split(batch), strict=True):
        terms, out = curvature.terms(group, structure, group.of(vectors), group.look(vectors, a), vectors, None)
        sums = {name: t + terms[name] for name, t in sums.items()}
        fit = fit + model.likelihood.log_prob(out, b, {}).sum()
    return group, sums, fit, group.of(vectors)


@pytest.mark.parametrize("batch", [40, 7])
@pytest.mark.parametrize("structure", ["diag", "full"])
def test_the_gauss_newton_matrix_equals_laplace_torchs(structure, batch):
    group, sums, _, _ = _fixed(structure, batch=batch)
    assert group.linear
    np.testing.assert_allclose(curvature.matrix(group, sums).numpy(), ORACLE[f"ggn.{structure}"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_variances_and_evidence_equal_laplace_torchs(structure):
    group, sums, fit, mean = _fixed(structure)
    q = curvature.posterior(group, sums, mean, torch.tensor(2.0))
    np.testing.assert_allclose(q.moments()[1].numpy(), ORACLE[f"variance.{structure}"], rtol=1e-7)
    values = curvature.eigenvalues(group, sums)
    for precision in (0.5, 7.0):
        ours = curvature.log_evidence(fit, values, torch.tensor(precision).double(), mean.square().sum())
        assert float(ours) == pytest.approx(float(ORACLE[f"evidence.{structure}.{precision}"]), rel=1e-7)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_fitted_precision_has_the_highest_evidence(structure):
    group, sums, fit, mean = _fixed(structure)
    values, distance = curvature.eigenvalues(group, sums), mean.square().sum()
    best = minimize_scalar(
        lambda t: -float(curvature.log_evidence(fit, values, torch.tensor(np.exp(t)), distance)),
        bounds=(-4, 10),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert float(curvature.fitted_precision(values, distance)) == pytest.approx(np.exp(best.x), rel=1e-4)


@pytest.mark.parametrize("structure", ["diag", "full"])
def test_jacobians_of_the_inputs_give_the_same_as_cached_features(structure):
    group, sums, _, _ = _fixed(structure)
    whole, all_sums, _, _ = _fixed(structure, patterns=("*",))
    assert not whole.linear
    mine, everything = curvature.matrix(group, sums), curvature.matrix(whole, all_sums)
    part = everything[group.places] if structure == "diag" else everything[group.places][:, group.places]
    torch.testing.assert_close(mine, part, rtol=1e-10, atol=1e-12)


LIKELIHOODS = {
    "classes": (categorical(), torch.tensor(1)),
    "labels": (bernoulli(), torch.tensor([1.0, 0.0, 1.0]).double()),
    "normal": (normal(0.3), torch.tensor([0.2, -1.0, 3.0]).double()),
    "learned": (normal(0.5, learn=True), torch.tensor([0.2, -1.0, 3.0]).double()),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_curvature_in_the_outputs_is_autograds_hessian(name):
    likelihood, target = LIKELIHOODS[name]
    own = {f"likelihood.{n}": v.double() for n, v in likelihood.parameters.items()}
    output = torch.tensor([0.3, -1.2, 2.0]).double()
    exact = hessian(lambda f: -likelihood.log_prob(f[None], target[None], own)[0])(output)
    torch.testing.assert_close(curvature.of_outputs(likelihood, output[None], own)[0], exact, rtol=1e-9, atol=1e-12)


def test_a_linear_gaussian_model_gives_the_exact_posterior():
    g = torch.Generator().manual_seed(0)
    x, scale = torch.randn(30, 3, generator=g).double(), 0.4
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.7 + scale * torch.randn(30, generator=g).double()
    network = nn.Linear(3, 1).double()
    model = Model.of(network, normal(scale))
    group = group_of(model, network, ("head",), x[:1])
    rows = torch.cat([x, torch.ones(30, 1).double()], 1)
    precision = rows.T @ rows / scale**2 + 2.5 * torch.eye(4).double()
    mean = torch.linalg.solve(precision, rows.T @ y / scale**2)  # the mode is the mean
    vectors = {"model": mean}
    terms, _ = curvature.terms(group, "full", mean, group.look(vectors, x), vectors, None)
    q = curvature.posterior(group, terms, mean, torch.tensor(2.5))
    torch.testing.assert_close(q.covariance, torch.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    # A prior with a covariance of its own: that of the first half of the rows.
    first, second = (rows[a : a + 15] for a in (0, 15))
    before = torch.linalg.inv(first.T @ first / scale**2 + 2.5 * torch.eye(4).double())
    terms, _ = curvature.terms(group, "full", mean, second[:, :3], vectors, None)
    after = curvature.posterior(group, terms, mean, FullGaussian.from_covariance(mean, before))
    torch.testing.assert_close(after.covariance, q.covariance, rtol=1e-6, atol=1e-9)


def test_the_evidence_of_a_linear_gaussian_model_is_exact():
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 2, generator=g).double(), torch.randn(20, generator=g).double()
    precision = torch.tensor(1.7, dtype=torch.float64)
    marginal = torch.distributions.MultivariateNormal(torch.zeros(20).double(), torch.eye(20).double() + x @ x.T / 1.7)
    mean = torch.linalg.solve(x.T @ x + precision * torch.eye(2).double(), x.T @ y)
    fit = torch.distributions.Normal(x @ mean, 1.0).log_prob(y).sum()
    values = torch.linalg.eigvalsh(x.T @ x)
    ours = curvature.log_evidence(fit, values, precision, mean.square().sum())
    assert float(ours) == pytest.approx(float(marginal.log_prob(y)), rel=1e-10)


# The curvature of classes does not depend on the labels: a client with one class is one whose network is sure of it.
EDGES = {
    "one class": 1e3 * torch.ones(9, 4),
    "fewer rows than classes": torch.randn(2, 4),
    "one row": torch.randn(1, 4),
    "features that never fire": torch.zeros(6, 4),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("seed", [0, 13])
def test_a_singular_matrix_is_held_by_the_prior(structure, edge, seed):
    """Directions that the data say nothing of keep the prior's variance; nothing is infinite."""
    torch.manual_seed(seed)
    x = EDGES[edge]
    network = nn.Linear(4, 3)
    model = Model.of(network, categorical())
    group, vectors = group_of(model, network, ("head",), x[:1]), model.initial()
    sums, _ = curvature.terms(group, structure, group.of(vectors), group.look(vectors, x), vectors, None)
    if structure != "diag":
        assert float(curvature.eigenvalues(group, sums).min()) < 1e-6
    precision = curvature.fitted_precision(
        curvature.eigenvalues(group, sums), group.of(vectors).double().square().sum()
    )
    assert 1e-2 <= float(precision) <= 1e6
    q = curvature.posterior(group, sums, group.of(vectors), precision)
    variance = q.moments()[1]
    assert torch.isfinite(variance).all()
    assert (variance > 0).all()
    assert (variance <= 1.001 / precision).all()
    if edge == "features that never fire":
        torch.testing.assert_close(variance[:12].double(), (1 / precision).expand(12), rtol=1e-5, atol=0)


def test_data_that_say_nothing_take_the_least_precision_and_weights_at_zero_the_largest():
    zero = torch.zeros(5).double()
    assert float(curvature.fitted_precision(zero, torch.tensor(3.0).double())) == pytest.approx(1e-2, rel=1e-6)
    assert float(curvature.fitted_precision(zero + 1, torch.tensor(0.0).double())) == pytest.approx(1e6, rel=1e-6)


def _sites():
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)) for n in (11, 5, 8)]
    return from_clients(pairs, pairs[0], classes=3)


def _method(structure: str, prior: str = "evidence"):
    """FedAvg whose clients also send their classifier's posterior each round."""
    from fedbayes.clients.laplace import standard
    from fedbayes.federation.rules import RULES
    from fedbayes.methods import Composed

    base = fedavg(batch=4, epochs=2)

    def build(setting):
        program = base.build(setting)
        group = group_of(program.model, setting.network, ("head",), setting.x)
        laplace = Laplace(group, structure, prior, batch=3)
        first = standard(group, structure, program.initial["model"].mean)
        rule = RULES["lp" if structure == "diag" else "moment_matching"]
        return program._replace(
            client=with_laplace(program.client, program.client.finish, laplace),
            initial={**program.initial, CLASSIFIER: first},
            pooling=program.pooling._replace(rules={**program.pooling.rules, CLASSIFIER: rule}),
        )

    return Composed(program=build)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_posteriors_of_a_round_are_pooled_about_the_averaged_network(structure):
    import fedbayes as fb

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    runs = [
        fb.fit(network, _sites(), method=_method(structure), rounds=1, engine=engine, seed=1)
        for engine in ("loop", "stacked")
    ]
    plain = fb.fit(network, _sites(), method=fedavg(batch=4, epochs=2), rounds=1, engine="loop", seed=1)
    q, other = (run.progress.state.broadcast[CLASSIFIER] for run in runs)
    assert "notes" not in runs[1].journal[0]
    torch.testing.assert_close(q.mean, other.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.moments()[1], other.moments()[1], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(q.mean, plain.posterior.mean[-21:], rtol=1e-9, atol=1e-9)
    # What each client sent, and the pool of it.
    task = runs[0].task
    order = task.orders(task.begin())[-1]
    sent = [task.engine.client(task.program, order, k, None)[0].parts for k in range(3)]
    pooled = pool(
        task.program.pooling.rules[CLASSIFIER],
        [s[CLASSIFIER] for s in sent],
        [11.0, 5.0, 8.0],
        order.broadcast[CLASSIFIER],
    )
    torch.testing.assert_close(pooled.moments()[1], q.moments()[1], rtol=1e-8, atol=1e-9)
    own = nn.Sequential(*network)
    nn.utils.vector_to_parameters(sent[1]["model"].mean, own.parameters())
    x = task.clients.data.x[task.clients.train_rows(1)].double()
    probs = own(x).softmax(-1)
    exact = ((probs - probs**2).T @ own[:2](x) ** 2).flatten()
    if structure == "diag":
        bare = sent[1][CLASSIFIER].scale[:18] ** -2 - exact
        torch.testing.assert_close(bare, bare[:1].expand(18), rtol=1e-6, atol=1e-9)  # the prior's precision


def test_a_broadcast_prior_adds_its_precision():
    network = nn.Linear(4, 3).double()
    model = Model.of(network, categorical())
    x = torch.randn(6, 4).double()
    group, vectors = group_of(model, network, ("head",), x[:1]), model.initial()
    sums, _ = curvature.terms(group, "diag", group.of(vectors), x, vectors, None)
    prior = Gaussian(torch.zeros(15).double(), torch.linspace(0.1, 2, 15).double())
    q = curvature.posterior(group, sums, group.of(vectors), prior)
    torch.testing.assert_close(q.scale**-2, sums["diag"] + prior.scale**-2)


def test_a_diverged_client_is_left_out_and_not_an_error():
    import fedbayes as fb

    sites = _sites()
    sites.data.x[sites.train_rows(1)] = 1e30
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    for engine in ("loop", "stacked"):
        run = fb.fit(network, sites, method=_method("kron"), rounds=1, engine=engine)
        assert list(run.journal[0]["left_out"]) == ["1"]
        assert torch.isfinite(run.progress.state.broadcast[CLASSIFIER].tril).all()


def test_what_has_no_such_curvature_is_refused():
    network = nn.Linear(4, 2)
    for likelihood in (mean_variance(),):
        model = Model.of(network, likelihood)
        with pytest.raises(ValueError, match="curvature"):
            curvature.check_curvature(group_of(model, network, ("head",), torch.zeros(1, 4)), "full")
    deep = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model = Model.of(deep, categorical())
    with pytest.raises(ValueError, match="kron"):
        curvature.check_curvature(group_of(model, deep, ("0.*",), torch.zeros(1, 4)), "kron")
    with pytest.raises(ValueError, match="classifier"):
        group_of(model, deep, ("nothing.*",), torch.zeros(1, 4))
