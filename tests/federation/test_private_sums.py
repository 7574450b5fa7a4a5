"""Private sums: nobody adds more than the clip, whatever they upload; without noise the sum is exact."""

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Info, Upload
from fedbayes.engine.stacked import run_all
from fedbayes.errors import InputError
from fedbayes.federation.contributions import contribute
from fedbayes.federation.private import CHANGES, KNOWN, one_of, released
from fedbayes.federation.program import Order, Outcome, Program, Terms
from fedbayes.federation.randomness import Randomness
from fedbayes.federation.schedule import poisson
from fedbayes.methods import METHODS
from fedbayes.options import options_of
from fedbayes.posterior.values import Gaussian, Point
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import close
from fedbayes.training.run import Memory

pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
CLIP = 0.7
POINTS = ("fedavg", "fedprox", "fedpa", "fedppd")  # without a precision to cap
PRIVATE: dict[str, Any] = {"private": "clients", "noise_multiplier": 1.0, "private_clip": CLIP, "private_seed": 0}
FAST: dict[str, Any] = {"epochs": 1, "batch": 4, "lr": 0.3}
RULED = {
    "fedavg": lambda **o: fb.methods.fedavg(**FAST, **o),
    **{rule: (lambda rule=rule, **o: fb.methods.fedvi(rule=rule, prior="broadcast", points=("bias",), **FAST, **o))
       for rule in CHANGES if rule != "fedavg"},
}  # fmt: skip


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def sites(count: int = 4) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 3, generator=random) for n in (4, 9, 6, 40, 1, 13)[:count]]
    return [(rows, (rows[:, 0] > 0).long()) for rows in x]


def task_of(method: Any, **options: Any) -> Any:
    return prepare(network(), sites(), method=method, rounds=2, **{**PRIVATE, "engine": "loop", **options})


ROWS = [(rule, weighting) for rule in RULED for weighting in ("equal", "size")]


@lru_cache
def bound_to(rule: str, weighting: str) -> Any:
    return task_of(RULED[rule](weighting=weighting), cap_rows=None if weighting == "equal" else 8)


def length(terms: Terms) -> float:
    return float(torch.cat([t.reshape(-1) for s in terms.values() for t in s.values()]).norm())


values = st.floats(-8, 8, width=32) | st.floats(width=32)
scales = st.floats(0.125, 8, width=32) | st.floats(min_value=2.0**-100, width=32)


@settings(max_examples=100)
@given(
    st.sampled_from(ROWS),
    st.lists(values, min_size=8, max_size=8),
    st.lists(scales, min_size=8, max_size=8),
    st.integers(1, 10**9),
)
def test_nobody_adds_more_than_the_clip_whatever_they_upload(at: Any, mean: Any, scale: Any, rows: int) -> None:
    program: Program = bound_to(*at).program
    assert "points" in program.initial or at[0] == "fedavg"
    parts, used = {}, 0
    for part, q in program.initial.items():
        size = q.mean.shape[-1]
        m, s = (torch.tensor(v[used : used + size]) for v in (mean, scale))
        parts[part] = Gaussian(m, s, q.layout) if isinstance(q, Gaussian) else Point(m, q.layout)
        used += size
    options = {name: torch.tensor(v) for name, v in program.options(0).items()}
    info = Info(program.initial, options, torch.tensor(0), torch.tensor(rows), ())
    term = contribute(program, Upload(parts, {}, {}), info)
    assert not {key for s in term.terms.values() for key in s} & {*KNOWN}
    if bool(term.finite):
        assert length(term.terms) <= CLIP
        for s in term.terms.values():
            assert all(torch.isfinite(t).all() for t in s.values())
    else:
        plain = all(abs(v) < 1e15 for v in mean) and all(1e-15 < v < 1e15 for v in scale)
        assert not plain


def orders(task: Any, cohort: tuple[int, ...]) -> Order:
    order = task.plan(task.begin()).closing
    return order._replace(cohort=cohort, dropped=())


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("at", ROWS, ids=str)
def test_one_client_more_moves_the_sum_by_the_clip_at_most(engine: str, at: tuple[str, str]) -> None:
    """Over sites of unequal size, one of which has inputs that throw it far."""
    rule, weighting = at
    clients = sites()
    clients[1] = (clients[1][0] * 1e4, clients[1][1])
    cap = None if weighting == "equal" else 8
    task = prepare(network(), clients, method=RULED[rule](weighting=weighting), rounds=1,
                   **{**PRIVATE, "engine": engine, "cap_rows": cap})  # fmt: skip
    whole = task.engine.run(task.program, orders(task, (0, 1, 2, 3)), lambda k: None)
    assert whole.terms is not None
    alone = [task.engine.run(task.program, orders(task, (k,)), lambda k: None).terms for k in range(4)]
    assert max(length(terms) for terms in alone if terms) == pytest.approx(CLIP, rel=1e-5)
    for k in range(4):
        rest = task.engine.run(task.program, orders(task, tuple(j for j in range(4) if j != k)), lambda k: None)
        assert rest.terms is not None
        gap = {p: {key: t - rest.terms[p][key] for key, t in s.items()} for p, s in whole.terms.items()}
        assert length(gap) <= CLIP * (1 + 1e-9)


