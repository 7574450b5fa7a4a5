"""Ratios on this machine's CPU, each measured side by side in one run: `make bench`. Under five minutes on two cores.

FedUAB's settings: MLP 784-50-50-10 on MNIST shapes (600 rows a client) and the CNN on CIFAR shapes, 10 clients a round,
batch 10. The denominator is the plain loop of `eager.py`, run as PyTorch comes and, where that is faster, with the same
CPU settings that the library chooses.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from measure import Figures, eager_round, federation, our_round, task_of

from fedbayes.engine.choice import quick_cpu

CASES = [
    # what, network, method, options, draws of the plain loop, shape, rows a client, settings of ours
    ("FedAvg MLP", "mlp", "fedavg", {}, 0, (1, 28, 28), 600),
    ("FedUAB-1 MLP", "mlp", "feduab", {"train_draws": 1}, 1, (1, 28, 28), 600),
    ("FedAvg CNN", "cnn", "fedavg", {}, 0, (3, 32, 32), 100),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/bench-cpu.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = Figures(arguments.output, "cpu")
    for what, network, method, options, draws, shape, each in CASES:
        clients = federation(shape, 10, each)
        as_it_comes = eager_round(network, draws, clients, "cpu", share=2, epochs=1)
        with quick_cpu():
            tuned = eager_round(network, draws, clients, "cpu", share=2, epochs=1)
        plain = min(as_it_comes, tuned)
        figures.add(f"{what}: plain loop", seconds_an_epoch=plain, as_pytorch_comes=as_it_comes)
        for name, engine, compile in (
            ("loop", "loop", "off"),
            ("auto", "auto", "off"),
            ("auto, compiled", "auto", "on"),
        ):
            task = task_of(network, method, {"epochs": 1, **options}, clients, "cpu", engine=engine, compile=compile)
            best, first, notes = our_round(task, "cpu", times=1 if engine == "loop" else 3)
            ratio = {"ratio": plain / best, "ratio_as_pytorch_comes": as_it_comes / best}
            figures.add(
                f"{what}: {name}", seconds_an_epoch=best, first=first, **ratio, **({"notes": notes} if notes else {})
            )


if __name__ == "__main__":
    main()
