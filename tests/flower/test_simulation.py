"""Flower's local simulation: the same federation on virtual nodes, killed and resumed."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')
pytest.importorskip("ray", reason='Ray is not installed: pip install "fedbayes[flower]"')

import fedbayes as fb
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.flower import simulation
from fedbayes.runs.folder import run as run_here
from fedbayes.runs.journal import read as journal_of

pytestmark = pytest.mark.flower
RANK = "RAY_worker_niceness"


def test_a_killed_simulation_goes_on_to_what_the_loop_engine_gives(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The own state of virtual nodes lies in the run folder, so that even methods with state go on exactly."""
    monkeypatch.chdir(Path(__file__).parent)
    x = replace(tiny, data="flower_code:site", method="pvi", rounds=20, flower={})
    (tmp_path / "x.toml").write_text(to_toml(x))
    command = [sys.executable, "-m", "fedbayes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [*command, "run", str(tmp_path / "x.toml"), "--engine", "flower", "--output", str(tmp_path / "far")],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 240
    while len(journal_of(tmp_path / "far")) < 2 and time.monotonic() < end and first.poll() is None:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert 2 <= len(journal_of(tmp_path / "far")) < 20
    done = subprocess.run(
        [*command, "resume", str(tmp_path / "far")], env=environment, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stderr.decode()
    far = fb.load(tmp_path / "far")
    near = run_here(replace(x, engine="loop"), tmp_path / "near")["pvi"]
    for field in ("mean", "scale"):
        torch.testing.assert_close(getattr(far.posterior, field), getattr(near.posterior, field), rtol=0, atol=1e-12)
    assert [r["left_out"] for r in far.journal] == [{}] * 20
    assert "report.html" in done.stdout.decode()


def test_a_mistake_is_one_line_here_too(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('flower = { min_client = 2 }\nengine = "flower"\nclients = 2\nrounds = 1\n')
    done = subprocess.run(
        [sys.executable, "-m", "fedbayes", "run", str(tmp_path / "x.toml"), "--output", str(tmp_path / "run")],
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert "did you mean 'min_clients'" in done.stderr.decode().splitlines()[-1]


def test_virtual_nodes_rank_with_other_processes(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ray's own rank of its workers they hardly run beside a busy process; an operator's choice stays."""
    ranks = []
    monkeypatch.setattr(simulation, "_simulated", lambda *_: ranks.append(os.environ[RANK]) or {})
    for chosen in (None, "7"):
        with monkeypatch.context() as here:
            here.delenv(RANK, raising=False)
            if chosen is not None:
                here.setenv(RANK, chosen)
            simulation.simulate(tiny, tmp_path)
    assert ranks == ["0", "7"]
