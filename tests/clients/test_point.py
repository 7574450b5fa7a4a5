"""The point client against plain training loops written with torch.optim."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedbayes.clients.client import Batch, Info, Phase
from fedbayes.data import from_clients
from fedbayes.engine.batches import schedule
from fedbayes.engine.loop import Loop
from fedbayes.federation.program import Store
from fedbayes.federation.round import open_round
from fedbayes.methods import Setting, fedavg, fedprox
from fedbayes.model.likelihood import categorical
from fedbayes.noise import Tape
from fedbayes.training.prepare import prepare


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def _data(n: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def _train(batches, **options) -> torch.Tensor:
    """Our client's steps on given batches, from the network's own weights."""
    program = fedavg(**{"lr": 0.1, **options}).build(Setting(_net(), categorical(), batches[0][0]))
    client, scalars = program.client, program.options(0)
    given = {n: torch.tensor(v, dtype=torch.float64) for n, v in scalars.items()}
    info = Info(program.initial, given, torch.tensor(0), torch.tensor(5), (torch.tensor(1),))
    state = client.start({}, info)
    for step, (x, y) in enumerate(batches):
        state = client.phases[0].step(state, Batch(x, y, None, torch.tensor(step)), Tape(), info)
    return client.finish(state, info).parts["model"].mean


def _oracle(net, make, batches, penalty=lambda net: 0.0) -> torch.Tensor:
    optimiser = make(net.parameters())
    for x, y in batches:
        optimiser.zero_grad()
        (F.cross_entropy(net(x), y) + penalty(net)).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def _proximal(mu: float):
    centre = nn.utils.parameters_to_vector(_net().parameters()).detach()
    return lambda net: mu / 2 * (nn.utils.parameters_to_vector(net.parameters()) - centre).square().sum()


SGD = torch.optim.SGD
CASES = {
    "sgd": ({}, lambda p: SGD(p, lr=0.1), None),
    "momentum": ({"momentum": 0.9}, lambda p: SGD(p, lr=0.1, momentum=0.9), None),
    "weight decay": ({"weight_decay": 0.3}, lambda p: SGD(p, lr=0.1, weight_decay=0.3), None),
    "decay and momentum": (
        {"weight_decay": 0.3, "momentum": 0.5},
        lambda p: SGD(p, lr=0.1, momentum=0.5, weight_decay=0.3),
        None,
    ),
    "adam": ({"optimiser": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01), None),
    "fedprox": ({"proximal": 2.0}, lambda p: SGD(p, lr=0.1), 2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_a_plain_loop(name):
    options, make, mu = CASES[name]
    batches = [_data(5, seed) for seed in range(4)]
    penalty = (lambda net: 0.0) if mu is None else _proximal(mu)
    got = _train(batches, **options)
    torch.testing.assert_close(got, _oracle(_net(), make, batches, penalty), rtol=1e-10, atol=1e-12)


def test_the_proximal_term_adds_mu_times_the_move_to_the_gradient():
    batches = [_data(5, seed) for seed in range(2)]
    centre = nn.utils.parameters_to_vector(_net().parameters()).detach()
    one = _train(batches[:1], proximal=3.0)
    torch.testing.assert_close(one, _train(batches[:1]))  # at the broadcast it pulls nowhere
    held, free = (_train(batches, proximal=mu) for mu in (3.0, 0.0))
    torch.testing.assert_close(held, free - 0.1 * 3.0 * (one - centre), rtol=1e-9, atol=1e-12)


def _clients(sizes):
    return from_clients([tuple(t.float() if t.is_floating_point() else t for t in _data(n, n)) for n in sizes])


def _round(method, sizes=(7,), number=0, net=None):
    task = prepare((net or _net()).float(), _clients(sizes), method=method, rounds=1, seed=3, engine="loop")
    state = task.begin().state
    order = open_round(task.program, state._replace(round=number), clients=len(sizes), cohort=len(sizes), seed=3)
    return task, order, task.engine.client(task.program, order, 0, None)[0]


def test_padded_rows_change_nothing():
    # 7 rows in batches of 5: the second batch of each epoch has 2 live rows and 3 of padding.
    method = fedavg(lr=0.1, epochs=3, batch=5, momentum=0.5)
    task, _, upload = _round(method)
    plan = schedule(task.clients.train_rows(0), task.program.client.phases[0], 3, 0, 0, 0)
    assert plan.live.sum(-1).flatten().tolist() == [5, 2] * 3
    data = task.clients.data
    batches = [(data.x[r[0][m[0]]], data.y[r[0][m[0]]]) for r, m in zip(plan.rows, plan.live, strict=True)]
    want = _oracle(_net().float(), lambda p: SGD(p, lr=0.1, momentum=0.5), batches)
    torch.testing.assert_close(upload.parts["model"].mean, want, rtol=1e-5, atol=1e-6)


def _phase(**shape):
    return Phase(lambda state, batch, tape, info: state, **shape)


def test_each_epoch_reads_every_row_once_in_a_new_order():
    rows = torch.tensor([3, 8, 11, 15, 16, 20, 42])
    phase = _phase(epochs=4, batch=5)
    plan = schedule(rows, phase, 0, 1, 2)
    epochs = [plan.rows[i : i + 2][plan.live[i : i + 2]] for i in range(0, 8, 2)]
    assert all(e.sort().values.tolist() == rows.tolist() for e in epochs)
    assert len({tuple(e.tolist()) for e in epochs}) == 4
    assert torch.equal(schedule(rows, phase, 0, 1, 2).rows, plan.rows)
    assert not torch.equal(schedule(rows, phase, 0, 1, 3).rows, plan.rows)
    assert set(plan.rows.flatten().tolist()) <= set(rows.tolist())  # padding is the client's own rows


def test_two_batches_of_a_step_are_shuffled_apart():
    plan = schedule(torch.arange(40), _phase(epochs=1, batch=10, batches=2), 0)
    assert plan.rows.shape == (4, 2, 10)
    assert plan.live is None or plan.live.all()
    for stream in range(2):
        assert plan.rows[:, stream].flatten().sort().values.tolist() == list(range(40))
    assert not torch.equal(plan.rows[:, 0], plan.rows[:, 1])


def test_the_learning_rate_falls_by_round_after_the_silent_ones():
    method = fedavg(lr=0.2, lr_decay=0.5, lr_silent=3)
    task = prepare(_net().float(), _clients([7]), method=method)
    rates = [task.program.options(number)["lr"] for number in range(7)]
    assert rates == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.025])
    method = fedavg(lr=0.2, lr_decay=0.5, epochs=1, batch=7)
    start = nn.utils.parameters_to_vector(_net().float().parameters()).detach()
    first, third = (_round(method, number=number)[2].parts["model"].mean - start for number in (0, 2))
    torch.testing.assert_close(third, first / 4, rtol=1e-3, atol=1e-6)  # one step on all rows


def test_fedprox_is_fedavg_with_its_proximal_term():
    a = _round(fedprox(proximal=0.5, epochs=2, batch=5))[2].parts["model"].mean
    b = _round(fedavg(proximal=0.5, epochs=2, batch=5))[2].parts["model"].mean
    c = _round(fedavg(epochs=2, batch=5))[2].parts["model"].mean
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_the_reported_loss_is_the_mean_over_the_steps():
    _, _, upload = _round(fedavg(lr=1e-12, epochs=2, batch=7))
    x, y = _data(7, 7)
    want = F.cross_entropy(_net().float()(x.float()), y).detach()
    assert float(upload.metrics["loss"]) == pytest.approx(float(want), rel=1e-5)


def test_batch_norm_statistics_travel_as_in_a_plain_loop():
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    method = fedavg(lr=0.1, epochs=2, batch=5)
    task, _, upload = _round(method, net=net())
    plan = schedule(task.clients.train_rows(0), task.program.client.phases[0], 3, 0, 0, 0)
    data, plain = task.clients.data, net()
    batches = [(data.x[r[0][m[0]]], data.y[r[0][m[0]]]) for r, m in zip(plan.rows, plan.live, strict=True)]
    want = _oracle(plain, lambda p: SGD(p, lr=0.1), batches)
    torch.testing.assert_close(upload.parts["model"].mean, want, rtol=1e-4, atol=1e-5)
    named = upload.parts["buffers"].named()
    torch.testing.assert_close(named["1.running_mean"].mean, plain[1].running_mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(named["1.running_var"].mean, plain[1].running_var, rtol=1e-4, atol=1e-6)
    assert upload.parts["counters"].mean.tolist() == [4]


def test_a_client_runs_by_itself_without_a_federation():
    x, y = (t.float() if t.is_floating_point() else t for t in _data(12))
    task, order, _ = _round(fedavg(epochs=1, batch=4))
    engine = Loop(Store(x, y, lambda k: torch.arange(12)), seed=0)
    a, b = (engine.client(task.program, order, k, None)[0].parts["model"].mean for k in (0, 1))
    assert not torch.equal(a, b)  # other clients read other batches of the same rows
