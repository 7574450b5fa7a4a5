"""A federation of processes on this machine, started by the scripts of a user's app, and killed when a test says so."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data import load
from fedbayes.experiments import toml
from fedbayes.flower.start import init
from fedbayes.runs.journal import read as journal_of

PATIENCE = float(os.environ.get("PATIENCE", "1500"))  # seconds; much more than anything takes on an idle machine

MINE = '''
"""Digits in float64; each machine has them in a file."""

import numpy as np
from torch import nn

from fedbayes.data import from_arrays


def network(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, outputs)).double()


def data(client):
    digits = np.load("DIGITS")
    x, y, test_x, test_y = (digits[name] for name in ("x", "y", "test_x", "test_y"))
    if client is None:
        return from_arrays(x[:1], y[:1], test_x[:90], test_y[:90], classes=10)
    mine = slice(client, 300, 4)
    return from_arrays(x[mine], y[mine], test_x[mine], test_y[mine], classes=10)
'''

# The app's clients, with two faults that a test can ask for: answers of NaN, and training that lasts until let go.
APP = """
import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, RecordDict
from flwr.clientapp import ClientApp

from fedbayes.flower.answers import LOOKS
from fedbayes.flower.apps import client_app, server_app
from fedbayes.flower.grid import ARRAYS
from fedbayes.flower.node import SECURE

EXPERIMENT = Path(__file__).parent.parent / "experiment.toml"
server = server_app(EXPERIMENT)
inner = client_app(EXPERIMENT)
client = ClientApp()


@client.query()
def query(message, context):
    return inner(message, context)


@client.evaluate()
def evaluate(message, context):
    return inner(message, context)


@client.evaluate("refine")
def refine(message, context):
    return inner(message, context)


for look in LOOKS:
    client.evaluate(look.partition(".")[2])(lambda message, context: inner(message, context))
for letter in SECURE:
    client.train(letter.partition(".")[2])(lambda message, context: inner(message, context))


@client.train()
def train(message, context):
    reply = inner(message, context)
    hold = Path(context.node_config["state"]) / "hold"
    while hold.exists():
        hold.with_name("held").touch()
        time.sleep(0.05)
    if context.node_config.get("poison"):
        arrays = {name: Array(a.numpy() * float("nan")) for name, a in reply.content[ARRAYS].items()}
        reply.content[ARRAYS] = ArrayRecord(arrays)
    return reply
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what: str, fine: Callable[[], Any], *, pause: float = 0.2) -> Any:
    """Wait until something is so; fail with its name where it never is."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := fine():
            return found
        time.sleep(pause)
    raise TimeoutError(f"not within {PATIENCE:g} s: {what}")


class Machines:
    """A SuperLink and SuperNodes by the app's own scripts, each in a process group of its own."""

    def __init__(self, folder: Path, nodes: int, users: tuple[str, str] | None = None) -> None:
        self.folder, self.nodes = folder, nodes
        init(folder)
        digits = load("digits")
        arrays = {name: getattr(digits, name).numpy() for name in ("x", "y", "test_x", "test_y")}
        np.savez(folder / "digits.npz", **arrays)
        (folder / folder.name / "mine.py").write_text(MINE.replace("DIGITS", str(folder / "digits.npz")))
        (folder / folder.name / "app.py").write_text(APP)
        self.port, self.control = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {
            **os.environ,
            "PATH": self.path,
            "FLWR_HOME": str(folder / ".flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "NODE_CONFIG": f'stream="{folder}/stream.csv"',
            **({"KEY_USER": users[0], "APP_USER": users[1]} if users else {"ONE_USER": "yes"}),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.call("sh", "secure.sh", str(nodes), self.address, str(self.control))

    def call(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, (command, done.stdout.decode(), done.stderr.decode())
        return done.stdout.decode()

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a machine at once, as a power cut would."""
        process = self.running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for name in [*self.running]:
            self.kill(name)

    def superlink(self) -> None:
        before = self.log("superlink").count("registered") if "superlink.log" in os.listdir(self.folder) else 0
        self.start("superlink", "sh", "superlink.sh", str(self.port), str(self.control))
        until(
            "the SuperLink listens",
            lambda: self.alive("superlink") and self.log("superlink").count("registered") > before,
        )

    def alive(self, name: str) -> bool:
        assert self.running[name].poll() is None, self.log(name)[-3000:]
        return True

    def node(self, k: int, more: str = "") -> None:
        script = self.folder / "supernode.sh"
        if more:
            script = self.folder / f"supernode-{k}.sh"
            text = (self.folder / "supernode.sh").read_text()
            script.write_text(text.replace("partition-id=$k", f"partition-id=$k {more}"))
        self.start(f"node-{k}", "sh", script.name, str(k), self.address, str(free_port()))

    def hold(self, *nodes: int) -> list[Path]:
        """Let training on nodes last until the files that are returned are gone."""
        files = [self.folder / f"state/node-{k}/hold" for k in nodes]
        for file in files:
            file.with_name("held").unlink(missing_ok=True)
            file.touch()
        return files

    def experiment(self, **table: Any) -> None:
        name = self.folder.name
        base = {"data": f"{name}.mine:data", "network": f"{name}.mine:network", "clients": 3, "seed": 3}
        few = {"test_draws": 2}
        each = {m: few for m in table.get("methods", ()) if m != "fedppd"}  # whose student is a point
        options = {"options": {"epochs": 1, **(each or few), **table.get("options", {})}}
        (self.folder / "experiment.toml").write_text(toml.dumps({**base, **table, **options}))

    def train(self, output: str, more: str = "") -> Run:
        """Start a run by `flwr run`, which exits with 0 where a SuperLink that has just started refuses it."""
        said: dict[str, Any] = {}
        for _ in range(20):
            said = json.loads(
                self.call("flwr", "run", ".", self.folder.name, "-c", f'output="{output}" {more}', "--format", "json")
            )
            if "run-id" in said:
                return Run(self, str(said["run-id"]), self.folder / output)
            time.sleep(3)
        raise AssertionError(said)

    def complete(self, output: str, more: str = "") -> Path:
        """Train to the end. Flower fails a run whose machine stood still for a minute: then it is started again."""
        for _ in range(3):
            if self.train(output, more).finish() == "finished:completed":
                return self.folder / output
        raise AssertionError(self.log("superlink")[-3000:])


class Run:
    """A run on the SuperLink, and its folder."""

    def __init__(self, machines: Machines, key: str, folder: Path) -> None:
        self.machines, self.key, self.folder = machines, key, folder

    @property
    def journal(self) -> list[dict[str, Any]]:
        return journal_of(self.folder)

    def status(self) -> str:
        listed = json.loads(self.machines.call("flwr", "list", self.machines.folder.name, "--format", "json"))
        (row,) = [r for r in listed["runs"] if str(r["run-id"]) == self.key]
        return str(row["status"])

    def closed(self, rounds: int) -> None:
        until(f"round {rounds} is closed", lambda: len(self.journal) >= rounds)

    def finish(self) -> str:
        """Wait for the end, and say which."""
        return until("the run is finished", lambda: (s := self.status()).startswith("finished") and s, pause=4)
