"""Tables of four sites from files to predictions: one TOML and one command, and exit code 2 where a table is wrong."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from site_files import at_site
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.evaluate.scoring import evaluate
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.sites import alone, everybody
from fedbayes.export.predictions import predict_file
from fedbayes.export.program import export
from fedbayes.runs.folder import resume, run

HEAD = "age,ward,dose,ill"


def rows(n, seed, wards="abc"):
    random = np.random.default_rng(seed)
    age, dose = random.normal(50, 10, n), random.normal(5, 1, n)
    ill = age - 50 + 10 * (dose - 5) + random.normal(0, 5, n) > 0
    ages = [f"{v:.4f}" if random.random() > 0.1 else "" for v in age]
    return [
        f"{a},{wards[i % len(wards)]},{d:.4f},{'yes' if y else 'no'}"
        for i, (a, d, y) in enumerate(zip(ages, dose, ill))
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("tables")
    (home / "sites").mkdir()
    for seed, site in enumerate(("aachen", "basel")):
        (home / "sites" / f"{site}.csv").write_text("\n".join([HEAD, *rows(60, seed)]) + "\n")
    experiment = Experiment(
        data="tables",
        data_options={"sites": str(home / "sites"), "target": "ill"},
        network="linear",
        method="feduab",
        rounds=2,
        options={"epochs": 5, "lr": 0.2, "test_draws": 4},
    )
    run(experiment, home / "run")
    return home


def test_new_rows_are_coded_as_the_training_rows_were(home, tmp_path):
    (tmp_path / "new.csv").write_text("\n".join(["dose,ward,age", "5.5,b,60", "4.5,c,", "5,a,41"]))
    trained = fb.load(home / "run")
    arrays, _ = predict_file(home / "run", tmp_path / "new.csv")
    frame = {"ward": ["b", "c", "a"], "age": [60, np.nan, 41], "dose": [5.5, 4.5, 5.0]}
    for x in (frame, tmp_path / "new.csv", torch.tensor([[60, 1, 5.5], [np.nan, 2, 4.5], [41, 0, 5.0]]).double()):
        np.testing.assert_allclose(arrays["probs"], trained.predict(x).probs.numpy(), atol=1e-6)
    with pytest.warns(UserWarning, match="column 'ward': 'z' in 1 of 3 rows is in no training row"):
        trained.predict({**frame, "ward": ["z", "c", "a"]})
    with pytest.raises(InputError, match="has no column 'dose'; add it there"):
        trained.predict({"ward": ["a"], "age": [3.0]})


def test_exports_hold_the_coding(home, tmp_path, recwarn):
    trained = fb.load(home / "run")
    export(trained, tmp_path / "model", "ensemble", draws=4)
    assert not [w for w in recwarn if "tensor" in str(w.message)]  # such as torch's of slices
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert [column["name"] for column in card["coding"]["columns"]] == ["age", "ward", "dose"]
    assert card["coding"]["columns"][1]["values"] == ["a", "b", "c"]
    x = trained.task.clients.data.test_x
    program = torch.export.load(tmp_path / "model" / "model.pt2").module()
    torch.testing.assert_close(program(x)["probs"], trained.predict(x, draws=4).probs, atol=1e-6, rtol=0)


def test_the_coding_is_kept_with_the_run(home, tmp_path):
    """New rows at a site change neither predictions nor, unasked, what a run goes on with; without rows it predicts."""
    kept = fb.data.read_coding(home / "run" / "coding.json")
    x = {"age": [60.0], "ward": ["b"], "dose": [5.5]}
    before = fb.load(home / "run").predict(x).probs
    table = home / "sites" / "basel.csv"
    text = table.read_text()
    try:
        table.write_text(text + "\n".join(rows(40, 9, "cde")))
        with pytest.warns(UserWarning, match="in no training row"):
            changed = fb.load(home / "run")
        assert changed.task.clients.data.coding == kept
        assert torch.equal(changed.predict(x).probs, before)
        with pytest.raises(InputError, match="the tables have changed since the run"):
            resume(home / "run")
        table.rename(tmp_path / "gone.csv")
        (home / "sites" / "aachen.csv").rename(tmp_path / "aachen.csv")
        with pytest.warns(UserWarning, match="the run can predict, and not be scored"):
            bare = fb.load(home / "run")
        assert torch.equal(bare.predict(x).probs, before)
        with pytest.raises(InputError, match="no test rows"):
            bare.scores()
    finally:
        (tmp_path / "aachen.csv").rename(home / "sites" / "aachen.csv")
        table.write_text(text)


CHANGED = {
    "a row more": lambda text: text + "55,b,5.1,no\n",
    "a test row's target": lambda text: text.replace(",yes\n", ",no\n", 1),
    "a category renamed": lambda text: text.replace(",a,", ",x,"),
}


@pytest.mark.filterwarnings("ignore:.*in no training row")
@pytest.mark.parametrize("change", CHANGED)
def test_rows_that_may_have_been_trained_on_are_not_scored(home, change):
    """The share of test rows is drawn over a table's rows: with one row more it is another."""
    table, x = home / "sites" / "basel.csv", {"age": [60.0], "ward": ["b"], "dose": [5.5]}
    before, text = fb.load(home / "run").predict(x).probs, table.read_text()
    try:
        table.write_text(CHANGED[change](text))
        commands = (["evaluate", "--repeats", "1"], ["evaluate", "--by", "site"], ["calibrate"])
        for command, *options in commands:
            with pytest.raises(InputError, match=r"the tables have changed since the run in .* began.* put them back"):
                CliRunner().invoke(app, [command, str(home / "run"), *options], catch_exceptions=False)
        with pytest.raises(InputError, match="the tables have changed since the run"):
            resume(home / "run")
        with pytest.raises(InputError, match="the tables have changed since the run"):
            CliRunner().invoke(app, ["resume", str(home / "run"), "--rounds", "9"], catch_exceptions=False)
        with pytest.warns(UserWarning, match="changed since the run .* the run can predict, and not be scored"):
            changed = fb.load(home / "run")
        assert torch.equal(changed.predict(x).probs, before)
        with pytest.raises(InputError, match="no test rows"):
            changed.scores()
    finally:
        table.write_text(text)


