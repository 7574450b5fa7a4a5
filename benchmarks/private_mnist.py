"""Ten thousand private clients of six MNIST digits each: accuracy, NLL and ECE at epsilon 2 and 8, and without privacy.

`python benchmarks/private_mnist.py --choose --device cuda` tries step sizes and clips for each method and epsilon on
10,000 training digits that nobody trains on then; that choice is in no account. Without `--choose` it trains with what
that file says is best there by NLL, over seeds, and scores test digits, which are public. "no noise" is the clip of
epsilon 2 without its noise. Noise and cohorts are the system's: seeds are of networks and training alone. Runs are
processes side by side (`--jobs`). Needs MNIST in the folder named by FEDBAYES_DATA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from measure import Figures
from torch import nn

import fedbayes as fb

ROWS, DELTA = 6, 1e-5
LOCAL = {"epochs": 5, "batch": 6}
# Step sizes and clips that are tried; a clip is in units of the broadcast's scales, of points in those of the weights.
GRID: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "fedavg": ((0.1, 0.3), (0.4, 1.0, 2.5)),
    "feduab": ((0.1, 0.3), (4.0, 12.0, 36.0)),
    "fedivon": ((0.05, 0.2), (4.0, 12.0, 36.0)),
}
OWN: dict[str, dict[str, Any]] = {
    "fedavg": {"weighting": "equal"},
    "feduab": {"weighting": "equal", "initial": 0.05, "division": 1.0},
    "fedivon": {"initial": 0.05, "prior_scale": 0.1},
}
SCORES = ("accuracy", "nll", "ece")
SILENT = 1e-3  # noise that changes nothing
LEVELS: dict[str, dict[str, float]] = {
    "not private": {},
    "no noise": {"noise_multiplier": SILENT},
    "epsilon 8": {"epsilon": 8.0},
    "epsilon 2": {"epsilon": 2.0},
}


class Job(NamedTuple):
    """One run."""

    method: str
    level: str
    lr: float
    clip: float
    seed: int
    clients: int
    cohort: int
    rounds: int
    device: str
    held_out: bool


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def data_of(job: Job) -> fb.data.Dataset:
    """Digits for so many clients; the last sixth of them in the place of the test digits where they are held out."""
    data = fb.data.load("mnist")
    data = replace(data, x=data.x[: ROWS * job.clients], y=data.y[: ROWS * job.clients])
    if not job.held_out:
        return data
    cut = len(data.x) * 5 // 6
    return replace(data, x=data.x[:cut], y=data.y[:cut], test_x=data.x[cut:], test_y=data.y[cut:])


def scores(job: Job) -> dict[str, float]:
    """Of one run, with the seconds that it took."""
    data = data_of(job)
    private: dict[str, Any] = dict(LEVELS[job.level])
    if private:
        private |= {"private": "clients", "delta": DELTA, "private_clip": job.clip, "public_test": True}
    started = time.perf_counter()
    run = fb.fit(
        network(job.seed),
        data.split(fb.partition.iid(), clients=len(data.x) // ROWS, seed=job.seed),
        method=fb.methods.method_named(job.method, {**LOCAL, **OWN[job.method], "lr": job.lr}),
        rounds=job.rounds,
        cohort=job.cohort,
        seed=job.seed,
        device=job.device,
        at_once=max(1, min(700, job.cohort // 2)),
        evaluate_every=job.rounds,
        **private,
    )
    figures = {name: v for name, v in run.scores().items() if name in SCORES}
    if run.task.privacy is not None and job.level != "no noise":
        figures |= {"epsilon": float(run.epsilon or 0), "noise": run.task.privacy.noise}
    return {**figures, "seconds": time.perf_counter() - started}


def done(jobs: list[Job], side_by_side: int) -> Iterator[tuple[Job, dict[str, float]]]:
    """Runs as they end."""
    if side_by_side == 1:
        yield from ((job, scores(job)) for job in jobs)
        return
    with ProcessPoolExecutor(side_by_side, get_context("spawn")) as pool:
        waiting = {pool.submit(scores, job): job for job in jobs}
        for future in as_completed(waiting):
            yield waiting[future], future.result()


def choose(given: argparse.Namespace, methods: list[str]) -> None:
    """Every pair of the grid at each level; without privacy there is no clip."""
    figures = Figures(given.choices, given.device, given.commit, keep=given.keep)
    jobs = []
    for method in methods:
        rates, clips = GRID[method]
        for level in ("epsilon 2", "epsilon 8", "not private"):
            pairs = itertools.product(rates, clips if level != "not private" else (0.0,))
            jobs += [
                Job(method, level, lr, clip, 0, given.clients, given.cohort, given.rounds, given.device, True)
                for lr, clip in pairs
            ]
    for job, found in done(jobs, given.jobs):
        what = f"{job.method}, {job.level}, lr {job.lr:g}, clip {job.clip:g}"
        figures.add(what, **found, lr=job.lr, clip=job.clip, method=job.method, level=job.level)


def chosen(path: Path, method: str, level: str) -> tuple[float, float]:
    """The pair with the least NLL on digits that were held out."""
    wanted = "epsilon 2" if level == "no noise" else level
    rows = [r for r in json.loads(path.read_text())["rows"] if (r["method"], r["level"]) == (method, wanted)]
    best = min((r for r in rows if r["nll"] == r["nll"]), key=lambda r: r["nll"])
    return best["lr"], best["clip"]


def measure(given: argparse.Namespace, methods: list[str]) -> None:
    """The chosen pairs over seeds; a level is written when all its seeds are done."""
    figures = Figures(given.output, given.device, given.commit, keep=given.keep)
    size = (given.clients, given.cohort, given.rounds, given.device, False)
    jobs = [
        Job(method, level, *chosen(given.choices, method, level), seed, *size)
        for method in methods
        for level in LEVELS
        for seed in range(given.seeds)
    ]
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for job, found in done(jobs, given.jobs):
        own = rows.setdefault((job.method, job.level), [])
        own.append(found)
        if len(own) < given.seeds:
            continue
        told = {name: mean(row[name] for row in own) for name in own[0]}
        spread = {f"{n}_std": stdev(row[n] for row in own) for n in SCORES} if given.seeds > 1 else {}
        figures.add(f"{job.method}, {job.level}", **told, **spread, lr=job.lr, clip=job.clip, rounds=given.rounds,
                    cohort=given.cohort, clients=given.clients, seeds=given.seeds)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/results/private-mnist.json"))
    parser.add_argument("--choices", type=Path, default=Path("docs/results/private-mnist-choices.json"))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--method", choices=GRID)
    parser.add_argument("--commit")
    parser.add_argument("--keep", action="store_true", help="keep the rows that the file has")
    given = parser.parse_args()
    methods = [given.method] if given.method else list(GRID)
    (choose if given.choose else measure)(given, methods)


if __name__ == "__main__":
    main()
