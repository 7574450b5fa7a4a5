"""Heart disease at four hospitals with private rows, beside FLamby's published curve (Terrail et al., 2022).

Mean accuracy over the hospitals' own test patients, as published, five seeds; logistic regression, as there. Options
are chosen for each epsilon on a fifth of each hospital's training rows that is held out (`inner`), over eight seeds;
that choice is in no account, as theirs was not. Training starts at zero, so that noise is all that it has to outweigh.
Columns are standardised by each hospital's training rows, as FLamby's are, without noise. Needs heart-disease and
flamby-published-dp.csv in the folder named by FEDBAYES_DATA.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measure import Figures
from torch import nn

import fedbayes as fb
from fedbayes.data.natural import heart_disease

DELTA = 1e-4
GRID: dict[str, tuple[float, ...]] = {"lr": (0.1, 0.3, 1.0), "private_clip": (0.3, 1.0), "rounds": (2, 10)}
CHOSEN_BY = 8  # seeds
OWN: dict[str, dict[str, Any]] = {
    "fedavg": {"epochs": 1, "batch": 10_000},
    "feduab": {"epochs": 1, "batch": 10_000, "initial": 0.1, "test_draws": 50, "kl_weight": 1e-3},
}


def published() -> dict[float | None, tuple[float, float]]:
    """FLamby's mean accuracy and its deviation by epsilon at this delta; None: without privacy."""
    path = Path(os.environ["FEDBAYES_DATA"]) / "flamby-published-dp.csv"
    rows = list(csv.DictReader(path.open()))
    found: dict[float | None, tuple[float, float]] = {}
    for row in rows:
        if row["delta"] == "" or float(row["delta"]) == DELTA:
            found[float(row["epsilon"]) if row["epsilon"] else None] = (
                float(row["mean accuracy over centres"]), float(row["std"]))  # fmt: skip
    return found


def network(inputs: int) -> nn.Module:
    """Logistic regression that knows nothing yet."""
    linear = nn.Linear(inputs, 2)
    for weight in linear.parameters():
        nn.init.zeros_(weight)
    return linear


def scores(
    method: str, chosen: dict[str, float], epsilon: float | None, seed: int, inner: int | None
) -> dict[str, float]:
    """Of one run: means over the hospitals, and NLL of all patients."""
    data = heart_disease(inner=inner)
    torch.manual_seed(seed)
    private: dict[str, Any] = {}
    if epsilon is not None:
        private = {"private": "rows", "epsilon": epsilon, "delta": DELTA, "public_test": True,
                   "private_clip": chosen["private_clip"]}  # fmt: skip
    run = fb.fit(
        network(data.x.shape[-1]),
        data.split(fb.partition.natural(), clients=4),
        method=fb.methods.method_named(method, {**OWN[method], "lr": chosen["lr"]}),
        rounds=int(chosen["rounds"]),
        seed=seed,
        evaluate_every=int(chosen["rounds"]),
        **private,
    )
    sites = run.scores(by="site")
    at = sites.names.index("accuracy")
    spent = {} if epsilon is None else {"epsilon": float(run.epsilon or 0)}
    return {"accuracy": float(sites.values[:, at].mean()), "nll": float(run.scores()["nll"]), **spent}


def choose(method: str, epsilon: float | None) -> dict[str, float]:
    """The options with the least NLL on rows that were held out."""
    grid = {name: v if epsilon is not None or name != "private_clip" else v[:1] for name, v in GRID.items()}
    tried = {
        pair: mean(scores(method, dict(zip(grid, pair)), epsilon, seed, 100 + seed)["nll"] for seed in range(CHOSEN_BY))
        for pair in itertools.product(*grid.values())
    }
    return dict(zip(grid, min(tried, key=lambda pair: tried[pair])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/private-hospitals.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--more", type=int, default=40, help="seeds over which the mean accuracy is told beside it")
    parser.add_argument("--method", choices=OWN)
    parser.add_argument("--commit")
    given = parser.parse_args()
    theirs, figures = published(), Figures(given.output, "cpu", given.commit)
    for method, epsilon in itertools.product([given.method] if given.method else OWN, (None, 10.0, 5.0, 1.0, 0.1)):
        chosen = choose(method, epsilon)
        every = [scores(method, chosen, epsilon, seed, None) for seed in range(max(given.seeds, given.more))]
        rows = every[: given.seeds]
        told = {name: mean(row[name] for row in rows) for name in rows[0]}
        spread = stdev(row["accuracy"] for row in rows) if len(rows) > 1 else 0.0
        flamby, deviation = theirs[epsilon]
        privacy = "not private" if epsilon is None else f"epsilon {epsilon:g}"
        figures.add(f"{method}, {privacy}", **told, accuracy_std=spread, flamby=flamby, flamby_std=deviation, **chosen,
                    seeds=given.seeds, accuracy_of_more=mean(row["accuracy"] for row in every), more=len(every),
                    delta=DELTA)  # fmt: skip


if __name__ == "__main__":
    main()
