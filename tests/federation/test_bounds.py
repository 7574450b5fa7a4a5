"""Bounded terms against numpy's and closed forms: one client, one round, every engine, a run that goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.federation.bounds import BINS, MILD, bins_of, capped, change_of, clipped, mildly_bounded, quantile_of
from fedbayes.federation.program import Context
from fedbayes.posterior.values import Gaussian, Point
from fedbayes.runs import checkpoint
from fedbayes.runs.own import Index
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

ENGINES = ("loop", "stacked")
HUGE = 1e30


def vector(seed: int, positive: bool = False) -> torch.Tensor:
    t = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return t.exp() if positive else t


Q, START = Gaussian(vector(1), vector(2, True)), Gaussian(vector(3), vector(4, True))


def numpys(q: Gaussian, start: Gaussian) -> tuple[np.ndarray, ...]:
    return tuple(t.numpy() for t in (q.mean, q.scale, start.mean, start.scale))


def test_a_cap_of_precision_is_a_floor_of_the_scale() -> None:
    _, s, _, s0 = numpys(Q, START)
    q = capped(Q, START, 1.7)
    np.testing.assert_allclose(q.scale.numpy(), np.maximum(s, s0 / np.sqrt(1.7)), rtol=1e-15)
    assert torch.equal(q.mean, Q.mean)
    assert float((START.scale / q.scale).square().max()) == pytest.approx(1.7)
    assert (s < s0 / np.sqrt(1.7)).any()
    assert (s > s0 / np.sqrt(1.7)).any()


@pytest.mark.parametrize("bound", [0.01, 0.5, 1.0])
def test_a_clipped_normal_goes_a_part_of_the_way(bound: float) -> None:
    m, s, m0, s0 = numpys(Q, START)
    u = np.concatenate([(m - m0) / s0, np.log(s0**2 / s**2)])
    size = np.sqrt((u**2).mean())
    assert float(change_of(Q, START).size) == pytest.approx(size)
    assert size > bound
    u = u * min(1, bound / size)
    q = clipped(Q, START, bound)
    np.testing.assert_allclose(q.mean.numpy(), m0 + s0 * u[:7], rtol=1e-12)
    np.testing.assert_allclose(q.scale.numpy(), s0 * np.exp(-u[7:] / 2), rtol=1e-12)
    assert float(change_of(q, START).size) == pytest.approx(bound)


def test_sizes_of_many_weights_are_right_in_float32() -> None:
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    size = float(change_of(Point(values), Point(torch.zeros_like(values))).size)
    assert size == pytest.approx(float(values.double().square().mean().sqrt()), rel=1e-6)


def test_a_clipped_point_moves_by_the_bound() -> None:
    q = clipped(Point(Q.mean), Point(START.mean), 0.2)
    d = (Q.mean - START.mean).numpy()
    np.testing.assert_allclose(q.mean.numpy(), START.mean.numpy() + d * 0.2 / np.sqrt((d**2).mean()), rtol=1e-12)
    assert torch.equal(capped(Point(Q.mean), Point(START.mean), 2.0).mean, Q.mean)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_what_is_within_the_bounds_stays_to_the_bit(kind: torch.dtype) -> None:
    q, start = (Gaussian(x.mean.to(kind), x.scale.to(kind)) for x in (Q, START))
    after = clipped(capped(q, start, HUGE), start, HUGE)
    assert torch.equal(after.mean, q.mean)
    assert torch.equal(after.scale, q.scale)
    same = clipped(start, start, 1e-9)  # no change at all
    assert torch.equal(same.mean, start.mean)
    assert torch.equal(same.scale, start.scale)


@pytest.mark.parametrize("rule", ["log_pool", "conflation", "wc", "dwc"])
def test_one_client_that_claims_to_be_sure_has_ten_votes_of_109(rule: str) -> None:
    """99 x N(0, .1^2) and one N(1, 1e-4^2): the plain rules give .9999, with a cap of 10 the mean is 10 / 109."""
    start = Gaussian(torch.zeros(1).double(), torch.full((1,), 0.1).double())
    sure = Gaussian(torch.ones(1).double(), torch.full((1,), 1e-4).double())
    plain = fb.pool(rule, [start] * 99 + [sure], reference=start)
    assert float(plain.mean) > 0.999
    bounded = fb.pool(rule, [start] * 99 + [capped(sure, start, MILD)], reference=start)
    votes = 99 + 10 - (99 if rule == "dwc" else 0)  # dwc takes 99 references off again
    assert float(bounded.mean) == pytest.approx(10 / votes)


def test_quantiles_of_counted_sizes_are_numpys_to_a_bin() -> None:
    sizes = np.exp(np.random.default_rng(0).normal(size=201) * 2)
    counts = torch.stack([bins_of(torch.tensor(v)) for v in sizes]).sum(0)
    assert counts.shape == (BINS,)
    assert counts.sum() == 201
    for share in (0.01, 0.25, 0.5, 0.9, 1.0):
        exact = np.quantile(sizes, share, method="inverted_cdf")
        assert exact <= quantile_of(counts, share) <= exact * 10 ** (16 / BINS)
    odd = torch.stack([bins_of(torch.tensor(v).double()) for v in (0.0, torch.inf, torch.nan)]).sum(-1)
    assert odd.tolist() == [1, 1, 0]


def sites() -> list[Any]:
    random = torch.Generator().manual_seed(0)
    sizes = (4, 9, 6, 40)
    x = [torch.randn(n, 3, generator=random, dtype=torch.float64) for n in sizes]
    return [(rows, (rows[:, 0] > 0).long()) for rows in x]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


FAST = {"epochs": 2, "batch": 4, "lr": 0.3}
METHODS = {
    "feduab": fb.methods.feduab(kl_weight=0.0, **FAST),
    "fedvi": fb.methods.fedvi(rule="wc", weighting="distance", **FAST),
    "fedavg": fb.methods.fedavg(**FAST),
}


def uploads(method: fb.methods.Method) -> tuple[list[Any], Any]:
    task = prepare(network(), sites(), method=method, rounds=1, engine="loop")
    order = task.orders(task.begin())[-1]
    sent = [task.engine.client(task.program, order, k, None)[0].parts["model"] for k in range(4)]
    return sent, order.broadcast["model"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["feduab", "fedavg"])
def test_a_round_pools_bounded_uploads_by_bounded_rows(engine: str, name: str) -> None:
    sent, start = uploads(METHODS[name])
    size = sorted(float(change_of(q, start).size) for q in sent)[1]
    cap = 1.0001
    bounded = [clipped(capped(q, start, cap), start, size) for q in sent]
    assert sum(not torch.equal(a.mean, b.mean) for a, b in zip(sent, bounded)) >= 2
    rule = {"feduab": "log_pool", "fedavg": "fedavg"}[name]
    want = fb.pool(rule, bounded, weights=[4.0, 9.0, 6.0, 10.0], reference=start)
    options = {"cap_precision": cap, "clip_change": size, "cap_rows": 10}
    run = fb.fit(network(), sites(), method=METHODS[name], rounds=1, engine=engine, **options)
    torch.testing.assert_close(run.posterior.mean, want.mean, rtol=1e-10, atol=1e-10)
    if name == "feduab":
        torch.testing.assert_close(run.posterior.scale, want.scale, rtol=1e-10, atol=1e-10)


def test_weights_are_made_of_what_is_added() -> None:
    """By distance from the broadcast: of the clipped uploads, which are as far from it as one another."""
    method = fb.methods.fedavg(weighting="distance", **FAST)
    sent, start = uploads(method)
    bounded = [clipped(q, start, 0.01) for q in sent]
    for held in ({}, {"rule": "fedag"}):
        run = fb.fit(network(), sites(), method=fb.methods.fedavg(weighting="distance", **FAST, **held), rounds=1,
                     clip_change=0.01)  # fmt: skip
        torch.testing.assert_close(run.posterior.mean, torch.stack([q.mean for q in bounded]).mean(0))


@pytest.mark.parametrize("weighting", ["size", "discrepancy"])
def test_the_bound_follows_the_changes_and_a_run_that_goes_on_is_the_same(tmp_path: Path, weighting: str) -> None:
    """Where the server holds the uploads too."""
    method = fb.methods.feduab(weighting=weighting, **FAST)
    options = {"method": method, "rounds": 4, "clip_quantile": 0.5}
    runs = {engine: fb.fit(network(), sites(), engine=engine, **options) for engine in ENGINES}
    bounds = {engine: [record["next_clip_change.model"] for record in run.journal] for engine, run in runs.items()}
    first, start = uploads(method)
    exact = np.quantile([float(change_of(q, start).size) for q in first], 0.5, method="inverted_cdf")
    assert exact <= bounds["loop"][0] <= exact * 10 ** (16 / BINS)
    assert bounds["loop"] == bounds["stacked"]
    assert len({*bounds["loop"]}) > 1

    x = Experiment(rounds=4, clients=4, method="feduab")
    task = prepare(network(), sites(), engine="stacked", **options)
    for progress, _ in rounds(task, task.begin(), Memory()):
        if progress.state.round == 2:
            checkpoint.write(tmp_path, x, task, progress, Index().as_tensors())
            break
    again = checkpoint.read(checkpoint.paths(tmp_path)[-1], x, task).progress
    *_, (last, record) = rounds(task, again, Memory())
    assert record["next_clip_change.model"] == bounds["stacked"][-1]
    assert torch.equal(last.state.broadcast["model"].mean, runs["stacked"].posterior.mean)


def test_counts_that_no_clients_can_have_made_leave_the_bound_as_it_was() -> None:
    task = prepare(network(), sites(), method=METHODS["feduab"], rounds=2, clip_quantile=0.5, clip_change=3.0)
    stage = next(stage for stage in task.program.stages if stage.name == "bounds")
    order = task.orders(task.begin())[-1]
    outcome = task.engine.run(task.program, order, Memory().get)
    for spoilt in (outcome.terms["counts"]["model"] + 5.0, outcome.terms["counts"]["model"] * 0 - 1):
        terms = {**outcome.terms, "counts": {"model": spoilt}}
        context = Context(task.program, order, outcome._replace(terms=terms), task.engine, Memory().get)
        _, state, _ = stage.apply(context, stage.init({}), {})
        assert float(state["model"]) == 3.0


def test_bounds_that_have_no_meaning_are_refused_by_name() -> None:
    def build_with(method: str, **bounds: float) -> None:
        options = {"laplace": "every"} if method == "fedavg_pf" else {}
        options |= {"covariance": "low_rank"} if bounds.pop("low", None) else {}
        prepare(network(), sites(), method=fb.methods.method_named(method, options), rounds=1, **bounds)

    with pytest.raises(InputError, match="clip_change: clients of pvi keep a factor"):
        build_with("pvi", clip_change=1.0)
    with pytest.raises(InputError, match="cap_precision: clients of pvi keep a factor"):
        build_with("pvi", cap_precision=10.0)
    with pytest.raises(InputError, match="clip_change: part 'classifier' is uploaded as a FullGaussian"):
        build_with("fedavg_pf", clip_quantile=0.5)
    with pytest.raises(InputError, match="clip_change: part 'model' is uploaded as a LowRank"):
        build_with("fedswag", clip_change=1.0, low=1)
    with pytest.raises(InputError, match="cap_precision: clients of this method start from points"):
        build_with("fedswag", cap_precision=10.0)
    for name, value in (("cap_precision", -1.0), ("clip_change", 0.0), ("clip_quantile", 1.5), ("cap_rows", 0)):
        with pytest.raises(InputError, match=name):
            build_with("feduab", **{name: value})
    build_with("pvi", cap_rows=5, cap_precision=0)


@pytest.mark.parametrize("method", ["feduab", "fedavg", "pvi", "fedswag"])
def test_on_flower_a_mild_cap_is_on_where_clients_count_by_precision(method: str) -> None:
    x = Experiment(method=method, clients=3, rounds=1, engine="flower")
    names = [transform.name for transform in build(x).program.pooling.channel]
    assert names == (["cap of precision"] if method == "feduab" else [])
    here = prepare(network(), sites(), method=method, rounds=1)
    assert not here.program.pooling.channel
    if method == "feduab":
        assert build(x).program.options(0)["cap_precision"] == MILD
        assert not build(replace(x, cap_precision=0.0)).program.pooling.channel
        assert build(replace(x, cap_precision=3.0)).program.options(0)["cap_precision"] == 3.0
    assert bool(mildly_bounded(here.program).pooling.channel) == (method == "feduab")
