"""What privacy costs a round: the same round with and without it, in turns.

`python benchmarks/private_cost.py` measures seconds of the processor on a CPU, which other programs do not lengthen,
and of the clock on a GPU (`--device cuda`, eagerly or by `--compile graph`). Cohorts are everybody, so that both
train the same clients; epsilon is worked out when a round is evaluated, and none is here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from measure import SHAPES, Figures, federation, wait

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

CLIENTS = {"private": "clients", "noise_multiplier": 1.0}
ROWS = {"private": "rows", "noise_multiplier": 1.0}
CASES: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "clients: FedAvg, MLP, 20 clients of 100 rows, 5 epochs": ("fedavg", CLIENTS, 20, 100, 5),
    "clients: FedUAB, MLP, 20 clients of 100 rows, 5 epochs": ("feduab", CLIENTS, 20, 100, 5),
    "clients: FedAvg, MLP, 20 clients of 100 rows, one epoch": ("fedavg", CLIENTS, 20, 100, 1),
    "clients: FedUAB, MLP, 20 clients of 100 rows, one epoch": ("feduab", CLIENTS, 20, 100, 1),
    "rows: FedAvg, MLP, 4 clients of 500 rows, one epoch": ("fedavg", ROWS, 4, 500, 1),
    "rows: FedUAB, MLP, 4 clients of 500 rows, one epoch": ("feduab", ROWS, 4, 500, 1),
}
BATCH = 32


def seconds_of(case: str, turns: int, device: str, compile: str, **private: Any) -> Iterator[float]:
    """Seconds of one round after another."""
    method, _, clients, rows, epochs = CASES[case]
    task = prepare(
        network_named("mlp", SHAPES["mlp"], 10, seed=0),
        federation(SHAPES["mlp"], [rows] * clients),
        method=fb.methods.method_named(method, {"epochs": epochs, "batch": BATCH, "weighting": "equal"}),
        rounds=turns,
        device=device,
        engine="stacked",
        compile=compile,
        evaluate_every=turns + 1,
        **private,
    )
    clock = time.process_time if device == "cpu" else time.perf_counter
    steps = rounds(task, task.begin(), Memory())
    for _ in range(turns):
        wait(device)
        started = clock()
        next(steps, None)
        wait(device)
        yield clock() - started


def measure(case: str, turns: int, device: str, compile: str) -> dict[str, float]:
    """Rounds in turns, the first of each left out; medians, and their ratio."""
    how = (case, turns, device, compile)
    ways = {"plain": seconds_of(*how), "private": seconds_of(*how, **CASES[case][1])}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns - 1):  # the last is evaluated
        for name, way in ways.items():
            times[name].append(next(way))
    middle = {name: median(found[1:] or found) for name, found in times.items()}
    return {**{f"{name}_seconds": v for name, v in middle.items()}, "ratio": middle["private"] / middle["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-private.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", choices=("off", "graph"), default="off")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--keep", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures = Figures(given.output, given.device, given.commit, keep=given.keep)
    how = {"off": "", "graph": ", as a graph"}[given.compile]
    for case in [given.case] if given.case else CASES:
        figures.add(f"{case}{how}", **measure(case, given.turns, given.device, given.compile))


if __name__ == "__main__":
    main()
