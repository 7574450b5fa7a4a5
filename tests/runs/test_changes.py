"""Runs that go on with more rounds or another learning rate, as their folders record it."""

import json
import tomllib

import pytest
import torch

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.files import write_atomically
from fedbayes.runs import changes, sealed
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
        ({"settings": ["prior_scale=0.1"]}, "prior_scale: it shapes what is trained"),  # it is in the first broadcast
        ({"settings": ["lr=-1"]}, "lr"),
        ({"settings": ["lr=0.02", "damping=-1"]}, "damping"),  # which is of the second method of a comparison
    ],
)
@pytest.mark.parametrize("methods", [(), ("fedavg", "pvi")], ids=["one", "comparison"])
def test_what_can_not_change_is_refused_and_nothing_is_written(tmp_path, options, says, methods):
    run(Experiment(**COMMON, methods=methods, rounds=1, options=OPTIONS), tmp_path / "run")
    held = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=says):
        change(tmp_path / "run", **options)
    assert held == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_how_sites_follow_can_not_change_for_they_are_kept_about_a_share_of_the_mean(tmp_path):
    run(Experiment(**COMMON | {"method": "bayes_admm"}, rounds=1, options=OPTIONS), tmp_path / "run")
    with pytest.raises(InputError, match="gamma: it shapes what is trained"):
        change(tmp_path / "run", settings=["gamma=0.1"])


CUT = [((), writes) for writes in range(5)] + [(("fedavg", "pvi"), writes) for writes in (3, 5, 7)]


@pytest.mark.parametrize(("methods", "writes"), CUT)
def test_a_change_that_was_cut_short_is_finished(tmp_path, monkeypatch, methods, writes):
    """Killed before any of its writes: the next resume goes on, with the change or without, and records it once."""
    home = tmp_path / "run"
    run(Experiment(**COMMON, methods=methods, rounds=1, options=OPTIONS), home)
    left = [writes]

    def killed(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return write_atomically(*arguments)

    with monkeypatch.context() as patch:
        for module in (changes, sealed):
            patch.setattr(module, "write_atomically", killed)
        try:
            change(home, rounds=2, settings=["lr=0.02"])
        except KeyboardInterrupt:
            if writes:
                with pytest.raises(InputError, match=r"cut short; `fedbayes resume .*` finishes it"):
                    fb.load(home)
    made = resume(home)
    assert {len(r.journal) for r in made.values()} == {2 if writes else 1}
    for path in [home / name for name in methods] or [home]:
        kept = (path / "changes.jsonl").read_text().splitlines() if writes else []
        assert [json.loads(line)["key"] for line in kept] == (["lr", "rounds"] if writes else [])
    assert not (home / "changing.toml").exists()
    change(home, rounds=3)
    assert {len(r.journal) for r in resume(home).values()} == {3}
