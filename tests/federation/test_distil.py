"""Server distillation: the ensemble, its pseudo-labels, training by weight averaging, and refusals before training."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Phase
from fedbayes.engine.batches import schedule
from fedbayes.errors import InputError
from fedbayes.federation.distil import dirichlet_draws, ensemble, gaussian_draws
from fedbayes.methods import fedavg, fedbe, fedppd, fedppd_distill
from fedbayes.methods.distilling import Distilling, pseudo_labels
from fedbayes.model.likelihood import categorical
from fedbayes.model.model import Model
from fedbayes.posterior.values import Draws, Point
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

P, K = 3, 4
MEMBERS = torch.randn(K, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MEAN = MEMBERS.mean(0) + 0.1  # weighted by size, so not the plain mean
SMALL = {"server_batch": 8, "server_epochs": 4, "swa_start": 6, "swa_every": 3, "server_lr": 0.05}
# The phases of the server's client, for their batches.
TRAINING = Phase(lambda *_: None, SMALL["server_epochs"], SMALL["server_batch"])
REFRESHING = Phase(lambda *_: None, 1, SMALL["server_batch"])


def _clients(sizes=(23, 12, 30), features=4):
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, features, generator=g), torch.randint(3, (n,), generator=g)) for n in (*sizes, 15)]
    return fb.data.from_clients(pairs[:-1], pairs[-1], classes=3)


def _inputs(n=40, features=4):
    return torch.randn(n, features, generator=torch.Generator().manual_seed(5))


def _net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_gaussian_draws_have_the_spread_of_the_members_about_the_mean():
    drawn = gaussian_draws(MEAN, MEMBERS, 20_000, 0.5, (0, "a"))
    want = 0.25 * (MEMBERS - MEAN).square().mean(0)
    assert ((drawn.mean(0) - MEAN).abs() < 5 * (want / 20_000).sqrt()).all()
    assert (drawn.var(0) / want - 1).abs().max() < 5 * (2 / 20_000) ** 0.5


@pytest.mark.parametrize("spread", [0.2, 1.0, 5.0])
def test_dirichlet_draws_are_mixtures_with_the_right_moments(spread):
    """E[g] = 1 / K and Cov[g] = (I / K - 11' / K^2) / (K a + 1) for concentration a = 1 / spread."""
    drawn = dirichlet_draws(MEAN, MEMBERS, 8000, spread, (0, "a"))
    shares = torch.linalg.lstsq(
        torch.cat([MEMBERS.T, torch.ones(1, K).double()]), torch.cat([drawn.T, torch.ones(1, 8000).double()])
    ).solution
    assert shares.min() > -1e-9
    cov = (torch.eye(K) / K - torch.ones(K, K) / K**2).double() / (K / spread + 1)
    want = MEMBERS.T @ cov @ MEMBERS
    assert ((drawn.mean(0) - MEMBERS.mean(0)).abs() < 5 * (want.diagonal() / 8000).sqrt()).all()
    torch.testing.assert_close(drawn.T.cov().diagonal(), want.diagonal(), rtol=0.12, atol=0)


def test_an_ensemble_is_draws_then_the_mean_then_the_clients():
    made = ensemble(MEAN, MEMBERS, fit="gaussian", draws=2, spread=1.0, place=(0,))
    assert made.shape == (2 + 1 + K, P)
    assert torch.equal(made[2], MEAN)
    assert torch.equal(made[3:], MEMBERS)
    assert not torch.equal(made, ensemble(MEAN, MEMBERS, fit="gaussian", draws=2, spread=1.0, place=(1,)))


@pytest.mark.parametrize("sharpen", [1.0, 0.5])
def test_pseudo_labels_are_the_mean_prediction_made_sharper(sharpen):
    model, nets = Model.of(_net(), categorical()), [_net(seed) for seed in range(3)]
    vectors = torch.stack([nn.utils.parameters_to_vector(net.parameters()).detach() for net in nets])
    parts, members = {"model": Point(vectors[0])}, {"model": Draws(vectors)}
    options = Distilling(ensemble_draws=0, sharpen=sharpen)
    x = _inputs()
    with torch.no_grad():
        said = torch.stack([net(x).softmax(-1) for net in (nets[0], *nets)]).mean(0)
    want = said ** (1 / sharpen) / (said ** (1 / sharpen)).sum(-1, keepdim=True)
    torch.testing.assert_close(pseudo_labels(model, parts, members, x, options, (0,))[:, 0], want)


@pytest.mark.parametrize(("start", "decay"), [(6, 0.0), (6, 0.1), (100, 0.0)])
def test_the_server_averages_the_iterates_of_sgd_from_the_average(start, decay):
    """Against torch.optim.SGD on the same batches and targets; where training ends before, its last weights stay."""
    options = {**SMALL, "swa_start": start, "server_weight_decay": decay}
    x, clients = _inputs(), _clients()
    task = prepare(_net(), clients, method=fedbe(epochs=1, **options), rounds=1, engine="loop", server_data=x)
    (progress, _), *_ = rounds(task, task.begin(), Memory())
    averaged = fb.fit(_net(), clients, method=fedavg(epochs=1), rounds=1, engine="loop").posterior.mean
    net = _net()
    nn.utils.vector_to_parameters(averaged, net.parameters())
    sgd, kept = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=decay), []
    plan = schedule(torch.arange(len(x)), TRAINING, 0, 1, -1, 0)
    for number, rows in enumerate(plan.rows[:, 0]):
        sgd.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), task.engine.store.server.y[rows, 0, 0]).backward()
        sgd.step()
        if number >= start and (number - start) % 3 == 0:
            kept.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())
    want = torch.stack(kept).mean(0) if kept else nn.utils.parameters_to_vector(net.parameters()).detach()
    assert len(plan.rows) == 20
    assert len(kept) == (5 if start == 6 else 0)
    torch.testing.assert_close(progress.state.broadcast["model"].mean, want, rtol=1e-4, atol=1e-5)