ADMITTED = (
    "fedavg", "fedprox", "fedpa", "feduab", "fedvi", "fedivon", "pvi", "bayes_admm", "fedlap_cov", "fedppd",
)  # fmt: skip
BOUNDS: dict[str, dict[str, Any]] = {
    "no bound": {},
    "bounds": {"cap_precision": 1.5, "clip_change": 0.2},
    "weights by rows": {"cap_rows": 8},
}
KEEPS = ("pvi", "bayes_admm", "fedlap_cov")  # clients that keep a factor: bounds and weights are refused


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("name", "bounds"), [(n, b) for n in ADMITTED for b in BOUNDS if b == "no bound" or n not in KEEPS]
)
def test_with_what_clients_have_kept_one_more_moves_the_sum_by_the_clip_at_most(
    name: str, bounds: str, engine: str
) -> None:
    """Two rounds of every method that is admitted: in the second, factors are of the first."""
    clients = sites()
    clients[1] = (clients[1][0] * 1e3, clients[1][1])
    more: dict[str, Any] = {"points": []} if name in ("pvi", "bayes_admm") else {}
    more |= {} if name in KEEPS else {"weighting": "size" if "rows" in bounds else "equal"}
    method = METHODS[name](**FAST, **more)
    given = {"cap_precision": BOUNDS[bounds].get("cap_precision")} if name not in POINTS else {}
    given |= {key: value for key, value in BOUNDS[bounds].items() if key != "cap_precision"}
    task = prepare(network(), clients, method=method, rounds=2, **{**PRIVATE, "engine": engine, **given})
    own, progress = Memory(), task.begin()
    for _ in range(2):
        plan = task.plan(progress)
        order = plan.closing._replace(cohort=(0, 1, 2, 3), dropped=())
        whole = task.engine.run(task.program, order, own.get)
        for k in range(4):
            rest = task.engine.run(task.program, order._replace(cohort=tuple(j for j in range(4) if j != k)), own.get)
            gap = {p: {key: t - rest.terms[p][key] for key, t in s.items()} for p, s in whole.terms.items()}
            assert length(gap) <= CLIP * (1 + 1e-9)
        progress, _ = close(task, progress, own, plan._replace(closing=order, orders=(order,)), whole)


def test_every_method_is_admitted_or_refused_by_name() -> None:
    for name in {*METHODS} - {*ADMITTED}:
        with pytest.raises(InputError):
            task_of(METHODS[name](**{k: v for k, v in FAST.items() if k in options_of(METHODS[name])}))


def test_in_a_sweep_each_member_has_its_own_clip() -> None:
    members = [
        task_of(RULED["log_pool"](weighting="equal"), engine="stacked", private_clip=c) for c in (0.05, 0.4, 9.0)
    ]
    some = [orders(task, (0, 1, 3)) for task in members]
    owns = [lambda k: None] * 3
    together = run_all([t.engine for t in members], [t.program for t in members], some, owns)
    for task, order, ours in zip(members, some, together):
        alone = task_of(RULED["log_pool"](weighting="equal"), private_clip=task.privacy.clip)
        theirs = alone.engine.run(alone.program, order, lambda k: None)
        for key, t in theirs.terms["model"].items():
            torch.testing.assert_close(ours.terms["model"][key], t, rtol=1e-5, atol=1e-6)
        assert length(ours.terms) <= 3 * task.privacy.clip


