"""A SuperLink and SuperNodes with TLS and node keys on this machine: they train, fall over and go on."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from machines import Machines, until

import fedbayes as fb
from fedbayes.experiments.experiment import read
from fedbayes.flower.federated import carried
from fedbayes.flower.jobs import calibrate
from fedbayes.flower.watchdog import TURNED_AWAY
from fedbayes.posterior.values import check
from fedbayes.runs import calibrated, watched
from fedbayes.runs.folder import run as run_here

pytestmark = pytest.mark.flower

METHODS = ("fedavg", "pvi", "bpfed", "fedppd")  # one round each; another joins by its name


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("machines") / "loop", nodes=4)
    try:
        made.superlink()
        for k in range(3):
            made.node(k)
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def _app_code(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(machines.folder))


def near(machines: Machines, output: str) -> dict[str, fb.Run]:
    """The experiment of the app by the loop engine."""
    x = replace(read(machines.folder / "experiment.toml"), engine="loop")
    return run_here(x, machines.folder / f"{output}-near")


def same(folder: Path, b: fb.Run) -> None:
    """The run of a folder is b: posterior, scores, and bytes where nothing but rounds was sent."""
    a = fb.load(folder)
    for part, q in a.progress.state.broadcast.items():
        assert q.mean.dtype == torch.float64
        for field in ("mean", "scale"):
            if hasattr(q, field):
                other = getattr(b.progress.state.broadcast[part], field)
                torch.testing.assert_close(getattr(q, field), other, rtol=1e-9, atol=1e-9)
    for ours, theirs in zip(a.journal, b.journal, strict=True):
        assert ours["left_out"] == {}
        if theirs["test"]:  # without a global model nodes score their own test rows, which here the server's stand for
            assert ours["test"] == pytest.approx(theirs["test"], rel=1e-9)
        if a.task.program.prediction.whole:
            assert (ours["bytes_down"], ours["bytes_up"]) == (theirs["bytes_down"], theirs["bytes_up"])


def test_five_rounds_of_feduab_are_those_of_the_loop_engine(machines: Machines) -> None:
    machines.experiment(method="feduab", rounds=5, flower={"min_clients": 3, "timeout": 600})
    folder = machines.complete("runs/feduab")
    same(folder, near(machines, "runs/feduab")["feduab"])


def test_nodes_calibrate_and_watch_what_was_trained(machines: Machines) -> None:
    """The jobs of a node in a process of its own are those of one in this process."""
    machines.experiment(method="feduab", rounds=1, flower={"min_clients": 3, "timeout": 600})
    folder = machines.complete("runs/looked-at")
    x = read(machines.folder / "experiment.toml")
    alike = shutil.copytree(folder, machines.folder / "looked-at-near", ignore=shutil.ignore_patterns("places*"))
    for way in ("label_shift", "quantiles"):
        machines.complete("runs/looked-at", f'job="calibrate" job-options="way={way} coverage=0.8"')
        there = calibrated.read(folder)
        here = calibrate(x, alike, InProcess(carried(x)), way=way, coverage=0.8)
        assert (there.way, there.sites, there.rows) == (way, ("0", "1", "2"), here.rows)
        torch.testing.assert_close(there.thresholds, here.thresholds)
        assert there.judged["hits"].tolist() == here.judged["hits"].tolist()
    machines.complete("runs/looked-at", 'job="calibrate" job-options="epsilon=8 coverage=0.5"')
    assert "epsilon 8 for every row; sites keep their thresholds" in calibrated.read(folder).source

    digits = np.load(machines.folder / "digits.npz")
    rows = np.concatenate([digits["test_x"][:60].reshape(60, -1), 16 - digits["test_x"][:60].reshape(60, -1)])
    for seen in (60, 120):  # a stream that has grown since the last look, in new processes
        np.savetxt(machines.folder / "stream.csv", rows[:seen], delimiter=",")
        machines.complete("runs/looked-at", 'job="watch"')
        states = watched.states_in(folder)
        assert [(s.site, s.rows) for s in states] == [(k, seen) for k in "012"]


def test_private_rounds_under_masks_tell_of_nobody_and_are_accounted_for(machines: Machines) -> None:
    pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
    private = {"private": "clients", "noise_multiplier": 2.0, "private_clip": 0.5, "delta": 1e-5}
    wait = {"min_clients": 3, "timeout": 600}
    for name, secure in (("clear", False), ("masked", True)):
        machines.experiment(
            method="fedavg", rounds=2, options={"weighting": "equal"}, flower={**wait, "secure": secure}, **private
        )
        made = fb.load(machines.complete(f"runs/private-{name}"))
        check(made.posterior)
        assert made.epsilon == pytest.approx(near(machines, f"runs/private-{name}")["fedavg"].epsilon)
        assert len({record["release"] for record in made.journal}) == 2
        for record in made.journal:
            assert not {"took_part", "client_seconds", "influence"} & {*record}
            assert record["left_out"] == {} == record["train"]


def test_a_round_of_each_method_is_that_of_the_loop_engine(machines: Machines) -> None:
    machines.experiment(methods=METHODS, rounds=1, flower={"min_clients": 3, "timeout": 600})
    folder = machines.complete("runs/methods")
    for method, there in near(machines, "runs/methods").items():
        same(folder / method, there)


def test_a_server_killed_in_a_round_goes_on_from_the_last_that_was_closed(machines: Machines) -> None:
    """Clients that keep state had trained the lost round already; the result is as if nothing had happened."""
    machines.experiment(method="pvi", rounds=2, flower={"min_clients": 3, "timeout": 600})
    run = machines.train("runs/killed")
    run.closed(1)
    held = machines.hold(0, 1, 2)
    until("all clients are in the second round", lambda: all(file.with_name("held").exists() for file in held))
    machines.kill("superlink")
    for file in held:
        file.unlink()
    assert len(run.journal) == 1
    machines.superlink()
    same(machines.complete("runs/killed"), near(machines, "runs/killed")["pvi"])


def test_nodes_that_die_lie_or_come_late_do_not_stop_the_rounds(machines: Machines) -> None:
    """Node 3 sends NaN, node 1 is killed in a round and started again, node 2 comes after the first round."""
    machines.kill("node-2")
    machines.node(3, more="poison=true")
    machines.experiment(method="pvi", clients=4, rounds=50, flower={"timeout": 100, "wait": 40})
    run = machines.train("runs/faults")
    run.closed(1)
    (held,) = machines.hold(1)
    until("client 1 is in a round", lambda: held.with_name("held").exists())
    number = len(run.journal)  # the round that client 1 will not finish
    machines.kill("node-1")
    held.unlink()
    machines.node(1)  # at once: it is turned away until Flower has noticed that the first one is gone
    machines.node(2)
    run.closed(number + 1)
    until("clients 1 and 2 are back", lambda: not {"1", "2"} & run.journal[-1]["left_out"].keys())
    machines.call("flwr", "stop", run.key, machines.folder.name)

    records = run.journal
    assert re.search("error|no reply", records[number]["left_out"]["1"])
    assert any("not finite" in r["left_out"].get("3", "") for r in records)
    assert all("3" in r["left_out"] for r in records)
    assert "2" in records[0]["left_out"]
    assert not any("had lost its own state" in note for r in records for note in r.get("notes", []))
    made = fb.load(run.folder)
    assert made.progress.state.round >= number + 2
    check(made.posterior)


def test_a_node_whose_key_is_not_registered_gets_nothing(machines: Machines) -> None:
    keys = machines.folder / "keys"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(keys / "node-9")], check=True)
    for kind in ("crt", "key"):
        shutil.copy(keys / f"node-0.{kind}", keys / f"node-9.{kind}")
    machines.environment["PATIENCE"] = "10"  # of its watchdog
    machines.node(9)
    del machines.environment["PATIENCE"]
    assert machines.running.pop("node-9").wait(timeout=240) == TURNED_AWAY
    public = (keys / "node-9.pub").read_text().split()[1]
    assert public not in machines.call("flwr", "supernode", "list", machines.folder.name, "--format", "json")


def test_a_server_of_another_authority_is_not_spoken_to(machines: Machines) -> None:
    folder = machines.folder / "elsewhere"
    folder.mkdir()
    shutil.copy(machines.folder / "secure.sh", folder)
    keys = ["sh", "secure.sh", "1", machines.address, str(machines.control)]
    subprocess.run(keys, cwd=folder, check=True, capture_output=True)
    listed = subprocess.run(
        [shutil.which("flwr", path=machines.path), "list", machines.folder.name],
        cwd=folder,
        env={**machines.environment, "FLWR_HOME": str(folder / ".flwr")},
        capture_output=True,
        timeout=120,
    )
    assert listed.returncode != 0
    machines.call("flwr", "list", machines.folder.name)  # by the right authority it answers
