"""What a round of FedIVON costs against FedAvg's and FedUAB-1's on a CUDA device, in one run.

`python benchmarks/ivon.py` writes docs/results/bench-ivon.json. Random images of MNIST's shape, 100 clients of 600
rows. `--rows 20 --only "10 clients"` tries it in seconds on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from measure import Figures, federation, our_round

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedAvg, Adam": ("fedavg", {"optimiser": "adam", "lr": 0.001}),
    "FedUAB-1": ("feduab", {"draws": 1}),
    "FedIVON": ("fedivon", {"test_draws": 1}),
    "FedIVON, draws of weights": ("fedivon", {"test_draws": 1, "estimator": "weight"}),
    "FedIVON, as published": (
        "fedivon",
        {"test_draws": 1, "estimator": "weight", "beta2": 0.9998, "curvature": "price"},
    ),
    "Bayes-ADMM": ("bayes_admm", {"test_draws": 1, "estimator": "weight"}),
}
SETTINGS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {  # hidden layers, cohort, options
    "784-50-50-10, 10 clients, batch 10": ((50, 50), 10, {"epochs": 5, "batch": 10}),
    "784-200-100-10, 100 clients, batch 64": ((200, 100), 100, {"epochs": 10, "batch": 64}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--rows", type=int, default=600, help="of each client")
    parser.add_argument("--only", default="", help="settings whose names hold this")
    parser.add_argument("--method", action="append", choices=METHODS, help="one or several; all by default")
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-ivon.json"))
    parser.add_argument("--commit", help="of the code, where there is no repository")
    given = parser.parse_args()
    figures = Figures(given.output, given.device, given.commit)
    clients = federation((1, 28, 28), [given.rows] * 100)
    how = "graph" if given.device == "cuda" else "off"
    for setting, (hidden, cohort, options) in SETTINGS.items():
        if given.only not in setting:
            continue
        taken: dict[str, float] = {}
        for name in given.method or METHODS:
            method, own = METHODS[name]
            network = network_named("mlp", (1, 28, 28), 10, hidden=list(hidden))
            task = prepare(
                network, clients, method=fb.methods.method_named(method, {**options, **own}), rounds=given.times + 2,
                cohort=cohort, device=given.device, engine="stacked", compile=how, precision="tf32",
                evaluate_every=10**6,
            )  # fmt: skip
            taken[name], first, notes = our_round(task, given.device, times=given.times)
            ratios = {
                f"against {other}": taken[name] / taken[other] for other in ("FedAvg", "FedUAB-1") if other in taken
            }
            more = {"notes": notes} if notes else {}
            figures.add(f"{name} round, {setting}", seconds=taken[name], first=first, **ratios, **more)


if __name__ == "__main__":
    main()
