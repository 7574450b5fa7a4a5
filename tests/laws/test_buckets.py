"""Buckets in front of robust rules: one posterior for each, by hand and in every engine, without holding uploads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fedbayes as fb
from fedbayes.data import Clients, from_clients
from fedbayes.errors import InputError
from fedbayes.federation.cohorts import dealt
from fedbayes.federation.pooling import pooled
from fedbayes.federation.program import Stage
from fedbayes.federation.round import open_round
from fedbayes.federation.rules import RULES
from fedbayes.posterior.values import Gaussian, Parts
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds, rounds_together
from fedbayes.training.run import Memory

ROBUST = [name for name, rule in RULES.items() if rule.robust]
ENGINES: list[dict[str, Any]] = [{"engine": "loop"}, {"engine": "stacked", "at_once": 3}]
SIZES = (4, 9, 6, 5, 8, 7, 6)
FAST = {"epochs": 1, "batch": 4, "lr": 0.1, "test_draws": 2}


def clients(sizes: tuple[int, ...] = SIZES) -> Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=random), torch.randint(2, (n,), generator=random)) for n in sizes]
    return from_clients(pairs, pairs[0], classes=2)


def network(norm: bool = True) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(4)] if norm else []
    return nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).double()


def close(a: Parts, b: Parts, tolerance: float = 1e-9) -> None:
    assert a.keys() == b.keys()
    for part in a:
        for one, other in zip(tree_leaves(a[part]), tree_leaves(b[part]), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_clients_are_dealt_evenly_and_by_address() -> None:
    cohort = tuple(range(3, 26))
    deals = [dealt(cohort, 5, 7, number) for number in range(200)]
    assert deals[3] == dealt(cohort, 5, 7, 3)
    assert deals[3] != deals[4] != dealt(cohort, 5, 8, 4)
    for deal in deals:
        assert tuple(sorted(deal)) == cohort
        assert sorted(Counter(deal.values()).values()) == [4, 4, 5, 5, 5]
    # Any two meet as often as chance has it: in 4.3 of 22.
    together = sum(deal[3] == deal[4] for deal in deals) / len(deals)
    assert abs(together - 0.165) < 5 * (0.165 * 0.835 / 200) ** 0.5
    assert dealt(cohort, 0, 7, 3) == {}


@pytest.mark.parametrize(
    ("method", "within", "name"),
    [
        *[("fedvi", "log_pool", name) for name in ROBUST],
        ("fedavg", "fedavg", "median"),
        ("pfedbayes", "mean_rho", "median"),
    ],
)
def test_the_rule_sees_one_posterior_of_each_bucket(method: str, within: str, name: str) -> None:
    made = getattr(fb.methods, method)(rule=name, buckets=3, outliers=0.1, **FAST)
    task = prepare(network(norm=False), clients(), method=made, rounds=1, engine="loop")
    assert not task.program.needs_uploads
    state = task.begin().state
    order = open_round(task.program, state, clients=7, cohort=7, seed=0)
    sent = {k: task.engine.client(task.program, order, k, None)[0].parts["model"] for k in range(7)}
    q_0 = state.broadcast["model"]
    buckets = [[sent[k] for k in range(7) if order.buckets[k] == b] for b in range(3)]
    # One client of seven may lie, and spoil one bucket of three.
    want = fb.pool(name, [fb.pool(within, qs, reference=q_0) for qs in buckets], reference=q_0, outliers=1 / 3)
    outcome = task.engine.run(task.program, order, lambda k: None)
    assert outcome.uploads == []
    assert outcome.terms is None
    assert len(outcome.buckets) == 3
    run = fb.fit(network(norm=False), clients(), method=made, rounds=1, engine="loop")
    close({"model": run.progress.state.broadcast["model"]}, {"model": want})
    assert run.journal[0]["buckets"] == 3


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedavg", {"norm_passes": 1}), ("fedvi", {}), ("fedswag", {})],
    ids=["fedavg, statistics taken again", "fedvi", "fedswag"],
)
def test_engines_agree_on_buckets(method: str, options: dict[str, Any]) -> None:
    rule = {"pooled" if method == "fedswag" else "rule": "median"}
    made = getattr(fb.methods, method)(**rule, buckets=3, outliers=0.1, **options, **FAST)
    runs = [
        fb.fit(network(), clients(), method=made, rounds=2, cohort=6, dropout=0.1, compile="off", **engine)
        for engine in ENGINES
    ]
    for run in runs[1:]:
        assert "notes" not in run.journal[-1]
        close(run.progress.state.broadcast, runs[0].progress.state.broadcast)


@pytest.mark.parametrize("name", ROBUST)
def test_as_many_buckets_as_clients_are_none(name: str) -> None:
    alone, bucketed = (
        fb.fit(network(), clients(), method=fb.methods.fedavg(rule=name, buckets=b, **FAST), rounds=2, engine="loop")
        for b in (None, len(SIZES))
    )
    close(bucketed.progress.state.broadcast, alone.progress.state.broadcast, 1e-8)


def test_buckets_bear_clients_that_lie_in_every_engine() -> None:
    made = fb.methods.fedvi(rule="median", buckets=5, outliers=0.2, **FAST)
    lying = {"attack": "overconfident", "attackers": [2, 5]}
    honest = fb.fit(network(), clients(), method=made, rounds=1, engine="loop").posterior
    runs = [fb.fit(network(), clients(), method=made, rounds=1, compile="off", **e, **lying) for e in ENGINES]
    for run in runs[1:]:
        close(run.progress.state.broadcast, runs[0].progress.state.broadcast)
    plain = fb.fit(network(), clients(), method=fb.methods.fedvi(**FAST), rounds=1, engine="loop", **lying).posterior
    robust = runs[0].posterior
    assert isinstance(robust, Gaussian)
    assert isinstance(plain, Gaussian)
    assert isinstance(honest, Gaussian)
    assert distance(robust, honest) < 0.5 * distance(plain, honest)


def distance(a: Gaussian, b: Gaussian) -> float:
    return float((a.mean - b.mean).norm() + (a.scale.log() - b.scale.log()).norm())


def test_a_sweep_over_rules_and_buckets_equals_its_members() -> None:
    options = [{}, {"rule": "median"}, {"rule": "median", "buckets": 3}, {"rule": "trimmed_mean", "buckets": 4}]
    options += [{"rule": "multi_krum", "mixing": True}, {"rule": "median", "buckets": 3, "mixing": True}]
    options += [{"rule": "median", "twins": 0.9}]

    def task(some: dict[str, Any]) -> Any:
        made = fb.methods.fedavg(outliers=0.1, **some, **FAST)
        return prepare(network(), clients(), method=made, rounds=2, engine="stacked", compile="off", evaluate_every=2)

    tasks, owns = [task(some) for some in options], [Memory() for _ in options]
    *_, last = rounds_together(tasks, [one.begin() for one in tasks], owns)
    for some, entry in zip(options, last, strict=True):
        alone = task(some)
        *_, (progress, _) = rounds(alone, alone.begin(), Memory())
        assert entry is not None
        close(entry[0].state.broadcast, progress.state.broadcast)


def looking() -> Stage:
    return Stage("look", lambda parts: None, lambda context, state, parts: (parts, state, {}), uploads=True)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "more than clients": ("fedavg", {"buckets": 8}, {}, r"buckets: 8 are more than a cohort has clients \(7\)"),
    "of a cohort": ("fedavg", {"buckets": 5}, {"cohort": 4}, r"buckets: 5 are more than a cohort has clients \(4\)"),
    "too few against liars": (
        "fedavg",
        {"buckets": 3, "outliers": 0.2},
        {},
        r"2 of 7 clients may lie \(outliers = 0.2\) and spoil as many of 3 buckets; set at least 5, or fewer outliers",
    ),
    "a rule that adds": (
        "fedvi",
        {"rule": "nwa", "buckets": 5},
        {},
        r"in front of a robust rule \(median, trimmed_mean, geometric_median, multi_krum\); set one",
    ),
    "mixing before a rule that adds": (
        "fedvi",
        {"rule": "nwa", "mixing": True},
        {},
        r"mixing: it stands in front of a robust rule \(median, trimmed_mean, geometric_median, multi_krum\); set one",
    ),
    "twins before a rule that adds": (
        "fedvi",
        {"rule": "nwa", "twins": 0.1},
        {},
        "twins: it stands in front of a robust",
    ),
    "twins before buckets": (
        "fedvi",
        {"rule": "median", "twins": 0.1, "buckets": 5},
        {},
        "twins: they are found among uploads, and a bucket is a sum of several; leave one out",
    ),
    "twins at any distance": (
        "fedvi",
        {"rule": "median", "twins": 1.0},
        {},
        r"twins must be a share in \[0, 1\), not 1.0",
    ),
    "a method that looks at uploads": (
        "fedswag",
        {"pooled": "median", "covariance": "low_rank", "buckets": 5},
        {},
        "looks at every client's upload",
    ),
    "a stage that does": ("fedavg", {"buckets": 5}, {"stages": [looking()]}, "looks at every client's upload"),
    "one bucket": ("fedavg", {"buckets": 1}, {}, "buckets must be a whole number of at least 2, not 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_buckets_that_can_not_be_are_refused_in_one_line(case: str) -> None:
    method, options, more, words = REFUSED[case]

    def made() -> Any:
        rule = {} if method == "fedswag" else {"rule": "median"}
        return getattr(fb.methods, method)(**{**rule, **options})

    with pytest.raises(InputError, match=words):
        prepare(network(), clients(), method=made(), rounds=1, **more)


def test_a_bucket_that_is_not_finite_is_left_out() -> None:
    task = prepare(network(), clients(), method=fb.methods.fedavg(rule="median", buckets=3, outliers=0.1, **FAST))
    order = open_round(task.program, task.begin().state, clients=7, cohort=7, seed=0)
    outcome = task.engine.run(task.program, order, lambda k: None)
    spoilt: Tensor = outcome.buckets[1]["model"]["mean"]
    spoilt.fill_(torch.inf)
    parts, report = pooled(task.program, order, outcome)
    assert report["buckets"] == 2.0
    assert torch.isfinite(parts["model"].mean).all()
