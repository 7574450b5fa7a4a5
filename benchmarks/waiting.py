"""What it brings not to wait: simulated time to a target, a million registered clients, thirty kills.

`python benchmarks/waiting.py` needs MNIST and CIFAR-10 in the folder named by FEDBAYES_DATA. `--only` takes one of
`time`, `population` and `kills`; `--case` one row of the first. Of the devices one in a hundred is fifty times as slow.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import Figures
from torch import nn

import fedbayes as fb
from fedbayes.data.ragged import Ragged
from fedbayes.federation.delays import uniform
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

CLIENTS, COHORT, BUFFER = 100, 20, 10
# Rows and the target of each set. Both were changed after short looks at test accuracy: they were not set blind.
SETS: dict[str, dict[str, Any]] = {
    "mnist": {"rows": 5_000, "hidden": 50, "target": 0.80},
    "cifar10": {"rows": 5_000, "hidden": 50, "target": 0.30},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"lr": 0.05},
    "feduab": {"lr": 0.05},
    "pvi": {"optimiser": "adam", "lr": 0.005, "damping": 0.1},  # the others' steps diverge here
}
MOST = {"synchronous": 80, "buffered": 320}
SEEDS = 3


def seeds_with_one_straggler() -> list[int]:
    """The first seeds by which exactly one client in a hundred is of the slow class."""
    fit = (s for s in range(1000) if sum(uniform(s, k, "speed") >= 0.99 for k in range(CLIENTS)) == 1)
    return [*islice(fit, SEEDS)]


def time_to_target(name: str, method: str, schedule: str, seed: int, device: str) -> dict[str, Any]:
    """Simulated seconds until the accuracy on the test rows is as high, and what it took."""
    given = SETS[name]
    data = fb.data.load(name)
    clients = _first(data, given["rows"]).split(fb.partition.dirichlet(0.5), clients=CLIENTS, seed=0)
    torch.manual_seed(0)
    width = int(np.prod(data.seen_shape))
    network = nn.Sequential(nn.Flatten(), nn.Linear(width, given["hidden"]), nn.ReLU(), nn.Linear(given["hidden"], 10))
    options = {"buffer": BUFFER} if schedule == "buffered" else {}
    run = fb.fit(
        network, clients, method=fb.methods.method_named(method, {"epochs": 2, "batch": 20, **METHODS[method]}),
        rounds=MOST[schedule], cohort=COHORT, seed=seed, device=device, schedule=schedule, schedule_options=options,
        delays="devices", evaluate_every=2, compile="off", target_accuracy=given["target"],
    )  # fmt: skip
    last = run.journal[-1]
    tested = [(r["clock"], r["test"]["accuracy"], r["test"]["nll"]) for r in run.journal if r.get("test")]
    speeds: dict[str, int] = {}
    for record in run.journal:
        for speed, count in record["speeds"].items():
            speeds[speed] = speeds.get(speed, 0) + count
    return {
        "reached": tested[-1][1] >= given["target"],
        "clock": last["clock"],
        "closings": last["round"],
        "contributions": sum(speeds.values()),
        "accuracy": tested[-1][1],
        "nll": tested[-1][2],
        "speeds": speeds,
    }


def _first(data: fb.data.Dataset, rows: int) -> fb.data.Dataset:
    """The first rows of a set, and of its test rows a fifth as many."""
    tests = rows // 5
    return replace(data, x=data.x[:rows], y=data.y[:rows], test_x=data.test_x[:tests], test_y=data.test_y[:tests])


def compare(name: str, method: str, seed: int, device: str) -> dict[str, Any]:
    """Both schedules with one seed. A run that has not reached the target counts with all its time."""
    results = {schedule: time_to_target(name, method, schedule, seed, device) for schedule in MOST}
    ratio = results["buffered"]["clock"] / results["synchronous"]["clock"]
    return {"target": SETS[name]["target"], **results, "ratio": ratio}


def million(clients: int, in_flight: int, closings: int) -> dict[str, float]:
    """Seconds per closing and memory with so many registered clients; in a process of its own."""
    rows = 4
    x = torch.randn(2_000, 784, generator=torch.Generator().manual_seed(0))
    y = (x[:, :10].argmax(1)).long()
    data = fb.data.from_clients([(x, y)], test=(x[:100], y[:100]), kind="classes", classes=10).data
    held = Ragged.of_sizes(np.arange(clients * rows) % len(x), np.full(clients, rows))
    none = Ragged.of_sizes(np.zeros(0, np.int64), np.zeros(clients, np.int64))
    task = prepare(
        nn.Sequential(nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)),
        fb.data.Clients(data, held, none, torch.zeros(0).long()),
        method=fb.methods.feduab(epochs=1, batch=4), rounds=closings, cohort=in_flight, engine="stacked", compile="off",
        schedule="buffered", schedule_options={"buffer": in_flight // 10}, delays="devices", evaluate_every=closings,
    )  # fmt: skip
    taken, sizes = [], []
    started = time.process_time()
    for progress, _ in rounds(task, task.begin(), Memory()):
        taken.append(time.process_time() - started)
        sizes.append(len(progress.state.flight.seats))
        started = time.process_time()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is held, not what the allocator keeps for later
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return {"seconds": median(taken[closings // 4 :]), "resident": pages, "in_flight": max(sizes)}


def population(closings: int, turns: int) -> dict[str, Any]:
    """10^4 and 10^6 clients in turns, each in a process of its own; the least of each, for others use the machine."""
    found: dict[int, list[dict[str, float]]] = {10_000: [], 1_000_000: []}
    for _ in range(turns):
        for clients, results in found.items():
            command = [sys.executable, __file__, "--million", str(clients), "--closings", str(closings)]
            results.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    least = {n: {key: min(r[key] for r in results) for key in results[0]} for n, results in found.items()}
    small, large = least.values()
    ratios = {f"{key}_ratio": large[key] / small[key] for key in ("seconds", "resident")}
    return {**{f"of {n:,}": row for n, row in least.items()}, **ratios, "in_flight": 1000, "buffer": 100}


KILLED = """
data = "digits"
partition = "dirichlet"
partition_options = {alpha = 0.5}
clients = 40
cohort = 20
network = "linear"
method = "pvi"
options = {epochs = 1, damping = 0.3}
rounds = 40
evaluate_every = 10
checkpoint_every = 2
schedule = "buffered"
schedule_options = {buffer = 3, timeout = 400.0, max_staleness = 30}
delays = "lognormal"
delay_options = {awake = 0.7, period = 600.0}
dropout = 0.05
"""


def kills(times: int) -> dict[str, Any]:
    """A run killed at random moments and resumed, again and again until it ends, against one that was not."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
    from run_content import content, same

    from fedbayes.experiments.experiment import from_toml
    from fedbayes.runs.folder import run
    from fedbayes.runs.journal import read

    home, chance, experiment = Path(tempfile.mkdtemp()), random.Random(0), from_toml(KILLED)
    run(experiment, home / "whole")
    began = time.monotonic()
    _child(lambda: run(experiment, home / "warm"), float("inf"))
    whole, expected = time.monotonic() - began, content(home / "whole")
    moments: list[int] = []
    runs = equal = 0
    while len(moments) < times:
        cut, before = home / f"cut-{runs}", len(moments)
        while (code := _child(lambda cut=cut: run(experiment, cut), chance.uniform(0.05, 0.8) * whole)) != 0:
            if code != -signal.SIGKILL:
                raise RuntimeError(f"a run ended with {code}")
            moments.append(len(read(cut)) if cut.exists() else 0)
        if len(moments) > before:  # one that was never killed shows nothing
            runs += 1
            equal += same(content(cut), expected)
        shutil.rmtree(cut)
    shutil.rmtree(home)
    return {"kills": len(moments), "runs": runs, "equal": equal, "closings_before_each_kill": moments}


def _child(work: Callable[[], object], seconds: float) -> int:
    """Work in a forked process that is killed after so many seconds; its exit code, or the signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr)
            os._exit(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/waiting.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=("time", "population", "kills"))
    parser.add_argument("--case", help='one row of the times, such as "mnist, pvi, seed 0"')
    parser.add_argument("--closings", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--million", type=int, help="one measurement with so many clients, printed")
    parser.add_argument("--commit")
    given = parser.parse_args()
    if given.million:
        print(json.dumps(million(given.million, 1000, given.closings)))
        return
    figures = Figures(given.output, given.device, given.commit, keep=True)
    if given.only in (None, "kills"):
        figures.add("kills", **kills(given.kills))
    if given.only in (None, "time"):
        for name in SETS:
            for method in METHODS:
                for seed in seeds_with_one_straggler():
                    case = f"{name}, {method}, seed {seed}"
                    if given.case in (None, case):
                        figures.add(f"time to target: {case}", **compare(name, method, seed, given.device))
    if given.only in (None, "population"):
        figures.add("population", **population(given.closings, given.turns))


if __name__ == "__main__":
    main()
