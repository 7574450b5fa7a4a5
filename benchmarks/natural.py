"""Natural federations: our figures beside FLamby's, and federated training between local and pooled. Minutes a part.

`python benchmarks/natural.py heart "tcga, pvi, cox" landmine` (needs FEDBAYES_DATA, or downloads; `--device cuda`).
Options were set before any test row was looked at, of survival chosen on training rows; seeds and splits that share a
program are trained as one.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.data import Clients, Dataset, Standardise, load
from fedbayes.data.natural import tcga_brca
from fedbayes.data.ragged import Ragged
from fedbayes.federation.weighting import Weighting
from fedbayes.files import write_atomically
from fedbayes.methods import METHODS, Method
from fedbayes.networks.papers import network_named
from fedbayes.papers.cells import commit, device_name
from fedbayes.runs.evaluation import predictions
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, Run

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "natural.json"
SEEDS = range(5)
DEVICE: dict[str, Any] = {"device": "cpu", "compile": "off"}


def together(
    members: Sequence[tuple[nn.Module, Clients, int]], method: Method, rounds: int, **options: Any
) -> list[Run]:
    """Runs of one method as one program: each member has a network, clients of the same data, and a seed."""
    shared = {**DEVICE, **options}
    tasks = [
        prepare(
            *(net, clients), method=method, rounds=rounds, seed=seed, evaluate_every=rounds, engine="stacked", **shared
        )
        for net, clients, seed in members
    ]
    progress, own = [task.begin() for task in tasks], [Memory() for _ in tasks]
    for entries in rounds_together(tasks, list(progress), own):
        for m, entry in enumerate(entries):
            if entry is not None:
                progress[m] = entry[0]
    return [Run(task, at, [], memory) for task, at, memory in zip(tasks, progress, own)]


def some_rows(clients: Clients, rows: Sequence[Tensor]) -> Clients:
    """Clients of the same data that hold other rows."""
    empty = Ragged.of_sizes(np.zeros(0, np.int64), np.zeros(len(rows), np.int64))
    return replace(clients, train=Ragged.of_lists(list(rows)), test=empty, names=())


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and number of some figures."""
    array = np.array(values, float)
    return {"mean": float(array.mean()), "std": float(array.std()), "runs": len(array)}


# ---- heart disease: FLamby's FedAvg, 100 updates of 4 rows a round by plain SGD, 15 rounds, weights by rows ----

UPDATES, BATCH, ROUNDS = 100, 4, 15


