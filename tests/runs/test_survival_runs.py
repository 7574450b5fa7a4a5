"""Survival from an experiment to a folder, report, predictions and exports; in every engine, sweep and on Flower."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedbayes as fb
from fedbayes.evaluate.scoring import evaluate
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment
from fedbayes.export.predictions import predict_file
from fedbayes.export.program import export
from fedbayes.methods import METHODS
from fedbayes.report import write
from fedbayes.runs.folder import run
from fedbayes.training.rounds import rounds, rounds_together
from fedbayes.training.run import Memory
from fedbayes.training.task import Task

sys.path.append(str(Path(__file__).parents[1] / "flower"))

TINY = Experiment(
    data="own_code:survivors",
    clients=3,
    network="mlp",
    network_options={"hidden": [4]},
    rounds=2,
    method="feduab",
    options={"batch": 10, "epochs": 2, "test_draws": 5},
)


@pytest.fixture(scope="module", params=["hazard", "cox"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("survival") / request.param
    run(replace(TINY, likelihood=request.param), path)
    return path


def test_a_folder_predicts_curves_with_bands(folder, tmp_path):
    again = fb.load(folder)
    data = again.task.clients.data
    p = again.predict(data.test_x)
    assert p.times == (0.3, 0.8, 2.0)
    assert p.survival.shape == (24, 3)
    assert ((p.low <= p.survival) & (p.survival <= p.high)).float().mean() > 0.9
    assert (p.survival[:, 1:] <= p.survival[:, :-1]).all()
    assert {"concordance", "nll", "brier", "count"} == set(again.scores())
    np.savetxt(tmp_path / "x.csv", data.test_x.numpy(), delimiter=",")
    arrays, _ = predict_file(folder, tmp_path / "x.csv", tmp_path / "p.csv")
    np.testing.assert_allclose(arrays["survival"], p.survival, atol=1e-6)
    head = (tmp_path / "p.csv").read_text().splitlines()[0]
    assert head.startswith("row,alive_0.3,alive_0.8,alive_2,low_0.3")


def test_scores_and_a_page(folder, tmp_path):
    (scores,) = evaluate(folder, repeats=2).values()
    assert {"concordance", "concordance_ipcw", "calibration", "brier"} <= set(scores["scores"])
    page = write([folder], tmp_path / "page.html").read_text()
    assert "Kaplan-Meier" in page
    assert "middle risk" in page


def test_an_export_gives_the_same_curves(folder, tmp_path):
    one = fb.load(folder)
    export(one, tmp_path)
    x = one.task.clients.data.test_x
    with torch.no_grad():
        made = torch.export.load(tmp_path / "model.pt2").module()(x)
    p = one.predict(x)
    for name, expected in (("survival", p.survival), ("low", p.low), ("high", p.high)):
        torch.testing.assert_close(made[name], expected, atol=1e-5, rtol=1e-4)
    assert json.loads((tmp_path / "model.json").read_text())["times"] == pytest.approx([0.3, 0.8, 2.0])


def _last(task: Task):
    return list(rounds(task, task.begin(), Memory()))[-1]


# The curvature of a survival time is not known.
REFUSED = {"fedlap_cov", "laplace", "fedavg_pf", "fedper_pf", "lg_fedavg_pf"}
NEEDS_SERVER = {"fedbe", "fedppd_distill"}


@pytest.mark.parametrize("name", sorted(set(METHODS) - REFUSED - NEEDS_SERVER))
def test_every_method_trains_and_engines_agree(name):
    likelihood = ("hazard", "cox")[len(name) % 2]
    known = set(METHODS[name].__signature__.parameters)
    options = {k: v for k, v in {"batch": 10, "epochs": 1, "samples": 2}.items() if k in known}
    x = replace(TINY, method=name, likelihood=likelihood, rounds=1, options=options)
    ends = []
    for engine in ("loop", "stacked"):
        task = build(replace(x, engine=engine))
        progress, *_ = _last(task)
        tensors: dict[str, torch.Tensor] = {}
        for part, q in progress.state.broadcast.items():
            layout = task.program.model.layouts.get(part)
            fits = layout is not None and layout.size == q.mean.shape[-1]
            tensors |= layout.split(q.mean) if fits else {part: q.mean}
        if likelihood == "cox":  # it does not know a common shift, whose gradient is rounding: Adam makes a step of it
            tensors.pop("3.bias", None)
        ends.append(tensors)
    torch.testing.assert_close(*ends, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("likelihood", ["hazard", "cox"])
def test_members_of_a_sweep_equal_runs_alone(likelihood):
    members = [replace(TINY, likelihood=likelihood, seed=seed, engine="stacked") for seed in (0, 1)]
    alone = [_last(build(x)) for x in members]
    tasks = [build(x) for x in members]
    together = list(rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks]))[-1]
    for (progress, *_), (other, *_) in zip(alone, together):
        ours, theirs = (p.state.broadcast["model"].mean for p in (progress, other))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("likelihood", ["hazard", "cox"])
def test_nodes_give_what_the_loop_engine_gives(likelihood, tmp_path):
    from in_process import InProcess

    from fedbayes.flower.federated import carried
    from fedbayes.flower.federated import run as federate

    x = replace(TINY, likelihood=likelihood, engine="flower", cap_precision=0.0)
    far = federate(x, tmp_path / "far", InProcess(carried(x)))[x.method]
    near = run(replace(x, engine="loop"), tmp_path / "near")[x.method]
    mine, other = (r.progress.state.broadcast["model"].mean for r in (far, near))
    assert mine.shape == other.shape
    assert "concordance" in far.journal[-1]["test"]
