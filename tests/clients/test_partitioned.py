"""Partitioned variational inference on a conjugate model, where the mean-field posterior is known."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.clients.client import Client, Phase, Upload
from fedbayes.clients.partitioned import partitioned
from fedbayes.data import from_clients
from fedbayes.errors import InputError
from fedbayes.methods import Composed
from fedbayes.model.likelihood import normal
from fedbayes.posterior.values import Gaussian, softplus_inverse
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds as every_round
from fedbayes.training.run import Memory

SCALE = 0.5


def sites(sizes=(20, 30, 40)):
    random = torch.Generator().manual_seed(1)
    pairs = []
    for n in sizes:
        x = torch.randn(n, 2, generator=random)
        pairs.append((x, x @ torch.tensor([[1.0], [-0.5]]) + SCALE * torch.randn(n, 1, generator=random)))
    return pairs


def pooled(pairs, noise=SCALE):
    """The mean-field posterior under N(0, 1): the exact mean, and the diagonal of the exact precision."""
    x, y = (torch.cat(t).double() for t in zip(*pairs))
    precision = torch.eye(x.shape[1], dtype=torch.float64) + x.T @ x / noise**2
    return torch.linalg.solve(precision, x.T @ y[:, 0] / noise**2), precision.diagonal().rsqrt()


class Exact(NamedTuple):
    vectors: dict[str, Tensor]


def solver(layout, noise=SCALE) -> Client:
    """A client that finds the mean-field posterior of its rows in closed form, in one step on all of them."""

    def start(own, info):
        q = info.broadcast["model"]
        return Exact({"mean": q.mean, "rho": softplus_inverse(q.scale)})

    def step(state, b, tape, info):
        prior = info.broadcast["model"]
        live = torch.ones(len(b.x)) if b.mask is None else b.mask
        x = b.x.double() * live[:, None]
        own = prior.scale.double().square().reciprocal()
        precision = torch.diag(own) + x.T @ x / noise**2
        mean = torch.linalg.solve(precision, own * prior.mean + x.T @ b.y[:, 0].double() / noise**2)
        return Exact({"mean": mean.float(), "rho": softplus_inverse(precision.diagonal().rsqrt()).float()})

    def finish(state, info):
        v = state.vectors
        return Upload({"model": Gaussian(v["mean"], nn.functional.softplus(v["rho"]), layout)}, {}, {})

    return Client(start, (Phase(step, 1, 40),), finish)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_few_rounds_reach_the_pooled_posterior(engine):
    pairs = sites()
    q = trained(pairs, solver, rounds=20, engine=engine)
    mean, scale = pooled(pairs)
    torch.testing.assert_close(q.mean.double(), mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(q.scale.double(), scale, rtol=1e-3, atol=0)


def single(width: float, features: int = 1):
    """One client, whose posterior has scales `width`; and the noise under which it has."""
    return _plain([(features, range(features))], width)


def exclusive(width: float):
    """Three clients, each the only one that knows anything of its feature."""
    return _plain([(3, [k]) for k in range(3)], width)


def shared(width: float):
    """Four clients, each with all three features."""
    return _plain([(3, range(3))] * 4, width)


def _plain(clients, width: float, rows: int = 8):
    random = torch.Generator().manual_seed(2)
    counts = sum(len(list(known)) for _, known in clients) / clients[0][0] * rows
    noise = width * counts**0.5
    pairs = []
    for features, known in clients:
        x = torch.eye(features)[list(known)].repeat(rows, 1)
        wanted = torch.linspace(0.4, 1.3, features)
        pairs.append((x, (x @ wanted)[:, None] + noise * torch.randn(len(x), 1, generator=random)))
    return pairs, noise


@pytest.mark.parametrize(
    ("width", "options"), [(0.01, {}), (0.001, {}), (0.001, {"cohort": 1}), (0.001, {"dropout": 0.4})], ids=str
)
@pytest.mark.parametrize("damping", [0.5, 1.0])
@pytest.mark.parametrize("who", [single, exclusive, shared])
def test_narrow_posteriors_are_reached_exactly(who, width, damping, options):
    """Under N(0, 1). A floor at a thousandth of the posterior's precision left the mean 6 scales off for good."""
    pairs, noise = who(width)
    rounds = 30 if not options else 90
    q = trained(
        pairs, lambda layout: solver(layout, noise), rounds=rounds, damping=damping, likelihood=noise, **options
    )
    mean, scale = pooled(pairs, noise)
    torch.testing.assert_close((q.mean.double() - mean) / scale, torch.zeros_like(mean), rtol=0, atol=0.01)
    torch.testing.assert_close(q.scale.double(), scale, rtol=1e-4, atol=0)


