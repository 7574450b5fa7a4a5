"""Clients that answer late on conjugate models: sites reach the pooled posterior under every law of delays.

Beside them FedAvg's changes, which count by how often they come: where it ends depends on who is fast.
"""

from typing import Any

import pytest
import torch
from test_admm import trained as by_admm
from test_partitioned import pooled, shared, sites, wild
from test_partitioned import solver as exact
from test_partitioned import trained as by_pvi
from torch import nn

import fedbayes as fb
from fedbayes.clients.partitioned import partitioned
from fedbayes.data import from_clients
from fedbayes.methods import Composed
from fedbayes.model.likelihood import normal
from fedbayes.posterior.values import Gaussian
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

ROUNDS = 60
# One of each way to answer late.
DELAYS: dict[str, dict[str, Any]] = {
    "constant": {"jitter": 0.5},
    "lognormal": {"spread": 1.0},
    "pareto": {"tail": 1.1},
    "devices": {"devices": [[0.5, 1.0], [0.5, 20.0]]},
    "labels": {"slowest": 30.0},
    "lognormal, asleep": {"awake": 0.4, "period": 100.0},
}


def late(law: str, **options: Any) -> dict[str, Any]:
    return {
        "schedule": "buffered",
        "schedule_options": {"buffer": 1, **options},
        "delays": law.split(",")[0],
        "delay_options": DELAYS[law],
    }


@pytest.mark.parametrize("law", DELAYS)
def test_asynchronous_pvi_reaches_the_pooled_posterior(law: str) -> None:
    pairs, noise = sites(), 0.5
    q = by_pvi(
        pairs,
        lambda layout: exact(layout, noise),
        rounds=ROUNDS,
        damping=1.0,
        likelihood=noise,
        evaluate_every=ROUNDS,
        **late(law),
    )
    mean, scale = pooled(pairs, noise)
    torch.testing.assert_close(q.mean.double(), mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(q.scale.double(), scale, rtol=1e-3, atol=0)


@pytest.mark.parametrize("law", DELAYS)
def test_asynchronous_bayes_admm_reaches_the_pooled_posterior(law: str) -> None:
    pairs, noise = shared(0.1)
    q, _ = by_admm(pairs, noise, ROUNDS, task=late(law), rho=1.0, gamma=1.0)
    mean, scale = pooled(pairs, noise)
    torch.testing.assert_close(q.mean.double(), mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(q.scale.double(), scale, rtol=1e-3, atol=0)


def test_changes_that_only_add_drift_to_who_is_fast() -> None:
    """FedBuff on two clients who disagree, one of them 20 times as slow: sites do not care, sums of changes do."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 1, generator=random)
    pairs = [(x[k], (1.0 - 2 * k) * x[k] + 0.1 * torch.randn(40, 1, generator=random)) for k in range(2)]
    slow = {**late("devices"), "delay_options": {"devices": [[0.5, 1.0], [0.5, 20.0]], "jitter": 0.1}, "seed": 4}
    steps = fb.methods.fedavg(lr=0.1, epochs=1, batch=40, momentum=0.0)

    def averaged(**options: Any) -> float:
        network, clients = nn.Linear(1, 1, bias=False), from_clients(pairs, kind="real")
        run = fit(network, clients, method=steps, rounds=100, likelihood=normal(1.0), evaluate_every=100, **options)
        if options:
            assert {r for record in run.journal for r in record["speeds"]} == {"usual", "very slow"}
        return float(run.posterior.mean)

    q = by_pvi(pairs, lambda layout: exact(layout, 0.5), rounds=60, damping=1.0, likelihood=0.5, **slow)
    mean, _ = pooled(pairs)
    assert abs(float(q.mean) - float(mean)) < 1e-3
    assert abs(averaged() - float(mean)) < 0.05
    assert abs(averaged(**slow) - float(mean)) > 0.5


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_the_prior_times_all_sites_is_the_posterior_whatever_clients_find(damping: float) -> None:
    """Those of an older broadcast may take more precision off than there is: what a floor holds back is owed."""
    base = fb.methods.pvi(damping=damping, epochs=1, batch=40, prior_scale=1.0)

    def build(setting: Any) -> Any:
        program = base.build(setting)
        first = program.initial["model"]
        return program._replace(client=partitioned(wild(first.layout)), constants={"first": first})

    task = prepare(
        nn.Linear(2, 1, bias=False), from_clients(sites(), kind="real"), method=Composed(program=build), rounds=60,
        likelihood=normal(0.5), evaluate_every=60, **late("devices"),
    )  # fmt: skip
    own, most, floors = Memory(), torch.zeros(2, 1, dtype=torch.float64), 0.0
    for progress, record in rounds(task, task.begin(), own):
        q, debt = progress.state.broadcast["model"], progress.state.stages["owed"]
        shift, precision = Gaussian(q.mean.double(), q.scale.double()).naturals()
        whole = torch.stack([precision + debt["precision"], shift + debt["shift"]])
        factors = sum(torch.stack([f["precision"], f["shift"]]) for f in own.rows.values())
        most = torch.maximum(most, torch.stack([precision, shift.abs()]))
        assert ((factors + torch.tensor([[1.0], [0.0]]) - whole).abs() <= 3e-5 * most).all()
        floors += record.get("floored", 0)
    assert floors > 0
