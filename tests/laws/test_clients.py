"""Four toy clients in the shape of later methods, run end to end, so that the abstractions are proven early.

Two networks and two batches a step; own state across rounds; a pass over the data after training; server data.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from fedbayes import Gaussian, Point, data, pool
from fedbayes.clients.client import Client, Phase, Upload
from fedbayes.data import partition
from fedbayes.engine.batches import schedule
from fedbayes.federation.program import (
    AT_SERVER,
    SERVER,
    Order,
    Pooling,
    Prediction,
    Program,
    ServerData,
    Stage,
)
from fedbayes.federation.round import open_round
from fedbayes.federation.rules import RULES
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.methods import Composed
from fedbayes.model.model import Model
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory, Run

SIZES = (6, 9, 4, 12)


def _clients():
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=g), torch.randint(2, (n,), generator=g)) for n in SIZES]
    return data.from_clients(pairs, (torch.randn(20, 3, generator=g), torch.randint(2, (20,), generator=g)), classes=2)


def _net(seed: int = 0, hidden: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2)) if hidden else nn.Linear(3, 2)


def _program(model, client, initial, rules, **prediction) -> Program:
    pooling = Pooling(rules, WEIGHTINGS["size"])
    return Program(model, client, initial, lambda number: {"lr": 0.2}, pooling, prediction=Prediction(**prediction))


@pytest.fixture(params=["loop", "stacked"])
def engine(request):
    return request.param


def _train(build, engine="loop", rounds_=3, clients=None, **options):
    """All progress, journal and own state of a hand-made method."""
    method = Composed(program=build)
    task = prepare(_net(), clients or _clients(), method=method, rounds=rounds_, engine=engine, **options)
    own, seen = Memory(), []
    for progress, record in rounds(task, task.begin(), own):
        assert "notes" not in record  # no engine fell back to another
        seen.append((progress, record))
    return task, seen, own


def _live(batch, rows):
    return rows if batch.mask is None else rows[batch.mask]


# (a) Two networks and two batches a step: a teacher learns the labels, a larger student learns the teacher.


def _teacher_and_student(setting):
    teacher = Model.of(setting.network, setting.likelihood)
    student = Model.of(_net(1, hidden=5), setting.likelihood, parts={"student": ["*"]})
    models = {"model": teacher, "student": student}
    initial = {part: Point(m.initial()[part], m.layouts[part]) for part, m in models.items()}

    def start(own, info):
        return {part: info.broadcast[part].mean for part in models}

    def step(state, batches, tape, info):
        labelled, other = batches
        assert tape.used == 0

        def teach(vector):
            out = teacher.output(teacher.weights({"model": vector}), labelled.x)
            return teacher.nll(out, labelled.y, labelled.mask, {})

        moved = state["model"] - info.options["lr"] * grad(teach)(state["model"])
        noisy = other.x + 0.01 * tape(other.x)
        said = teacher.output(teacher.weights({"model": moved}), noisy).softmax(-1)

        def learn(vector):
            out = student.output(student.weights({"student": vector}), noisy).log_softmax(-1)
            rows = -(said * out).sum(-1)
            live = torch.ones_like(rows) if other.mask is None else other.mask.float()
            return (rows * live).sum() / live.sum()

        return {"model": moved, "student": state["student"] - info.options["lr"] * grad(learn)(state["student"])}

    def finish(state, info):
        return Upload({part: Point(v, models[part].layouts[part]) for part, v in state.items()}, {}, {})

    client = Client(start, (Phase(step, epochs=1, batch=5, batches=2),), finish)
    rules = {"model": RULES["fedavg"], "student": RULES["fedag"]}
    return _program(student, client, initial, rules, part="student", draws=4)


def test_two_networks_and_two_batches_a_step(engine):
    task, seen, _ = _train(_teacher_and_student, engine, rounds_=3)
    parts = seen[-1][0].state.broadcast
    assert isinstance(parts["model"], Point)
    assert isinstance(parts["student"], Gaussian)  # each part under its own rule
    assert parts["model"].mean.shape == (8,)
    assert parts["student"].mean.shape == (32,)
    run = Run(task, seen[-1][0], [r for _, r in seen])
    assert run.posterior is parts["student"]
    assert run.predict(task.clients.data.test_x).probs.shape == (20, 2)
    assert (run.predict(task.clients.data.test_x).epistemic > 0).any()
    assert seen[-1][1]["bytes_down"] == 4 * 4 * (8 + 2 * 32)


def test_a_teachers_round_equals_a_plain_loop_and_the_student_follows_it(engine):
    task, seen, _ = _train(_teacher_and_student, engine, rounds_=1)
    store, means = task.clients.data, []
    for k in range(4):
        plain = _net()
        optimiser = torch.optim.SGD(plain.parameters(), lr=0.2)
        plan = schedule(task.clients.train_rows(k), task.program.client.phases[0], 0, 0, k, 0)
        for r, m in zip(plan.rows, plan.live, strict=True):
            rows = r[0][m[0]]
            optimiser.zero_grad()
            F.cross_entropy(plain(store.x[rows]), store.y[rows]).backward()
            optimiser.step()
        means.append(nn.utils.parameters_to_vector(plain.parameters()).detach())
    want = sum(n * m for n, m in zip(SIZES, means, strict=True)) / sum(SIZES)
    torch.testing.assert_close(seen[0][0].state.broadcast["model"].mean, want, rtol=1e-5, atol=1e-6)

    task, seen, _ = _train(_teacher_and_student, engine, rounds_=25)
    parts, x = seen[-1][0].state.broadcast, store.x
    student = task.program.model
    teacher = Model.of(_net(), student.likelihood)
    gap = {}
    for name, given in (("first", task.program.initial), ("last", parts)):
        told = teacher.output(teacher.weights({"model": parts["model"].mean}), x).softmax(-1)
        said = student.output(student.weights({"student": given["student"].mean}), x).softmax(-1)
        gap[name] = float((told - said).abs().mean())
    assert gap["last"] < 0.5 * gap["first"]


# (b) Own state kept across rounds: a count of visits, and a personal vector that never travels.


def _personal(setting):
    model = Model.of(setting.network, setting.likelihood)
    layout = model.layouts["model"]

    def start(own, info):
        return {"visits": own["visits"] + 1, "personal": own["personal"], "sum": info.broadcast["model"].mean}

    def step(state, batch, tape, info):
        live = torch.ones(len(batch.x)) if batch.mask is None else batch.mask.float()
        return {**state, "personal": state["personal"] + (live[:, None] * batch.x).sum(0)}

    def finish(state, info):
        sent = {"model": Point(state["sum"] + state["visits"], layout)}
        return Upload(sent, {"visits": state["visits"], "personal": state["personal"]}, {})

    def first(broadcast):
        return {"visits": torch.tensor(0.0), "personal": torch.full((3,), 10.0)}

    client = Client(start, (Phase(step, epochs=2, batch=5),), finish, first)
    initial = {"model": Point(model.initial()["model"], layout)}
    return _program(model, client, initial, {"model": RULES["fedavg"]})


def test_own_state_is_kept_across_rounds_with_partial_cohorts(engine):
    task, seen, own = _train(_personal, engine, rounds_=7, cohort=2)
    state = task.begin().state
    visits = [0] * 4
    level = torch.zeros(())
    for number, (progress, _) in enumerate(seen):
        order = open_round(task.program, state._replace(round=number), clients=4, cohort=2, seed=0)
        for k in order.cohort:
            visits[k] += 1
        level = level + sum(SIZES[k] * visits[k] for k in order.cohort) / sum(SIZES[k] for k in order.cohort)
        want = task.program.initial["model"].mean + level
        torch.testing.assert_close(progress.state.broadcast["model"].mean, want, rtol=1e-5, atol=1e-5)
    assert len(set(visits)) > 1
    for k in range(4):
        kept = own.get(k)
        if not visits[k]:
            assert kept is None
            continue
        assert float(kept["visits"]) == visits[k]
        rows = task.clients.data.x[task.clients.train_rows(k)]
        torch.testing.assert_close(kept["personal"], 10 + 2 * visits[k] * rows.sum(0), rtol=1e-4, atol=1e-4)


def test_a_client_that_is_left_out_keeps_the_state_it_had(engine):
    def build(setting):
        program = _personal(setting)
        finish = program.client.finish

        def broken(state, info):
            upload = finish(state, info)
            bad = torch.where((info.n == 4) & (info.round == 2), torch.nan, 0.0)
            return upload._replace(parts={"model": Point(upload.parts["model"].mean + bad)})

        return program._replace(client=program.client._replace(finish=broken))

    _, seen, own = _train(build, engine, rounds_=4)
    assert [list(record["left_out"]) for _, record in seen] == [[], [], ["2"], []]
    assert [float(own.get(k)["visits"]) for k in range(4)] == [4, 4, 3, 4]
    assert torch.isfinite(seen[-1][0].state.broadcast["model"].mean).all()


# (c) A second phase that passes over the data after training, without updating: a diagonal second moment of gradients.


def _second_moment(setting):
    model = Model.of(setting.network, setting.likelihood)
    layout = model.layouts["model"]

    def nll(vector, x, y, mask):
        weights = model.weights({"model": vector})
        return model.nll(model.output(weights, x), y, mask, weights)

    def start(own, info):
        mean = info.broadcast["model"].mean
        return {"mean": mean, "fisher": torch.zeros_like(mean), "rows": torch.zeros(())}

    def train(state, b, tape, info):
        return {**state, "mean": state["mean"] - info.options["lr"] * grad(nll)(state["mean"], b.x, b.y, b.mask)}

    def measure(state, b, tape, info):
        each = torch.func.vmap(grad(nll), in_dims=(None, 0, 0, None))(state["mean"], b.x[:, None], b.y[:, None], None)
        live = torch.ones(len(b.x)) if b.mask is None else b.mask.float()
        total = (live[:, None] * each.square()).sum(0)
        return {**state, "fisher": state["fisher"] + total, "rows": state["rows"] + live.sum()}

    def finish(state, info):
        q = Gaussian(state["mean"], (1 + state["fisher"]).rsqrt(), layout)
        return Upload({"model": q}, {}, {"rows": state["rows"], "n": info.n.float()})

    phases = (Phase(train, epochs=2, batch=4), Phase(measure, epochs=1, batch=5))
    initial = {"model": Gaussian(model.initial()["model"], torch.ones(layout.size), layout)}
    return _program(model, Client(start, phases, finish), initial, {"model": RULES["log_pool"]}, draws=5)


def test_a_second_phase_passes_over_the_data_without_updating(engine):
    task, seen, _ = _train(_second_moment, engine, rounds_=2)
    assert seen[0][1]["train"] == {"rows": sum(SIZES) / 4, "n": sum(SIZES) / 4}
    alone, _, _ = _train(_second_moment, rounds_=0)
    order = open_round(task.program, task.begin().state, clients=4, cohort=4, seed=0)
    uploads = [alone.engine.client(alone.program, order, k, None)[0].parts["model"] for k in range(4)]
    pooled = pool("log_pool", uploads, SIZES, task.program.initial["model"])
    torch.testing.assert_close(seen[0][0].state.broadcast["model"].mean, pooled.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen[0][0].state.broadcast["model"].scale, pooled.scale, rtol=1e-5, atol=1e-6)
    for k, q in enumerate(uploads):
        rows = task.clients.train_rows(k)
        fisher = torch.zeros(8)
        plain = _net()
        nn.utils.vector_to_parameters(q.mean, plain.parameters())
        for x, y in zip(task.clients.data.x[rows], task.clients.data.y[rows], strict=True):
            plain.zero_grad()
            F.cross_entropy(plain(x[None]), y[None]).backward()
            fisher += nn.utils.parameters_to_vector(p.grad for p in plain.parameters()) ** 2
        torch.testing.assert_close(q.scale**-2, 1 + fisher, rtol=1e-4, atol=1e-5)
        assert not torch.equal(q.mean, task.program.initial["model"].mean)


def test_the_phases_of_a_client_shuffle_by_addresses_of_their_own():
    task, _, _ = _train(_second_moment, rounds_=0)
    rows = task.clients.train_rows(3)
    phase = Phase(lambda *_: None, 1, 12)
    a, b = (schedule(rows, phase, 0, 0, 3, place).rows for place in (0, 1))
    assert not torch.equal(a, b)


# (d) Server data: after the pooling the server takes steps of its own.


ON_SERVER = Phase(lambda *_: None, epochs=1, batch=8)


def _with_server(setting):
    program = _personal(setting)
    model = program.model

    def start(own, info):
        assert own == {}
        return info.broadcast["model"].mean

    def step(state, b, tape, info):
        def nll(vector):
            weights = model.weights({"model": vector})
            return model.nll(model.output(weights, b.x), b.y, b.mask, weights)

        return state - info.options["lr"] * grad(nll)(state)

    def finish(state, info):
        return Upload({"model": Point(state, model.layouts["model"])}, {}, {})

    client = Client(start, (ON_SERVER._replace(step=step),), finish)
    alone = program._replace(client=client, pooling=program.pooling._replace(rules={}))

    def apply(context, state, parts):
        order = Order(context.order.round + 1, (SERVER,), (), parts, context.order.options, purpose=AT_SERVER)
        outcome = context.engine.run(alone, order, lambda k: None)
        return {**parts, **outcome.uploads[0].parts}, None, {}

    stage = Stage("own rows", lambda parts: None, apply, server=ServerData(least=1))
    return program._replace(stages=(*program.stages, stage))


def _server_oracle(task, start, rows, number):
    plain = _net()
    nn.utils.vector_to_parameters(start, plain.parameters())
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.2)
    plan = schedule(rows, ON_SERVER, 0, number, -1, 0)
    for r, m in zip(plan.rows, plan.live, strict=True):
        at = r[0][m[0]]
        optimiser.zero_grad()
        F.cross_entropy(plain(task.clients.data.x[at]), task.clients.data.y[at]).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(plain.parameters()).detach()


def test_the_server_trains_on_its_own_rows_after_the_pooling(engine):
    rows = torch.arange(11)
    task, seen, _ = _train(_with_server, engine, rounds_=2, server_data=rows)
    before = task.program.initial["model"].mean
    for visit, (progress, _) in enumerate(seen, 1):
        # Every client adds its number of visits to the broadcast, so the pooled mean is known.
        want = _server_oracle(task, before + visit, rows, visit)
        torch.testing.assert_close(progress.state.broadcast["model"].mean, want, rtol=1e-4, atol=1e-5)
        before = progress.state.broadcast["model"].mean


def test_rows_that_a_partition_leaves_at_the_server_are_the_default():
    g = torch.Generator().manual_seed(0)
    whole = data.from_arrays(torch.randn(60, 3, generator=g), torch.randint(2, (60,), generator=g), classes=2)

    def deal(labels, clients, random):
        return partition.Shares(data.Ragged.of_lists([range(15), range(15, 40)]), torch.arange(40, 60))

    task, seen, _ = _train(_with_server, rounds_=1, clients=whole.split(deal, clients=2))
    want = _server_oracle(task, task.program.initial["model"].mean + 1, torch.arange(40, 60), 1)
    torch.testing.assert_close(seen[0][0].state.broadcast["model"].mean, want, rtol=1e-4, atol=1e-5)


def test_a_method_that_trains_at_the_server_asks_for_rows_there():
    with pytest.raises(ValueError, match="server_data"):
        _train(_with_server)


@pytest.mark.parametrize("build", [_teacher_and_student, _personal, _second_moment], ids=lambda f: f.__name__)
def test_toy_methods_repeat_bit_for_bit_and_do_not_depend_on_the_order_of_the_cohort(build):
    (_, first, _), (task, second, _) = (_train(build, rounds_=2) for _ in range(2))
    for name, q in first[-1][0].state.broadcast.items():
        assert torch.equal(q.mean, second[-1][0].state.broadcast[name].mean)
    order = open_round(task.program, task.begin().state, clients=4, cohort=4, seed=0)
    fresh = _train(build, rounds_=0)[0]
    for k in reversed(range(4)):
        a, b = (t.engine.client(t.program, order, k, None)[0].parts for t in (task, fresh))
        assert all(torch.equal(a[part].mean, b[part].mean) for part in a)
