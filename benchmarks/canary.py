"""An attack on private sums: was the canary, a client with pixels that nobody else has, in the training or not?

Pairs of federations on digits, one with the canary and one without, are trained as one tensor program, each with noise
of its own. The attacker knows everything but the noise and whether the canary was there: it looks at how much farther
the weights went in the canary's direction than the others alone would take them. A threshold is chosen on some pairs;
on 1000 others its errors bound epsilon from below (Clopper and Pearson, 95 %). That bound must stay under what the
account claims, and must not where noise is turned off.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Figures
from scipy.stats import beta
from torch import nn

import fedbayes as fb
from fedbayes.federation.accounting import Spent, epsilon_of
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory

OTHERS, ROWS, ROUNDS, CLIP, DELTA = 10, 16, 2, 0.5, 1e-2
UNUSED, LARGE = (0, 32, 39), 20.0  # pixels that are blank in all digits, and what the canary has there
OFF = 1e-9
NOISES = {"noise off": OFF, "noise 2": 2.0, "noise 1": 1.0, "noise 0.5": 0.5}


def federation(seed: int, canary: bool) -> fb.data.Clients:
    """Ten clients of a few digits each, and the canary."""
    split = fb.data.load("digits").split(fb.partition.iid(), clients=OTHERS, seed=seed)
    data = split.data
    pairs = [(data.x[rows].float() / 16, data.y[rows]) for rows in (split.train_rows(k)[:ROWS] for k in range(OTHERS))]
    if canary:
        x = torch.zeros(8, *data.shape)
        # Of both signs, so that every hidden unit passes some of it on.
        x.view(8, -1)[:, list(UNUSED)] = LARGE * torch.tensor([1.0, -1.0]).repeat(4)[:, None]
        pairs.append((x, torch.full((8,), 3)))
    return fb.data.from_clients(pairs, kind="classes", classes=10)


def task_of(seed: int, canary: bool, noise: float) -> Any:
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    method = fb.methods.fedavg(weighting="equal", epochs=2, batch=16, lr=0.1)
    private = {"private": "clients", "noise_multiplier": noise, "private_clip": CLIP}
    task = prepare(network, federation(seed, canary), method=method, rounds=ROUNDS, seed=seed, engine="stacked",
                   compile="off", evaluate_every=ROUNDS + 1, **private)  # fmt: skip
    # Both divide by the same cohort: it is public.
    mechanism = task.program.pooling.private._replace(cohort=OTHERS)
    return replace(task, program=task.program._replace(pooling=task.program.pooling._replace(private=mechanism)))


def direction(task: Any) -> torch.Tensor:
    """Where the canary goes from the first broadcast."""
    order = task.plan(task.begin()).closing._replace(cohort=(OTHERS,))
    v = task.engine.run(task.program, order, lambda k: None).terms["model"]["mean"]
    assert float(v.norm()) > 0.99 * CLIP, "the canary does not go as far as it may"
    return v / v.norm()


def moves(tasks: list[Any], ways: list[torch.Tensor]) -> list[float]:
    """How far each federation goes in its canary's direction."""
    last = [task.begin() for task in tasks]
    first = [progress.state.broadcast["model"].mean for progress in last]
    for entries in rounds_together(tasks, last, [Memory() for _ in tasks]):
        last = [entry[0] for entry in entries if entry is not None]
    ends = [progress.state.broadcast["model"].mean for progress in last]
    return [float((end - start).double() @ v) for v, start, end in zip(ways, first, ends)]


def trials(pairs: int, noise: float, seeds: int) -> np.ndarray:
    """How much farther than the others alone, without noise, each federation went, [2, pairs]: without the canary, and
    with it."""
    worlds = [[task_of(seed, canary, noise) for seed in range(seeds)] for canary in (False, True)]
    ways = [direction(task) for task in worlds[1]]
    alone = np.array(moves([task_of(seed, False, OFF) for seed in range(seeds)], ways))
    times = -(-pairs // seeds)
    found = [np.concatenate([moves(tasks, ways) - alone for _ in range(times)]) for tasks in worlds]
    return np.array(found)[:, :pairs]


def bound(hits: int, misses: int, of: int) -> float:
    """Epsilon is at least log((p - delta) / q): p bounded from below, q from above, 97.5 % each."""
    p = beta.ppf(0.025, hits, of - hits + 1) if hits else 0.0
    q = beta.ppf(0.975, misses + 1, of - misses) if misses < of else 1.0
    return math.log((p - DELTA) / q) if p > DELTA else 0.0


def empirical(out: np.ndarray, inside: np.ndarray, at: float) -> float:
    """The larger of the bounds that both kinds of error give at a threshold."""
    of = len(out)
    above, false = int((inside > at).sum()), int((out > at).sum())
    return max(bound(above, false, of), bound(of - false, of - above, of), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/canary.json"))
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--choosing", type=int, default=200, help="more pairs, by which the threshold is chosen")
    parser.add_argument("--seeds", type=int, default=50, help="networks and splits")
    parser.add_argument("--commit")
    given = parser.parse_args()
    figures = Figures(given.output, "cpu", given.commit)
    for name, noise in NOISES.items():
        out, inside = trials(given.pairs + given.choosing, noise, given.seeds)
        few = slice(given.pairs, None)
        at = max(np.concatenate([out[few], inside[few]]), key=lambda t: empirical(out[few], inside[few], t))
        found = empirical(out[: given.pairs], inside[: given.pairs], float(at))
        claims = {z: epsilon_of((Spent(1.0, z, ROUNDS),), DELTA) for z in NOISES.values() if z != OFF}
        below = (
            {f"claim at noise {z:g}": claim for z, claim in claims.items()}
            if noise == OFF
            else {"claim": claims[noise]}
        )
        spread = float((inside.mean() - out.mean()) / out.std()) if noise != OFF else 0.0
        figures.add(name, found=found, **below, separation=spread, pairs=given.pairs, delta=DELTA, rounds=ROUNDS)


if __name__ == "__main__":
    main()
