"""Runs that go on with more rounds or another learning rate, as their folders record it."""

import json
import tomllib

import pytest
import torch

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.changes import change
from fedbayes.runs.folder import resume, run

COMMON = {"network": "linear", "clients": 6, "cohort": 3, "method": "pvi"}
OPTIONS = {"epochs": 1, "lr": 0.05}


def test_more_rounds_for_a_finished_run_are_those_of_a_longer_one(tmp_path):
    run(Experiment(**COMMON, rounds=2, options=OPTIONS), tmp_path / "run")
    assert change(tmp_path / "run", rounds=4) == ["pvi: rounds = 4 after round 2 (was 2)"]
    longer = resume(tmp_path / "run")["pvi"]
    straight = run(Experiment(**COMMON, rounds=4, options=OPTIONS), tmp_path / "straight")["pvi"]
    assert torch.equal(longer.posterior.mean, straight.posterior.mean)
    assert torch.equal(fb.load(tmp_path / "run").posterior.mean, straight.posterior.mean)
    assert (tmp_path / "run" / "evaluation.npz").is_file()


def test_another_learning_rate_holds_from_here_on_and_is_recorded(tmp_path):
    home = tmp_path / "run"
    run(Experiment(**COMMON, rounds=2, options=OPTIONS), home)
    before = fb.load(home).posterior.mean
    change(home, rounds=3, settings=["lr=1e-12"])
    after = resume(home)["pvi"]
    assert torch.allclose(after.posterior.mean, before, atol=1e-6)
    assert tomllib.loads((home / "config.toml").read_text())["options"]["lr"] == 1e-12
    rows = [json.loads(line) for line in (home / "changes.jsonl").read_text().splitlines()]
    assert rows == [
        {"after_round": 2, "key": "lr", "before": 0.05, "after": 1e-12},
        {"after_round": 2, "key": "rounds", "before": 2, "after": 3},
    ]


def test_a_comparison_goes_on_as_a_whole(tmp_path):
    common = {**COMMON, "methods": ("fedavg", "pvi")}
    run(Experiment(**common, rounds=1, options=OPTIONS), tmp_path / "two")
    change(tmp_path / "two", rounds=2)
    assert {name: len(r.journal) for name, r in resume(tmp_path / "two").items()} == {"fedavg": 2, "pvi": 2}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rounds": 0}, "rounds: the run has 1 already; give more"),
        ({"settings": ["clients=3"]}, "only the method's options that are numbers can change"),
        ({"settings": ["epochs=3"]}, "epochs: it shapes what is trained"),
        ({"settings": ["lr=-1"]}, "lr"),
    ],
)
def test_what_can_not_change_is_refused_and_nothing_is_written(tmp_path, options, says):
    run(Experiment(**COMMON, rounds=1, options=OPTIONS), tmp_path / "run")
    held = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=says):
        change(tmp_path / "run", **options)
    assert held == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
