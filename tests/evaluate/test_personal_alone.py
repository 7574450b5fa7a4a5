"""Methods that have personal models alone: what needs a global one says what to use instead, and that works."""

import pytest
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.evaluate import recalibrated
from fedbayes.export.program import export, export_adapters
from fedbayes.report.material import gather

CONFIG = 'data = "digits"\nnetwork = "mlp"\nclients = 4\nrounds = 1\nmethod = "fedper"\n'
NEEDS = {
    "predict": lambda run, folder: run.predict(run.task.clients.data.test_x[:3]),
    "ood": lambda run, folder: fb.ood.scores(run, run.task.clients.data.test_x[:3]),
    "conformal": lambda run, folder: fb.conformal.fit(run),
    "temperature": lambda run, folder: fb.calibrate.temperature(run),
    "maps": lambda run, folder: recalibrated.compared(run),
    "watch": lambda run, folder: fb.watch(run, 0),
    "export": lambda run, folder: export(run, folder / "model", "mean"),
}
COMMANDS = [
    ["calibrate"],
    ["calibrate", "--recalibrate"],
    ["evaluate"],
    ["evaluate", "--ood", "uniform-noise"],
    ["export", "--output", "model"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("personal")
    (home / "x.toml").write_text(CONFIG)
    made = CliRunner().invoke(app, ["run", str(home / "x.toml"), "--output", str(home / "run")])
    assert made.exit_code == 0, made.output
    return home / "run"


@pytest.mark.parametrize("what", NEEDS)
def test_what_needs_a_global_model_says_what_to_use_and_that_works(folder, tmp_path, what):
    run = fb.load(folder)
    with pytest.raises(
        InputError, match=r"\(fedper\) has no global model, only personal ones: use run\.personal\(client\)"
    ):
        NEEDS[what](run, tmp_path)
    NEEDS[what](run.personal(0).as_run, tmp_path)


def test_adapters_are_a_clients_too(folder, tmp_path):
    with pytest.raises(InputError, match="or --client"):
        export_adapters(fb.load(folder), tmp_path)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_end_in_one_line(folder, command):
    name, *options = command
    with pytest.raises(InputError, match="only personal ones"):
        CliRunner().invoke(app, [name, str(folder), *options], catch_exceptions=False)


def test_no_report_recommends_what_cannot_work(folder, tmp_path):
    assert gather([folder]).missing == []
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=2, seed=0)
    saved = fb.save(fb.fit("linear", clients, rounds=1), tmp_path / "saved")
    assert not any("fedbayes evaluate" in note for note in gather([saved]).missing)
    (tmp_path / "x.toml").write_text(CONFIG.replace("fedper", "fedavg") + "personal_every = 1\n")
    CliRunner().invoke(app, ["run", str(tmp_path / "x.toml"), "--output", str(tmp_path / "run")])
    assert any("fedbayes evaluate" in note for note in gather([tmp_path / "run"]).missing)
