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
from fedbayes.methods import Method
from fedbayes.model import normal
from fedbayes.posterior import Gaussian, softplus_inverse
from fedbayes.training import Memory, fit, prepare, rounds

SCALE = 0.5


def sites(sizes=(20, 30, 40)):
    random = torch.Generator().manual_seed(1)
    pairs = []
    for n in sizes:
        x = torch.randn(n, 2, generator=random)
        pairs.append((x, x @ torch.tensor([[1.0], [-0.5]]) + SCALE * torch.randn(n, 1, generator=random)))
    return pairs


def pooled(pairs):
    """The mean-field posterior under N(0, 1): the exact mean, and the diagonal of the exact precision."""
    x, y = (torch.cat(t).double() for t in zip(*pairs))
    precision = torch.eye(2, dtype=torch.float64) + x.T @ x / SCALE**2
    return torch.linalg.solve(precision, x.T @ y[:, 0] / SCALE**2), precision.diagonal().rsqrt()


class Exact(NamedTuple):
    vectors: dict[str, Tensor]


def solver(layout) -> Client:
    """A client that finds the mean-field posterior of its rows in closed form, in one step on all of them."""

    def start(own, info):
        q = info.broadcast["model"]
        return Exact({"mean": q.mean, "rho": softplus_inverse(q.scale)})

    def step(state, b, tape, info):
        prior = info.broadcast["model"]
        live = torch.ones(len(b.x)) if b.mask is None else b.mask.float()
        x = b.x * live[:, None]
        own = prior.scale.square().reciprocal()
        precision = torch.diag(own) + x.T @ x / SCALE**2
        mean = torch.linalg.solve(precision, own * prior.mean + x.T @ b.y[:, 0] / SCALE**2)
        return Exact({"mean": mean, "rho": softplus_inverse(precision.diagonal().rsqrt())})

    def finish(state, info):
        v = state.vectors
        return Upload({"model": Gaussian(v["mean"], nn.functional.softplus(v["rho"]), layout)}, {}, {})

    return Client(start, (Phase(step, 1, 40),), finish)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_few_rounds_reach_the_pooled_posterior(engine):
    pairs = sites()
    base = fb.methods.pvi(damping=0.5, epochs=1, batch=40)

    def build(setting):
        program = base.build(setting)
        first = program.initial["model"]
        return program._replace(client=partitioned(solver(first.layout), first=first))

    network = nn.Linear(2, 1, bias=False)
    task = prepare(
        network, from_clients(pairs, kind="real"), method=Method("exact", {}, build), rounds=20, engine=engine,
        likelihood=normal(SCALE),
    )  # fmt: skip
    own = Memory()
    *_, (last, record) = rounds(task, task.begin(), own)
    assert not record["left_out"]
    mean, scale = pooled(pairs)
    q = last.state.broadcast["model"]
    torch.testing.assert_close(q.mean.double(), mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(q.scale.double(), scale, rtol=1e-3, atol=0)
    # The posterior is the prior times all factors.
    precision = 1 + sum(own.get(k)["precision"] for k in range(3))
    torch.testing.assert_close(precision, q.scale.square().reciprocal(), rtol=1e-3, atol=0)


def test_the_method_itself_comes_near_by_gradient_steps():
    pairs = sites()
    method = fb.methods.pvi(damping=0.4, epochs=60, batch=40, lr=0.03, optimiser="adam", train_draws=2)
    run = fit(
        nn.Linear(2, 1, bias=False), from_clients(pairs, kind="real"), method=method, rounds=8, likelihood=normal(SCALE)
    )
    mean, scale = pooled(pairs)
    torch.testing.assert_close(run.posterior.mean.double(), mean, atol=0.05, rtol=0)
    torch.testing.assert_close(run.posterior.scale.double(), scale, rtol=0.15, atol=0)


def test_what_pvi_is_can_not_be_chosen():
    with pytest.raises(InputError, match="rule is fixed"):
        fb.methods.pvi(rule="nwa")
    with pytest.raises(InputError, match="damping"):
        fb.methods.pvi(damping=0.0)
    with pytest.raises(InputError, match="dampening"):
        fb.methods.method_named("pvi", {"dampening": 0.5})