def test_distillation_brings_the_average_nearer_to_the_ensemble():
    x = _inputs(200)
    task = prepare(_net(), _clients(), method=fedbe(lr=0.5, epochs=8, **SMALL), rounds=1, server_data=x)
    (progress, _), *_ = rounds(task, task.begin(), Memory())
    plain = fb.fit(_net(), _clients(), method=fedavg(lr=0.5, epochs=8), rounds=1).posterior.mean
    model, target, gaps = task.program.model, task.engine.store.server.y[:, 0, 0], []
    for vector in (plain, progress.state.broadcast["model"].mean):
        log = model.output(model.weights({"model": vector}), x).log_softmax(-1)
        gaps.append(float((target * (target.log() - log)).sum(-1).mean()))
    assert gaps[1] < 0.5 * gaps[0]


def test_teachers_and_students_are_both_distilled_each_towards_its_own_ensemble():
    method = {"student": _wide(), "epochs": 1}
    x = _inputs()
    plain = fb.fit(_net(), _clients(), method=fedppd(**method), rounds=1)
    run = fb.fit(_net(), _clients(), method=fedppd_distill(**method, **SMALL), rounds=1, server_data=x)
    for part in ("model", "student"):
        assert not torch.equal(run.parts[part].mean, plain.parts[part].mean)
    assert run.task.engine.store.server.y.shape == (40, 2, 1, 3)
    assert not torch.equal(run.task.engine.store.server.y[:, 0], run.task.engine.store.server.y[:, 1])


def _wide(momentum=0.1):
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12, momentum=momentum), nn.ReLU(), nn.Linear(12, 3))


def test_batchnorm_is_measured_anew_under_the_averaged_weights():
    """With momentum 1 the buffers are the statistics of the last batch of the pass that measures."""
    x, method = _inputs(), fedbe(epochs=1, **SMALL)
    run = fb.fit(_wide(1.0), _clients(), method=method, rounds=1, server_data=x)
    plan = schedule(torch.arange(len(x)), REFRESHING, 0, 1, -1, 1)
    net = _wide()
    nn.utils.vector_to_parameters(run.parts["model"].mean, net.parameters())
    inside = net[0](x[plan.rows[-1, 0]])
    torch.testing.assert_close(run.parts["buffers"].mean, torch.cat([inside.mean(0), inside.var(0)]).detach())


def test_a_regression_is_distilled_too():
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(20, 4, generator=g), torch.randn(20, 1, generator=g)) for _ in range(3)]
    clients = fb.data.from_clients(pairs, pairs[0], kind="real")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    for method in (fedbe(epochs=1, **SMALL), fedppd_distill(epochs=1, **SMALL)):
        run = fb.fit(net, clients, method=method, rounds=1, server_data=_inputs())
        assert run.task.engine.store.server.y.shape[-2:] == (2, 1)  # mean and variance
        assert (run.task.engine.store.server.y[..., 1, :] >= 1).all()  # the likelihood's own, and the members' spread
        assert run.journal[0]["test"]["nll"] < 10


def test_a_round_in_which_nobody_contributes_leaves_the_server_as_it_was():
    task = prepare(_net(), _clients(), method=fedbe(epochs=1, **SMALL), rounds=2, dropout=0.999, server_data=_inputs())
    *_, (progress, record) = rounds(task, task.begin(), Memory())
    assert record["cohort"] == 0
    assert torch.equal(progress.state.broadcast["model"].mean, task.program.initial["model"].mean)


@pytest.mark.parametrize("method", [fedbe, fedppd_distill])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "there are none"),
        (torch.zeros(0, 4), "there are none"),
        (_inputs(7), "7 unlabelled inputs don't fill one batch of 8"),
        (_inputs(40, 5), r"inputs of shape \[5\], but the clients' are \[4\]"),
        (torch.zeros(40, 4, dtype=torch.uint8), "inputs are uint8, the clients' float32"),
        (torch.full((40, 4), torch.nan), "not finite"),
        (torch.arange(60, 80), "rows outside 0..64"),
    ],
    ids=["missing", "empty", "too small", "other shape", "other type", "not finite", "no such rows"],
)
def test_an_unlabelled_set_that_does_not_serve_is_refused_before_training(method, given, message):
    with pytest.raises(InputError, match=message):
        prepare(_net(), _clients(), method=method(**SMALL), server_data=given)


def test_rows_of_the_data_serve_as_unlabelled_inputs():
    task = prepare(_net(), _clients(), method=fedbe(**SMALL), server_data=torch.arange(10, 30))
    assert torch.equal(task.engine.store.server.x, task.clients.data.x[10:30])
    whole = fb.data.load("digits").split(fb.partition.iid(server=100), clients=5)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert len(prepare(net, whole, method=fedbe()).engine.store.server.x) == 100
