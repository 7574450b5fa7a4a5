"""Robust rules and buckets on Flower: the loop engine's posterior in the clear, and one secure sum for each bucket."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process import InProcess

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter
from fedbayes.posterior.values import Posterior
from fedbayes.runs.folder import run as run_here

BUCKETS = {"rule": "median", "buckets": 3, "outliers": 0.1}


@pytest.fixture
def nine(tiny: Experiment) -> Experiment:
    """Nine clients, that no bound touches."""
    return replace(tiny, clients=9, cap_precision=0.0, options={**tiny.options, "epochs": 1, **BUCKETS})


def close(a: Posterior, b: Posterior, tolerance: float) -> None:
    torch.testing.assert_close(a.mean, b.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(a.scale, b.scale, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options",
    [{"rule": "trimmed_mean"}, {"rule": "multi_krum"}, {"rule": "trimmed_mean", "mixing": True, "twins": 0.95}],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_a_robust_rule_in_the_clear_is_the_loop_engines(
    tiny: Experiment, tmp_path: Path, options: dict[str, object]
) -> None:
    x = replace(tiny, rounds=1, clients=4, cap_precision=0.0, options={**tiny.options, **options})
    near = run_here(replace(x, engine="loop"), tmp_path / "near")["feduab"]
    far = run(x, tmp_path / "far", InProcess(carried(x)))["feduab"]
    close(far.posterior, near.posterior, 1e-6)
    twins = [run.journal[0]["influence"].get("twins", []) for run in (far, near)]
    assert twins[0] == twins[1]
    assert bool(twins[0]) == ("twins" in options)


def test_twins_are_refused_where_only_sums_are_seen(tiny: Experiment, tmp_path: Path) -> None:
    options = {**tiny.options, "rule": "trimmed_mean", "twins": 0.02}
    x = replace(tiny, rounds=1, clients=4, options=options, flower={**tiny.flower, "secure": True})
    with pytest.raises(InputError, match="secure"):
        run(x, tmp_path / "far", InProcess(carried(x)))


def test_buckets_are_the_loop_engines_in_the_clear_and_by_secure_sums(nine: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    near = run_here(replace(nine, engine="loop"), tmp_path / "near")["feduab"]
    for secure in (False, True):
        there = replace(nine, flower={**nine.flower, "secure": secure, "timeout": 5.0})
        post = InProcess(carried(there))
        far = run(there, tmp_path / f"{secure}", post)["feduab"]
        close(far.posterior, near.posterior, 1e-5 if secure else 1e-6)
        assert [record["buckets"] for record in far.journal] == [3, 3]
        assert far.journal[-1]["took_part"] == list(range(9))
        masked = [client for kind, client, _ in post.asked if kind == "train.masked"]
        assert sorted(masked) == (sorted([*range(9)] * 2) if secure else [])


def swallow(*clients: int):
    def spoil(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        return None if k in clients and kind.startswith("train") else answer

    return spoil


def test_a_bucket_without_a_sum_is_left_out_and_most_must_have_one(nine: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    x = replace(nine, rounds=1, flower={"wait": 0.05, "timeout": 0.05, "attempts": 1, "secure": True})
    made = run(x, tmp_path / "one", InProcess(carried(x), spoil=swallow(4)))["feduab"]
    record = made.journal[0]
    assert record["buckets"] == 2
    assert len(record["took_part"]) == 6
    assert any("was left out: round 1: no secure sum came about" in note for note in record["notes"])
    everybody = InProcess(carried(x), spoil=swallow(*range(9)))
    with pytest.raises(InputError, match="no secure sum came about"):
        run(x, tmp_path / "all", everybody)


def test_who_stands_in_takes_the_bucket_of_the_missing(nine: Experiment, tmp_path: Path) -> None:
    x = replace(nine, rounds=1, cohort=6)
    post = InProcess(carried(x))
    post.there.remove(100 + min(run(x, tmp_path / "all", InProcess(carried(x)))["feduab"].journal[0]["took_part"]))
    record = run(x, tmp_path / "fewer", post)["feduab"].journal[0]
    assert len(record["took_part"]) == 6
    assert record["buckets"] == 3


def test_a_secure_sum_refuses_robust_rules_without_buckets_and_small_ones(nine: Experiment, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    secure = replace(nine, flower={**nine.flower, "secure": True})
    bare = replace(secure, options={**nine.options, "buckets": None, "rule": "median"})
    bare = replace(secure, options={k: v for k, v in bare.options.items() if k != "buckets"})
    with pytest.raises(InputError, match="compares the clients' posteriors, which a secure sum hides; set buckets"):
        run(bare, tmp_path / "bare", InProcess(carried(bare)))
    small = replace(secure, options={**nine.options, "buckets": 4})
    with pytest.raises(InputError, match="at least 3 clients, and 4 buckets of a cohort of 9 have 2; set at most 3"):
        run(small, tmp_path / "small", InProcess(carried(small)))
