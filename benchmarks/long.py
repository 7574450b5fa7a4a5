"""Where the time of a long run goes: 2000 rounds into a folder, by share. `python benchmarks/long.py`, half an hour.

MNIST's setting: 100 clients of 600 rows, 10 of them a round, MLP 784-50-50-10, batch 10; one local epoch, all test rows
every 20 rounds, folder, journal and checkpoints as `fedbayes run` has them. `--data digits` needs no files.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measure import Figures, Others

from fedbayes.engine.clock import profile
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.folder import run

CASES = {"FedAvg": ("fedavg", {}), "FedUAB-1": ("feduab", {"train_draws": 1})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-long.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=1, help="of a client in a round")
    parser.add_argument("--only", choices=CASES)
    arguments = parser.parse_args()
    of_epochs = f" of {arguments.epochs} epochs" if arguments.epochs > 1 else ""
    figures = Figures(arguments.output, arguments.device, keep=arguments.only is not None)
    for what, (method, options) in CASES.items():
        if arguments.only not in (None, what):
            continue
        experiment = Experiment(
            data=arguments.data,
            network="mlp",
            clients=100,
            cohort=10,
            rounds=arguments.rounds,
            evaluate_every=20,
            method=method,
            options={"batch": 10, "epochs": arguments.epochs, **options},
            device=arguments.device,
            precision=arguments.precision,
        )
        with tempfile.TemporaryDirectory() as folder, Others() as others, profile() as shares:
            run(experiment, Path(folder) / "run")
        figures.add(
            f"{what}, {arguments.data}, {arguments.rounds} rounds{of_epochs}",
            seconds=shares.total,
            **{name: seconds / shares.total for name, seconds in shares.seconds.items() if seconds},
            others_busy=others.share,
        )


if __name__ == "__main__":
    main()
