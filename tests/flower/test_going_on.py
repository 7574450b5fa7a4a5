"""A federation here that goes on by itself: its server and a node are killed, a key is taken away, and given anew."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from machines import Machines, until

import fedbayes as fb
from fedbayes.experiments.experiment import read
from fedbayes.flower.watchdog import TURNED_AWAY
from fedbayes.runs.folder import run as run_here
from fedbayes.runs.journal import read as journal_of

pytestmark = [
    pytest.mark.flower,
    pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are found in /proc"),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("going") / "going", nodes=2)
    try:
        made.superlink()
        for k in range(2):
            made.node(k)
        yield made
    finally:
        made.stop()


def process(machines: Machines, *words: str) -> int:
    """The process of the app's folder whose command has these words, without their folders, below its watchdog."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            command = [word.rpartition("/")[2] for word in (place / "cmdline").read_text().split("\0")]
            here = os.readlink(place / "cwd") == str(machines.folder)
        except OSError:
            continue
        if here and "watch" not in command and all(word in command for word in words):
            return int(place.name)
    raise AssertionError(f"no process of {words}")


def test_a_run_goes_on_when_server_and_node_are_killed(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody starts anything again; the posterior is that of the loop engine, the client's own state included."""
    monkeypatch.syspath_prepend(str(machines.folder))
    machines.experiment(method="pvi", clients=2, rounds=3, flower={"min_clients": 2, "timeout": 600, "wait": 60})
    folder = machines.folder / "runs/on"
    machines.start("driver", "fedbayes", "flower", "train", ".", "--output", "runs/on")
    until("a round is closed", lambda: machines.alive("driver") and len(journal_of(folder)) >= 1)
    os.kill(process(machines, "flower-superlink", "--database"), signal.SIGKILL)
    os.kill(process(machines, "flower-supernode", "node-1"), signal.SIGKILL)
    driver = machines.running.pop("driver")
    assert driver.wait(timeout=1200) == 0, machines.log("driver")
    for name in ("superlink", "node-1"):
        assert "ended with status -9" in machines.log(name)
    far = fb.load(folder)
    near = run_here(replace(read(machines.folder / "experiment.toml"), engine="loop"), machines.folder / "near")["pvi"]
    for field in ("mean", "scale"):
        ours, theirs = (getattr(made.posterior, field) for made in (far, near))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert [record["took_part"] for record in far.journal] == [[0, 1]] * 3
    assert "finished, 3 of 3 rounds" in machines.call("fedbayes", "flower", "status", "runs/on")


def test_a_key_that_is_taken_away_ends_its_node(machines: Machines) -> None:
    machines.call("sh", "rekey.sh", "revoke", "1")
    assert machines.running.pop("node-1").wait(timeout=600) == TURNED_AWAY, machines.log("node-1")[-2000:]
    machines.alive("node-0")


def test_a_client_with_a_new_key_is_back(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gives the client a new key while the server runs; its node takes part again."""
    monkeypatch.syspath_prepend(str(machines.folder))
    before = (machines.folder / "keys/node-1.pub.revoked").read_text()
    said = machines.call("sh", "rekey.sh", "renew", "1")
    assert said.startswith("client 1 has a new key")
    assert (machines.folder / "keys/node-1.pub").read_text().split()[1] != before.split()[1]
    machines.node(1)
    machines.experiment(method="fedavg", clients=2, rounds=1, flower={"min_clients": 2, "timeout": 600, "wait": 200})
    run = fb.load(machines.complete("runs/renewed"))
    assert [record["took_part"] for record in run.journal] == [[0, 1]]
