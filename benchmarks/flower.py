"""What Flower costs a round: the same federation by the loop engine, on Flower's simulation, and on SuperNodes here.

Three clients with 32 rows and one epoch each, so that carrying is what is measured; networks of 42 thousand and one
million weights, a Gaussian each: 8 bytes a weight in each direction and client. Seconds are the median of the rounds
after the first. Writes docs/results/bench-flower.json.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flwr
import torch

import fedbayes
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.federation.program import Order, Program
from fedbayes.flower.simulation import simulate
from fedbayes.flower.start import init
from fedbayes.flower.total import Reply, Total
from fedbayes.flower.wire import Coding, read, write
from fedbayes.runs import journal
from fedbayes.runs.folder import run

RESULT = Path(__file__).parent.parent / "docs/results/bench-flower.json"
SIZES = {"42k": [50, 50], "1M": [1010, 200]}
CLIENTS, ROUNDS, PORT = 3, 4, 9453
MINE = """
import torch
from torch import nn

from fedbayes.data import from_arrays


def network(shape, outputs, hidden):
    widths = [784, *hidden, outputs]
    layers = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def data(client):
    random = torch.Generator().manual_seed(7 if client is None else client)
    x = torch.randn(32, 784, generator=random)
    return from_arrays(x, torch.arange(32) % 10, x, torch.arange(32) % 10, classes=10)
"""


def main() -> None:
    """Measure each size by each road, and write the table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bench"
        init(folder)
        (folder / "bench/mine.py").write_text(MINE)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        table: dict[str, Any] = {
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "versions": {"fedbayes": fedbayes.__version__, "flwr": flwr.__version__, "torch": torch.__version__},
            "clients": CLIENTS,
            "sizes": {},
        }
        for size, hidden in SIZES.items():
            table["sizes"][size] = measure(folder, size, hidden)
            RESULT.write_text(json.dumps(table, indent=1) + "\n")
    print(json.dumps(table, indent=1))


def measure(folder: Path, size: str, hidden: list[int]) -> dict[str, Any]:
    x = Experiment(
        data="bench.mine:data",
        network="bench.mine:network",
        network_options={"hidden": hidden},
        clients=CLIENTS,
        rounds=ROUNDS,
        engine="loop",
        options={"epochs": 1, "batch": 32, "test_draws": 1},
        flower={"min_clients": CLIENTS},
    )
    roads: dict[str, Callable[[Path], object]] = {
        "loop": lambda where: run(x, where),
        "simulation": lambda where: simulate(x, where),
        "supernodes": lambda where: deploy(folder, x, where),
    }
    program = build(x).program
    made: dict[str, Any] = {"weights": program.initial["model"].mean.numel(), "server_ms": server(program)}
    for name, train in roads.items():
        where = folder / "runs" / f"{size}-{name}"
        started = time.perf_counter()
        train(where)
        records = journal.read(where)
        seconds = [r["seconds"] for r in records]
        made[name] = {
            "round_seconds": statistics.median(seconds[1:]),
            "load": os.getloadavg()[0],  # processes that wanted the cores; far above them, times are not the road's
            "first_round_seconds": seconds[0],
            "all_seconds": time.perf_counter() - started,
            "bytes_down": records[-1]["bytes_down"],
            "bytes_up": records[-1]["bytes_up"],
        }
        made[name]["ratio"] = made[name]["round_seconds"] / made["loop"]["round_seconds"]
    return made


def server(program: Program) -> dict[str, float]:
    """Milliseconds of the server's work on one upload: to read it, by coding, and to add its term."""
    parts, times = program.initial, {}
    for coding in (Coding("float32"), Coding("float16", True), Coding("bfloat16", True)):
        arrays = write(parts, coding, parts)
        name = f"read {coding.dtype}{', delta' if coding.delta else ''}"
        times[name] = _milliseconds(lambda k, a=arrays, c=coding: read(a, parts, c, parts))
    total = Total(program, Order(0, (), (), parts, program.options(0)), Coding())

    def add(k: int) -> None:
        total.hold(k, Reply(parts, 32, False, False, {}))
        total.add(None)

    return {**times, "add": _milliseconds(add)}


def _milliseconds(f: Callable[[int], object]) -> float:
    laps = []
    for k in range(7):
        started = time.perf_counter()
        f(k)
        laps.append(time.perf_counter() - started)
    return 1000 * statistics.median(laps)


def deploy(folder: Path, x: Experiment, where: Path) -> None:
    """The app on a SuperLink and SuperNodes of this machine, with TLS and node keys, by its own scripts."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_HOME": str(folder / ".flwr"),
        "OMP_NUM_THREADS": "1",
    }
    (folder / "experiment.toml").write_text(to_toml(replace(x, engine="auto")))
    subprocess.run(["sh", "secure.sh", str(CLIENTS), f"127.0.0.1:{PORT}"], check=True, env=environment)
    log = (folder / "log").open("w+b")
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        started.append(
            subprocess.Popen(["sh", *command], env=environment, stdout=log, stderr=log, start_new_session=True)
        )

    try:
        start("superlink.sh", str(PORT))
        while b"registered" not in (folder / "log").read_bytes():
            time.sleep(0.2)
        for k in range(CLIENTS):
            start("supernode.sh", str(k), f"127.0.0.1:{PORT}")
        subprocess.run(["flwr", "run", ".", "bench", "-c", f'output="{where}"'], check=True, env=environment)
        patience = time.monotonic() + 900
        while not (where / "evaluation.npz").is_file():
            if time.monotonic() > patience:
                raise SystemExit(
                    f"the federation did not end within 15 minutes:\n{(folder / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


if __name__ == "__main__":
    main()
