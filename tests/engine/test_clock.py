"""Shares of the time: they add up to the wall clock, and nothing is measured unasked."""

import json
import threading
import time
from contextlib import suppress

import pytest
from torch import nn
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.engine import clock


@pytest.fixture
def hands(monkeypatch):
    """A clock that is turned by hand."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def turn(seconds):
        now[0] += seconds

    return turn


def test_a_share_within_another_is_taken_out_of_it_and_all_add_up(hands):
    with fb.profile() as shares:
        hands(1)
        with clock.share(clock.STEPS):
            hands(10)
            with clock.share(clock.COMPILE):
                hands(100)
            hands(20)
        with clock.share(clock.PERSONAL), clock.share(clock.SUM):
            hands(1000)
        hands(2)
    hands(10_000)
    assert shares.seconds[clock.OTHER] == 3
    assert shares.seconds[clock.STEPS] == 30
    assert shares.seconds[clock.COMPILE] == 100
    assert shares.seconds[clock.PERSONAL] == 1000  # its own training is its own
    assert shares.total == 1133
    assert "88.3%" in str(shares)


def test_an_error_leaves_its_share(hands):
    with fb.profile() as shares:
        with suppress(KeyError), clock.share(clock.FILES):
            hands(1)
            raise KeyError
        hands(5)
    assert shares.seconds[clock.FILES] == 1
    assert shares.seconds[clock.OTHER] == 5


def test_other_threads_and_what_follows_are_not_measured(hands):
    def aside():
        with clock.share(clock.SUM):
            hands(1)

    with fb.profile() as shares, clock.share(clock.STEPS):
        thread = threading.Thread(target=aside)
        thread.start()
        thread.join()
    with clock.share(clock.SUM):
        hands(1)
    assert shares.seconds[clock.SUM] == 0
    assert shares.seconds[clock.STEPS] == 1


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_run_in_memory_has_all_its_shares_and_the_same_result(engine):
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=4, seed=0)
    network, method = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), fb.methods.feduab(epochs=1, batch=100)

    def fit():
        return fb.fit(network, clients, method=method, rounds=1, cohort=2, engine=engine, personal_every=1)

    with fb.profile() as shares:
        run = fit()
    named = (clock.START, clock.STEPS, clock.SUM, clock.EVALUATION, clock.PERSONAL)
    assert all(shares.seconds[name] > 0 for name in named)
    assert shares.seconds[clock.COMPILE] == 0
    plain = fit()
    assert run.posterior.mean.equal(plain.posterior.mean)
    assert [r["test"] for r in run.journal] == [r["test"] for r in plain.journal]


def test_the_command_line_shows_the_shares_and_writes_them(tmp_path):
    words = ["run", "quickstart", "--profile", "--output", str(tmp_path / "run")]
    words += ["--set", "rounds=1", "--set", "cohort=2", "--set", "methods=[]", "--set", "method=fedavg"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    seconds = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in clock.MEANING))
    assert min(seconds[name] for name in ("start", "steps", "evaluation", "files")) > 0
    assert "share of the time" in done.output
