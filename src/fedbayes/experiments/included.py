"""Experiments that come with the library, by name."""

from __future__ import annotations

from pathlib import Path

from fedbayes.errors import unknown
from fedbayes.experiments.experiment import Experiment, read

EXPERIMENTS: dict[str, Experiment] = {
    # Sixty clients with nine digits of three kinds each. Both methods get the same network, optimiser, learning rate
    # and epochs; so few rows and so many local steps are where point estimates grow sure of what they can't know.
    "quickstart": Experiment(
        data="digits",
        network="mlp",
        network_options={"hidden": [100]},
        partition="labels_per_client",
        partition_options={"k": 3, "volume": 9},
        clients=60,
        cohort=10,
        rounds=60,
        methods=("fedavg", "feduab"),
        method="feduab",
        options={
            "optimiser": "adam",
            "lr": 0.01,
            "epochs": 10,
            "batch": 9,
            "feduab": {"kl_weight": 3e-4, "initial": 0.1, "test_draws": 20},
        },
    ),
}


def find(name: str) -> Experiment:
    """An experiment by its name here, or from a TOML file."""
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    if name.endswith(".toml") or Path(name).exists():
        return read(name)
    raise unknown("experiment", name, [*EXPERIMENTS, "a path to a .toml file"])
