"""The league: its protocol on tiny hospitals, resumed; ranks and critical differences against published figures."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from fedbayes.errors import InputError
from fedbayes.papers import league
from fedbayes.papers.cells import Request
from fedbayes.papers.league_scores import in_sets
from fedbayes.papers.ranks import ranks_of
from fedbayes.papers.tables import run_league

SITES = ("cleveland", "hungarian", "switzerland", "va")


@pytest.fixture
def hospitals(tmp_path, monkeypatch):
    """Four tiny hospitals in the form of the real ones."""
    home = tmp_path / "files/heart-disease"
    home.mkdir(parents=True)
    random = np.random.default_rng(0)
    for site in SITES:
        ill = random.integers(0, 2, 30)
        lines = [
            ",".join(map(str, [50 + i, i % 2, 1 + i % 4, 120 + 20 * v, 200 + i, 0, i % 3, 150 - 9 * v, 0, v + 0.1 * i]))
            + f",?,?,?,{v}"
            for i, v in enumerate(ill)
        ]
        (home / f"processed.{site}.data").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("FEDBAYES_DATA", str(tmp_path / "files"))
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "cache"))


ONLY = ("heart-disease", "fedavg", "fedper", "local", "pooled", "as given")


def test_the_league_of_two_methods(hospitals, tmp_path):
    output, said = tmp_path / "league", []
    request = Request(ONLY, "small", (0,), {}, False, said.append)
    text = run_league(output, request)
    assert "Mean rank by NLL over one federation" in text
    rows = json.loads((output / "league-small.json").read_text())
    assert {row["row"] for row in rows} == {"fedavg", "fedper", "local", "pooled"}
    metrics = {row["metric"] for row in rows}
    assert {"nll", "ece", "auroc", "worst_nll", "worst_coverage", "seconds", "bytes_up"} <= metrics
    nll = {row["row"]: row["ours"] for row in rows if row["metric"] == "nll"}
    worst = {row["row"]: row["ours"] for row in rows if row["metric"] == "worst_nll"}
    assert all(worst[name] > nll[name] for name in nll)
    # The rate that was chosen is the best on inner rows, and it is what the cell was trained with.
    rates = league.choices(output, "small")
    tried = list((output / "cells/small").glob("league-choice-heart-disease-fedavg-*.json"))
    assert len(tried) == len(league.MULTIPLES)
    inner = {c["experiment"]["options"]["lr"]: c["measured"]["nll"] for c in (json.loads(f.read_text()) for f in tried)}
    assert rates["heart-disease", "fedavg", "as given"] == min(inner, key=inner.get)
    kept = json.loads((output / "cells/small/league-heart-disease-fedavg-as-given-r2-s0.json").read_text())
    assert kept["experiment"]["options"]["lr"] == rates["heart-disease", "fedavg", "as given"]
    # Again: nothing is trained, the page is the same.
    said.clear()
    assert run_league(output, request) == text
    assert not said
    with pytest.raises(InputError, match="group, row or column 'fedagv'"):
        run_league(output, request._replace(only=("fedagv",)))


def test_every_federation_has_enough_methods():
    for name, f in league.FEDERATIONS.items():
        methods = league.methods_for(name)
        assert len(methods) >= (13 if f.likelihood else 16)
    cells = league.league_cells({})
    assert len({(c.group, c.row, c.column) for c in cells}) == len(cells)


def test_sets_of_nine_tenths():
    probs = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.6, 0.4]])
    assert in_sets(probs, torch.tensor([0, 1, 1])).tolist() == [True, False, True]


def test_ranks_and_the_critical_difference():
    """Demsar (2006): for 4 methods over 14 sets it is 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25."""
    random = np.random.default_rng(0)
    blocks = [dict(zip("abcd", random.random(4))) for _ in range(14)]
    ranks = ranks_of(blocks)
    assert ranks.critical == pytest.approx(1.25, abs=0.005)
    expected = np.mean([rankdata(list(block.values())) for block in blocks], 0)
    assert {name: ranks.mean[name] for name in "abcd"} == pytest.approx(dict(zip("abcd", expected)))
    assert list(ranks.mean.values()) == sorted(ranks.mean.values())
    assert ranks_of(blocks, higher=True).mean["a"] == pytest.approx(5 - ranks.mean["a"])
    with pytest.raises(ValueError, match="at least two methods"):
        ranks_of([{"a": 1.0}])
