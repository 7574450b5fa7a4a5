"""Adapters in every method and engine, and pooling over one factor: exact, where averages of both factors are not."""

import copy

import numpy as np
import pytest
import torch
from few_rows import fallbacks
from test_engines import METHODS, NETWORKS, same, sites
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.model.adapted import adapt
from fedbayes.model.adapters import Adapters
from fedbayes.model.likelihood import normal

HEADS_ALONE = ("lg_fedavg",)  # whose adapters stay home
TABLE = {"pattern": "first", "rank": 2, "full": ("last.*", "norm.*")}


def one_round(method: str, engine: str, **options: object) -> fb.Run:
    torch.manual_seed(3)
    made = fb.methods.method_named(method.split(",")[0], {"batch": 5, "epochs": 1, **METHODS[method]})
    server = torch.linspace(-2, 2, 13 * 6, dtype=torch.float64).sin().reshape(13, 6)
    network = NETWORKS["batchnorm, dropout"]().double()
    given = {"adapters": TABLE, "server_data": server, "engine": engine, **options}
    return fb.fit(network, sites([3, 9, 7]), method=made, rounds=1, seed=4, evaluate_every=2, **given)


@pytest.mark.parametrize("method", {name.split(",")[0]: name for name in reversed(METHODS)}.values())
def test_every_method_trains_adapters_alike_in_both_engines(method: str) -> None:
    loop, stacked = (one_round(method, engine) for engine in ("loop", "stacked"))
    assert not fallbacks(*stacked.journal), "the stacked engine fell back"
    same(loop, stacked, 1e-9)
    names = {n for q in loop.parts.values() if q.layout for n in q.layout.names}
    assert not names & {"first.weight", "first.lora_A"}
    assert ("first.lora_B" in names) is (method.split(",")[0] not in HEADS_ALONE)


@pytest.mark.parametrize("method", ["fedavg", "fedvi, weight"])
def test_a_traced_step_is_the_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: graph)
    eager, traced = (one_round(method, "stacked", compile=how) for how in ("off", "on"))
    assert not fallbacks(*traced.journal), "compilation fell back"
    same(eager, traced, 1e-9)


def linear_sites(rows: tuple[int, ...] = (12, 30, 21)) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    random = torch.Generator().manual_seed(1)
    body = torch.randn(3, 8, generator=random, dtype=torch.float64)
    pairs = []
    for n in rows:
        x = torch.randn(n, 8, generator=random, dtype=torch.float64)
        noise = 0.5 * torch.randn(n, 3, generator=random, dtype=torch.float64)
        pairs.append((x, x @ body.T + x[:, :1] - x[:, 3:4] + noise))
    return pairs, body


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_posterior_over_b_is_that_of_all_rows_in_one_place(engine: str) -> None:
    pairs, body = linear_sites()
    network = nn.Linear(8, 3, bias=False).double()
    network.weight.data = body.clone()
    table, noise, width = {"rank": 4, "full": ()}, 0.5, 0.7
    run = fb.fit(
        network,
        fb.data.from_clients(pairs, kind="real", classes=3),
        method=fb.methods.laplace(prior="fixed", prior_scale=width),
        likelihood=normal(noise),
        rounds=1,
        adapters=table,
        engine=engine,
    )
    # The same by hand: targets without what the body says, features A x, an output's row of B each.
    a = adapt(copy.deepcopy(network), Adapters(**table)).lora_A.detach().numpy()
    x, y = (torch.cat(t).numpy() for t in zip(*pairs))
    features, rest = x @ a.T, y - x @ body.numpy().T
    precision = features.T @ features / noise**2 + np.eye(4) / width**2
    mean = np.linalg.solve(precision, features.T @ rest / noise**2).T
    q = run.posterior
    assert q.layout.names == ("lora_B",)
    np.testing.assert_allclose(q.mean.numpy().reshape(3, 4), mean, atol=1e-5)
    np.testing.assert_allclose(q.covariance.numpy(), np.kron(np.eye(3), np.linalg.inv(precision)), atol=1e-5)


@pytest.mark.parametrize("both", [False, True])
def test_averages_of_b_are_averages_of_weights_and_those_of_both_factors_are_not(both: bool) -> None:
    pairs, body = linear_sites((20, 20, 20))
    network = nn.Linear(8, 3, bias=False).double()
    network.weight.data = body.clone()

    def trained(clients: list[tuple[Tensor, Tensor]]) -> Tensor:
        data = fb.data.from_clients(clients, kind="real", classes=3)
        method = fb.methods.fedavg(lr=0.02, epochs=10, batch=20)
        table = {"rank": 2, "full": (), "both": both, "scale": 0.5}
        run = fb.fit(network, data, method=method, rounds=1, adapters=table, likelihood=normal(0.5))
        return run.module().weight.detach() - body

    average = torch.stack([trained([pair]) for pair in pairs]).mean(0)
    error = (trained(pairs) - average).norm() / average.norm()
    assert error > 0.05 if both else error < 1e-9
