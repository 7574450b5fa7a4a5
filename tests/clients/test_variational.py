"""The variational client against an independent implementation, and against exact posteriors."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as D
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Batch, Info
from fedbayes.clients.optimisers import adam, sgd
from fedbayes.clients.variational import KL_WEIGHTS, VariationalStep, initial_scale, variational
from fedbayes.data import from_clients
from fedbayes.engine.batches import schedule
from fedbayes.federation.round import open_round
from fedbayes.methods import feduab
from fedbayes.model.estimators import plan
from fedbayes.model.likelihood import categorical, normal
from fedbayes.model.model import Model
from fedbayes.noise import Tape, normals
from fedbayes.posterior.values import Gaussian
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _data(n: int = 5, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=g, dtype=torch.float64), torch.randint(2, (n,), generator=g)


def _double(**values: float) -> dict[str, torch.Tensor]:
    return {n: torch.tensor(v, dtype=torch.float64) for n, v in values.items()}


class Case:
    """A client of a small network with a broadcast that is not its start, ready to step."""

    def __init__(self, estimator="weight", draws=1, prior="broadcast", kl="constant", kl_weight=0.1) -> None:
        self.model = Model.of(_net(), categorical())
        self.x, self.y = _data()
        self.made = plan(self.model, "model", self.x, estimator)
        self.client = variational(VariationalStep(self.model, self.made, sgd(), 1, draws, kl, prior), batch=5)
        g = torch.Generator().manual_seed(2)
        size = self.model.layouts["model"].size
        mean = torch.randn(size, generator=g, dtype=torch.float64)
        scale = 0.1 + torch.rand(size, generator=g, dtype=torch.float64)
        self.broadcast = Gaussian(mean, scale, self.model.layouts["model"])
        options = _double(lr=0.1, kl_weight=kl_weight, prior_scale=0.7)
        self.info = Info({"model": self.broadcast}, options, torch.tensor(0), torch.tensor(5), (torch.tensor(1),))
        self.noise = torch.randn(draws * self.made.normals, generator=g, dtype=torch.float64)

    def step(self, state, noise=None):
        batch = Batch(self.x, self.y, None, torch.tensor(0))
        return self.client.phases[0].step(state, batch, Tape(self.noise if noise is None else noise), self.info)


def _weights_of(theta: torch.Tensor) -> list[torch.Tensor]:
    a, b, c, d = theta.split([12, 4, 8, 2])
    return [a.reshape(4, 3), b, c.reshape(2, 4), d]


def _nll_by_weights(case: Case, mean, rho, noise):
    a, b, c, d = _weights_of(mean + F.softplus(rho) * noise)
    return F.cross_entropy(torch.tanh(case.x @ a.T + b) @ c.T + d, case.y)


def _nll_by_outputs(case: Case, mean, rho, noise):
    """Local reparameterisation, layer by layer."""
    scale = F.softplus(rho)
    (a, b, c, d), (va, vb, vc, vd) = _weights_of(mean), _weights_of(scale**2)
    first, second = noise.split([20, 10])
    h = torch.tanh(case.x @ a.T + b + (case.x**2 @ va.T + vb).sqrt() * first.reshape(5, 4))
    return F.cross_entropy(h @ c.T + d + (h**2 @ vc.T + vd).sqrt() * second.reshape(5, 2), case.y)


@pytest.mark.parametrize("prior", ["broadcast", "fixed"])
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize(("estimator", "nll"), [("weight", _nll_by_weights), ("local", _nll_by_outputs)])
def test_a_step_on_fixed_noise_equals_an_independent_implementation(estimator, nll, draws, prior):
    case = Case(estimator, draws, prior)
    state = case.client.start({}, case.info)
    moved = {n: v + 0.3 * torch.sin(torch.arange(v.numel()).double()) for n, v in state.vectors.items()}
    got = case.step(state._replace(vectors=moved)).vectors
    mean, rho = (moved[n].clone().requires_grad_() for n in ("mean", "rho"))
    p = D.Normal(case.broadcast.mean, case.broadcast.scale)
    if prior == "fixed":
        p = D.Normal(torch.zeros_like(mean), torch.full_like(mean, 0.7))
    losses = [nll(case, mean, rho, noise) for noise in case.noise.reshape(draws, -1)]
    loss = sum(losses) / draws + 0.1 * D.kl_divergence(D.Normal(mean, F.softplus(rho)), p).sum()
    loss.backward()
    torch.testing.assert_close(got["mean"], (mean - 0.1 * mean.grad).detach(), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(got["rho"], (rho - 0.1 * rho.grad).detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])
def test_draws_one_after_another_equal_draws_at_once(estimator):
    together, apart = Case(estimator, 3), Case(estimator, 3)
    one = apart.made._replace(stacks=False)
    apart.client = variational(VariationalStep(apart.model, one, sgd(), 1, draws=3), batch=5)
    moved = [case.step(case.client.start({}, case.info)).vectors for case in (together, apart)]
    for name in ("mean", "rho"):
        torch.testing.assert_close(moved[0][name], moved[1][name], rtol=1e-10, atol=1e-12)


def test_a_client_starts_from_the_broadcast_with_kl_zero():
    case = Case()
    state = case.client.start({}, case.info)
    torch.testing.assert_close(F.softplus(state.vectors["rho"]), case.broadcast.scale, rtol=1e-12, atol=0)
    upload = case.client.finish(state, case.info)
    assert float(upload.metrics["kl"]) == pytest.approx(0, abs=1e-12)
    assert float(case.client.finish(case.step(case.step(state)), case.info).metrics["kl"]) > 1e-4
    torch.testing.assert_close(upload.parts["model"].scale, case.broadcast.scale)
    assert torch.equal(upload.parts["model"].mean, case.broadcast.mean)


def test_at_the_broadcast_the_kl_weight_plays_no_role():
    free, held = (Case(kl_weight=weight) for weight in (0.0, 10.0))
    moved = [case.step(case.client.start({}, case.info)).vectors["mean"] for case in (free, held)]
    torch.testing.assert_close(*moved)


def _info(n: int, steps: int, weight: float) -> Info:
    return Info({}, _double(kl_weight=weight), torch.tensor(0), torch.tensor(n), (torch.tensor(steps),))


def _batch(step: int) -> Batch:
    return Batch(torch.zeros(1), torch.zeros(1), None, torch.tensor(step))


@pytest.mark.parametrize(("name", "want"), [("constant", 0.3), ("1/B", 0.3 / 8), ("1/n", 0.3 / 75)])
def test_the_kl_weight_is_the_same_at_every_step(name, want):
    assert [float(KL_WEIGHTS[name](_batch(b), _info(75, 8, 0.3))) for b in (0, 7, 9)] == pytest.approx([want] * 3)


@pytest.mark.parametrize("steps", [1, 2, 8, 300])
def test_blundells_weights_halve_from_step_to_step_and_sum_to_the_kl_weight_in_each_epoch(steps):
    info = _info(75, steps, 0.3)
    for epoch in range(2):
        weights = [float(KL_WEIGHTS["blundell"](_batch(epoch * steps + b), info)) for b in range(steps)]
        assert sum(weights) == pytest.approx(0.3, rel=1e-5)
        assert all(b == pytest.approx(a / 2, rel=1e-5) for a, b in pairwise(weights[:20]))
        assert all(math.isfinite(w) for w in weights)


@pytest.mark.parametrize("division", [1.0, 2.0, 4.0])
def test_the_initial_variance_is_divided_by_h_at_each_layer(division):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = Model.of(net, categorical())
    scales = model.layouts["model"].split(initial_scale(model, 0.1, division))
    for depth, layer in enumerate(("0", "2", "4")):
        for name in ("weight", "bias"):
            want = torch.full_like(scales[f"{layer}.{name}"], 0.01 / division**depth)
            torch.testing.assert_close(scales[f"{layer}.{name}"] ** 2, want)


def deep(layers: int) -> nn.Module:
    random = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), *[nn.Linear(8, 8) for _ in range(layers)], nn.Linear(8, 2))
    for p in network.parameters():
        nn.init.normal_(p, std=0.3, generator=random)
    return network


def test_scales_of_deep_networks_are_divided_no_further_than_steps_on_the_kl_allow():
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    clients = from_clients([(x, (x.sum(1) > 0).long())])
    task = prepare(deep(16), clients, method="feduab")
    scales = [float(q.scale.mean()) for q in task.program.initial["model"].named().values()]
    assert min(scales) == pytest.approx((10 * 0.05 * 1e-4) ** 0.5)
    assert scales[:16] == pytest.approx([0.1 * 2 ** (-(k // 2) / 2) for k in range(16)])
    assert fb.fit(deep(16), clients, method="feduab", rounds=2).journal[-1]["train"]["loss"] < 1.5


def test_feduab_starts_with_sigma_01_and_h_2():
    x, y = _data(8)
    task = prepare(_net().float(), from_clients([(x.float(), y)]), method="feduab")
    scales = {n: float(q.scale.mean()) for n, q in task.program.initial["model"].named().items()}
    assert scales == pytest.approx({n: 0.1 if n[0] == "0" else 0.1 / 2**0.5 for n in scales})


def _one_round(method, clients, net):
    task = prepare(net, clients, method=method, rounds=1, seed=0, engine="loop")
    order = open_round(task.program, task.begin().state, clients=len(clients), cohort=len(clients), seed=0)
    return task, task.engine.client(task.program, order, 0, None)[0].parts["model"]


@pytest.mark.parametrize("estimator", ["weight", "local", "flipout"])
def test_long_training_reaches_the_exact_mean_field_posterior_of_a_conjugate_model(estimator):
    # y = x w + noise of scale .5, prior N(0, .8^2). The best diagonal Gaussian has the exact mean, and the diagonal of
    # the exact precision.
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=g, dtype=torch.float64)
    x[:, 1] += 0.5 * x[:, 0]
    y = x @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + 0.5 * torch.randn(40, 1, generator=g).double()
    precision = x.T @ x / 0.25 + torch.eye(2) / 0.64
    mean = torch.linalg.solve(precision, x.T @ y / 0.25).flatten()
    scale = precision.diag().rsqrt()

    model = Model.of(nn.Linear(2, 1, bias=False).double(), normal(0.5), prepare=lambda rows: rows)
    made = plan(model, "model", x, estimator)
    client = variational(VariationalStep(model, made, adam(), 1, draws=32, kl="1/n", prior="fixed"), batch=40)
    first = Gaussian(torch.zeros(2).double(), torch.full((2,), 0.3).double(), model.layouts["model"])
    start = Info({"model": first}, {}, torch.tensor(0), torch.tensor(40), (torch.tensor(1),))
    state = client.start({}, start)
    tail = []
    for step in range(500):
        lr = 0.05 if step < 250 else 0.004
        info = start._replace(options=_double(lr=lr, kl_weight=1.0, prior_scale=0.8))
        noise = torch.randn(32 * made.normals, generator=g, dtype=torch.float64)
        state = client.phases[0].step(state, Batch(x, y, None, torch.tensor(step)), Tape(noise), info)
        if step >= 300:
            tail.append((state.vectors["mean"], F.softplus(state.vectors["rho"])))
    found = [torch.stack(column).mean(0) for column in zip(*tail, strict=True)]
    assert ((found[0] - mean).abs() < 0.15 * scale).all()
    torch.testing.assert_close(found[1], scale, rtol=0.04, atol=0)


def test_padded_rows_change_nothing_under_weight_sampling():
    # The same noise by address; only the padding differs, in a client whose rows fill 1.4 batches.
    x, y = _data(7)
    clients = from_clients([(x.float(), y)])
    method = feduab(estimator="weight", division=1.0, epochs=2, batch=5, lr=0.1, kl_weight=0.01)
    task, got = _one_round(method, clients, _net().float())
    shuffled = schedule(task.clients.train_rows(0), task.program.client.phases[0], 0, 0, 0, 0)
    first = task.program.initial["model"]
    mean = first.mean.clone().requires_grad_()
    rho = (first.scale.double().expm1().log().float()).requires_grad_()
    optimiser = torch.optim.SGD([mean, rho], lr=0.1)
    prior = D.Normal(first.mean, first.scale)
    for step, (r, m) in enumerate(zip(shuffled.rows, shuffled.live, strict=True)):
        rows = r[0][m[0]]
        case = SimpleNamespace(x=x.float()[rows], y=y[rows])
        noise = normals(mean.numel(), 0, 0, 0, 0, step, "noise")
        kl = D.kl_divergence(D.Normal(mean, F.softplus(rho)), prior).sum()
        optimiser.zero_grad()
        (_nll_by_weights(case, mean, rho, noise) + 0.01 * kl).backward()
        optimiser.step()
    torch.testing.assert_close(got.mean, mean.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.scale, F.softplus(rho).detach(), rtol=1e-4, atol=1e-5)


def test_padding_a_batch_further_leaves_the_gradient_as_it_was():
    case = Case("local")
    wide = torch.cat([case.x, 1e6 * torch.ones(3, 3).double()])
    labels = torch.cat([case.y, torch.zeros(3, dtype=torch.int64)])
    mask = torch.arange(8) < 5
    first, second = case.noise.split([20, 10])
    noise = torch.cat([first, torch.ones(12).double(), second, torch.ones(6).double()])
    state = case.client.start({}, case.info)
    padded = case.client.phases[0].step(state, Batch(wide, labels, mask, torch.tensor(0)), Tape(noise), case.info)
    for name, vector in case.step(state).vectors.items():
        torch.testing.assert_close(padded.vectors[name], vector, rtol=1e-10, atol=1e-12)


def test_feduab_draws_set_training_and_test_draws_unless_given():
    assert feduab(draws=5).options["train_draws"] == 5
    assert feduab(draws=5).options["test_draws"] == 5
    assert feduab(draws=5, test_draws=50).options["test_draws"] == 50


def test_more_draws_give_a_less_noisy_gradient():
    def spread(draws):
        case = Case("weight", draws)
        state = case.client.start({}, case.info)
        g = torch.Generator().manual_seed(7)
        moves = [
            case.step(state, torch.randn(draws * case.made.normals, generator=g).double()).vectors["mean"]
            for _ in range(60)
        ]
        return float(torch.stack(moves).var(0).sum())

    assert spread(8) < 0.3 * spread(1)


VARIATIONAL = [name for name, rule in fb.rules.RULES.items() if fb.Gaussian in rule.takes and name != "fedag"]


@pytest.fixture(scope="module")
def journals_by_rule():
    """The journal of fedvi on digits by rule; those that share a client's program are trained as one."""
    digits = fb.data.load("digits")
    few = replace(digits, x=digits.x[:400], y=digits.y[:400])
    clients = few.split(fb.partition.dirichlet(0.3), clients=5, seed=0)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    groups, journals = {}, {}
    for rule in VARIATIONAL:
        method = fb.methods.fedvi(rule=rule, epochs=2)
        task = prepare(network, clients, method=method, rounds=8, evaluate_every=8, engine="stacked")
        groups.setdefault((method.kl, method.prior), {})[rule] = task
    for tasks in groups.values():
        together = rounds_together(list(tasks.values()), [t.begin() for t in tasks.values()], [Memory() for _ in tasks])
        journals |= dict(zip(tasks, zip(*([record for _, record in entries] for entries in together))))
    return journals


@pytest.mark.parametrize("rule", VARIATIONAL)
def test_under_every_rule_no_client_is_lost_by_default(rule, journals_by_rule):
    """ws, wc and conflation narrow with every round: with their broadcast as the prior all clients diverged."""
    journal = journals_by_rule[rule]
    assert len(journal) == 8
    assert not any(record["left_out"] for record in journal)
    if rule != "dwc":  # which moves the mean further than any client went
        assert journal[-1]["test"]["accuracy"] > 0.6


def test_what_clients_take_their_rows_for_goes_by_the_rule_unless_it_is_given():
    assert [fb.methods.fedvi(rule=rule).kl for rule in ("log_pool", "nwa", "ws", "dwc")] == ["1/all"] * 2 + ["1/n"] * 2
    assert fb.methods.fedvi(rule="ws", kl="1/B").kl == "1/B"
    assert fb.methods.fedvi(rule="ws").prior == "fixed"
    for method in (fb.methods.feduab, fb.methods.bpfed):  # as published
        assert (method(rule="conflation").prior, method().kl, method().optimiser) == ("broadcast", "constant", "sgd")
