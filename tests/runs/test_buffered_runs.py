"""Runs that do not wait, in folders: the clock in journal and table, and what is on its way in checkpoints."""

import csv
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_content import content, same

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import to_toml
from fedbayes.report import write_report
from fedbayes.runs import journal
from fedbayes.runs.folder import load, resume, run

HERE = Path(__file__).parents[1] / "shared"
PLACES = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PLACES, "CUDA_VISIBLE_DEVICES": ""}
LATE = {
    "schedule": "buffered",
    "schedule_options": {"buffer": 2, "timeout": 300.0, "max_staleness": 20},
    "delays": "lognormal",
    "delay_options": {"spread": 1.5, "awake": 0.6, "period": 200.0},
    "dropout": 0.1,
}


@pytest.mark.parametrize("method", ["pvi", "feduab"])
def test_a_run_that_goes_on_has_what_was_on_its_way(tiny, tmp_path, method):
    options = {"epochs": 1, "test_draws": 2}
    experiment = replace(tiny, method=method, clients=12, cohort=6, rounds=10, options=options, **LATE)
    run(experiment, tmp_path / "whole")
    for end in (3, 6):
        run(replace(experiment, rounds=end), tmp_path / "cut")
        flight = content(tmp_path / "cut")["checkpoint"]["flight"]
        assert len(flight["seats"]["client"]) >= 3
        assert flight["sent"]
        (tmp_path / "cut/config.toml").write_text(to_toml(experiment))
        if end == 3:
            (tmp_path / "cut/config.toml").write_text(to_toml(replace(experiment, rounds=6)))
    resume(tmp_path / "cut")
    assert same(content(tmp_path / "cut"), content(tmp_path / "whole"))
    assert load(tmp_path / "cut").progress.state.flight.clock > 0


def test_the_clock_is_in_the_journal_and_in_the_table(tiny, tmp_path):
    run(replace(tiny, clients=12, cohort=6, rounds=6, **LATE), tmp_path)
    records = journal.read(tmp_path)
    clocks = [record["clock"] for record in records]
    assert clocks == sorted(clocks)
    assert clocks[0] > 0
    assert all(sum(record["speeds"].values()) == record["cohort"] == 2 for record in records)
    assert max(record["staleness"]["most"] for record in records) > 0
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert [float(row["clock"]) for row in rows] == clocks
    assert all(row["staleness.mean"] for row in rows)


def test_a_synchronous_run_has_a_clock_where_clients_take_time(tiny, tmp_path):
    run(replace(tiny, clients=12, cohort=6, rounds=2, delays="constant", delay_options={"jitter": 0.0}), tmp_path)
    assert [record["clock"] for record in journal.read(tmp_path)] == [11.0, 22.0]


def test_a_buffered_run_killed_at_steps_on_disk_resumes_exactly(tiny, tmp_path):
    """At every third: test_kill_and_resume.py has each of them, of a run that waits."""
    experiment = replace(tiny, clients=8, cohort=4, rounds=2, evaluate_every=2, **LATE)
    (tmp_path / "x.toml").write_text(to_toml(experiment))
    made = subprocess.run(
        [sys.executable, HERE / "kill_everywhere.py", tmp_path / "x.toml", tmp_path, "3"],
        env=QUIET,
        capture_output=True,
        text=True,
        check=True,
        timeout=1000,
    )
    outcomes = json.loads(made.stdout)
    assert len(outcomes) > 4
    assert {row["code"] for row in outcomes} == {-signal.SIGKILL}
    assert [row for row in outcomes if not row["equal"] or row["left"]] == [], made.stderr


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"schedule": "bufered"}, "buffered"),
        ({"schedule_options": {"buffer": 2}}, "schedule_options: they are of a schedule that does not wait"),
        ({"schedule": "buffered", "schedule_options": {"bufer": 2}}, "buffer"),
        ({"schedule": "buffered", "schedule_options": {"buffer": 9}}, "9 answers can't close a round of 3 clients"),
        ({"schedule": "buffered", "schedule_options": {"staleness": "linear"}}, "staleness"),
        ({"schedule": "buffered", "method": "pvi", "schedule_options": {"staleness": "sqrt"}}, "keep a factor"),
        ({"delay_options": {"compute": 2.0}}, "there are no delays"),
        ({"delays": "lognormal", "delay_options": {"tail": 2.5}}, 'tail is of delays = "pareto", not of "lognormal"'),
        ({"delays": "lognormal", "delay_options": {"compute": -1.0}}, "compute must be not negative"),
        ({"delays": "devices", "delay_options": {"devices": [[0.5]]}}, "share, factor"),
        ({"delays": "gamma"}, "delays"),
    ],
)
def test_what_does_not_fit_is_one_line(tiny, tmp_path, wrong, words):
    with pytest.raises(InputError, match=words):
        run(replace(tiny, **wrong), tmp_path)


def test_the_report_shows_time_and_contributions_by_speed(tiny, tmp_path):
    spread = {"delays": "devices", "delay_options": {"devices": [[0.5, 1.0], [0.5, 30.0]]}}
    run(replace(tiny, clients=12, cohort=6, rounds=6, **{**LATE, **spread}), tmp_path)
    (first, *_) = journal.read(tmp_path)
    assert first["registered"].keys() == {"usual", "very slow"}
    page = write_report(tmp_path).read_text()
    section = page[page.index('<section id="waiting">') :]
    assert all(words in section for words in ("Staleness", "Contributions by speed", "very slow", "minutes"))
    assert "nan" not in section[: section.index("</section>")]
