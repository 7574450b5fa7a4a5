"""Seats for what comes between a client and the next broadcast: a transform, a rule that is no sum, a stage."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.data import Clients, from_clients
from fedbayes.errors import InputError
from fedbayes.federation.program import (
    AT_SERVER,
    SERVER,
    Context,
    FederationState,
    Order,
    Passed,
    Program,
    Stage,
    Transform,
)
from fedbayes.federation.round import open_round
from fedbayes.federation.rule import combining
from fedbayes.federation.schedule import Plan, Scheduler
from fedbayes.methods import Composed, Setting
from fedbayes.posterior.values import Parts, Point
from fedbayes.training.fit import train
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory, Run

ENGINES = ("loop", "stacked")
FAST = {"epochs": 1, "batch": 4, "lr": 0.3}
BOUND = 0.05


def clients() -> Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=random), torch.randint(2, (n,), generator=random)) for n in (4, 9, 6)]
    return from_clients(pairs, pairs[0], classes=2)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def uploads() -> tuple[list[torch.Tensor], torch.Tensor]:
    """What each client sends in the first round, and the broadcast."""
    task = prepare(network(), clients(), method=fb.methods.fedavg(**FAST), rounds=1, engine="loop")
    order = open_round(task.program, task.begin().state, clients=3, cohort=3, seed=0)
    sent = [task.engine.client(task.program, order, k, None)[0].parts["model"].mean for k in range(3)]
    return sent, order.broadcast["model"].mean


def one_round(engine: str, method: fb.methods.Method, rounds: int = 1) -> Run:
    run = train(prepare(network(), clients(), method=method, rounds=rounds, engine=engine))
    assert "notes" not in run.journal[-1]
    return run


def clip(parts: Parts, start: Parts, options: Any) -> Passed:
    """The change of each upload, made shorter than a bound."""
    q, old = parts["model"], start["model"].mean
    change = q.mean - old
    factor = (BOUND / change.norm()).clamp(max=1)
    return Passed({**parts, "model": Point(old + factor * change, q.layout)})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transform_of_the_channel_bounds_every_upload(engine: str) -> None:
    def compose(setting: Setting) -> Program:
        program = fb.methods.fedavg(**FAST).build(setting)
        return program._replace(pooling=program.pooling._replace(channel=(Transform("clip", upload=clip),)))

    sent, old = uploads()
    moves = torch.stack([(q - old) * (BOUND / (q - old).norm()).clamp(max=1) for q in sent])
    assert max((q - old).norm() for q in sent) > BOUND
    want = old + torch.tensor([4.0, 9.0, 6.0]).double() / 19 @ moves
    torch.testing.assert_close(one_round(engine, Composed(program=compose)).posterior.mean, want)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_transform_of_the_sum_is_the_servers(engine: str) -> None:
    def halve(terms: Any) -> Any:
        return {part: {**t, "mean": t["mean"] / 2} if "mean" in t else t for part, t in terms.items()}

    def compose(setting: Setting) -> Program:
        program = fb.methods.fedavg(**FAST).build(setting)
        return program._replace(pooling=program.pooling._replace(channel=(Transform("halve", total=halve),)))

    sent, old = uploads()
    mean = torch.tensor([4.0, 9.0, 6.0]).double() / 19 @ torch.stack(sent)
    torch.testing.assert_close(one_round(engine, Composed(program=compose)).posterior.mean, (old + mean) / 2)


def middle(posteriors: Any, weights: torch.Tensor, reference: Any) -> Point:
    return Point(torch.stack([q.mean for q in posteriors]).median(0).values, reference.layout)


MEDIAN = combining(middle, "median of each weight", takes=(Point,))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rule_may_combine_all_uploads(engine: str) -> None:
    run = one_round(engine, fb.methods.fedavg(rule=MEDIAN, **FAST))
    sent, _ = uploads()
    torch.testing.assert_close(run.posterior.mean, torch.stack(sent).median(0).values)
    pooled = fb.pool(MEDIAN, [Point(q) for q in sent])
    torch.testing.assert_close(pooled.mean, torch.stack(sent).median(0).values)


def counting(factor: float) -> Stage:
    """Goes only a part of the way to the pool, and counts its rounds."""

    def apply(context: Context, state: torch.Tensor, parts: Parts) -> tuple[Parts, torch.Tensor, dict[str, float]]:
        old, q = context.order.broadcast["model"].mean, parts["model"]
        moved = Point(old + factor * (q.mean - old), q.layout)
        return {**parts, "model": moved}, state + 1, {"counted": float(state + 1)}

    return Stage("counting", lambda parts: torch.zeros(()), apply)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_users_stage_follows_the_pooling_and_keeps_a_state(engine: str) -> None:
    def compose(setting: Setting) -> Program:
        program = fb.methods.fedavg(server="sgd", server_momentum=0.0, **FAST).build(setting)
        return program._replace(stages=(*program.stages, counting(0.25)))

    sent, old = uploads()
    mean = torch.tensor([4.0, 9.0, 6.0]).double() / 19 @ torch.stack(sent)
    run = one_round(engine, Composed(program=compose))
    torch.testing.assert_close(run.posterior.mean, old + 0.25 * (mean - old))
    again = one_round(engine, Composed(program=compose), rounds=3)
    assert [record["counted"] for record in again.journal] == [1, 2, 3]
    assert set(again.progress.state.stages) == {"server step", "counting"}


def stale(old: FederationState) -> Scheduler:
    """Client 0 trains from the newest broadcast, clients 1 and 2 from one of an earlier version."""

    def plan(program: Program, state: FederationState) -> Plan:
        options = program.options(state.round)
        late = Order(state.round, (1, 2), (), old.broadcast, options, old.version)
        new = Order(state.round, (0,), (), state.broadcast, options, state.version)
        return Plan((late, new), new._replace(cohort=(0, 1, 2)))

    return Scheduler("stale", plan, lambda number: (0, 1, 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scheduler_may_close_a_round_on_orders_of_two_versions(engine: str) -> None:
    task = prepare(network(), clients(), method=fb.methods.fedavg(**FAST), rounds=2, engine=engine)
    begun = task.begin()
    (first, _), *_ = rounds(replace(task, rounds=1), begun, Memory())
    assert (begun.state.version, first.state.version) == (0, 1)
    ((second, record),) = rounds(replace(task, scheduler=stale(begun.state)), first, Memory())
    loop = prepare(network(), clients(), method=fb.methods.fedavg(**FAST), rounds=2, engine="loop")
    late, new = stale(begun.state).plan(task.program, first.state).orders
    sent = {k: loop.engine.client(loop.program, late, k, None)[0].parts["model"].mean for k in (1, 2)}
    sent[0] = loop.engine.client(loop.program, new, 0, None)[0].parts["model"].mean
    old, now = begun.state.broadcast["model"].mean, first.state.broadcast["model"].mean
    want = now + (4 * (sent[0] - now) + 9 * (sent[1] - old) + 6 * (sent[2] - old)) / 19
    torch.testing.assert_close(second.state.broadcast["model"].mean, want)
    assert second.state.version == 2
    assert record["train"]["loss"] > 0


def test_versions_that_do_not_add_are_refused() -> None:
    task = prepare(network(), clients(), method=fb.methods.fedvi(rule="conflation"), rounds=2, engine="loop")
    begun = task.begin()
    (first, _), *_ = rounds(replace(task, rounds=1), begun, Memory())
    with pytest.raises(InputError, match="uploads of two versions can't be added: the rule of part 'model'"):
        next(rounds(replace(task, scheduler=stale(begun.state)), first, Memory()))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_may_run_another_program_on_clients(engine: str) -> None:
    """A second visit of the cohort, from the pooled posterior: its uploads are looked at, the posterior stays."""
    norms: list[float] = []

    def visit(program: Program) -> Stage:
        alone = program._replace(pooling=program.pooling._replace(rules={}), stages=())

        def apply(context: Context, state: Any, parts: Parts) -> tuple[Parts, Any, dict[str, float]]:
            order = context.order._replace(broadcast=parts, purpose="visit")
            uploads = context.engine.run(alone, order, context.own).uploads
            norms.extend(float((u.parts["model"].mean - parts["model"].mean).norm()) for u in uploads)
            return parts, state, {"visited": float(len(uploads))}

        return Stage("visit", lambda parts: None, apply)

    def compose(setting: Setting) -> Program:
        program = fb.methods.fedavg(**FAST).build(setting)
        return program._replace(stages=(*program.stages, visit(program)))

    run = one_round(engine, Composed(program=compose))
    assert run.journal[0]["visited"] == 3
    assert all(norm > 0 for norm in norms)
    plain = one_round(engine, fb.methods.fedavg(**FAST))
    assert torch.equal(run.posterior.mean, plain.posterior.mean)


def test_the_noise_of_an_order_begins_with_its_purpose() -> None:
    order = Order(0, (0,), (), {}, {})
    assert order.seed(5) == order._replace(cohort=(SERVER,), purpose=AT_SERVER).seed(5) == 5
    others = {order._replace(purpose=purpose).seed(5) for purpose in ("personal", "gather", "statistics")}
    assert len(others | {5}) == 4
