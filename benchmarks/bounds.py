"""What bounded terms and the record of influence cost a round: the same round with and without them, in turns.

`python benchmarks/bounds.py` measures seconds of the processor on a CPU, which other programs do not lengthen, and of
the clock on a GPU (`--device cuda`). `bounded` has a cap of precision and a clip that follows the changes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from measure import SHAPES, Figures, federation, wait

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

BOUNDED = {"cap_precision": 10.0, "clip_quantile": 0.5}
CASES = {
    "FedUAB, MLP, 20 clients of 100 rows, 5 epochs": ("feduab", "mlp", 20, 100, 5),
    "FedUAB, MLP, 20 clients of 100 rows, one epoch": ("feduab", "mlp", 20, 100, 1),
    "FedAvg, MLP, 20 clients of 100 rows, 5 epochs": ("fedavg", "mlp", 20, 100, 5),
    "FedAvg, MLP, 20 clients of 100 rows, one epoch": ("fedavg", "mlp", 20, 100, 1),
}


def seconds_of(case: str, turns: int, device: str, **bounds: Any) -> Iterator[float]:
    """Seconds of one round after another."""
    method, network, clients, rows, epochs = CASES[case]
    task = prepare(
        network_named(network, SHAPES[network], 10, seed=0),
        federation(SHAPES[network], [rows] * clients),
        method=fb.methods.method_named(method, {"epochs": epochs, "batch": 10}),
        rounds=turns,
        device=device,
        engine="stacked",
        compile="off" if device == "cpu" else "auto",
        evaluate_every=turns + 1,
        **bounds,
    )
    clock = time.process_time if device == "cpu" else time.perf_counter
    steps = rounds(task, task.begin(), Memory())
    for _ in range(turns):
        wait(device)
        started = clock()
        next(steps)
        wait(device)
        yield clock() - started


def unseen(*given: Any) -> torch.Tensor:
    """In the place of a client's figures: nothing."""
    return torch.zeros(0, dtype=torch.float64, device=given[1].parts["model"].mean.device)


def measure(case: str, turns: int, device: str) -> dict[str, float]:
    """Rounds in turns, the first of each left out; medians, and their ratios to the round without anything."""
    ways: dict[str, Iterator[float]] = {
        "bare": seconds_of(case, turns, device),
        "seen": seconds_of(case, turns, device),
        "bounded": seconds_of(case, turns, device, **BOUNDED),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        with mock.patch("fedbayes.federation.contributions.figures_of", unseen):
            times["bare"].append(next(ways["bare"]))
        for name in ("seen", "bounded"):
            times[name].append(next(ways[name]))
    middle = {name: median(found[1:] or found) for name, found in times.items()}
    ratios = {f"{name}_ratio": middle[name] / middle["bare"] for name in ("seen", "bounded")}
    return {**{f"{name}_seconds": v for name, v in middle.items()}, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-bounds.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures = Figures(given.output, given.device, given.commit)
    for case in [given.case] if given.case else CASES:
        figures.add(case, **measure(case, given.turns, given.device))


if __name__ == "__main__":
    main()
