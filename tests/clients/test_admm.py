"""Bayesian ADMM on conjugate models, where the posterior of all rows is known; PVI is one of its settings."""

from typing import Any, NamedTuple

import pytest
import torch
from test_partitioned import SCALE, exclusive, pooled, shared, sites
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.clients.anchored import root_noise
from fedbayes.clients.client import Client, Phase, Upload
from fedbayes.clients.partitioned import partitioned
from fedbayes.clients.variational import TILT
from fedbayes.data import from_clients
from fedbayes.errors import InputError
from fedbayes.methods import Composed
from fedbayes.model.curvature import of_outputs
from fedbayes.model.likelihood import LIKELIHOODS, normal
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds as every_round
from fedbayes.training.run import Memory


class Exact(NamedTuple):
    mean: Tensor
    scale: Tensor


def solver(layout: Any, noise: float) -> Client:
    """Finds the minimum of E_q[rows * loss] / kl_weight + KL to the tilted broadcast in closed form, in one step."""

    def start(own: Any, info: Any) -> Exact:
        q = info.broadcast["model"]
        return Exact(q.mean, q.scale)

    def step(state: Exact, b: Any, tape: Any, info: Any) -> Exact:
        q, tilt, sharp = info.broadcast["model"], info.constants[TILT], 1 / (noise**2 * info.options["kl_weight"])
        live = torch.ones(len(b.x)) if b.mask is None else b.mask
        x = b.x.double() * live[:, None]
        broad, curved = q.scale.double() ** -2, sharp * x.T @ x
        own = broad - tilt.held.double()
        slope = own * q.mean - tilt.pull + sharp * x.T @ b.y[:, 0].double()
        mean = torch.linalg.solve(torch.diag(own) + curved, slope)
        precision = broad - tilt.precision.double() + curved.diagonal()
        return Exact(mean.float(), precision.rsqrt().float())

    def finish(state: Exact, info: Any) -> Upload:
        return Upload({"model": Gaussian(state.mean, state.scale, layout)}, {}, {})

    return Client(start, (Phase(step, 1, 40),), finish)


def trained(
    pairs: Any, noise: float, rounds: int, *, task: dict[str, Any] | None = None, seen: Any = None, **options: Any
) -> Any:
    """The posterior after some rounds with exact clients, and the last record; sites agree with the server's sum.

    `seen` is called with the number of a round and its posterior.
    """
    base = fb.methods.bayes_admm(epochs=1, batch=40, prior_scale=1.0, **options)

    def build(setting: Any) -> Any:
        program = base.build(setting)
        return program._replace(client=partitioned(solver(program.initial["model"].layout, noise), tilts=True))

    network = nn.Linear(pairs[0][0].shape[1], 1, bias=False)
    made = prepare(
        network, from_clients(pairs, kind="real"), method=Composed(program=build), rounds=rounds,
        likelihood=normal(noise), evaluate_every=rounds, **(task or {}),
    )  # fmt: skip
    own = Memory()
    for progress, record in every_round(made, made.begin(), own):
        if seen is not None:
            seen(record["round"], progress.state.broadcast["model"])
    for name, total in progress.state.stages["sites"].items():
        kept = sum(site[name] for site in own.rows.values())
        torch.testing.assert_close(kept, total, rtol=1e-7, atol=1e-7 * float(total.abs().max()))
    return progress.state.broadcast["model"], record


TASKS: tuple[dict[str, Any], ...] = ({}, {"cohort": 2}, {"dropout": 0.4})
CASES = [(*case, task) for case in ((shared, 0.1, 1.0), (exclusive, 0.3, 0.5), (sites, 1.0, 0.5)) for task in TASKS]


