"""The page of a private run: what its journal does not tell is neither drawn nor called missing."""

import pytest

from fedbayes.cli.terminal import closing_table
from fedbayes.experiments.experiment import Experiment
from fedbayes.report import write
from fedbayes.runs.folder import run
from fedbayes.runs.records import runs_in

pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')


def test_seconds_and_clients_are_left_out(tmp_path):
    x = Experiment(
        data="digits", network="linear", clients=4, cohort=2, rounds=2, method="fedavg", public_test=True,
        options={"weighting": "equal", "epochs": 1}, private="clients", noise_multiplier=1.0, private_clip=1.0,
    )  # fmt: skip
    run(x, tmp_path / "run")
    text = write([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "clients are private, epsilon" in text
    assert "client_sizes" not in text
    assert 'data-name="cost-bytes"' in text
    assert 'data-name="cost-time"' not in text
    cells = [str(cell) for cell in closing_table(runs_in(tmp_path / "run")).columns[-1].cells]
    assert cells == ["-"]