def test_evaluate_takes_the_coding_of_the_run(home, tmp_path):
    """Of a folder of before, that keeps no digest of its rows: what is coded anew is scored otherwise."""
    shutil.copytree(home / "run", tmp_path / "run")
    (tmp_path / "run" / "rows.json").unlink()
    table = home / "sites" / "basel.csv"
    text = table.read_text()
    try:
        table.write_text(CHANGED["a category renamed"](text))
        with pytest.warns(UserWarning, match="'x' in .* is in no training row"):
            scored = evaluate(tmp_path / "run", repeats=1)["feduab"]["scores"]
        with pytest.warns(UserWarning, match="'x' in .* is in no training row"):
            assert scored["nll"]["value"] == pytest.approx(fb.load(tmp_path / "run").scores()["nll"], abs=1e-9)
    finally:
        table.write_text(text)


def test_of_private_rows_no_digest_is_kept(home, tmp_path):
    assert set(json.loads((home / "run" / "rows.json").read_text())) == {"train", "test"}
    private = Experiment(
        data="tables", data_options={"sites": str(home / "sites"), "target": "ill"}, network="linear", rounds=1,
        method="fedavg", options={"weighting": "equal"}, private="clients", noise_multiplier=1.0,
    )  # fmt: skip
    run(private, tmp_path / "hidden")
    assert not (tmp_path / "hidden" / "rows.json").exists()
    run(replace(private, public_test=True), tmp_path / "public")
    assert set(json.loads((tmp_path / "public" / "rows.json").read_text())) == {"test"}
    fb.load(tmp_path / "public").scores()


def test_one_toml_and_one_command(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ('data = "tables"', f'data_options = {{sites = "{home}/sites", target = "ill"}}', "rounds = 1")
    (tmp_path / "my.toml").write_text("\n".join(lines))
    result = CliRunner().invoke(app, ["run", "my.toml"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs/my/report.html").is_file()
    shown = CliRunner().invoke(app, ["data", "show", "my.toml", "--figure", "held.svg"])
    assert "aachen" in shown.output
    assert "category" in shown.output
    assert (tmp_path / "held.svg").is_file()


WRONG = {
    "no column": ("age,ward,ill\n3,a,yes\n4,a,no\n", "site cadiz has no column 'dose', which site aachen has"),
    "a label": (f"{HEAD}\n3,a,5,maybe\n4,a,5,no\n5,a,5,yes\n", "label 'maybe'"),
    "one class": (f"{HEAD}\n3,a,5,no\n4,a,5,no\n", "site cadiz, target 'ill': all 2 training rows are 'no'"),
    "one row": (f"{HEAD}\n3,a,5,no\n", "site cadiz has 1 row to train on"),
    "a date": (f"{HEAD}\n3,1.2.2024,5,no\n4,a,5,yes\n", "column 'ward': '1.2.2024' looks like a date"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_tables_end_in_one_line(home, tmp_path, fault):
    text, says = WRONG[fault]
    (tmp_path / "cadiz.csv").write_text(text)
    sites = {"aachen": str(home / "sites" / "aachen.csv"), "cadiz": str(tmp_path / "cadiz.csv")}
    options = {"sites": sites, "target": "ill", "labels": ["no", "yes"]}
    with pytest.raises(InputError, match=r"^site cadiz") as caught:
        run(Experiment(data="tables", data_options=options, rounds=1), tmp_path / "run")
    assert says in str(caught.value)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_nodes_need_no_rows_but_their_own(home, tmp_path):
    files = []
    for site in ("aachen", "basel"):
        fb.data.save_summaries(fb.data.summary_of(home / "sites" / f"{site}.csv", "ill"), tmp_path / f"{site}.json")
        files.append(tmp_path / f"{site}.json")
    fb.data.agree_on(files, "ill").save(home / "coding.json")
    together, whole = everybody(at_site, {"folder": str(home)}, 2), fb.data.from_tables(home / "sites", "ill")
    assert together.data.coding == whole.data.coding
    torch.testing.assert_close(together.data.test_x, whole.data.test_x, equal_nan=True)
    one = alone(at_site, {"folder": str(home)}, 2, 1)
    torch.testing.assert_close(one.data.x, whole.data.x[whole.train_rows(1)], equal_nan=True)
    assert one.data.prepare == whole.data.prepare


def test_a_run_that_was_saved_predicts_tables_and_does_not_go_on(home, tmp_path):
    clients, x = fb.data.from_tables(home / "sites", "ill", thin="keep"), {"age": [60.0], "ward": ["b"], "dose": [5.5]}
    run = fb.fit("linear", clients, method="fedavg", rounds=1)
    folder = fb.save(run, tmp_path / "saved", network="linear")
    torch.testing.assert_close(fb.load(folder).predict(x).probs, run.predict(x).probs)
    with pytest.raises(InputError, match=r"written by fb\.save, and holds no checkpoint to go on from"):
        resume(folder)