def silent(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


@lru_cache
def thrown_far(rule: str, weighting: str) -> Any:
    """Sites of unequal size, one of which has inputs that throw it far."""
    clients = sites()
    clients[1] = (clients[1][0] * 1e4, clients[1][1])
    cap = None if weighting == "equal" else 8
    return prepare(network(), clients, method=RULED[rule](weighting=weighting), rounds=1, cohort=3,
                   **{**PRIVATE, "engine": "loop", "cap_rows": cap})  # fmt: skip


everybody = st.sets(st.integers(0, 3))


@settings(max_examples=60)
@given(st.sampled_from(ROWS), everybody, everybody, st.integers(0, 3))
def test_whoever_drops_out_one_client_moves_the_sum_by_the_clip_at_most(
    at: Any, cohort: Any, gone: Any, k: int
) -> None:
    """Nor does anything else that is released differ: it is of the expected cohort, however many were left of it."""
    task = thrown_far(*at)
    sums, releases = [], []
    for drawn in (cohort | {k}, cohort - {k}):
        came, dropped = tuple(sorted(drawn - gone)), tuple(sorted(drawn & gone))
        order = orders(task, came)._replace(dropped=dropped)
        nobody = Outcome(None, [], {}, {}, {}, 0)
        outcome = task.engine.run(task.program, order, lambda k: None) if came else nobody
        still = task.program.initial
        zero = {p: {key: torch.zeros_like(t) for key, t in one_of(rule, still[p]).items() if key not in KNOWN}
                for p, rule in task.program.pooling.rules.items()}  # fmt: skip
        sums.append(outcome.terms or zero)
        closed, made = released(task.program, order, outcome, silent)
        assert (closed.cohort, closed.dropped) == ((), ())
        releases.append(made)
    gap = {p: {key: t - sums[1][p][key] for key, t in s.items()} for p, s in sums[0].items()}
    assert length(gap) <= (0.0 if k in gone else CLIP * (1 + 1e-9))
    with_it, without = releases
    assert (with_it.counted, with_it.left_out, with_it.metrics) == (without.counted, {}, {}) == (3, {}, {})
    for part, statistics in with_it.terms.items():
        for key in {*statistics} & {*KNOWN}:
            assert torch.equal(statistics[key], without.terms[part][key])


def test_who_drops_out_does_not_depend_on_who_else_was_drawn() -> None:
    """Each of a cohort is gone with the same chance, and on its own."""
    task = thrown_far("fedavg", "equal")
    gone, pairs, rounds = torch.zeros(4), 0, 3000
    for seed in range(rounds):
        order = poisson(clients=4, rate=1.0, random=Randomness(seed), dropout=0.3).plan(
            task.program, task.begin().state
        )
        gone[list(order.closing.dropped)] += 1
        pairs += {0, 1} <= {*order.closing.dropped}
    error = 5 * (0.3 * 0.7 / rounds) ** 0.5
    assert bool(((gone / rounds - 0.3).abs() < error).all())
    assert abs(pairs / rounds - 0.09) < 5 * (0.09 * 0.91 / rounds) ** 0.5


@pytest.mark.parametrize("rule", sorted(RULED))
def test_without_clip_and_noise_it_is_the_plain_rule_over_the_expected_cohort(rule: str) -> None:
    plain = fb.fit(network(), sites(), method=RULED[rule](weighting="equal"), rounds=1, engine="loop")
    wide = task_of(RULED[rule](weighting="equal"), private_clip=1e9)
    order = orders(wide, (0, 1, 2, 3))
    outcome = wide.engine.run(wide.program, order, lambda k: None)
    closed, bare = released(wide.program, order, outcome, silent)
    assert closed.cohort == ()
    for part, pooled in wide.program.pooling.rules.items():
        q = pooled.decode(bare.terms[part], order.broadcast[part])
        torch.testing.assert_close(q.mean, plain.parts[part].mean, rtol=1e-4, atol=1e-6)
        if isinstance(q, Gaussian):
            torch.testing.assert_close(q.scale, plain.parts[part].scale, rtol=1e-4, atol=1e-6)


def test_noise_has_its_deviation_whoever_came_and_floors_hold() -> None:
    task = task_of(RULED["log_pool"](weighting="equal"), noise_multiplier=30.0, private_clip=1.0)
    order = orders(task, ())
    nobody = Outcome(None, [], {}, {}, {}, 0)
    draws, precisions = [], []
    random = torch.Generator().manual_seed(0)
    for _ in range(400):
        _, out = released(task.program, order, nobody, lambda n: torch.randn(n, generator=random, dtype=torch.float64))
        draws.append(out.terms["points"]["mean"])
        precisions.append(out.terms["model"]["precision"])
        q = task.program.pooling.rules["model"].decode(out.terms["model"], order.broadcast["model"])
        assert (q.scale <= order.broadcast["model"].scale * 10**0.5 * (1 + 1e-5)).all()
        assert torch.isfinite(q.mean).all()
    assert float(torch.stack(draws).std()) == pytest.approx(30.0, rel=0.1)
    low = torch.stack(precisions)
    assert float(low.min()) == pytest.approx(0.4)  # a tenth of four clients' worth
    assert 0.3 < float((low == low.min()).double().mean()) < 0.6


# Methods whose rounds can be private.
TAKEN = (
    *("fedavg", "fedprox", "fedpa", "fedppd"),
    *("feduab", "fedvi", "fedivon", "pvi", "bayes_admm", "fedlap_cov"),
)
REASONS = "every upload|keep a vector|personal|no sum of changes|start from points|posterior of all rows"


def asked(name: str) -> Any:
    method = METHODS[name]
    weighs = "weighting" in method.__dataclass_fields__ and "weighting" not in method.fixed
    two = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return fb.fit(
        *(two, sites()),
        method=method(**({"weighting": "equal"} if weighs else {})),
        rounds=2,
        cohort=2,
        **PRIVATE,
    )


@pytest.mark.parametrize("name", TAKEN)
def test_a_private_method_accounts_for_its_rounds(name: str) -> None:
    run = asked(name)
    assert run.epsilon == pytest.approx(run.journal[-1]["epsilon"])
    assert torch.isfinite(run.posterior.mean).all()
    assert torch.isfinite(getattr(run.posterior, "scale", run.posterior.mean)).all()


@pytest.mark.parametrize("name", [name for name in METHODS if name not in TAKEN])
def test_all_others_are_refused_with_their_reason(name: str) -> None:
    with pytest.raises(InputError, match=f"^private: .*({REASONS})"):
        asked(name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "fedavg"}, "cap_rows"),
        ({"method": fb.methods.fedavg(weighting="distance")}, "must have a bound"),
        ({"method": fb.methods.fedvi(rule="wc", weighting="equal")}, "no sum of changes"),
        ({"method": fb.methods.fedvi(rule="lp", weighting="equal")}, "no sum of changes"),
        ({"method": fb.methods.fedvi(rule="median", weighting="equal")}, "every upload"),
        ({"method": fb.methods.fedvi(rule="dwc", prior="fixed", weighting="equal")}, "fixed prior"),
        ({"method": fb.methods.fedavg(weighting="equal"), "clip_quantile": 0.5}, "clip_quantile"),
        ({"method": "pvi", "validation": 0.2}, "validation: the run is private"),
        ({"method": "pvi", "target_loss": 0.1}, "target_loss: the run is private"),
        ({"method": "pvi", "target_accuracy": 0.9}, "public_test"),
        ({"method": "pvi", "personal_every": 1}, "personal_every"),
        ({"method": "pvi", "noise_multiplier": None}, "give epsilon"),
        ({"method": "pvi", "private": None}, "the run is not private"),
        ({"method": "pvi", "epsilon": 0.01}, "one round at noise 1 costs more than 0.01"),
    ],
)
def test_what_would_show_clients_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        fb.fit(network(), sites(), rounds=2, cohort=2, **{**PRIVATE, **options})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("level", ["clients", "rows"])
@pytest.mark.parametrize("refine", ["flow", "laplace"])
def test_what_is_gathered_for_personal_models_is_refused_before_training_and_after(level: str, refine: str) -> None:
    private = {**PRIVATE, "private": level}
    plain = {"weighting": "equal", "epochs": 1, "batch": 8}
    with pytest.raises(InputError, match=r'^private: .*personal models .*set refine = "tune"$'):
        fb.fit(network(), sites(), method=fb.methods.fedavg(**plain, refine=refine), rounds=1, **private)
    run = fb.fit(network(), sites(), method=fb.methods.fedavg(**plain), rounds=1, **private)
    with pytest.raises(InputError, match=r'^private: .*personal models .*set refine = "tune"$'):
        run.refined(refine)
    assert run.refined("none").personal(0).parts.keys() == {"model"}


