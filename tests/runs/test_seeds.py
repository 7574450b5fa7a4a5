"""Means over the seeds of a sweep: by hand, and in pairs of seeds."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedbayes.cli.terminal import seeds_table
from fedbayes.experiments.experiment import Experiment
from fedbayes.report import write
from fedbayes.runs.margins import within
from fedbayes.runs.records import RunFiles, runs_in
from fedbayes.runs.seeds import over_seeds
from fedbayes.runs.sweep import sweep

SPLITS = np.random.default_rng(0).normal(0.8, 0.05, 5)  # which all methods have


def member(name: str, seed: int, accuracy: float) -> RunFiles:
    record = {"round": 1, "test": {"accuracy": accuracy}}
    return RunFiles(name, Path("a"), Experiment(seed=seed), [record], {})


def runs_of(gap: float) -> list[RunFiles]:
    noise = np.random.default_rng(1).normal(0, 0.001, 5)
    better = SPLITS + gap + noise
    each = {"fedavg": SPLITS, "feduab": better}
    return [member(f"method={m},seed={s}", s, v) for m, values in each.items() for s, v in enumerate(values)]


def test_settings_are_means_with_standard_errors_and_compared_in_pairs():
    settings = over_seeds([(run.name, run) for run in runs_of(0.01)])
    assert [(own.name, own.seeds) for own in settings] == [("fedavg", 5), ("feduab", 5)]
    mean, margin = settings[0].figures["accuracy"]
    assert mean == pytest.approx(SPLITS.mean())
    assert margin.error == pytest.approx(SPLITS.std(ddof=1) / 5**0.5)
    figures = [own.figures["accuracy"] for own in settings]
    assert within(figures, figures[1][0]) == [False, True]  # though each mean is off by .02
    figures = [own.figures["accuracy"] for own in over_seeds([(run.name, run) for run in runs_of(0.0)])]
    assert within(figures, max(value for value, _ in figures)) == [True, True]


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (["seed=0", "seed=1"], ["feduab"]),
        (["seed=-1,lr=0.1", "seed=1,lr=0.1"], ["lr=0.1"]),
        (["lr=0.1,seed=0,batch=5", "lr=0.1,seed=1,batch=5", "lr=1,seed=0,batch=5"], ["lr=0.1,batch=5", "lr=1,batch=5"]),
        (["a/seed=0", "a/seed=1", "b/seed=0,lr=1", "b/seed=1,lr=1"], ["a", "b/lr=1"]),
        (["lr=0.1", "lr=1"], []),
        (["lr=0.1,seed=0", "lr=1,seed=0"], []),
        (["private_seed=0", "private_seed=1"], []),
    ],
)
def test_settings_are_named_without_their_seeds(names, settings):
    method = Experiment().method
    wanted = [method if own == "feduab" else own for own in settings]
    assert [own.name for own in over_seeds([(n, member(n, i, 0.5)) for i, n in enumerate(names)])] == wanted


def test_a_sweep_over_seeds_begins_with_their_means(tmp_path):
    x = Experiment(network="linear", clients=4, rounds=1, options={"epochs": 1})
    sweep(x, ["method=fedavg,feduab", "seed=0..1"], tmp_path / "s")
    console = Console(width=80, file=io.StringIO())
    console.print(seeds_table(runs_in(tmp_path / "s")))
    text = console.file.getvalue()
    accuracies = [run.scores["accuracy"] for run in runs_in(tmp_path / "s")[:2]]
    assert f"{np.mean(accuracies):.3f} ±" in text
    assert "fedavg" in text
    page = write([tmp_path / "s"], tmp_path / "page.html").read_text()
    assert page.index("Means over seeds") < page.index("Each run")
    assert f"{np.mean(accuracies):.4f} <small>±" in page
    assert seeds_table(runs_in(tmp_path / "s")[:1]) is None
