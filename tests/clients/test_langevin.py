"""The Langevin client: its chain, its student, and what it uploads."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.engine import loop
from fedbayes.engine.batches import schedule
from fedbayes.errors import InputError
from fedbayes.federation.round import open_round
from fedbayes.methods import fedavg, fedppd
from fedbayes.noise import Tape, normals
from fedbayes.training.prepare import prepare


def _clients(sizes=(23, 12, 30), seed=0):
    g = torch.Generator().manual_seed(seed)

    def pair(n):
        return torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)

    return fb.data.from_clients([pair(n) for n in sizes], pair(15), classes=3)


def _net(hidden=6, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))


class Normed(nn.Module):
    """BatchNorm and dropout, so that a network has buffers, counters and noise of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(hidden, 3)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("options", [{"schedule": "interleaved"}, {"schedule": "epochs"}], ids=str)
def test_without_temperature_the_teacher_is_trained_by_sgd_at_half_the_rate(options):
    cold = fedppd(temperature=0.0, lr=0.2, epochs=1, batch=5, upload="last", weight_decay=0.01, **options)
    plain = fedavg(lr=0.1, epochs=1, batch=5, weight_decay=0.01)
    a, b = (fb.fit(_net(), _clients(), method=m, rounds=1, engine="loop") for m in (cold, plain))
    torch.testing.assert_close(a.parts["model"].mean, b.parts["model"].mean, rtol=1e-5, atol=1e-6)


