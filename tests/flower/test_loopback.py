"""A SuperLink and SuperNodes with TLS and node keys on this machine: they train, fall over and go on."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from machines import Machines, until

import fedbayes as fb
from fedbayes.posterior import check
from fedbayes.study.experiment import read
from fedbayes.study.run import run as run_here

pytestmark = pytest.mark.flower

# A method, and for how many rounds; a new one joins by a row.
METHODS = {"feduab": 5, "fedavg": 1, "pvi": 1, "bpfed": 1}


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


def far_and_near(machines: Machines, output: str) -> tuple[fb.Run, fb.Run]:
    """The run of a folder, and the same experiment by the loop engine."""
    x = replace(read(machines.folder / "experiment.toml"), engine="loop")
    near = run_here(x, machines.folder / f"{output}-near")[x.method]
    return fb.load(machines.folder / output), near


def same(a: fb.Run, b: fb.Run) -> None:
    for part, q in a.progress.state.broadcast.items():
        assert q.mean.dtype == torch.float64
        for field in ("mean", "scale"):
            if hasattr(q, field):
                other = getattr(b.progress.state.broadcast[part], field)
                torch.testing.assert_close(getattr(q, field), other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_rounds_on_other_machines_are_those_of_the_loop_engine(machines: Machines, method: str) -> None:
    machines.experiment(method=method, rounds=METHODS[method], flower={"min_clients": 3, "timeout": 200})
    records = machines.train(f"runs/{method}").finish()
    assert [r["left_out"] for r in records] == [{}] * METHODS[method]
    far, near = far_and_near(machines, f"runs/{method}")
    same(far, near)
    for ours, theirs in zip(records, near.journal, strict=True):
        assert ours["test"] == pytest.approx(theirs["test"], rel=1e-9)
        if far.task.program.whole:  # else the personal models' messages are counted too
            assert (ours["bytes_down"], ours["bytes_up"]) == (theirs["bytes_down"], theirs["bytes_up"])


def test_a_server_killed_in_a_round_goes_on_from_the_last_that_was_closed(machines: Machines) -> None:
    """Clients that keep state had trained the lost round already; the result is as if nothing had happened."""
    machines.experiment(method="pvi", rounds=3, flower={"min_clients": 3, "timeout": 200})
    first = machines.train("runs/killed")
    first.closed(1)
    held = machines.hold(0, 1, 2)
    until("all clients are in a round", lambda: all(file.with_name("held").exists() for file in held))
    closed = len(first.journal)
    machines.kill("superlink")
    for file in held:
        file.unlink()
    machines.superlink()
    records = machines.train("runs/killed").finish()
    assert closed < 3 == len(records)
    far, near = far_and_near(machines, "runs/killed")
    same(far, near)


def test_nodes_that_die_lie_or_come_late_do_not_stop_the_rounds(machines: Machines, tmp_path: Path) -> None:
    """Node 3 sends NaN, node 1 is killed in a round and started again, node 2 comes after the first round."""
    machines.kill("node-2")
    machines.node(3, more="poison=true")
    machines.experiment(method="pvi", clients=4, rounds=30, flower={"min_clients": 1, "timeout": 100, "wait": 25})
    run = machines.train("runs/faults")
    run.closed(1)
    (held,) = machines.hold(1)
    until("client 1 is in a round", lambda: held.with_name("held").exists())
    number = len(run.journal)  # the round that client 1 will not finish
    machines.kill("node-1")
    held.unlink()
    machines.node(2)
    run.closed(number + 1)
    machines.node(1)

    def back() -> bool:
        last = run.journal[-1]
        return not {"1", "2"} & last["left_out"].keys()

    until("clients 1 and 2 are back", back)
    records = run.journal
    machines.call("flwr", "stop", run.key, machines.folder.name)

    assert all("not finite" in r["left_out"]["3"] for r in records if "3" in r["left_out"])
    assert "3" in records[-1]["left_out"]
    assert records[0]["left_out"]["2"] == "no node was online"
    assert re.search("error|no reply", records[number]["left_out"]["1"])
    assert not any("had lost its own state" in note for r in records for note in r.get("notes", []))
    assert all(r["cohort"] - len(r["left_out"]) >= 1 for r in records)
    check(fb.load(machines.folder / "runs/faults").posterior)


def test_a_node_whose_key_is_not_registered_gets_nothing(machines: Machines) -> None:
    keys = machines.folder / "keys"
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(keys / "node-9")], check=True)
    for kind in ("crt", "key"):
        shutil.copy(keys / f"node-0.{kind}", keys / f"node-9.{kind}")
    machines.node(9)
    code = machines.running.pop("node-9").wait(timeout=120)
    assert code != 0
    assert "node-9" not in machines.call("flwr", "supernode", "list", machines.folder.name)


def test_a_server_without_the_right_certificate_is_not_spoken_to(machines: Machines, tmp_path: Path) -> None:
    """The control connection, too, checks the certificate."""
    other = Machines(tmp_path / "other", nodes=1)  # another authority
    listed = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), "list", "other"],
        env={**other.environment},
        cwd=other.folder,
        capture_output=True,
        timeout=120,
    )
    text = (other.folder / ".flwr/config.toml").read_text()
    (other.folder / ".flwr/config.toml").write_text(text.replace(other.address, machines.address))
    assert listed.returncode != 0
