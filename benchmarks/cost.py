"""What FedUAB costs beside FedAvg (its table 1): seconds a round, memory of the process, bytes of a message.

`python benchmarks/cost.py` runs each method in a process of its own, in turns, on the stacked engine.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from measure import Figures, federation

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedUAB-1": ("feduab", {"draws": 1}),
    "FedUAB-2": ("feduab", {"draws": 2}),
    "FedUAB-5": ("feduab", {"draws": 5}),
}


def measure(name: str, rounds: int) -> dict[str, float]:
    """One method: the best round, the largest memory, bytes up and down for a client."""
    from torch import nn

    from fedbayes.methods import method_named
    from fedbayes.training.prepare import prepare
    from fedbayes.training.rounds import rounds as train
    from fedbayes.training.run import Memory

    method, options = METHODS[name]
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10)
    )
    task = prepare(
        network,
        federation((1, 28, 28), [100] * 10),
        method=method_named(method, {"epochs": 1, **options}),
        rounds=rounds,
        compile="off",
        evaluate_every=rounds,
    )
    seconds: list[float] = []
    record: dict[str, Any] = {}
    started = time.perf_counter()
    for _, made in train(task, task.begin(), Memory()):
        seconds.append(time.perf_counter() - started)
        started, record = time.perf_counter(), made
    return {
        "seconds": min(seconds[1:]),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "bytes_up": record["bytes_up"] / 10,
        "bytes_down": record["bytes_down"] / 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-cost.json"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", choices=METHODS)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.rounds)))
        return
    figures = Figures(arguments.output, "cpu", arguments.commit)
    found: dict[str, dict[str, float]] = {}
    for name in METHODS:
        command = [sys.executable, __file__, "--only", name, "--rounds", str(arguments.rounds)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        ratios = {f"{key}_ratio": v / found["FedAvg"][key] for key, v in found[name].items()}
        figures.add(f"{name}, 10 clients of 100 rows, one epoch", **found[name], **ratios)


if __name__ == "__main__":
    main()
