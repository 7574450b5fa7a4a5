"""What a small federation knows of what it does not know: OOD detection, calibration, conformal sets under label skew.

FedAvg beside FedUAB, 100 clients of 50 MNIST digits each, 10 a round, FedUAB's MLP and settings. Needs MNIST,
Fashion-MNIST, KMNIST and EMNIST letters in the folder named by FEDBAYES_DATA; about five minutes a seed on one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedbayes.evaluate import calibration as calibrate
from fedbayes.evaluate.scoring import conformal_scores, evaluate
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.folder import run

SETS = ("fashion-mnist", "kmnist", "emnist-letters", "uniform-noise", "uniform-noise@2000", "train@2000")
SPLITS = 20
ROUNDS = 100
SMALL = {"clients": 100, "cohort": 10, "rounds": ROUNDS}
SCENES: dict[str, dict[str, Any]] = {
    "mnist iid": {"data": "mnist", "partition": "iid", "partition_options": {"volume": 50}, **SMALL},
    "mnist two labels": {
        "data": "mnist",
        "partition": "labels_per_client",
        "partition_options": {"k": 2, "volume": 50},
        **SMALL,
    },
    "digits iid": {"data": "digits", "partition": "iid", "clients": 20, "cohort": 10, "rounds": 30},
}
# pFedPF, table III, FedAvg: LeNet-5, 20 clients of 1500 rows. Another setting, so a landmark and no target.
PUBLISHED = {
    ("fedavg", "msp", "fashion-mnist"): 0.9796,
    ("fedavg", "msp", "emnist-letters"): 0.9058,
    ("fedavg", "msp", "uniform-noise@2000"): 0.0596,
}
Key = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/results/ood-mnist.json"))
    parser.add_argument("--folder", type=Path, default=Path("runs/ood-mnist"), help="where the runs go, to be gone on")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[Key, list[float]] = defaultdict(list)
    for seed in range(arguments.seeds):
        for scene, settings in SCENES.items():
            for key, value in figures(scene, settings, seed, arguments.folder / f"{scene.replace(' ', '-')}-{seed}"):
                found[key].append(value)
        write(arguments.output, found, seed + 1)
        print(f"seed {seed}: {len(found)} figures in {arguments.output}", flush=True)


def figures(scene: str, settings: dict[str, Any], seed: int, folder: Path) -> Iterator[tuple[Key, float]]:
    """All figures of one seed's runs, each under (table, row, column, metric)."""
    experiment = Experiment(
        **settings,
        network="mlp",
        methods=("fedavg", "feduab"),
        method="feduab",
        engine="stacked",
        seed=seed,
        evaluate_every=settings["rounds"],
        checkpoint_every=settings["rounds"],
        options={"feduab": {"train_draws": 1, "test_draws": 20}},
    )
    runs = run(experiment, folder)
    ood = SETS if scene == "mnist iid" else ()
    for method, scores in evaluate(folder, ood=ood, repeats=3).items():
        for name, figure in scores["scores"].items():
            if figure["value"] is not None and name != "count":
                yield ("scores", method, scene, name), figure["value"]
                yield ("Monte Carlo error", method, scene, name), figure["error"]
        for name in ("temperature", "nll_before", "nll_after", "ece_before", "ece_after"):
            yield ("temperature", method, scene, name), scores["temperature"][name]
        for name in ood:
            for score, row in scores["ood"]["tables"][name].items():
                for metric, figure in row.items():
                    yield ("ood", f"{method} {score}", name, metric), figure["value"]
        for key, value in coverage(runs[method]):
            yield ("conformal 90 %", method, f"{scene}, {key[0]}", key[1]), value


def coverage(made: Any) -> Iterator[tuple[tuple[str, str], float]]:
    """Coverage by the pooled threshold, by class, and by each site's own: means over random halves of the test set."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    first = calibrate.held_out(made)
    for split in range(SPLITS):
        held = calibrate.held_out(made, seed=split, p=first.p)
        for way, row in conformal_scores(made, held).items():
            for name in ("coverage", "class_least", "site_tenth", "size", "empty"):
                found[way, name].append(row[name])
        for name, value in alone(made, held).items():
            found["own", name].append(value)
    return iter((key, mean(values)) for key, values in found.items())


def alone(made: Any, held: calibrate.Held) -> dict[str, float]:
    """Every site with a threshold of its own rows alone."""
    hits, sizes = [], []
    for k, rows in enumerate(held.judge_sites):
        if not len(held.sites[k]) or not len(rows):
            continue
        own = calibrate.conformal(made, sites=[k], held=held)
        judge = calibrate.rows_of(held.judge, rows)
        hits.append(float(calibrate.covered(own, judge, held.judge_y[rows]).double().mean()))
        sizes.append(float(own.sets(judge).double().sum(1).mean()))
    tenth = float(torch.tensor(hits).quantile(0.1))
    return {"coverage": mean(hits), "site_tenth": tenth, "size": mean(sizes)}


def write(path: Path, found: dict[Key, list[float]], seeds: int) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    rows = []
    for (table, row, column, metric), values in found.items():
        if table == "Monte Carlo error":
            continue
        scene = next((s for s in SCENES if column.startswith(s)), "mnist iid")
        method, _, score = row.partition(" ")
        error = found.get(("Monte Carlo error", row, column, metric))
        rows.append(
            {
                "table": table,
                "row": row,
                "column": column,
                "metric": metric,
                "ours": round(mean(values), 5),
                "spread": round(stdev(values), 5) if len(values) > 1 else None,
                "monte_carlo_error": error and round(mean(error), 5),
                "published": PUBLISHED.get((method, score, column)) if metric == "auroc" else None,
                "rounds": SCENES[scene]["rounds"],
                "seeds": seeds,
                "test_draws": 20 if method == "feduab" else 1,
                "device": "cpu",
                "commit": commit,
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