def test_batch_norm_is_refused() -> None:
    with pytest.raises(InputError, match="GroupNorm"):
        fb.fit(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), sites(),
               method=fb.methods.fedavg(weighting="equal"), rounds=1, **PRIVATE)  # fmt: skip


def test_a_factor_holds_what_its_client_added() -> None:
    """The prior times all factors is the server's posterior, but for the noise: here there is none."""
    method = fb.methods.pvi(damping=0.5, epochs=3, lr=0.2, batch=8)
    task = task_of(method, private_clip=0.5)
    order = orders(task, (0, 1, 2, 3))
    outcome = task.engine.run(task.program, order, lambda k: None)
    assert length(outcome.terms) > 0.1
    prior = order.broadcast["model"]
    _, bare = released(task.program, order, outcome, silent)
    q = task.program.pooling.rules["model"].decode(bare.terms["model"], prior)
    factors = sum(own["precision"] for own in outcome.own.values())
    torch.testing.assert_close(q.scale.double() ** -2, prior.scale.double() ** -2 + factors, rtol=1e-4, atol=1e-4)
    shifts = sum(own["shift"] for own in outcome.own.values())
    torch.testing.assert_close(q.mean.double() * q.scale.double() ** -2, shifts, rtol=1e-3, atol=1e-3)