@pytest.mark.parametrize(("who", "rho", "gamma", "task"), [*CASES, (exclusive, 10.0, 1.0, {"dropout": 0.2})])
def test_the_posterior_of_all_rows_is_reached(who: Any, rho: float, gamma: float, task: dict[str, Any]) -> None:
    pairs, noise = (sites(), SCALE) if who is sites else who(0.1)
    rounds = {0.1: 20, 0.3: 45, 1.0: 45, 10.0: 170}[rho]
    q, _ = trained(pairs, noise, rounds, task=task, rho=rho, gamma=gamma)
    mean, scale = pooled(pairs, noise)
    torch.testing.assert_close((q.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.02)
    torch.testing.assert_close(q.scale.double(), scale, rtol=5e-3, atol=0)


def correlated(correlation: float = 0.5, *, unlike: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Four clients whose five features are correlated; `unlike`: each has other rows of them, and other widths."""
    random, pairs = torch.Generator().manual_seed(3), []
    for k in range(4):
        rows = 5 * 2**k if unlike else 40
        own, common = torch.randn(rows, 5, generator=random), torch.randn(rows, 1, generator=random)
        width = 2 * torch.rand(5, generator=random) if unlike else 2**0.5
        x = width * ((1 - correlation) ** 0.5 * own + correlation**0.5 * common)
        pairs.append((x, x @ torch.linspace(-1, 1, 5)[:, None] + torch.randn(rows, 1, generator=random)))
    return pairs


@pytest.mark.parametrize(
    ("rho", "gamma", "dropout"), [(0.1, 0.5, 0.0), (0.1, 1.0, 0.3), (0.3, 0.2, 0.0), (0.5, 1.0, 0.3), (1.0, 1.0, 0.0)]
)
def test_correlated_features_do_not_throw_it_off(rho: float, gamma: float, dropout: float) -> None:
    """With rho < 1 the likelihood holds scales; means that it held alone would leave along what is hardly known."""
    pairs = correlated()
    q, _ = trained(pairs, 1.0, 80, task={"dropout": dropout}, rho=rho, gamma=gamma)
    mean, scale = pooled(pairs, 1.0)
    torch.testing.assert_close((q.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.05)
    torch.testing.assert_close(q.scale.double(), scale, rtol=5e-3, atol=0)


@pytest.mark.parametrize("unlike", [False, True], ids=["alike", "unlike"])
@pytest.mark.parametrize(
    ("rho", "gamma", "rounds", "task"),
    [
        (0.1, 0.2, 250, {}),
        (0.1, 1.0, 150, {"dropout": 0.3}),
        (0.3, 0.05, 250, {}),
        (0.3, 0.2, 150, {"cohort": 2}),
        (1.0, 0.05, 250, {}),
    ],
)
def test_high_correlations_do_not_throw_off_sites_that_follow_slowly(
    rho: float, gamma: float, rounds: int, task: dict[str, Any], unlike: bool
) -> None:
    """The server goes ahead of them by what clients found, and carries them along; else it left for good."""
    pairs = correlated(0.9, unlike=unlike)
    q, _ = trained(pairs, 1.0, rounds, task=task, rho=rho, gamma=gamma)
    mean, scale = pooled(pairs, 1.0)
    torch.testing.assert_close((q.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.1)
    torch.testing.assert_close(q.scale.double(), scale, rtol=5e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("unlike", [False, True], ids=["alike", "unlike"])
@pytest.mark.parametrize("task", TASKS, ids=["all", "cohort", "drop-outs"])
@pytest.mark.parametrize("gamma", [0.05, 1.0])
@pytest.mark.parametrize(("rho", "rounds"), [(0.1, 1000), (0.3, 600), (1.0, 600), (3.0, 1200), (10.0, 4000)])
def test_any_setting_arrives_where_correlations_are_high(
    rho: float, rounds: int, gamma: float, task: dict[str, Any], unlike: bool
) -> None:
    """And stays: fifty rounds on end are as near to the posterior of all rows as those of the tests above."""
    pairs = correlated(0.9, unlike=unlike)
    mean, scale = pooled(pairs, 1.0)
    near = 0

    class Arrived(Exception):
        pass

    def seen(number: int, q: Any) -> None:
        nonlocal near
        off, wide = (q.mean.double() - mean) / scale, q.scale.double() / scale - 1
        near = near + 1 if off.abs().max() < 0.1 and wide.abs().max() < 5e-3 else 0
        if near == 50:
            raise Arrived

    with pytest.raises(Arrived):
        trained(pairs, 1.0, rounds, task=task, seen=seen, rho=rho, gamma=gamma)


@pytest.mark.parametrize("gamma", [0.05, 1.0])
@pytest.mark.parametrize("alpha", [None, 1.0], ids=["mixed", "product"])
@pytest.mark.parametrize("rho", [0.1, 1.0, 10.0])
def test_no_setting_leaves_for_good_where_clients_are_unlike(rho: float, gamma: float, alpha: float | None) -> None:
    """After many rounds means are no further away than before. Where they left, they doubled in as many, or more."""
    away = distances(rho=rho, gamma=gamma, alpha=alpha)
    assert away[120] < 0.02 + away[60], away


@pytest.mark.parametrize("rho", [0.45, 0.7])
def test_sites_that_are_known_do_not_overshoot_under_the_product(rho: float) -> None:
    """With alpha = gamma = 1 and rho < 1, changes were of up to clients * rho times the precision that held a mean."""
    random, pairs = torch.Generator().manual_seed(1), []
    for _ in range(8):
        x = 0.03**0.5 * torch.randn(40, 2, generator=random) + 0.97**0.5 * torch.randn(40, 1, generator=random)
        pairs.append((x, x.sum(1, keepdim=True) + torch.randn(40, 1, generator=random)))
    q, _ = trained(pairs, 1.0, 40, rho=rho, gamma=1.0, alpha=1.0)
    mean, scale = pooled(pairs, 1.0)
    torch.testing.assert_close((q.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.05)


@pytest.mark.parametrize("rho", [0.1, 0.3])
def test_the_server_does_not_follow_whoever_came(rho: float) -> None:
    """With a small alpha it is about the mean of clients: that of one who came alone would be all that it has."""
    away = distances(task={"dropout": 0.4}, rho=rho, gamma=1.0, alpha=0.05)
    assert away[120] < 0.02 + away[60], away


def distances(**options: Any) -> dict[int, float]:
    """How far means are from those of all rows after each of 120 rounds, in scales."""
    pairs = correlated(0.97, unlike=True)
    mean, scale = pooled(pairs, 1.0)
    away = {}

    def seen(number: int, q: Gaussian) -> None:
        away[number] = float(((q.mean.double() - mean) / scale).abs().max())

    trained(pairs, 1.0, 120, seen=seen, **options)
    return away


@pytest.mark.parametrize("rho", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("who", [exclusive, shared])
def test_quadratics_of_which_all_is_known_take_one_round(who: Any, rho: float) -> None:
    """Their curvatures share axes, so that a diagonal is a full covariance. The server takes the product of sites."""
    pairs, noise = who(0.1)
    q, record = trained(pairs, noise, 1, rho=rho, gamma=1.0, alpha=1.0)
    mean, scale = pooled(pairs, noise)
    torch.testing.assert_close(q.mean.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.scale.double(), scale, rtol=1e-4, atol=0)
    assert record["sites_apart"] < 1e-6


@pytest.mark.parametrize("unlike", [False, True], ids=["alike", "unlike"])
def test_a_full_covariance_takes_one_round_whatever_the_axes(unlike: bool) -> None:
    """`laplace` is the same recursion with rho = alpha = gamma = 1 and whole matrices, of which nothing is missing."""
    pairs = correlated(0.97, unlike=unlike)
    run = fit(
        nn.Linear(5, 1, bias=False), from_clients(pairs, kind="real"), likelihood=normal(1.0), rounds=1,
        method=fb.methods.laplace(prior="fixed", prior_scale=1.0),
    )  # fmt: skip
    x, y = (torch.cat(rows).double() for rows in zip(*pairs))
    covariance = torch.linalg.inv(x.T @ x + torch.eye(5))
    q = run.posterior
    torch.testing.assert_close(q.mean.double(), (covariance @ x.T @ y)[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(q.covariance.double(), covariance, rtol=0, atol=1e-5)


def test_a_temperature_makes_rows_count_more() -> None:
    pairs = sites()
    q, _ = trained(pairs, SCALE, 60, rho=0.5, gamma=1.0, temperature=0.25)
    mean, scale = pooled(pairs, SCALE / 2)
    torch.testing.assert_close((q.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.02)
    torch.testing.assert_close(q.scale.double(), scale, rtol=2e-3, atol=0)


def test_pvi_is_one_setting_of_it() -> None:
    runs = []
    common = {"epochs": 2, "batch": 20, "optimiser": "ivon"}
    for method in (
        fb.methods.pvi(damping=0.4, **common),
        fb.methods.bayes_admm(gamma=0.4, rho=1.0, alpha=1.0, temperature=1.0, **common),
    ):
        torch.manual_seed(0)
        runs.append(fit(nn.Linear(2, 1), from_clients(sites(), kind="real"), method=method, rounds=4, cohort=2))
    one, other = (run.posterior for run in runs)
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one.scale, other.scale, rtol=1e-4, atol=0)


def test_the_journal_has_residuals_and_the_distance_of_clients() -> None:
    method = fb.methods.bayes_admm(epochs=1, batch=20, gamma=0.5)
    run = fit(nn.Linear(2, 1), from_clients(sites(), kind="real"), method=method, rounds=2)
    for record in run.journal:
        assert {"kl", "negative_curvature", "primal_residual"} <= record["train"].keys()
        assert record["dual_residual"] > 0
        assert record["sites_apart"] > 0


def test_by_default_the_mean_of_clients_is_the_product_of_their_sites() -> None:
    run = fit(nn.Linear(2, 1), from_clients(sites(), kind="real"), method="bayes_admm", rounds=3)
    assert max(record["sites_apart"] for record in run.journal) < 1e-5
    assert all(record["floored"] == 0 for record in run.journal)


def test_what_it_is_can_not_be_chosen() -> None:
    with pytest.raises(InputError, match="kl_weight is fixed in bayes_admm"):
        fb.methods.bayes_admm(kl_weight=0.5)
    with pytest.raises(InputError, match="alpha"):
        fb.methods.bayes_admm(alpha=0.0)
    with pytest.raises(InputError, match="rho"):
        fb.methods.bayes_admm(rho=0.0)


def test_laplace_finds_the_curvature_of_least_squares() -> None:
    """One client: the posterior of its rows under the prior, but for the noise of projections."""
    pairs = sites((40,))
    method = fb.methods.fedlap_cov(prior_scale=1.0, rho=1.0, gamma=1.0, alpha=1.0, epochs=30, batch=40, lr=0.1, probe=1)
    run = fit(
        nn.Linear(2, 1, bias=False), from_clients(pairs, kind="real"), method=method, rounds=4,
        likelihood=normal(SCALE), evaluate_every=4,
    )  # fmt: skip
    mean, scale = pooled(pairs)
    torch.testing.assert_close((run.posterior.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.1)
    torch.testing.assert_close(run.posterior.scale.double(), scale, rtol=0.4, atol=0)


@pytest.mark.parametrize("kind", ["classes", "labels", "real"])
def test_noise_has_the_covariance_of_the_curvature(kind: str) -> None:
    likelihood = normal(0.5) if kind == "real" else LIKELIHOODS[kind]()
    output = torch.tensor([[0.3, -1.0, 0.8]], dtype=torch.float64)
    draws = torch.randn(40000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    thrown = root_noise(likelihood, output.expand(40000, 3), {}, Tape(draws.flatten()))
    want = of_outputs(likelihood, output, {})[0]
    torch.testing.assert_close(thrown.T @ thrown / 40000, want, rtol=0, atol=0.02 * float(want.abs().max()))
