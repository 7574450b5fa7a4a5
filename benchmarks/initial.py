"""Whether uncertainty depends on `initial`, the scale at which training begins: NLL, and AUROC of what is unfamiliar.

`python benchmarks/initial.py` writes docs/results/initial.json. For each method by its default settings and each first
scale: means over seeds of the test NLL and of the AUROC by which epistemic variance tells unfamiliar inputs; then how
far the first scales are apart (largest less smallest mean), and the deviation over seeds. Five clients of 200 digits of
MNIST each against Fashion-MNIST; four hospitals against their own patients with standardised features times three.
Needs MNIST, Fashion-MNIST and heart-disease in the folder named by FEDBAYES_DATA.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import Figures
from torch import Tensor

import fedbayes as fb
from fedbayes.networks.papers import network_named
from fedbayes.scores.ranking import auroc
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, Run
from fedbayes.training.task import Task

METHODS = ("fedvi", "pvi", "bayes_admm", "fedivon", "feduab")
INITIALS = (0.01, 0.1, 1.0)
SEEDS = (0, 1, 2)
ROWS = 1000  # of the test sets of images
Scene = tuple[list[fb.data.Clients], list[int], dict[str, Any], Tensor, Tensor, Tensor]


def mnist() -> Scene:
    """Five clients of 200 rows; unfamiliar are clothes."""
    data, far = fb.data.load("mnist"), fb.data.load("fashion-mnist").test_x[:ROWS]
    clients = [data.split(fb.partition.iid(volume=200), clients=5, seed=seed) for seed in SEEDS]
    return clients, [20], {"batch": 50}, data.test_x[:ROWS], data.test_y[:ROWS], far


def heart() -> Scene:
    """Four hospitals; unfamiliar are patients far from all."""
    data = fb.data.load("heart-disease")
    clients = [data.split(fb.partition.natural(), clients=4, seed=seed) for seed in SEEDS]
    return clients, [16], {"batch": 16}, data.test_x, data.test_y, 3 * data.test_x


SCENES = {"heart-disease": heart, "mnist": mnist}


def trained(tasks: list[Task]) -> list[Run]:
    """All members as one program."""
    owns: list[Any] = [Memory() for _ in tasks]
    records: list[list[dict[str, Any]]] = [[] for _ in tasks]
    for entries in rounds_together(tasks, [task.begin() for task in tasks], owns):
        for member, entry in enumerate(entries):
            assert entry is not None
            records[member].append(entry[1])
        last = [entry[0] for entry in entries if entry is not None]
    return [Run(*member) for member in zip(tasks, last, records, owns)]


def measured(run: Run, near: Tensor, y: Tensor, far: Tensor) -> tuple[float, float, float]:
    """NLL, AUROC of epistemic variance, and the median scale."""
    known, unknown = run.predict(near), run.predict(far)
    nll = -known.probs[torch.arange(len(y)), y.long()].clamp(min=1e-12).log().mean()
    return float(nll), auroc(known.epistemic.sum(-1), unknown.epistemic.sum(-1)), float(run.posterior.scale.median())


def scene_figures(figures: Figures, name: str, methods: list[str], rounds: int) -> None:
    splits, hidden, options, near, y, far = SCENES[name]()
    data = splits[0].data
    for method in methods:
        members = [(initial, seed) for initial in INITIALS for seed in range(len(SEEDS))]
        tasks = [
            prepare(
                network_named("mlp", data.seen_shape, data.classes, seed=seed, hidden=hidden), splits[seed],
                method=fb.methods.method_named(method, {"initial": initial, **options}), rounds=rounds,
                seed=SEEDS[seed], evaluate_every=rounds, engine="stacked",
            )
            for initial, seed in members
        ]  # fmt: skip
        found = torch.tensor([measured(run, near, y, far) for run in trained(tasks)], dtype=torch.float64)
        by = found.reshape(len(INITIALS), len(SEEDS), 3)
        row: dict[str, Any] = {}
        for place, metric in enumerate(("nll", "auroc", "scale")):
            means = by[:, :, place].mean(1)
            row |= {f"{metric}, initial {s}": float(v) for s, v in zip(INITIALS, means)}
            row |= {f"{metric} apart": float(means.max() - means.min())}
            row |= {f"{metric} over seeds": float(by[:, :, place].std(1).mean())}
        figures.add(f"{name}: {method}", **row, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENES, help="one of the two")
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path("docs/results/initial.json"))
    parser.add_argument("--commit", help="of the code, where there is no repository")
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures = Figures(given.output, "cpu", given.commit, keep=True)
    for name in [given.only] if given.only else SCENES:
        scene_figures(figures, name, given.method or list(METHODS), given.rounds)


if __name__ == "__main__":
    main()
