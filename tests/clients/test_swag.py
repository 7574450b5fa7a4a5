"""SWAG's moments are those of the iterates it collected, on a client and at the server."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Client, Phase
from fedbayes.errors import InputError
from fedbayes.federation.round import open_round
from fedbayes.methods import METHODS, fedavg, fedswag
from fedbayes.posterior.lowrank import LowRank, mean_covariance
from fedbayes.posterior.values import load, save
from fedbayes.training.prepare import prepare


def _clients(sizes=(23, 12, 30)):
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)) for n in (*sizes, 15)]
    return fb.data.from_clients(pairs[:-1], pairs[-1], classes=3)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def _iterates(method, k=0, number=0):
    """The upload of a client in a round, and all its iterates, from the inner client's own steps."""
    task = prepare(_net(), _clients(), method=method, rounds=1, engine="loop")
    client, seen = task.program.client, []

    def step(state, b, tape, info):
        after = client.phases[0].step(state, b, tape, info)
        seen.append(after.inner.vectors["model"].double())
        return after

    phase = client.phases[0]
    watched = Client(client.start, (Phase(step, phase.epochs, phase.batch),), client.finish)
    order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
    order = order._replace(round=number, options=task.program.options(number))
    upload, _ = task.engine.client(task.program._replace(client=watched), order, k, None)
    return upload, torch.stack(seen[1:])  # the first is the dry run that counts noise


