"""A run killed at any moment and resumed equals the uninterrupted one, own state included."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from run_content import content, same

from fedbayes.experiments.experiment import to_toml
from fedbayes.runs import checkpoint
from fedbayes.runs.folder import resume, run
from fedbayes.runs.own import OwnFiles

HERE = Path(__file__).parents[1] / "shared"
HERE_FIRST = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE_FIRST}


def test_a_run_killed_at_every_step_on_disk_resumes_exactly(tiny, tmp_path):
    # Of four clients three take part: a file is worn after the next round, and compacted beside the third.
    experiment = replace(tiny, clients=4, rounds=3, options={"server": "adam"}, validation=0.2)
    (tmp_path / "x.toml").write_text(to_toml(experiment))
    made = subprocess.run(
        [sys.executable, HERE / "kill_everywhere.py", tmp_path / "x.toml", tmp_path],
        env={**QUIET, "CUDA_VISIBLE_DEVICES": ""},  # it forks, which a process that holds a GPU can't
        capture_output=True,
        text=True,
        check=True,
        timeout=1000,
    )
    outcomes = json.loads(made.stdout)
    assert len(outcomes) > 20
    assert {row["code"] for row in outcomes} == {-signal.SIGKILL}
    assert [row for row in outcomes if not row["equal"] or row["left"]] == [], made.stderr


def test_a_command_killed_from_outside_resumes_exactly_on_the_default_engine(tiny, tmp_path):
    experiment = replace(tiny, rounds=25, evaluate_every=10, checkpoint_every=3, engine="auto")
    run(experiment, tmp_path / "whole")
    (tmp_path / "x.toml").write_text(to_toml(experiment))
    command = [sys.executable, "-m", "fedbayes", "run", tmp_path / "x.toml", "--output", tmp_path / "cut"]
    process = subprocess.Popen(command, env=QUIET, stdout=subprocess.DEVNULL)
    journal = tmp_path / "cut" / "rounds.jsonl"
    while process.poll() is None and not (journal.is_file() and len(journal.read_bytes().splitlines()) > 4):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    resume(tmp_path / "cut")
    assert same(content(tmp_path / "cut"), content(tmp_path / "whole"))


def test_own_files_that_no_checkpoint_needs_are_gone(tiny, tmp_path):
    run(replace(tiny, rounds=12), tmp_path)
    needed = [checkpoint.own_index(path).files for path in checkpoint.paths(tmp_path)]
    held = {int(path.stem.removeprefix("rows-")) for path in (tmp_path / "own").iterdir()}
    assert len(needed) == 2
    assert held == needed[0] | needed[1]


def test_rows_are_compacted_beside_rounds_and_survive_a_kill(tiny, tmp_path, monkeypatch):
    experiment = replace(tiny, clients=12, cohort=4, rounds=14)
    run(experiment, tmp_path / "whole")
    moves = []
    real = OwnFiles.settle
    monkeypatch.setattr(OwnFiles, "settle", lambda self: (moves.append(self._move), real(self))[1])
    run(replace(experiment, rounds=9), tmp_path / "cut")
    assert any(move is not None for move in moves)
    (tmp_path / "cut/config.toml").write_text(to_toml(experiment))
    resume(tmp_path / "cut")
    assert same(content(tmp_path / "cut")["own"], content(tmp_path / "whole")["own"])
