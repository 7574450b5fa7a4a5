"""FedAG in run folders and pictures: what is kept beside the broadcast survives, and figures are drawn."""

from dataclasses import replace

import torch

import fedbayes as fb
from fedbayes.experiments.experiment import Experiment
from fedbayes.papers import fedag_figures, folds
from fedbayes.runs.folder import run


def experiment(rounds: int) -> Experiment:
    return Experiment(
        data="diabetes",
        partition="iid",
        clients=5,
        network="mlp",
        network_options={"hidden": [8]},
        method="fedag",
        options={"epochs": 2, "lr": 0.03},
        rounds=rounds,
        checkpoint_every=1,
    )


def test_a_run_folder_keeps_networks_and_noise(tmp_path):
    made = run(experiment(2), tmp_path / "run")["fedag"]
    again = fb.load(tmp_path / "run")
    assert isinstance(again.parts["model"], fb.Draws)
    assert isinstance(again.posterior, fb.Gaussian)
    torch.testing.assert_close(again.parts["noise"].mean, made.parts["noise"].mean)
    x = made.task.clients.data.test_x
    torch.testing.assert_close(again.predict(x).total, made.predict(x).total)
    assert again.scores() == made.scores()


def test_a_folder_that_ends_between_evaluations_knows_its_noise(tmp_path):
    """Interrupted after a round that was not evaluated: the noise is estimated when it is asked for."""
    every = replace(experiment(4), evaluate_every=4, cohort=3)
    watched = run(every, tmp_path / "whole")["fedag"]
    for later in sorted((tmp_path / "whole" / "checkpoints").glob("round-*.safetensors"))[1:]:
        later.unlink()
    cut = fb.load(tmp_path / "whole")
    assert cut.progress.state.round < 4
    assert "noise" not in cut.progress.state.broadcast
    x = watched.task.clients.data.test_x
    assert float(cut.predict(x).aleatoric.max()) < 0.95 * float(watched.task.clients.data.target_scale.std**2)


def test_the_cubic_toy_is_predicted_where_there_are_data():
    data, seen = fedag_figures.cubic_rounds()
    assert list(seen) == [1, 3, 5]
    assert len(data.x) == 160
    grid = data.test_x[:, 0]
    inside = grid.abs() <= 4
    p = seen[5]
    gap = (p.mean[:, 0] - grid**3).abs()
    assert float(gap[inside].mean()) < 4
    assert float((gap[inside] <= 3 * p.total[inside, 0].sqrt()).float().mean()) > 0.95
    assert float(p.epistemic[~inside].mean()) > 5 * float(p.epistemic[inside].mean())  # less sure where there are none


def test_figures_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(folds, "folds_of", lambda name, count=None: [fb.data.load("diabetes").as_seen()])
    monkeypatch.setattr(folds, "ROUNDS", 1)
    assert [path.name for path in fedag_figures.cubic_figure(tmp_path)] == [
        "fedag-figure-2.svg",
        "fedag-figure-2.png",
    ]
    made = fedag_figures.round_figure(tmp_path, sets=("made",))
    assert all(path.stat().st_size > 1000 for path in made)