def test_a_step_of_the_chain_is_the_formula():
    task = prepare(_net(), _clients(), method=fedppd(epochs=1, batch=30, lr=0.3, upload="last"), engine="loop")
    order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
    got = task.engine.client(task.program, order, 1, None)[0].parts["model"].mean  # twelve rows: one step
    net, data, rows = _net(), task.clients.data, task.clients.train_rows(1)
    theta = nn.utils.parameters_to_vector(net.parameters()).detach()
    nn.functional.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
    slope = torch.cat([p.grad.flatten() for p in net.parameters()]) + 1e-4 * theta
    z = normals(len(theta) + 120, 0, 0, 1, 0, 0, "noise")[: len(theta)]  # the student's inputs read the rest
    torch.testing.assert_close(got, theta - 0.15 * slope + (0.3 / 12) ** 0.5 * z, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cooling", ["constant", "1/n"])
def test_the_published_temperature_is_four_over_n(cooling):
    """With T = 4 / n the noise has scale 2 sqrt(lr) / n."""
    temperature = {"constant": 4 / 12, "1/n": 4.0}[cooling]
    made = fedppd(epochs=1, batch=30, lr=1e-12, temperature=temperature, cooling=cooling, upload="last")
    task = prepare(_net(), _clients(), method=made, engine="loop")
    order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
    moved = task.engine.client(task.program, order, 1, None)[0].parts["model"].mean.double()
    z = normals(len(moved) + 120, 0, 0, 1, 0, 0, "noise")[: len(moved)].double()
    start = task.program.initial["model"].mean.double()
    # The rate is so small that only float32's rounding of the weights is left beside the noise.
    torch.testing.assert_close(moved, start + 2 * 1e-6 / 12 * z, rtol=0, atol=1e-7)


def _chain(task, k=0):
    """The state of a client after each of its phases, walked by hand."""
    program, engine, rows = task.program, task.engine, task.clients.train_rows(k)
    order = open_round(program, task.begin().state, clients=len(task.clients), cohort=len(task.clients), seed=0)
    info = loop._info(program, order, rows, engine.store.x.device)
    state = program.client.start({}, info)
    for place, phase in enumerate(program.client.phases):
        plan = schedule(rows, phase, 0, 0, k, place)
        for step, batch in enumerate(loop._batches(engine.store, phase, plan)):
            count = engine._count(program.client, place, state, batch, info)
            state = phase.step(state, batch, Tape(normals(count, 0, 0, k, place, step, "noise")), info)
        yield state


def test_the_draw_of_highest_density_is_sent():
    """Of the draws at the ends of epochs, by the log-density on all rows of the client."""
    method = fedppd(epochs=6, batch=6, lr=0.5, temperature=3.0, upload="map")
    task = prepare(_net(), _clients(), method=method, engine="loop")
    rows = task.clients.train_rows(0)
    x, y = task.clients.data.x[rows], task.clients.data.y[rows]
    draws = [state.teacher.vectors["model"] for state in _chain(task)][::2]  # each lesson is followed by a judgement
    energies, net = [], _net()
    for theta in draws:
        nn.utils.vector_to_parameters(theta, net.parameters())
        nll = nn.functional.cross_entropy(net(x), y).detach()
        energies.append(float(nll + 0.5e-4 * theta.square().sum()))
    best = min(range(6), key=energies.__getitem__)
    assert best != 5, "the case tells nothing: the last draw is the best"
    order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
    sent = task.engine.client(task.program, order, 0, None)[0].parts["model"].mean
    torch.testing.assert_close(sent, draws[best], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_two_networks_with_buffers_of_their_own_share_a_client(engine):
    torch.manual_seed(1)
    method = fedppd(student=Normed(9), epochs=2, batch=6, thin=2, sampler="sghmc", teacher_dropout=True)
    torch.manual_seed(2)
    run = fb.fit(Normed(5), _clients(), method=method, rounds=2, engine=engine)
    assert "notes" not in run.journal[0]
    names = {"model", "buffers", "counters", "student", "student.buffers", "student.counters"}
    assert set(run.parts) == names
    assert run.posterior is run.parts["student"]
    assert run.parts["student.buffers"].mean.shape == (18,)
    # Thirty rows in batches of six: five steps a pass; the student makes half as many passes, each network counts.
    assert run.parts["counters"].mean.tolist() == [20]
    assert run.parts["student.counters"].mean.tolist() == [10]
    assert run.predict(run.task.clients.data.test_x).probs.shape == (15, 3)


@pytest.mark.parametrize(("epochs", "burn_in", "thin"), [(5, 1, 2), (3, 0, 3), (4, 3, 1)])
def test_burn_in_and_thinning_say_how_often_each_network_steps(epochs, burn_in, thin):
    for kind in ("interleaved", "epochs"):
        method = fedppd(epochs=epochs, burn_in=burn_in, thin=thin, batch=5, schedule=kind)
        *_, last = _chain(prepare(_net(), _clients((20,)), method=method, engine="loop"))
        assert float(last.teacher.steps) == 4 * epochs
        assert float(last.student.steps) == 4 * (epochs - burn_in) // thin


@pytest.mark.parametrize(("teacher", "student"), [("steps", "constant"), ("constant", "steps")])
def test_teacher_and_student_have_schedules_of_their_own(teacher, student):
    """A rate that is as good as gone after the first epoch leaves its network where that epoch ended."""
    rates = {"lr_within": teacher, "student_lr_within": student, "lr_drop": 1e-30}
    method = fedppd(epochs=2, batch=5, temperature=0.0, schedule="epochs", upload="last", **rates)
    first, *_, last = list(_chain(prepare(_net(), _clients((20,)), method=method, engine="loop")))[1::2]
    for kind, before, after in (
        (teacher, first.teacher, last.teacher),
        (student, first.student, last.student),
    ):
        moved = sum((after.vectors[part] - before.vectors[part]).abs().max() for part in after.vectors)
        assert moved < 1e-6 if kind == "steps" else moved > 1e-4


def test_a_student_that_would_never_learn_is_refused():
    with pytest.raises(InputError, match="multiple of thin"):
        fedppd(epochs=3, burn_in=3)
    with pytest.raises(InputError, match="multiple of thin"):
        fedppd(epochs=5, thin=2)
    with pytest.raises(InputError, match="student: it gives 2 outputs"):
        prepare(_net(), _clients(), method=fedppd(student=nn.Linear(4, 2)))


def test_a_student_matches_its_teachers_ensemble_on_digits_it_has_not_seen():
    """Online distillation ends within .05 nats (mean KL) of the ensemble of its second half of draws."""
    data = fb.data.load("digits")
    clients = fb.data.from_clients([(data.x[:400], data.y[:400])], (data.test_x, data.test_y), classes=10)
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 10))
    method = fedppd(
        student=student, epochs=30, batch=20, lr=0.4, student_lr=0.4, input_noise=0.05, temperature=0.1, upload="last"
    )  # fmt: skip
    task, seen = prepare(teacher, clients, method=method, engine="loop"), data.prepare(data.test_x)
    said = []
    for state in _chain(task):
        nn.utils.vector_to_parameters(state.teacher.vectors["model"], teacher.parameters())
        said.append(teacher(seen).softmax(-1).detach())
    ensemble = torch.stack(said[15:]).mean(0)
    nn.utils.vector_to_parameters(state.student.vectors["student"], student.parameters())

    def gap(log):
        return float((ensemble * (ensemble.clamp(min=1e-30).log() - log)).sum(-1).mean())

    kl = gap(student(seen).log_softmax(-1).detach())
    assert kl < 0.05