@pytest.mark.parametrize(("every", "start"), [(1, 0.0), (1, 0.5), (3, 0.4)])
def test_the_diagonal_is_the_variance_of_the_collected_iterates(every, start):
    upload, seen = _iterates(fedswag(epochs=3, batch=5, lr=0.3, swag_every=every, swag_start=start))
    assert len(seen) == 15
    kept = [s for s in range(15) if s >= int(15 * start) and (14 - s) % every == 0]
    q = upload.parts["model"]
    torch.testing.assert_close(q.mean.double(), seen[kept].mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(q.scale.double() ** 2, seen[kept].var(0, correction=0), rtol=1e-3, atol=1e-9)


def test_low_rank_is_half_the_diagonal_and_half_the_last_deviations():
    rank = 4
    method = fedswag(epochs=3, batch=5, lr=0.3, covariance="low_rank", rank=rank, swag_start=0.0)
    upload, seen = _iterates(method)
    q = upload.parts["model"]
    assert isinstance(q, LowRank)
    running = torch.stack([seen[: t + 1].mean(0) for t in range(len(seen))])
    last = (seen - running)[-rank:]
    dense = 0.5 * (torch.diag(seen.var(0, correction=0)) + last.T @ last / (rank - 1))
    got = torch.diag(q.scale.double() ** 2) + q.factors.double().T @ q.factors.double()
    torch.testing.assert_close(got, dense, rtol=1e-3, atol=1e-8)
    torch.testing.assert_close(q.moments()[1].double(), dense.diagonal(), rtol=1e-3, atol=1e-8)


def test_until_the_last_round_it_is_fedavg():
    plain = fb.fit(_net(), _clients(), method=fedavg(epochs=2, batch=5), rounds=3)
    for covariance in ("diagonal", "low_rank"):
        run = fb.fit(_net(), _clients(), method=fedswag(covariance=covariance, epochs=2, batch=5), rounds=3)
        for a, b in zip(plain.journal[:2], run.journal[:2], strict=True):
            assert a["test"] == pytest.approx(b["test"], rel=1e-5)
        assert run.journal[2]["test"] != pytest.approx(plain.journal[2]["test"], rel=1e-5)
        p = run.predict(run.task.clients.data.test_x)
        assert (p.epistemic > 0).any()


def test_the_rate_of_the_last_round_is_its_own():
    method = fedswag(lr=0.3, swag_lr=0.01, swag_rounds=2)
    options = prepare(_net(), _clients(), method=method, rounds=5).program.options
    assert [options(r)["lr"] for r in range(5)] == [0.3, 0.3, 0.3, 0.01, 0.01]
    assert [options(r)["collect"] for r in range(5)] == [0, 0, 0, 1, 1]


def test_the_best_round_is_one_of_those_that_make_the_posterior():
    """Where each round is worse than the one before, the best of all is the first of them."""
    how = {"lr": 3.0, "epochs": 2, "batch": 5}
    plain = fb.fit(_net(), _clients(), method=fedavg(**how), rounds=5, validation=0.3)
    run = fb.fit(_net(), _clients(), method=fedswag(**how, swag_rounds=2), rounds=5, validation=0.3)
    assert plain.progress.best.round < 4 <= run.progress.best.round
    scores = {record["round"]: record["validation"]["nll"] for record in run.journal if record["round"] > 3}
    assert run.progress.best.score == min(scores.values())
    assert (run.predict(run.task.clients.data.test_x).epistemic > 0).any()


def test_what_stands_in_front_of_a_robust_rule_is_of_the_rule_for_the_normals():
    how = {"epochs": 1, "batch": 5}
    run = fb.fit(_net(), _clients(), method=fedswag(pooled="median", mixing=True, **how), rounds=1)
    plain = fb.fit(_net(), _clients(), method=fedswag(pooled="median", **how), rounds=1)
    assert not torch.equal(run.posterior.mean, plain.posterior.mean)
    with pytest.raises(InputError, match="mixing: it stands in front of a robust rule"):
        fb.fit(_net(), _clients(), method=fedswag(mixing=True, **how), rounds=1)


def _low_rank(seed, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    tensors = torch.randn(5, 7, generator=g, dtype=torch.float64)
    return LowRank(tensors[0], scale * tensors[1].exp(), tensors[2:])


def test_a_low_rank_normal_against_the_dense_one():
    q = _low_rank(0)
    dense = torch.distributions.MultivariateNormal(q.mean, torch.diag(q.scale**2) + q.factors.T @ q.factors)
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(q.log_prob(x), dense.log_prob(x), rtol=1e-6, atol=1e-6)
    drawn = q.sample(40_000, torch.Generator().manual_seed(2))
    covariance = dense.covariance_matrix
    error = (covariance**2 + covariance.diagonal()[:, None] * covariance.diagonal()).sqrt() / 200
    assert ((drawn.T.cov() - covariance).abs() < 5 * error).all()
    assert ((drawn.mean(0) - q.mean).abs() < 5 * covariance.diagonal().sqrt() / 200).all()


def test_the_server_keeps_the_mean_of_covariances():
    qs, weights = [_low_rank(s) for s in range(3)], torch.tensor([1.0, 2.0, 5.0]).double()
    q = mean_covariance(qs[0].mean, qs, weights)
    each = [torch.diag(a.scale**2) + a.factors.T @ a.factors for a in qs]
    want = sum(w * c for w, c in zip(weights / 8, each, strict=True))
    torch.testing.assert_close(torch.diag(q.scale**2) + q.factors.T @ q.factors, want)


def test_a_low_rank_normal_is_saved_and_read(tmp_path):
    q = _low_rank(3)
    save(tmp_path / "q.safetensors", q)
    again = load(tmp_path / "q.safetensors")["model"]
    assert all(
        torch.equal(a, b) for a, b in zip((q.mean, q.scale, q.factors), (again.mean, again.scale, again.factors))
    )


def test_messages_count_what_is_sent():
    weights = 4 * 6 + 6 + 6 * 3 + 3
    for covariance, up in (("diagonal", 2), ("low_rank", 2 + 3)):
        method = fedswag(covariance=covariance, rank=3, epochs=1, batch=5)
        record = fb.fit(_net(), _clients(), method=method, rounds=1).journal[0]
        assert record["bytes_down"] == 3 * 4 * 2 * weights
        assert record["bytes_up"] == 3 * 4 * up * weights


def test_its_row_refuses_what_is_fixed():
    with pytest.raises(ValueError, match="rule is fixed"):
        METHODS["fedswag"](rule="fedavg")
    with pytest.raises(ValueError, match="pooled"):
        METHODS["fedswag"](pooled="dwc")
