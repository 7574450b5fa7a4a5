"""What a newcomer gets: methods by their default settings on digits, 10 and 100 sites with unequal labels, 20 rounds.

`python benchmarks/defaults.py` writes docs/results/defaults.json: test accuracy and NLL, means over three seeds with
their deviation, and the median scale. The network is the library's `mlp`, sites are by Dirichlet(.3). `--held` takes a
fifth of the training rows in place of the test rows: by those, defaults were chosen.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from measure import Figures

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory

METHODS = ("fedavg", "feduab", "pvi", "fedvi", "fedivon", "bayes_admm")
SITES, ROUNDS, SEEDS, ALPHA = (10, 100), 20, (0, 1, 2), 0.3


def digits(held: bool) -> fb.data.Dataset:
    """The set, or its training rows alone with a fifth of them as test rows."""
    data = fb.data.load("digits")
    if not held:
        return data
    rows = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(5))
    test, train = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    return replace(data, x=data.x[train], y=data.y[train], test_x=data.x[test], test_y=data.y[test])


def scores(data: fb.data.Dataset, method: str, sites: int) -> list[list[float]]:
    """Accuracy, NLL and the median scale after the last round, for each seed; they are trained as one program."""
    tasks = [
        prepare(
            network_named("mlp", data.seen_shape, data.classes, seed=seed),
            data.split(fb.partition.dirichlet(ALPHA), clients=sites, seed=seed),
            method=method, rounds=ROUNDS, seed=seed, evaluate_every=ROUNDS, engine="stacked",
        )
        for seed in SEEDS
    ]  # fmt: skip
    for entries in rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks]):
        last = [entry[1] for entry in entries if entry is not None]
    return [[r["test"]["accuracy"], r["test"]["nll"], r.get("scales", {}).get("median", 0.0)] for r in last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--sites", type=int, action="append", choices=SITES)
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--output", type=Path, default=Path("docs/results/defaults.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures, data = Figures(given.output, "cpu", given.commit, keep=True), digits(given.held)
    for sites in given.sites or SITES:
        for method in given.method or METHODS:
            found = torch.tensor(scores(data, method, sites), dtype=torch.float64)
            means, spread = found.mean(0).tolist(), found.std(0).tolist()
            figures.add(
                f"{method}, {sites} sites", accuracy=means[0], accuracy_std=spread[0], nll=means[1], nll_std=spread[1],
                scale=means[2], rounds=ROUNDS, seeds=len(SEEDS),
            )  # fmt: skip


if __name__ == "__main__":
    main()
