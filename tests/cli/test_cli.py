"""The command line: what a user types, and what comes back."""

import contextlib
import io
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app, main
from fedbayes.cli.terminal import closing_table
from fedbayes.cli.train import _after_a_stop
from fedbayes.cli.watching import heeded_ctrl_c
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.report import write
from fedbayes.runs.folder import Watch, run
from fedbayes.runs.records import RunFiles

SMALL = """
data = "digits"
network = "linear"
clients = 8
cohort = 3
rounds = 2
method = "feduab"
[options]
epochs = 1
"""


def call(*arguments: object) -> str:
    made = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    return made.output


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with `small.toml` and its run in `small`."""
    home = tmp_path_factory.mktemp("cli")
    (home / "small.toml").write_text(SMALL)
    call("run", home / "small.toml", "--output", home / "small")
    return home


def test_a_run_prints_progress_a_table_and_the_report(home):
    said = call("run", home / "small.toml", "--output", home / "again", "--set", "kl_weight=0.01", "--set", "cohort=2")
    assert "round 2/2" in said
    assert "NLL" in said
    assert f"report: {home / 'again' / 'report.html'}" in said.replace("\n", "")
    assert (home / "again" / "report.html").is_file()
    assert fb.load(home / "again").task.cohort == 2
    assert "\x1b" not in said  # no control codes where nobody reads them


def test_central_training_pools_the_clients(home):
    call("run", home / "small.toml", "--central", "--set", "epochs=2", "--output", home / "central")
    run = fb.load(home / "central")
    assert (len(run.task.clients), len(run.journal)) == (1, 4)
    assert tomllib.loads((home / "central" / "config.toml").read_text())["central"] is True


def test_the_version_is_that_of_the_package(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "src/fedbayes/version.py"
    assert call("--version").strip() == fb.__version__


def test_resuming_a_finished_run_says_so(home):
    assert "finished earlier" in call("resume", home / "small")


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("methods", "feduab"),
        ("rules", "log_pool"),
        ("weightings", "discrepancy"),
        ("networks", "mlp"),
        ("partitions", "dirichlet_own"),
        ("experiments", "quickstart"),
        ("table", "fedppd-1"),
    ],
)
def test_lists_have_a_name_and_a_sentence_a_line(command, word, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    lines = call(command).splitlines()
    assert any(line.startswith(word) for line in lines)
    assert all(len(line.split()) > 2 for line in lines)


def test_figures_are_listed_where_none_is_named():
    assert {"fedppd-2", "agg-prior", "pfedpf-confidence"} <= set(call("figure").split())


def test_data_sets_are_listed_with_sizes_kinds_and_presence(monkeypatch, tmp_path):
    """In 80 columns no path is torn apart."""
    monkeypatch.setenv("COLUMNS", "80")
    place = tmp_path / "a-folder-whose-name-is-as-long-as-a-line" / "and-goes-on-for-as-long-again-as-that-one-did"
    monkeypatch.setenv("FEDBAYES_DATA", str(place))
    said = call("datasets")
    assert f"{place}/femnist" in said
    words = " ".join(said.replace("\N{NO-BREAK SPACE}", " ").split())
    assert "digits 8x8 handwritten digits; 1 442 rows, 355 test rows, 10 classes; here, scikit-learn" in words
    assert "progression; 354 rows, 88 test rows, real targets; here, scikit-learn" in words
    assert "noise images; 2 000 test rows; here, made when asked for" in words


def test_data_show_tells_who_holds_what():
    said = call(
        "data", "show", "digits", "--partition", "labels_per_client", "--clients", 5, "--set", "partition_options.k=2"
    )
    assert "5 of digits" in said
    said = call("data", "show", "diabetes", "--clients", 4)
    assert "4 of diabetes" in said


def test_predictions_are_printed_and_written(home, tmp_path):
    x = fb.data.load("digits").test_x[:30].numpy()
    np.save(tmp_path / "x.npy", x)
    said = call("predict", home / "small", "--input", tmp_path / "x.npy", "--output", tmp_path / "out.npz")
    assert "epistemic" in said
    with np.load(tmp_path / "out.npz") as file:
        p = fb.load(home / "small").predict(x)
        np.testing.assert_array_equal(file["probs"], p.probs.numpy())
        np.testing.assert_array_equal(file["epistemic"], p.epistemic.numpy())


@pytest.mark.parametrize("bad", ["shape", "nan", "text", "missing"])
def test_wrong_inputs_to_predict_are_named(home, tmp_path, bad):
    path = tmp_path / "x.npy"
    if bad == "shape":
        np.save(path, np.zeros((3, 7)))
    elif bad == "nan":
        np.save(path, np.full((3, 1, 8, 8), np.nan, dtype=np.float32))
    elif bad == "text":
        path.write_text("not an array")
    with pytest.raises(InputError):
        call("predict", home / "small", "--input", path)


def test_an_input_error_is_one_line_and_exit_code_2(home, monkeypatch, capsys):
    said = {}
    for debug in ([], ["--debug"]):
        words = ["run", home / "small.toml", "--output", home / "bad", "--set", "metod=fedavg", *debug]
        monkeypatch.setattr(sys, "argv", ["fedbayes", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        said[bool(debug)] = capsys.readouterr().err
    assert said[False].count("\n") == 1
    assert "did you mean 'method'" in said[False]
    assert "Traceback" in said[True]
    assert not (home / "bad").exists()


IGNORED = {
    "resume {home}/active --rounds 5": "active learning goes on as it began",
    "resume {home}/active --set lr=3": "active learning goes on as it began",
    "evaluate {home}/small --by site --ood uniform-noise": "--ood and --repeats are of the whole test set",
    "evaluate {home}/small --by site --repeats 7": "--ood and --repeats are of the whole test set",
    "predict {home}/small --input x.npy --by distance": "--by says what --ood goes by",
    "run {home}/small.toml --labelled 5": "--labelled is of active learning",
    "run {home}/small.toml --budget 5": "--budget is of active learning",
    "export {home}/small --output {home}/out --what mean --draws 7": "--draws are the members of an ensemble",
    "export {home}/small --output {home}/out --what peft --onnx": "--onnx is of a whole network",
    "privacy {home}/small --rounds -1": "how many more, at least 1, not -1",
    "privacy {home}/small --delta 1e-9": "a run has its own epsilon, delta",
    "sweep {home}/small.toml --over seed=0 --over seed=1": "--over seed is given twice",
    "run {home}/tables.toml --set clients=7": "clients: each site of the tables is a client",
    "run {home}/tables.toml --set partition=dirichlet": "partition: each site of the tables is a client",
    "run {home}/tables.toml --set test_per_client=9": "test_per_client: each site of the tables is a client",
    "sweep {home}/tables.toml --over clients=2,3": "clients: each site of the tables is a client",
}
IMPOSSIBLE = {
    "predict {home}/small --input {home}/x.npy --draws 0": "draws must be at least 1, not 0",
    "predict {home}/small --input {home}/x.npy --draws -3": "draws must be at least 1, not -3",
    "evaluate {home}/small --by site --draws 0": "draws must be at least 1, not 0",
    "export {home}/small --output {home}/out --draws 0": "draws must be at least 1, not 0",
    "calibrate {home}/small --coverage 1.5": "coverage must be above 0 and below 1, not 1.5",
    "calibrate {home}/small --confidence 2": "confidence must be above 0 and below 1, not 2.0",
    "data show diabetes --figure {home}/x.svg": "diabetes has real targets",
    "data show digits --figure {home}/x.xyz": "no picture's name ends so; give .svg",
    "data show digits --figure {home}/x": "no picture's name ends so; give .svg",
    "privacy --epsilon inf --rounds 10 --rate .1": "--epsilon must be positive and finite",
    "privacy --noise inf --rounds 10 --rate .1": "--noise must be positive and finite",
}


@pytest.mark.parametrize("command", [*IGNORED, *IMPOSSIBLE])
def test_what_would_be_ignored_or_can_not_be_is_one_line(home, command):
    (home / "active").mkdir(exist_ok=True)
    (home / "active" / "active.toml").touch()
    (home / "tables.toml").write_text('data = "tables"\n')
    np.save(home / "x.npy", fb.data.load("digits").test_x[:3].numpy())
    before = set(home.rglob("*"))
    with pytest.raises(InputError, match=re.escape({**IGNORED, **IMPOSSIBLE}[command])) as caught:
        call(*command.format(home=home).split())
    assert "\n" not in str(caught.value)
    assert {path for path in home.rglob("*") if path.name != ".lock"} <= before


def test_help_version_and_lists_answer_without_torch():
    code = "import sys; sys.modules['torch'] = None; import fedbayes.cli as c; c.app(sys.argv[1:])"
    for word, expected in (("--help", "resume"), ("--version", fb.__version__), ("experiments", "quickstart")):
        made = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, check=True)
        assert expected in made.stdout


def test_a_ctrl_c_that_was_swallowed_is_heeded_after_the_round():
    before = signal.getsignal(signal.SIGINT)
    with heeded_ctrl_c() as heed:
        heed()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            heed()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_says_how_to_go_on(home):
    command = [sys.executable, "-m", "fedbayes", "run", str(home / "small.toml"), "--output", str(home / "long")]
    process = subprocess.Popen([*command, "--set", "rounds=100000"], stdout=subprocess.PIPE, text=True)
    try:
        while not (home / "long" / "rounds.jsonl").is_file():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(2)
        said, _ = process.communicate(timeout=1000)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.search(r"fedbayes resume .*long", said.replace("\n", ""))


def test_numbers_of_the_closing_table_stay_whole_in_a_narrow_terminal(tmp_path):
    name = "a name that is far too long for such a table"
    scores = {"accuracy": 0.6310, "nll": 1.0714, "ece": 0.1576}
    made = RunFiles(name, tmp_path, Experiment(), [{"round": 1, "seconds": 2.5, "test": scores}], {})
    console = Console(width=80, file=io.StringIO())
    console.print(closing_table([made]))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(f"{value:.4f}" in text for value in scores.values())
    assert "2.5" in text


def test_help_keeps_the_names_of_extras_and_methods_point_to_their_options():
    assert "fedbayes[tensorboard]" in CliRunner().invoke(app, ["run", "--help"]).output
    assert "fedbayes[onnx]" in CliRunner().invoke(app, ["export", "--help"]).output
    assert "fedbayes options NAME" in CliRunner().invoke(app, ["methods"]).output


def test_advice_after_an_interruption_can_be_followed(tmp_path):
    assert _after_a_stop(tmp_path) == "stopped before the first round; nothing was written"
    (tmp_path / "config.toml").touch()
    assert f"`fedbayes resume {tmp_path}`" in _after_a_stop(tmp_path)
    (tmp_path / "sweep.toml").touch()
    assert "the same command again" in _after_a_stop(tmp_path)


def test_an_interrupted_comparison_is_resumed_as_a_whole(tmp_path):
    experiment = Experiment(network="linear", methods=("fedavg", "feduab"), method="feduab", clients=4, rounds=1)

    def stop(method, task, records):
        if method == "feduab":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "two", Watch(begun=stop))
    with pytest.raises(InputError, match=f"run `fedbayes resume {tmp_path / 'two'}` to train it"):
        fb.load(tmp_path / "two")
    assert f"fedbayes resume {tmp_path / 'two'}<" in write([tmp_path / "two"], tmp_path / "page.html").read_text()
    assert len(fb.load(tmp_path / "two" / "fedavg").journal) == 1


def test_names_of_a_sweeps_members_stay_whole_in_80_columns(tmp_path):
    scores = {name: np.array(0.1234) for name in ("accuracy", "nll", "brier", "ece", "mce")}
    evaluation = {"score_names": np.array(list(scores)), "scores": np.array(list(scores.values()))}
    names = [f"seed={seed},lr=0.05" for seed in (0, 10)]
    runs = [RunFiles(name, tmp_path, Experiment(), [], evaluation) for name in names]
    text = io.StringIO()
    Console(file=text, width=80).print(closing_table(runs))
    assert all(name in text.getvalue() for name in names)


@pytest.mark.parametrize("command", ["methods", "rules", "networks", "partitions", "options feduab", "options"])
def test_lists_fit_into_60_columns_and_are_whole_in_a_pipe(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    narrow = call(*command.split()).splitlines()
    assert max(map(len, narrow)) <= 60
    monkeypatch.delenv("COLUMNS")
    pipe = call(*command.split()).splitlines()
    assert len(pipe) < len(narrow)
    assert " ".join(pipe).split() == " ".join(narrow).split()


def test_the_closing_table_fits_into_60_columns(tmp_path):
    scores = {"accuracy": 0.6310, "nll": 1.0714, "brier": 0.5184, "ece": 0.1576, "mce": 0.3699}
    made = RunFiles("feduab", tmp_path, Experiment(), [{"round": 1, "seconds": 2.5, "test": scores}], {})
    console = Console(width=60, file=io.StringIO())
    console.print(closing_table([made], console.width))
    text = console.file.getvalue()
    assert "2.5" in text
    assert "0.1576" in text
    assert "…" not in text
