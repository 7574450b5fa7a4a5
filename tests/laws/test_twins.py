"""Twins: copies count once before every robust rule, honest clients are told apart, and the journal names who did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from few_rows import few_rows, small_network
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

import fedbayes as fb
from fedbayes import Gaussian, Point, pool
from fedbayes.federation.robust import count_of, distances
from fedbayes.federation.rules import RULES
from fedbayes.federation.twins import groups_of
from fedbayes.training import influence
from fedbayes.training.influence import LISTED

ROBUST = [name for name, rule in RULES.items() if rule.robust]
EVERY = [(name, mixing) for name in ROBUST for mixing in (False, True)]
P = 6
Posteriors = list[Gaussian] | list[Point]


def uploads(seed: int, k: int, points: bool = False) -> Posteriors:
    random = torch.Generator().manual_seed(seed)
    means = 3 * torch.randn(k, P, generator=random, dtype=torch.float64)
    scales = 0.3 * torch.randn(k, P, generator=random, dtype=torch.float64).exp()
    return [Point(m) for m in means] if points else [Gaussian(m, s) for m, s in zip(means, scales)]


def still(outliers: float, many: Posteriors, few: Posteriors) -> float:
    """The share of a few that may lie, where all who are gone did; the one who stands for them may."""
    return min(max(count_of(outliers, len(many)) - (len(many) - len(few)), 1) / len(few), 0.499)


def equal(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a.mean, b.mean, rtol=tolerance, atol=tolerance)
    if isinstance(a, Gaussian):
        torch.testing.assert_close(a.scale, b.scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "mixing"), EVERY)
@settings(max_examples=10)
@given(seed=st.integers(0, 1000), k=st.integers(1, 7), data=st.data(), points=st.booleans())
def test_any_number_of_copies_counts_as_one_wherever_they_stand(
    name: str, mixing: bool, seed: int, k: int, data, points
):
    qs = uploads(seed, k, points)
    one = data.draw(st.integers(0, k - 1))
    many = [*qs, *[qs[one]] * data.draw(st.integers(1, 9))]
    if name != "multi_krum":  # the first of equal scores is kept
        many = [many[place] for place in data.draw(st.permutations(range(len(many))))]
    equal(pool(name, many, mixing=mixing, twins=1e-4), pool(name, qs, mixing=mixing, outliers=still(0.2, many, qs)))


@pytest.mark.parametrize(("name", "mixing"), EVERY)
def test_copies_count_as_one_however_far_away_they_are(name: str, mixing: bool) -> None:
    far = Gaussian(torch.full((P,), 1e30).double(), torch.full((P,), 1e-30).double())
    qs = uploads(3, 9)
    many, few = [*qs, *[far] * 4], [*qs, far]
    equal(pool(name, many, mixing=mixing, twins=0.1), pool(name, few, mixing=mixing, outliers=still(0.2, many, few)))


@pytest.mark.parametrize(("name", "mixing"), EVERY)
def test_without_twins_nothing_changes_to_the_bit(name: str, mixing: bool) -> None:
    qs = uploads(1, 9)
    alone, asked = pool(name, qs, mixing=mixing), pool(name, qs, mixing=mixing, twins=1e-4)
    assert torch.equal(alone.mean, asked.mean)
    assert torch.equal(alone.scale, asked.scale)


@pytest.mark.parametrize(("name", "mixing"), EVERY)
def test_what_all_agree_on_is_the_answer(name: str, mixing: bool) -> None:
    (q,) = uploads(0, 1)
    equal(pool(name, [q] * 5, mixing=mixing, twins=0.1), q, 1e-14)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), k=st.integers(2, 12), share=st.floats(0.05, 0.95))
def test_groups_are_those_of_complete_linkage(seed: int, k: int, share: float) -> None:
    x = np.random.default_rng(seed).normal(size=(k, 2))
    gaps = np.linalg.norm(x[:, None] - x, axis=-1)
    most = share * np.sort([np.sort(np.delete(gaps[i], i))[(k - 2) // 2] for i in range(k)])[(k - 1) // 2]
    labels = fcluster(linkage(x, "complete"), most, "distance")
    groups = groups_of(torch.tensor(gaps), share)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert {tuple(group) for group in groups} == {tuple(np.flatnonzero(labels == one)) for one in {*labels}}


@pytest.mark.parametrize(("name", "mixing"), EVERY)
def test_a_liar_between_two_honest_clients_hides_no_liar_far_away(name: str, mixing: bool) -> None:
    """Were the three one group, two would be gone, and as many fewer be taken to lie."""
    qs = uploads(4, 8, points=True)
    near = Point(qs[0].mean + 0.15 * (qs[1].mean - qs[0].mean))
    far = Point(torch.full((P,), 1e12).double())
    between = Point((qs[0].mean + near.mean) / 2)
    q = pool(name, [*qs, near, between, far, Point(-far.mean)], mixing=mixing, twins=0.1, outliers=0.25)
    assert float(q.mean.abs().max()) < 100


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), honest=st.integers(3, 8), far=st.floats(1, 1e12), data=st.data())
def test_a_minority_far_apart_makes_no_twins_of_honest_clients(seed: int, honest: int, far: float, data) -> None:
    """The usual distance is at most the largest between honest clients, wherever fewer than half of all go."""
    qs = uploads(seed, honest)
    liars = [Point(far * q.mean) for q in uploads(seed + 1, data.draw(st.integers(0, honest - 1)))]
    gaps = distances([*(Point(q.mean) for q in qs), *liars])
    among = gaps[:honest, :honest]
    least, most = float(among[among > 0].min()), float(among.max())
    assert all(len({*group} & {*range(honest)}) <= 1 for group in groups_of(gaps, 0.999 * least / most))


def moved(run: fb.Run) -> Tensor:
    return run.progress.state.broadcast["model"].mean


@pytest.mark.parametrize("method", ["fedavg", "fedvi"])
def test_engines_agree_and_the_journal_names_who_counted_as_one(method: str) -> None:
    made = getattr(fb.methods, method)(epochs=1, batch=4, rule="trimmed_mean", mixing=True, twins=0.1, test_draws=2)
    lying = {"attack": "ipm", "attackers": [1, 2, 4]}
    runs = [
        fb.fit(small_network(), few_rows((4, 9, 6, 5, 8, 7)), method=made, rounds=2, compile="off", **engine, **lying)
        for engine in ({"engine": "loop"}, {"engine": "stacked", "at_once": 2})
    ]
    torch.testing.assert_close(moved(runs[0]), moved(runs[1]), rtol=1e-7, atol=1e-9)
    for run in runs:
        assert run.journal[-1]["influence"]["twins"] == [["1", "2", "4"]]
        assert not influence.fault(run.journal[-1]["influence"])
        last = run.influence()[-6:]
        assert [row["twins"] for row in last] == [0, 2, 2, 0, 2, 0]
        shares = [1 / 4, 1 / 12, 1 / 12, 1 / 4, 1 / 12, 1 / 4]
        assert [row["share"] for row in last] == pytest.approx(shares, rel=1e-5)


def test_three_who_copy_one_lie_move_the_model_as_one_of_them_does() -> None:
    """Of five honest clients and one liar, or the liar three times: the same pool, part by part."""
    qs, lie = uploads(2, 5), Gaussian(torch.zeros(P).double(), torch.ones(P).double())
    without = pool("median", [*qs, lie, lie, lie])
    one, three = (pool("median", [*qs, *[lie] * count], twins=0.1) for count in (1, 3))
    equal(one, three)
    assert float((without.mean - one.mean).norm()) > 0.1


def test_twins_are_named_up_to_a_number() -> None:
    rows = {f"{k}": (1.0, 0.1, 0.0, 0.0) for k in range(300)}
    record = influence.record_of(rows, "weight", [["0", "1"], [f"{k}" for k in range(2, 290)]])
    assert [len(group) for group in record["twins"]] == [LISTED]
    assert not influence.fault(record)
    assert "twins" not in influence.record_of(rows, "weight")
    for false in ("0", [["0", 1]], ["0"], [[]], [[f"{k}" for k in range(LISTED + 1)]]):
        assert influence.fault({**record, "twins": false})


@pytest.mark.parametrize("twins", [-0.1, 1.0, "0.1", True])
def test_what_is_no_share_is_refused(twins: Any) -> None:
    with pytest.raises(ValueError, match=r"twins must be a share in \[0, 1\)"):
        pool("median", uploads(0, 3), twins=twins)
