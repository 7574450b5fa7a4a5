"""Commands that look at sites: calibrate, predictions and scores by site, a watch that goes on, its page."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.cli.sites import coverage_table
from fedbayes.errors import InputError
from fedbayes.report.material import gather
from fedbayes.runs import calibrated, watched

SMALL = """
data = "digits"
network = "linear"
partition = "labels_per_client"
partition_options = { k = 2 }
clients = 6
rounds = 3
method = "feduab"
[options]
lr = 0.2
epochs = 2
"""


def call(*arguments: object, code: int = 0) -> str:
    made = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert made.exit_code == code, made.output
    return made.output


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("sites")
    (home / "small.toml").write_text(SMALL)
    call("run", home / "small.toml", "--output", home / "small")
    return home / "small"


def test_calibrate_then_predict_evaluate_and_report_by_site(home, tmp_path):
    np.save(tmp_path / "x.npy", fb.data.load("digits").test_x[:12].numpy())
    with pytest.raises(InputError, match="is not calibrated yet"):
        call("predict", home, "--input", tmp_path / "x.npy", "--sets")
    said = call("calibrate", home, "--way", "blended", "--recalibrate")
    assert "sites as promised" in said
    assert "isotonic, by site" in said
    assert (home / calibrated.FILE).is_file()
    call("predict", home, "--input", tmp_path / "x.npy", "--site", "2", "--output", tmp_path / "p.csv")
    p = fb.load(home).predict(np.load(tmp_path / "x.npy"))
    sets = calibrated.read(home).sets(p, "2")
    rows = (tmp_path / "p.csv").read_text().splitlines()
    assert rows[0].endswith(",set")
    assert [row.rpartition(",")[2] for row in rows[1:]] == ["|".join(map(str, np.flatnonzero(r))) for r in sets]
    said = call("evaluate", home, "--by", "site")
    assert "blended" in said
    assert "95 % interval" in said
    call("report", home, "--no-figures")
    assert "Promises by site" in (home / "report.html").read_text()
    made = calibrated.read(home)
    assert [c.header for c in coverage_table(made).columns][-1] == "classes in a set"
    made.judged["size"] = np.full(len(made.sites), np.nan)  # as under epsilon, where sizes stay at the sites
    assert [c.header for c in coverage_table(made).columns][-1] == "95 % interval"


def test_what_is_measured_of_a_posterior_is_not_used_of_another(home, tmp_path):
    folder, x = tmp_path / "run", tmp_path / "x.npy"
    shutil.copytree(home, folder)
    np.save(x, fb.data.load("digits").test_x[:3].numpy())
    call("calibrate", folder)
    call("evaluate", folder, "--ood", "uniform-noise", "--repeats", 1)
    whole = gather([folder]).runs[0]
    assert whole.ood
    assert whole.errors
    assert whole.calibration
    call("resume", folder, "--rounds", 4)
    for command in (["predict", folder, "--input", x, "--sets"], ["export", folder, "--output", tmp_path / "model"]):
        with pytest.raises(InputError, match="promises are of round 3, the run is at round 4; run `fedbayes"):
            call(*command)
    assert not (tmp_path / "model").exists()
    after = gather([folder])
    assert after.runs[0][-3:] == ({}, {}, {})  # OOD scores, errors, promises
    for name in ("ood.npz", "scores.json", "calibration.npz"):
        assert any(f"{name} is of round 3, the run is at round 4" in note for note in after.missing)
    call("calibrate", folder)
    call("predict", folder, "--input", x, "--sets")
    assert "left out" in call("export", folder, "--output", tmp_path / "own", "--client", 0)
    with pytest.raises(InputError, match="client 'a': clients have no names, but numbers below 6"):
        call("export", folder, "--output", tmp_path / "own", "--client", "a")
    assert not (tmp_path / "own" / "sets.json").exists()
    assert gather([folder]).runs[0].calibration


def test_promises_are_of_what_predicts_as_the_run_does(home, tmp_path):
    folder, x = tmp_path / "run", tmp_path / "x.npy"
    shutil.copytree(home, folder)
    np.save(x, fb.data.load("digits").test_x[:3].numpy())
    call("calibrate", folder)
    for i, changed in enumerate((["--what", "mean"], ["--draws", 3])):
        assert "left out" in call("export", folder, "--output", tmp_path / str(i), *changed)
        assert not (tmp_path / str(i) / "sets.json").exists()
    call("export", folder, "--output", tmp_path / "whole")
    assert (tmp_path / "whole" / "sets.json").exists()
    with pytest.raises(InputError, match=r"own \d+ draws, not of 3"):
        call("predict", folder, "--input", x, "--sets", "--draws", 3)


def test_promises_of_another_run_are_refused_and_those_of_before_are_taken(home, tmp_path):
    run = fb.load(home)
    made = fb.conformal.fit(run)
    calibrated.write(tmp_path, replace(made, posterior="of another seed"))
    with pytest.raises(InputError, match="promises are of another posterior"):
        calibrated.read(tmp_path, run)
    calibrated.write(tmp_path, replace(made, posterior="", rounds=None))
    with pytest.warns(UserWarning, match="does not say of which round its promises are"):
        assert calibrated.read(tmp_path, run).sites == made.sites


def test_scores_by_site_of_a_single_test_row(tmp_path):
    rows = ["61.1,no", "58.8,yes", "65.8,yes", "56.0,yes", "51.0,no", ",no"]
    for site, own in (("aachen", rows[:3]), ("basel", rows[3:])):
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,ill", *own]))
    options = f'data = "tables"\nrounds = 1\n[data_options]\nsites = "{tmp_path}/*.csv"\ntarget = "ill"'
    (tmp_path / "two.toml").write_text(options)
    call("run", tmp_path / "two.toml", "--output", tmp_path / "two")
    said = " ".join(call("evaluate", tmp_path / "two", "--by", "site").split())
    assert "no error can be given where there is one row: aachen" in said
    assert "whether promises hold can't be told" in said
    with pytest.raises(InputError, match="no held-out row at any site"):
        call("calibrate", tmp_path / "two")


def test_of_a_comparison_it_is_said_whose_run_it_is(tmp_path):
    (tmp_path / "two.toml").write_text(SMALL.replace('method = "feduab"', 'methods = ["feduab", "fedavg"]'))
    call("run", tmp_path / "two.toml", "--output", tmp_path / "two", "--set", "rounds=1")
    said = call("evaluate", tmp_path / "two", "--by", "site")
    assert [line for line in said.splitlines() if line.endswith(":")] == ["feduab:", "fedavg:"]
    alone = call("evaluate", tmp_path / "two" / "feduab", "--by", "site")
    assert said.startswith(f"feduab:\n{alone}")
    np.save(tmp_path / "x.npy", fb.data.load("digits").test_x[:2].numpy())
    given = ["predict", "--input", tmp_path / "x.npy"]
    words = f"is a comparison: what follows is of fedavg; for others give {tmp_path / 'two'}/feduab"
    told = call(*given, tmp_path / "two")
    assert "".join(words.split()) in "".join(told.split())  # wherever a long path makes its lines break
    assert "comparison" not in call(*given, tmp_path / "two" / "feduab")


def test_predictions_for_a_site_have_its_effects(tmp_path):
    for i, site in enumerate(("aachen", "basel")):
        rows = [f"{k % 20 + 5 * i},{'yes' if k % 20 > 10 else 'no'}" for k in range(60)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,ill", *rows]))
    options = f'[data_options]\nsites = "{tmp_path}/*.csv"\ntarget = "ill"\nsite_effects = true'
    (tmp_path / "two.toml").write_text(f'data = "tables"\nrounds = 2\n{options}')
    call("run", tmp_path / "two.toml", "--output", tmp_path / "two")
    call("calibrate", tmp_path / "two")
    (tmp_path / "new.txt").write_text("age\n9\n")
    (tmp_path / "said.txt").write_text("age,site\n9,basel\n")
    lines = []
    for name, site in (("new", "basel"), ("said", "basel"), ("new", "1"), ("new", "aachen")):
        call(
            "predict",
            tmp_path / "two",
            "--input",
            tmp_path / f"{name}.txt",
            "--site",
            site,
            "--output",
            tmp_path / "p.csv",
        )
        lines.append((tmp_path / "p.csv").read_text())
    assert lines[0] == lines[1] == lines[2] != lines[3]


def test_of_a_private_run_promises_are_made_under_noise_alone(tmp_path):
    pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
    folder = tmp_path / "private"
    private = 'private = "clients"\nnoise_multiplier = 0.1\n[options]\nweighting = "equal"'
    (tmp_path / "private.toml").write_text(SMALL.replace("rounds = 3", "rounds = 1").replace("[options]", private))
    call("run", tmp_path / "private.toml", "--output", folder)
    for command in (["evaluate"], ["evaluate", "--by", "site"], ["evaluate", "--ood", "uniform-noise"]):
        with pytest.raises(InputError, match="the run is private, and scores of its test rows have no noise"):
            call(command[0], folder, *command[1:])
    assert not {"scores.json", "ood.npz"} & {path.name for path in folder.iterdir()}
    for more in ([], ["--recalibrate"]):
        with pytest.raises(InputError, match="the run is private"):
            call("calibrate", folder, *more)
    with pytest.raises(InputError, match="--recalibrate compares maps by sums without noise"):
        call("calibrate", folder, "--epsilon", 400, "--recalibrate")
    assert not (folder / calibrated.FILE).exists()
    assert "noised, epsilon 400" in " ".join(call("calibrate", folder, "--epsilon", 400).split())
    told = call("evaluate", folder, "--by", "site")
    assert "95 % interval" in told
    assert "accuracy" not in told
    assert [row.split()[:2] for row in call("privacy", folder).splitlines() if "all" in row] == [["in", "all"]]


def test_a_watch_goes_on_and_tells_what_changed(home, tmp_path):
    clients = fb.load(home).task.clients
    random = np.random.default_rng(0)
    own = random.choice(clients.test_rows(1).numpy(), 260)
    x = clients.data.test_x.numpy()[own].reshape(260, -1).astype(float)
    y = clients.data.test_y.numpy()[own]
    x[130:] = random.uniform(0, 16, x[130:].shape)

    def stream(rows: int) -> Path:
        head = ",".join([*(f"pixel{j}" for j in range(64)), "digit", "day"])
        lines = [",".join([*map(repr, row.tolist()), str(y[i]), f"day {i}"]) for i, row in enumerate(x[:rows])]
        (tmp_path / "stream.csv").write_text("\n".join([head, *lines]))
        return tmp_path / "stream.csv"

    options = ["--site", "1", "--label", "digit", "--time", "day"]
    assert "130 new rows, 130 in all" in call("watch", home, "--input", stream(130), *options)
    said = call("watch", home, "--input", stream(260), *options, code=3)
    assert "130 new rows, 260 in all" in said
    assert "the inputs changed" in said
    state = watched.at(home, "1")
    assert state is not None
    assert state.alarm is not None
    assert state.alarm.time == f"day {state.alarm.row - 1}"
    assert "1 of 1 sites have changed" in Path(call("watch", home).strip()).read_text()
    with pytest.raises(InputError, match="has seen 260: append to the file"):
        call("watch", home, "--input", stream(100), *options)
    with pytest.raises(InputError, match="give its name or number with --site"):
        call("watch", home, "--input", stream(100))


def test_a_folder_of_tables_is_shown_by_its_name_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    (tmp_path / "digits").mkdir()  # a data set's name stays that of the data set
    for site in ("aachen", "basel"):
        (tmp_path / "sites" / f"{site}.csv").write_text("age,ill\n50,no\n60,yes\n")
    assert "basel" in call("data", "show", "sites", "--target", "ill")
    assert "Dataset(digits" in call("data", "show", "digits")
