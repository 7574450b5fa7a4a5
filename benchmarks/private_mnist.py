"""Ten thousand private clients of six MNIST digits each: accuracy, NLL and ECE at epsilon 2 and 8, and without privacy.

`python benchmarks/private_mnist.py --device cuda` needs MNIST in the folder named by FEDBAYES_DATA. Clip and step size
are chosen at epsilon 8 on 10,000 training digits that nobody trains on then; that choice is in no account. Test digits
are public. Noise and cohorts are the system's, so that seeds are of networks and training alone.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measure import Figures
from torch import nn

import fedbayes as fb

CLIENTS, ROWS, DELTA = 10_000, 6, 1e-5
LOCAL = {"epochs": 5, "batch": 6}
# Step sizes and clips that are tried; a clip is in units of the broadcast's scales, of points in those of the weights.
GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "fedavg": {"lr": (0.05, 0.2), "clip": (0.1, 0.4)},
    "feduab": {"lr": (0.05, 0.2), "clip": (1.0, 4.0)},
    "fedivon": {"lr": (0.02, 0.1), "clip": (1.0, 4.0)},
}
OWN: dict[str, dict[str, Any]] = {
    "fedavg": {"weighting": "equal"},
    "feduab": {"weighting": "equal", "initial": 0.05, "division": 1.0},
    "fedivon": {"initial": 0.05, "prior_scale": 0.1},
}
SCORES = ("accuracy", "nll", "ece")


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def clients_of(data: fb.data.Dataset, seed: int, count: int) -> fb.data.Clients:
    return data.split(fb.partition.iid(), clients=count, seed=seed)


def held_out(data: fb.data.Dataset) -> fb.data.Dataset:
    """The last sixth of the training digits in the place of the test digits."""
    cut = len(data.x) * 5 // 6
    return replace(data, x=data.x[:cut], y=data.y[:cut], test_x=data.x[cut:], test_y=data.y[cut:])


def scores(
    data: fb.data.Dataset, method: str, chosen: dict[str, float], epsilon: float | None, given: Any, seed: int
) -> dict[str, float]:
    """Of one run, with the seconds that it took."""
    private: dict[str, Any] = {}
    if epsilon is not None:
        private = {
            "private": "clients",
            "epsilon": epsilon,
            "delta": DELTA,
            "private_clip": chosen["clip"],
            "public_test": True,
        }
    count = min(given.clients, len(data.x) // (ROWS - 1))
    started = time.perf_counter()
    run = fb.fit(
        network(seed),
        clients_of(data, seed, count),
        method=fb.methods.method_named(method, {**LOCAL, **OWN[method], "lr": chosen["lr"]}),
        rounds=given.rounds,
        cohort=given.cohort,
        seed=seed,
        device=given.device,
        at_once=min(given.at_once, given.cohort // 2),
        evaluate_every=given.rounds,
        **private,
    )
    figures = {name: v for name, v in run.scores().items() if name in SCORES}
    spent = {} if epsilon is None else {"epsilon": float(run.epsilon or 0), "noise": run.task.privacy.noise}  # type: ignore[union-attr]
    return {**figures, **spent, "seconds": time.perf_counter() - started}


def choose(data: fb.data.Dataset, method: str, given: Any) -> dict[str, float]:
    """The pair with the least NLL at epsilon 8 on digits that were held out."""
    tried = {}
    for pair in itertools.product(*GRID[method].values()):
        found = scores(held_out(data), method, dict(zip(GRID[method], pair)), 8.0, given, 0)
        tried[pair] = found["nll"] if found["nll"] == found["nll"] else float("inf")
        print(method, dict(zip(GRID[method], pair)), {n: round(v, 4) for n, v in found.items()}, flush=True)
    return dict(zip(GRID[method], min(tried, key=lambda pair: tried[pair])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/private-mnist.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--cohort", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=700)
    parser.add_argument("--method", choices=GRID)
    parser.add_argument("--commit")
    parser.add_argument("--keep", action="store_true", help="keep the rows that the file has")
    given = parser.parse_args()
    data = fb.data.load("mnist")
    data = (
        data
        if given.clients == CLIENTS
        else replace(data, x=data.x[: ROWS * given.clients], y=data.y[: ROWS * given.clients])
    )
    figures = Figures(given.output, given.device, given.commit, keep=given.keep)
    for method in [given.method] if given.method else GRID:
        chosen = choose(data, method, given)
        for epsilon in (None, 2.0, 8.0):
            rows = [scores(data, method, chosen, epsilon, given, seed) for seed in range(given.seeds)]
            told = {name: mean(row[name] for row in rows) for name in rows[0]}
            spread = {f"{n}_std": stdev(row[n] for row in rows) for n in SCORES} if given.seeds > 1 else {}
            privacy = "not private" if epsilon is None else f"epsilon {epsilon:g}"
            figures.add(f"{method}, {privacy}", **told, **spread, **chosen, rounds=given.rounds, cohort=given.cohort,
                        clients=given.clients, seeds=given.seeds)  # fmt: skip


if __name__ == "__main__":
    main()