def heart() -> dict[str, Any]:
    """Accuracy by hospital and on the pooled test rows; the latter are scaled by pooled statistics, as in FLamby."""
    sites, pooled = (_one_logit(load("heart-disease", standardise=way)) for way in ("site", "pooled"))
    clients = sites.sites()
    # All hospitals make 100 updates, so rows are repeated; 397 to 400 of them say who it is, for weights by true sizes.
    counts = [UPDATES * BATCH - 3 + k for k in range(len(clients))]
    rows = [own.repeat(-(-n // len(own)))[:n] for own, n in zip(clients.train, counts)]
    sizes = clients.sizes.double()
    weighting = Weighting("by rows", weigh=lambda q, broadcast, n: sizes[(n - counts[0]).long()])
    tests = [(clients.name(k), sites.test_x[own], sites.test_y[own]) for k, own in enumerate(clients.test)]
    tests.append(("pooled", pooled.test_x, pooled.test_y))
    figures: dict[str, Any] = {"updates": UPDATES, "batch": BATCH, "rounds": ROUNDS}
    for lr in (1e-3, 1e-4):
        method = fb.methods.fedavg(lr=lr, epochs=1, batch=BATCH, weighting=weighting)
        members = [
            (network_named("linear", (13,), 1, seed=42 + seed), some_rows(clients, rows), 42 + seed) for seed in SEEDS
        ]
        accuracies: dict[str, list[float]] = {}
        for run in together(members, method, ROUNDS):
            for name, x, y in tests:
                hit = (run.predict(x).cpu().probs > 0.5) == (y > 0.5)
                accuracies.setdefault(name, []).append(float(hit.double().mean()))
        figures[f"lr {lr:g}"] = {name: spread(values) for name, values in accuracies.items()}
    return figures


def _one_logit(data: Dataset) -> Dataset:
    """The classes as one label of 0 or 1, so that logistic regression has one output."""
    labels = {name: getattr(data, name).float()[:, None] for name in ("y", "test_y")}
    return replace(data, kind="labels", classes=1, class_names=(), **labels)


# ---- TCGA-BRCA: linear models of survival, FLamby's split and random ones ----

SURVIVAL = {"lr": 0.05, "epochs": 5, "batch": 16}
SURVIVAL_ROUNDS, SPLITS, INTERVALS = 20, 20, 10
INNER = 5  # times that a fifth of the training rows is held out, to choose by
FLAMBY = "split of FLamby"
TRIED: dict[str, list[dict[str, float]]] = {  # by method: how much weights are held back
    "fedavg": [{"weight_decay": decay} for decay in (0.0, 0.01, 0.03, 0.1)],
    "pvi": [{"prior_scale": width} for width in (1.0, 0.3, 0.1)],
}
CUT: dict[str, tuple[int, ...]] = {"cox": (INTERVALS,), "hazard": (INTERVALS, 30)}  # its intervals, by likelihood


class Held(NamedTuple):
    """A split of the rows of all regions: each region's training rows, and test rows."""

    train: list[Tensor]
    test: Tensor

    def inner(self, seed: int) -> Held:
        """A fifth of each region's training rows in place of the test rows."""
        random = torch.Generator().manual_seed(seed)
        drawn = [own[torch.randperm(len(own), generator=random)] for own in self.train]
        return Held([own[len(own) // 5 :] for own in drawn], torch.cat([own[: len(own) // 5] for own in drawn]))


def tcga(method: str, likelihood: str) -> dict[str, Any]:
    """Concordance, Brier score and calibration of linear models, over 5 seeds of FLamby's split and 20 random splits.

    For FLamby's split, how much weights are held back and into how many intervals time is cut is chosen on its training
    rows, by concordance on a fifth of them, drawn anew several times. Random splits have the first of what is tried.
    """
    official = load("tcga-brca")
    whole = _all_rows(official)
    splits = {FLAMBY: _rows_of_split(whole, official)}
    splits |= {f"split {k}": _rows_of_split(whole, tcga_brca(split=k)) for k in range(SPLITS)}
    tries = {f"{cut} intervals, {options}": (cut, options) for cut in CUT[likelihood] for options in TRIED[method]}
    inner = [(splits[FLAMBY].inner(k), 0) for k in range(INNER)]
    seen: dict[str, float] = {}
    for title, chosen in tries.items():
        scored = _trained(whole, inner, method, likelihood, *chosen)
        seen[title] = float(np.mean([scores["concordance"] for scores in scored]))
        print(title, round(seen[title], 4), flush=True)
    best = max(seen, key=seen.__getitem__)
    figures: dict[str, Any] = {**SURVIVAL, "rounds": SURVIVAL_ROUNDS, "tried on FLamby's training rows": seen}
    first = next(iter(tries))
    for title, chosen, runs in (
        (FLAMBY, best, [(splits[FLAMBY], seed) for seed in SEEDS]),
        ("random splits", first, [(held, k) for k, (name, held) in enumerate(splits.items()) if name != FLAMBY]),
    ):
        scored = _trained(whole, runs, method, likelihood, *tries[chosen])
        figures[title] = {"options": chosen}
        figures[title] |= {score: spread([one[score] for one in scored]) for score in scored[0]}
        print(title, figures[title]["concordance"], flush=True)
    return figures


def _trained(
    whole: Dataset, held: Sequence[tuple[Held, int]], method: str, likelihood: str, cut: int, options: dict[str, float]
) -> list[dict[str, float]]:
    """Scores on the test rows of some splits, each with a seed, all trained as one program."""
    data = replace(whole, times=tcga_brca(intervals=cut).times)
    clients = data.sites()
    made = METHODS[method](**SURVIVAL, **options)
    members = [(network_named("linear", (39,), 1, seed=s), some_rows(clients, one.train), s) for one, s in held]
    runs = together(members, made, SURVIVAL_ROUNDS, likelihood=likelihood)
    return [_survival_scores(run, data.x[one.test], data.y[one.test]) for run, (one, _) in zip(runs, held)]


def _all_rows(data: Dataset) -> Dataset:
    """Training and test rows as one training part, so that all splits are row numbers of the same data."""
    x, y = torch.cat([data.x, data.test_x]), torch.cat([data.y, data.test_y])
    owner = torch.cat([data.owner, data.test_owner])
    empty = {"test_x": x[:0], "test_y": y[:0], "test_owner": None}
    return replace(data, x=x, y=y, owner=owner, prepare=Standardise.of(data.x), **empty)


def _rows_of_split(whole: Dataset, split: Dataset) -> Held:
    """The row numbers of each region's training rows, and of all test rows."""
    places: dict[tuple[float, ...], list[int]] = {}
    for i, row in enumerate(torch.cat([whole.x, whole.y, whole.owner[:, None]], 1).tolist()):
        places.setdefault(tuple(row), []).append(i)

    def numbers(x: Tensor, y: Tensor, owner: Tensor) -> Tensor:
        return torch.tensor([places[tuple(row)].pop() for row in torch.cat([x, y, owner[:, None]], 1).tolist()])

    train, test = numbers(split.x, split.y, split.owner), numbers(split.test_x, split.test_y, split.test_owner)
    return Held([train[split.owner == k] for k in range(split.owners)], test)


def _survival_scores(run: Run, x: Tensor, y: Tensor) -> dict[str, float]:
    p = run.predict(x).cpu()
    times, risk = torch.tensor(p.times), fb.scores.risk_of(p.survival)
    middle = len(p.times) // 2
    return {
        "concordance": fb.scores.concordance(risk, y),
        "concordance_ipcw": fb.scores.concordance_ipcw(risk, y, p.times[-1]),
        "brier": fb.scores.integrated_brier(p.survival, y, times),
        "nll": fb.scores.survival_scores(p.sums(y))["nll"],
        "calibration": fb.scores.survival_calibration(p.survival[:, middle], y, p.times[middle]).error,
    }


# ---- landmine: who tells mines from clutter, field by field ----

FIELD = {"lr": 0.1, "epochs": 2, "batch": 16}
FIELD_ROUNDS = 25


def landmine() -> dict[str, Any]:
    """AUROC by field of federated, local and pooled training of the same network, with as many passes over the rows."""
    data = load("landmine")
    clients = data.sites()
    figures: dict[str, Any] = {**FIELD, "rounds": FIELD_ROUNDS, "hidden": 16}
    methods = {name: METHODS[name](**FIELD) for name in ("fedavg", "pvi", "fedper")}
    areas: dict[str, np.ndarray] = {}
    for name, method in methods.items():
        runs = together([(_small(s), clients, s) for s in SEEDS], method, FIELD_ROUNDS)
        areas[f"federated, {name}"] = np.array([_areas(run) for run in runs])
    runs = together([(_small(s), clients.pooled(), s) for s in SEEDS], methods["fedavg"], FIELD_ROUNDS)
    areas["pooled, fedavg"] = np.array([_areas(run, clients.test) for run in runs])
    alone = [(_small(s), some_rows(clients, [own]), s) for s in SEEDS for own in clients.train]
    runs = together(alone, methods["fedavg"], FIELD_ROUNDS)
    one = [_areas(run, [clients.test[i % len(clients)]])[0] for i, run in enumerate(runs)]
    areas["local, fedavg"] = np.array(one).reshape(len(SEEDS), len(clients))
    for name, values in areas.items():
        figures[name] = {
            "mean over fields": spread(values.mean(1)),
            "worst field": spread(values.min(1)),
            "by field": values.mean(0).round(4).tolist(),
        }
        print(name, figures[name]["mean over fields"], flush=True)
    return figures


def _small(seed: int) -> nn.Module:
    return network_named("mlp", (9,), 2, seed=seed, hidden=[16])


def _areas(run: Run, homes: Any = None) -> list[float]:
    """AUROC of the chance of a mine on the rows of each field, by the global model or the fields' own."""
    p, rows, own = predictions(run)
    assert p is not None
    p, y = p.cpu(), run.task.clients.data.test_y[rows]
    each = [(p.probs[at, 1], y[at]) for at in (own if homes is None else homes)]
    return [fb.scores.auroc(c[y == 0], c[y == 1]) for c, y in each]


# ---- Shakespeare: bits per character ----

PLAY = {"lr": 0.3, "epochs": 1, "batch": 64}
PLAY_ROUNDS, COHORT = 40, 20


def shakespeare() -> dict[str, Any]:
    """Bits per character on the roles' last speeches: a federation of roles, and pooled rows, by as many passes."""
    data = load("shakespeare", length=16, every=4)
    clients = data.sites()
    figures: dict[str, Any] = {**PLAY, "rounds": PLAY_ROUNDS, "cohort": COHORT, "roles": len(clients)}
    share = data.y.bincount(minlength=data.classes).double() / len(data.y)
    figures["bits of the characters' frequencies"] = float(-share[data.test_y].clamp_min(1e-12).log2().mean())
    passes = round(PLAY_ROUNDS * COHORT / len(clients))
    for name, held, rounds, cohort in (
        ("federated, fedavg", clients, PLAY_ROUNDS, COHORT),
        ("pooled, fedavg", clients.pooled(), passes, None),
    ):
        start = time.perf_counter()
        members = [(network_named("next_token", data.shape, data.classes, seed=s), held, s) for s in SEEDS]
        scores = [run.scores() for run in together(members, fb.methods.fedavg(**PLAY), rounds, cohort=cohort)]
        figures[name] = {
            "bits per character": spread([one["nll"] / np.log(2) for one in scores]),
            "accuracy": spread([one["accuracy"] for one in scores]),
            "rounds": rounds,
            "seconds": round(time.perf_counter() - start, 1),
        }
        print(name, figures[name], flush=True)
    return figures


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "heart": heart,
    **{f"tcga, {m}, {likelihood}": partial(tcga, m, likelihood) for likelihood in CUT for m in TRIED},
    "landmine": landmine,
    "shakespeare": shakespeare,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file that figures are added to")
    asked = parser.parse_args()
    DEVICE["device"] = asked.device
    for name in asked.parts:
        start = time.perf_counter()
        figures = PARTS[name]()
        about = {
            "machine": f"{platform.machine()}, {device_name(asked.device)}",
            "date": datetime.now(UTC).date().isoformat(),
            "commit": commit(),
            "seconds": round(time.perf_counter() - start, 1),
        }
        kept = json.loads(asked.output.read_text()) if asked.output.is_file() else {}
        write_atomically(asked.output, json.dumps({**kept, name: {**about, **figures}}, indent=1) + "\n")
        print(name, json.dumps(figures)[:2000], flush=True)


if __name__ == "__main__":
    main()
