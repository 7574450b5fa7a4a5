"""Consoles that can't show every character: a command ends as it should, and says what it can."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedbayes.cli import main

SMALL = """
data = "digits"
network = "linear"
clients = 8
cohort = 3
rounds = 1
methods = ["fedavg", "feduab"]
[options]
epochs = 1
"""


def said_by(monkeypatch, encoding: str, *words: object) -> str:
    """What a command prints on a console of that encoding; it must end with exit code 0."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    err = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "argv", ["fedbayes", *map(str, words)])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    out.flush()
    err.flush()
    assert code in (0, None), err.buffer.getvalue()
    return out.buffer.getvalue().decode(encoding)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("consoles")
    (home / "small.toml").write_text(SMALL)
    return home


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_every_command_ends_well(home, monkeypatch, encoding):
    def call(*words: object) -> str:
        return said_by(monkeypatch, encoding, *words)

    run = home / encoding
    shown = call("run", home / "small.toml", "--output", run)
    assert ("█" in shown) == (encoding == "utf-8")  # bars beside the pictures
    assert "epistemic #" in shown or encoding == "utf-8"
    assert "finished earlier" in call("resume", run)
    assert "report.html" in call("report", run, "--no-figures")
    assert "fedavg" in call("methods")
    assert "fedag-2" in call("table")
    assert "NLL" in call("evaluate", run, "--repeats", 2, "--ood", "uniform-noise")
    assert "digits" in call("data", "show", "digits", "--clients", 3)
    assert "mnist" in call("datasets")


def test_a_console_of_cp1252_as_a_process_has_it():
    surroundings = {**os.environ, "PYTHONIOENCODING": "cp1252", "LANG": "C"}
    made = subprocess.run(
        [sys.executable, "-m", "fedbayes", "rules"], env=surroundings, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert b"dwc" in made.stdout
