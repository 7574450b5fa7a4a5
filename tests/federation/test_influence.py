"""Who moved the model: figures by hand, the same in every engine, in the journal, the table and the warning."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import Diverged, InputError
from fedbayes.federation.changes import change_of
from fedbayes.runs import journal
from fedbayes.training import influence
from fedbayes.training.prepare import prepare

FAST = {"epochs": 2, "batch": 4, "lr": 0.3}
ENGINES = ("loop", "stacked")


def sites(sizes: tuple[int, ...] = (4, 9, 6, 20, 8)) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 3, generator=random, dtype=torch.float64) for n in sizes]
    return [(rows, (rows[:, 0] > 0).long()) for rows in x]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2).double()


def uploads(method: fb.methods.Method) -> tuple[list[Any], Any]:
    task = prepare(network(), sites(), method=method, rounds=1, engine="loop")
    order = task.orders(task.begin())[-1]
    sent = [task.engine.client(task.program, order, k, None)[0].parts["model"] for k in range(5)]
    return sent, order.broadcast["model"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["log_pool", "dwc", "nwa", "median"])
def test_change_and_share_are_those_by_hand(engine: str, rule: str) -> None:
    method = fb.methods.fedvi(rule=rule, prior="broadcast", weighting="size", **FAST)
    sent, start = uploads(method)
    run = fb.fit(network(), sites(), method=method, rounds=1, engine=engine)
    table = run.influence()
    assert [(row["round"], row["client"], row["refused"]) for row in table] == [(1, f"{k}", "") for k in range(5)]
    sizes = [float(change_of(q, start).size) for q in sent]
    np.testing.assert_allclose([row["change"] for row in table], sizes, rtol=1e-5)
    precisions = [float((start.scale / q.scale).square().mean()) for q in sent]
    rows = np.array([4, 9, 6, 20, 8])
    claims = {"log_pool": rows * precisions, "dwc": np.array(precisions), "nwa": rows, "median": np.ones(5)}[rule]
    np.testing.assert_allclose([row["share"] for row in table], claims / claims.sum(), rtol=1e-5)
    kind = run.journal[0]["influence"]["share_of"]
    assert kind == ("precision" if rule in ("log_pool", "dwc") else "weight")
    assert not any(row["capped"] or row["clipped"] for row in table)


@pytest.mark.parametrize("method", ["fedavg", "feduab", "fedag", "bpfed", "fedppd", "pvi", "fedswag", "pfedbayes"])
def test_the_engines_tell_the_same(method: str) -> None:
    bounds = {} if method in ("pvi", "fedswag") else {"clip_quantile": 0.5, "cap_precision": 1.01}
    tables = []
    for engine in ENGINES:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        made = fb.methods.method_named(method, FAST)
        tables.append(fb.fit(net, sites(), method=made, rounds=2, engine=engine, **bounds).influence())
    assert len(tables[0]) == len(tables[1]) == 10
    for a, b in zip(*tables, strict=True):
        assert {**a, "change": 0, "share": 0} == {**b, "change": 0, "share": 0}
        assert (a["change"], a["share"]) == pytest.approx((b["change"], b["share"]), rel=1e-4)
    if bounds:
        assert any(row["clipped"] for row in tables[0][5:]) or method == "pfedbayes"  # whose changes become smaller
        assert any(row["capped"] for row in tables[0]) == (method in ("feduab", "bpfed", "pfedbayes"))


def test_the_server_weighs_by_what_it_held() -> None:
    """By discrepancy: the shares are those of the weights that the server gave."""
    method = fb.methods.fedavg(weighting="discrepancy", **FAST)
    sent, _ = uploads(method)
    means = torch.stack([q.mean for q in sent])
    gaps = torch.cdist(means, means) + 1e9 * torch.eye(5)
    weights = 1 / gaps.amin(1)
    run = fb.fit(network(), sites(), method=method, rounds=1)
    shares = [row["share"] for row in run.influence()]
    np.testing.assert_allclose(shares, weights / weights.sum(), rtol=1e-5)


def digits(rounds: int, **options: Any) -> fb.Run:
    """20 clients of digits, a linear network, seed 0; 5 rounds without attackers give .915."""
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=20, seed=0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return fb.fit(net, clients, method=fb.methods.feduab(), rounds=rounds, **options)


def test_one_client_that_claims_to_be_sure_is_warned_of_and_ends_training_without_a_cap() -> None:
    lies = {"attack": "certain", "attackers": [3]}
    with pytest.warns(UserWarning, match="of the pooled precision") as told, pytest.raises(Diverged):
        digits(2, **lies)
    words = [str(warning.message) for warning in told if "precision" in str(warning.message)]
    assert len(words) == 1
    assert "client 3 has 100% of the pooled precision" in words[0]


def test_so_it_does_not_with_a_cap_and_a_clip() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = digits(3, attack="certain", attackers=[3], cap_precision=10, clip_quantile=0.5)
    assert run.scores()["accuracy"] > 0.8
    last = max(run.influence()[-20:], key=lambda row: row["change"])
    assert (last["client"], last["capped"], last["clipped"]) == ("3", 1.0, True)
    assert last["share"] < 0.1


def test_a_large_cohort_is_told_by_its_movers_and_quantiles() -> None:
    rows = {f"{k}": (float(k), (k % 7) / 1000, 0.0, float(k > 900)) for k in range(1000)}
    record = influence.record_of(rows, influence.WEIGHT)
    assert len(record["clients"]) <= influence.LISTED
    assert record["clients"]["999"] == [999.0, 0.005, 0.0, 1.0]
    assert record["change"] == [0, 250, 500, 749, 999]
    assert (record["cohort"], record["clipped"], record["capped"]) == (1000, 99, 0)
    assert not influence.fault(json.loads(json.dumps(record)))


def test_refused_clients_are_in_the_table_and_old_journals_have_nobody_else() -> None:
    old = [{"round": 1, "left_out": {"2": "why not"}}, {"round": 2, "left_out": {}}]
    (row,) = influence.table_of(old)
    assert (row["round"], row["client"], row["refused"]) == (1, "2", "why not")
    assert math.isnan(row["change"])


@pytest.mark.parametrize(
    "spoilt",
    [[], {"clients": 3}, {"clients": {"0": [1, 2, 3]}}, {"clients": {"0": [1, 2, 3, "x"]}}, {"other": 1},
     {"share_of": "all"}, {"change": [1]}, {"hidden": 3}, {"clients": {f"{k}": [0, 0, 0, 0] for k in range(101)}}],
)  # fmt: skip
def test_an_influence_of_another_kind_is_refused_with_its_journal(tmp_path: Path, spoilt: object) -> None:
    fine = {"round": 1, "influence": {"share_of": "weight", "clients": {"NaN": [1.0, math.inf, 0.0, 1.0]}}}
    journal.append(tmp_path, fine)
    assert journal.read(tmp_path) == [fine]
    assert journal.flat(fine) == {"round": 1, "largest_change": 1.0, "largest_share": math.inf, "clipped": 1}
    journal.append(tmp_path, {"round": 2, "influence": spoilt})
    with pytest.raises(InputError, match="influence is"):
        journal.read(tmp_path)