def wild(layout) -> Client:
    """A client that finds anything: up to a thousand times as wide or narrow as its prior, and anywhere."""

    def start(own, info):
        q = info.broadcast["model"]
        return Exact({"mean": q.mean, "rho": softplus_inverse(q.scale)})

    def step(state, b, tape, info):
        prior = info.broadcast["model"]
        scale = (prior.scale * torch.exp(3.5 * tape(prior.scale).clamp(-2, 2))).clamp(1e-4, 1e3)
        return Exact({"mean": tape(prior.mean), "rho": softplus_inverse(scale)})

    def finish(state, info):
        v = state.vectors
        return Upload({"model": Gaussian(v["mean"], nn.functional.softplus(v["rho"]), layout)}, {}, {})

    return Client(start, (Phase(step, 1, 40),), finish)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("options", [{}, {"cohort": 1}, {"cohort": 2}, {"dropout": 0.4}], ids=str)
@pytest.mark.parametrize("damping", [0.5, 1.0])
@pytest.mark.parametrize("inner", [solver, wild], ids=["conjugate", "wild"])
def test_the_posterior_is_the_prior_times_all_factors_after_every_round(inner, damping, options, engine):
    """Also where clients disagree so much that the precision would turn negative: `trained` looks each round."""
    trained(sites((20, 30, 40)), inner, rounds=12, engine=engine, damping=damping, **options)


def trained(pairs, inner, *, rounds, damping=0.5, likelihood=SCALE, **options):
    """The posterior after some rounds of pvi with another client inside; factors and posterior agree in each."""
    base = fb.methods.pvi(damping=damping, epochs=1, batch=40, prior_scale=1.0)

    def build(setting):
        program = base.build(setting)
        first = program.initial["model"]
        return program._replace(client=partitioned(inner(first.layout)), constants={"first": first})

    network = nn.Linear(pairs[0][0].shape[1], 1, bias=False)
    task = prepare(
        network, from_clients(pairs, kind="real"), method=Composed(program=build), rounds=rounds,
        likelihood=normal(likelihood), **options,
    )  # fmt: skip
    own, most = Memory(), torch.zeros(2, 1, dtype=torch.float64)
    for progress, record in every_round(task, task.begin(), own):
        assert not record["left_out"]
        assert record.get("floored", 0) == 0
        q = progress.state.broadcast["model"]
        shift, precision = Gaussian(q.mean.double(), q.scale.double()).naturals()
        most = torch.maximum(most, torch.stack([precision, shift.abs()]))
        factors = sum(torch.stack([f["precision"], f["shift"]]) for f in own.rows.values())
        gaps = factors + torch.stack([1 - precision, -shift])
        # To float32's rounding, round by round, of the largest that they have been.
        assert (gaps.abs() <= 1e-5 * most).all(), gaps / most
    return q


def test_the_method_itself_comes_near_by_gradient_steps():
    pairs = sites()
    method = fb.methods.pvi(damping=0.4, epochs=60, batch=40, lr=0.03, optimiser="adam", train_draws=2, prior_scale=1.0)
    run = fit(
        nn.Linear(2, 1, bias=False), from_clients(pairs, kind="real"), method=method, rounds=8, likelihood=normal(SCALE)
    )
    mean, scale = pooled(pairs)
    torch.testing.assert_close(run.posterior.mean.double(), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(run.posterior.scale.double(), scale, rtol=0.15, atol=0)


def test_what_pvi_is_can_not_be_chosen():
    with pytest.raises(InputError, match="rule is fixed"):
        fb.methods.pvi(rule="nwa")
    with pytest.raises(InputError, match="server"):
        fb.methods.pvi(server="adam")
    with pytest.raises(InputError, match="damping"):
        fb.methods.pvi(damping=0.0)
    with pytest.raises(InputError, match="dampening"):
        fb.methods.method_named("pvi", {"dampening": 0.5})
