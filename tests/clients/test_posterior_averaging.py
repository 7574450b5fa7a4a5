"""FedPA's delta against the dense solve, and its fixed point on quadratic clients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedbayes as fb
from fedbayes.clients.posterior_averaging import delta
from fedbayes.engine.batches import schedule
from fedbayes.federation.round import open_round
from fedbayes.methods import fedpa
from fedbayes.model.likelihood import normal
from fedbayes.training.prepare import prepare


def _dense(start, samples, rho):
    """Sigma^-1 (start - mean) with the P x P matrix written out."""
    count = len(samples)
    covariance = samples.T.cov() if count > 1 else torch.zeros(len(start), len(start), dtype=start.dtype)
    share = 1 / (1 + (count - 1) * rho)
    sigma = share * torch.eye(len(start), dtype=start.dtype) + (1 - share) * covariance.reshape(len(start), -1)
    return torch.linalg.solve(sigma, start - samples.mean(0))


@settings(max_examples=40)
@given(seed=st.integers(0, 999), count=st.integers(1, 8), weights=st.integers(1, 6), rho=st.floats(0, 20))
def test_the_recursion_equals_the_dense_solve(seed, count, weights, rho):
    g = torch.Generator().manual_seed(seed)
    samples = torch.randn(count, weights, generator=g, dtype=torch.float64)
    start = torch.randn(weights, generator=g, dtype=torch.float64)
    live, shrinkage = torch.ones(count).double(), torch.tensor(rho, dtype=torch.float64)
    torch.testing.assert_close(delta(start, samples, live, shrinkage), _dense(start, samples, rho))
    some = torch.cat([samples, torch.zeros(3, weights).double()])  # windows that no step has filled
    live = torch.cat([live, torch.zeros(3).double()])
    torch.testing.assert_close(delta(start, some, live, shrinkage), _dense(start, samples, rho))


def _quadratic(sizes=(24, 12)):
    """Clients of linear regression: their losses are quadratic in the weights."""
    g = torch.Generator().manual_seed(0)
    pairs = []
    for n in sizes:
        x = torch.randn(n, 3, generator=g, dtype=torch.float64)
        pairs.append((x, x @ torch.randn(3, 1, generator=g, dtype=torch.float64)))
    return fb.data.from_clients(pairs, pairs[0], kind="real")


def _linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


@pytest.mark.parametrize("samples", [1, 3, 50])
def test_a_quadratic_client_sends_the_dense_solve_of_its_own_samples(samples):
    """The iterates are made by hand; fifty windows are more than the client has steps."""
    epochs, batch, lr, rho = 4, 6, 0.1, 3.0
    method = fedpa(samples=samples, shrinkage=rho, burn_share=0.25, epochs=epochs, batch=batch, lr=lr)
    task = prepare(_linear(), _quadratic(), method=method, engine="loop", likelihood=normal())
    order = open_round(task.program, task.begin().state, clients=2, cohort=2, seed=0)
    sent = task.engine.client(task.program, order, 0, None)[0].parts["model"].mean
    rows, data = task.clients.train_rows(0), task.clients.data
    plan = schedule(rows, task.program.client.phases[0], 0, 0, 0, 0)
    start = w = task.program.initial["model"].mean
    iterates = []
    for r in plan.rows[:, 0]:
        x, y = data.x[r].double(), data.y[r].double()
        w = w - lr * x.T @ (x @ w - y[:, 0]) / len(r)
        iterates.append(w)
    kept = torch.stack(iterates)[4:]  # sixteen steps, a quarter of them before
    length = max(1, 12 // samples)
    windows = kept[: length * min(samples, 12)].reshape(-1, length, 3).mean(1)
    torch.testing.assert_close(start - sent, _dense(start, windows, rho), rtol=1e-9, atol=1e-9)


def test_plain_rounds_are_those_of_fedavg_with_a_server_optimiser():
    options = {"epochs": 2, "batch": 6, "lr": 0.1, "server_lr": 0.5}
    a = fb.fit(_linear(), _quadratic(), method=fedpa(plain_rounds=3, **options), rounds=3, likelihood=normal())
    plain = fb.methods.fedavg(server="sgd", **options)
    b = fb.fit(_linear(), _quadratic(), method=plain, rounds=3, likelihood=normal())
    torch.testing.assert_close(a.posterior.mean, b.posterior.mean, rtol=1e-9, atol=1e-9)


def test_one_sample_is_the_average_of_iterates():
    x = torch.tensor([1.0, 2.0])
    got = delta(torch.zeros(2), x[None], torch.ones(1), torch.tensor(5.0))
    assert torch.equal(got, -x)
