"""Tables of times and events from files to curves: one TOML and one command, nodes with rows of their own alone."""

import csv
import json

import numpy as np
import pytest
import torch
from site_files import at_site
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.sites import alone, everybody
from fedbayes.export.predictions import predict_file
from fedbayes.export.program import export
from fedbayes.runs.folder import run

HEAD = ["age", "ward", "dose", "days", "died"]
NEW = {"age": [60.0, np.nan], "ward": ["b", "a"], "dose": [5.5, 4.1]}


def write(path, rows, seed):
    """Patients of whom some ages are not known."""
    random = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(HEAD)
        for i in range(rows):
            age, dose = random.normal(60, 9), random.normal(5, 1)
            event, lost = random.exponential(100 * np.exp((60 - age) / 9)), random.exponential(200)
            known = f"{age:.1f}" if random.random() > 0.1 else "?"
            out.writerow([known, "abc"[i % 3], f"{dose:.2f}", f"{min(event, lost):.1f}", int(event <= lost)])


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("survival")
    (home / "sites").mkdir()
    for seed, site in enumerate(("aachen", "basel")):
        write(home / "sites" / f"{site}.csv", 60 + 20 * seed, seed)
    return home


def asked(home, **options):
    return {"sites": str(home / "sites"), "target": "days", "event": "died", **options}


@pytest.fixture(scope="module")
def folder(home):
    run(Experiment(data="tables", data_options=asked(home), network="linear", method="pvi", rounds=3), home / "run")
    return home / "run"


def test_one_toml_and_one_command(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (
        'data = "tables"',
        "rounds = 2",
        "[data_options]",
        f'sites = "{home}/sites"',
        'target = "days"',
        'event = "died"',
        "times = [30, 90, 365]",
    )
    (tmp_path / "my.toml").write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["run", "my.toml"])
    assert result.exit_code == 0, result.output
    assert "Kaplan-Meier" in (tmp_path / "runs/my/report.html").read_text()
    assert fb.load("runs/my").predict(NEW).times == (30.0, 90.0, 365.0)
    for name in (["my.toml"], [str(home / "sites"), "--target", "days", "--set", "event=died"]):
        shown = CliRunner().invoke(app, ["data", "show", *name, "--figure", "held.svg"])
        assert shown.exit_code == 0, shown.output
        assert shown.output.count("% events") == 2
        assert "died" not in shown.output


def test_a_folder_predicts_goes_on_and_is_exported(home, folder, tmp_path):
    trained = fb.load(folder)
    p = trained.predict(NEW)
    assert p.survival.shape == (2, 10)
    rows = ["days,dose,ward,age", "3,5.5,b,60", ",4.1,a,"]  # columns of targets are not looked at
    (tmp_path / "new.csv").write_text("\n".join(rows))
    arrays, _ = predict_file(folder, tmp_path / "new.csv")
    np.testing.assert_allclose(arrays["survival"], p.survival, atol=1e-6)
    assert {"concordance", "nll", "brier", "count"} == set(trained.scores())
    export(trained, tmp_path / "model")
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert (card["coding"]["event"], card["times"]) == ("died", pytest.approx(list(p.times)))
    assert CliRunner().invoke(app, ["resume", str(folder), "--rounds", "4"]).exit_code == 0
    assert fb.load(folder).progress.state.round == 4


def test_a_run_predicts_when_its_tables_are_gone(home, folder, tmp_path):
    before = fb.load(folder).predict(NEW).survival
    (home / "sites").rename(tmp_path / "away")
    try:
        with pytest.warns(UserWarning, match="the run can predict, and not be scored"):
            assert torch.equal(fb.load(folder).predict(NEW).survival, before)
    finally:
        (tmp_path / "away").rename(home / "sites")


@pytest.mark.parametrize("network", ["linear", "by_site"])
def test_a_run_that_was_saved_predicts(home, tmp_path, network):
    clients = fb.data.from_tables(**asked(home, site_effects=network == "by_site"))
    run = fb.fit(network, clients, rounds=1, likelihood="cox")
    saved = fb.load(fb.save(run, tmp_path / "saved", network=network))
    x = {**NEW, "site": ["basel", "aachen"]}
    torch.testing.assert_close(saved.predict(x).survival, run.predict(x).survival)
    assert set(fb.load(tmp_path / "saved", clients=clients).scores()) == set(run.scores())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"event": "dead"}, "site aachen has no column 'dead', the event"),
        ({"target": "age"}, "site aachen, target 'age' is missing in"),
        ({"target": "days", "event": "ward"}, "site aachen, event 'ward': 'a' .* is neither 0 nor 1"),
        ({"times": [5, "soon"]}, "data: could not convert string to float: 'soon'"),
        ({"times": 5}, r"times: give a list of them, such as times = \[365, 730\], not 5"),
    ],
)
def test_wrong_tables_end_in_one_line(home, tmp_path, options, says):
    with pytest.raises(InputError, match=says) as caught:
        run(Experiment(data="tables", data_options=asked(home, **options), rounds=1), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_nodes_need_no_rows_but_their_own(home, tmp_path):
    files = []
    for site in ("aachen", "basel"):
        said = fb.data.summary_of(home / "sites" / f"{site}.csv", "days", event="died")
        fb.data.save_summaries(said, tmp_path / f"{site}.json")
        files.append(tmp_path / f"{site}.json")
    fb.data.agree_on(files, "days", event="died", times=[30, 90, 365]).save(home / "coding.json")
    together = everybody(at_site, {"folder": str(home)}, 2)
    whole = fb.data.from_tables(**asked(home, times=[30, 90, 365]))
    assert together.data.coding == whole.data.coding
    assert torch.equal(together.data.test_y, whole.data.test_y)
    one = alone(at_site, {"folder": str(home)}, 2, 1).data
    assert torch.equal(one.y, whole.data.y[whole.train_rows(1)])
    assert (one.prepare, one.times) == (whole.data.prepare, (30.0, 90.0, 365.0))
