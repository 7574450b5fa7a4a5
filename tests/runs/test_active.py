"""Active learning: pools shrink to nothing, choices are those of the score, a killed study goes on, and it pays."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.build import clients_of
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.report import write
from fedbayes.runs.active import ACQUISITIONS, Active, area, resume_active, run_active, settings_in
from fedbayes.runs.folder import load
from fedbayes.runs.home import locked


@pytest.fixture
def quick(tiny):
    return replace(
        tiny, method="fedavg", partition="iid", partition_options={}, clients=4, cohort=None, rounds=2,
        options={"epochs": 1, "batch": 8}, checkpoint_every=None,
    )  # fmt: skip


def _rows(folder):
    return [stage["rows"] for stage in json.loads((folder / "active.json").read_text())]


@pytest.mark.parametrize("acquire", ACQUISITIONS)
def test_every_row_is_asked_for_once_until_the_pools_are_empty(quick, tmp_path, acquire):
    x = replace(quick, method="feduab") if acquire == "mutual_information" else quick
    records = run_active(x, Active(acquire, labelled=6, budget=7), tmp_path)
    assert [r["labelled"] for r in records] == [24, 52, 80, 96]
    assert [r["pool"] for r in records] == [72, 44, 16, 0]
    clients = clients_of(x)
    for k in range(4):
        asked = [row for stage in _rows(tmp_path) for row in stage[k]]
        assert len(set(asked)) == len(asked) == 18
        assert set(asked) < set(clients.train_rows(k).tolist())


def test_the_rows_of_the_highest_entropy_are_chosen(quick, tmp_path):
    run_active(quick, Active("entropy", labelled=6, budget=5, stages=1), tmp_path)
    run, clients = load(tmp_path / "stage-00"), clients_of(quick)
    for k, asked in enumerate(_rows(tmp_path)[0]):
        p = run.predict(clients.data.x[clients.train_rows(k)])
        entropy = dict(zip(clients.train_rows(k).tolist(), p.entropy.tolist(), strict=True))
        # Six rows were labelled; of the others, the five most uncertain.
        unlabelled = set(entropy) - set(asked)
        worse = sorted((entropy[r] for r in unlabelled), reverse=True)
        assert len(asked) == 5
        assert min(entropy[r] for r in asked) >= worse[6]


def test_choices_repeat_with_the_seed_and_differ_by_it(quick, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_active(replace(quick, seed=seed), Active("random", 6, 5, stages=2), tmp_path / name)
    assert _rows(tmp_path / "a") == _rows(tmp_path / "b")
    assert _rows(tmp_path / "a") != _rows(tmp_path / "c")


@pytest.mark.parametrize("lost", ["the last choice", "a stage and its choice"])
def test_a_study_that_was_cut_goes_on_as_if_nothing_had_happened(quick, tmp_path, lost):
    run_active(quick, Active("entropy", 6, 7), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    progress = json.loads((tmp_path / "cut" / "active.json").read_text())
    (tmp_path / "cut" / "active.json").write_text(json.dumps(progress[:2]))
    shutil.rmtree(tmp_path / "cut" / "stage-03")
    if lost != "the last choice":
        shutil.rmtree(tmp_path / "cut" / "stage-02")
    resume_active(tmp_path / "cut")
    assert (tmp_path / "cut" / "active.json").read_text() == (tmp_path / "whole" / "active.json").read_text()
    a, b = (load(tmp_path / name / "stage-03").posterior.mean for name in ("whole", "cut"))
    assert torch.equal(a, b)


def test_settings_come_back_from_the_folder_and_another_study_is_refused(quick, tmp_path):
    active = Active("random", 6, 7, stages=1)
    run_active(quick, active, tmp_path)
    assert settings_in(tmp_path) == (quick, active)
    with pytest.raises(InputError, match="another active learning"):
        run_active(quick, replace(active, budget=8), tmp_path)


@pytest.mark.parametrize(
    ("active", "change", "message"),
    [
        (Active("entropie"), {}, "did you mean 'entropy'"),
        (Active(budget=0), {}, "budget must be"),
        (Active(labelled=96), {}, "leaves no client a row to ask for"),
        (Active(), {"methods": ("fedavg", "feduab")}, "one method"),
        (Active(), {"data": "diabetes", "network": "linear"}, "real targets"),
        (Active(), {"engine": "flower"}, "trains in one process"),
        (Active(), {"options": {"lr": -1}}, "lr must be"),
        (Active(), {"network": "nosuch"}, "unknown network"),
    ],
)
def test_what_can_not_work_is_one_line(quick, tmp_path, active, change, message):
    with pytest.raises(InputError, match=message):
        run_active(replace(quick, **change), active, tmp_path / "run")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name != ".lock"]


def test_the_area_is_the_mean_over_labels():
    records = [{"labelled": n, "scores": {"accuracy": a}} for n, a in ((10, 0.0), (20, 1.0), (50, 1.0))]
    assert area(records) == pytest.approx((5 + 30) / 40)
    assert area(records[:1]) == 0


def test_the_command_line_runs_resumes_and_reports(quick, tmp_path):
    (tmp_path / "x.toml").write_text(to_toml(quick))
    folder = tmp_path / "out"
    command = ["run", str(tmp_path / "x.toml"), "--output", str(folder), "--active", "entropy", "--labelled", "6"]
    told = CliRunner().invoke(app, [*command, "--budget", "10"])
    assert told.exit_code == 0, told.output
    assert "Active learning" in (folder / "report.html").read_text()
    again = CliRunner().invoke(app, ["resume", str(folder)])
    assert again.exit_code == 0, again.output
    assert "labels-accuracy" in write([folder], tmp_path / "r.html").read_text()


def test_entropy_beats_random_on_digits_by_the_area_under_the_curve(tmp_path):
    """Means over three seeds: forty labels a client to begin with, ten more a stage; the claim is about curves."""
    base = Experiment(
        data="digits", network="mlp", network_options={"hidden": [40]}, clients=4, rounds=6, method="fedavg",
        options={"epochs": 4, "batch": 10, "lr": 0.3}, evaluate_every=6, checkpoint_every=6,
    )  # fmt: skip
    areas = {"entropy": 0.0, "random": 0.0}
    for seed in range(3):
        for acquire in areas:
            active = Active(acquire, labelled=40, budget=10, stages=4)
            made = run_active(replace(base, seed=seed), active, tmp_path / f"{acquire}{seed}")
            areas[acquire] += area(made) / 3
    assert areas["entropy"] > areas["random"]


def test_a_folder_in_use_is_left_alone(quick, tmp_path):
    with locked(tmp_path / "a"), pytest.raises(InputError, match="a is in use by another process"):
        run_active(quick, Active("random", 6, 5, stages=1), tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]
    run_active(quick, Active("random", 6, 5, stages=1), tmp_path / "a")
    (tmp_path / "b").write_text("a file")
    with pytest.raises(InputError, match="is a file, not a folder"):
        run_active(quick, Active("random", 6, 5, stages=1), tmp_path / "b")
