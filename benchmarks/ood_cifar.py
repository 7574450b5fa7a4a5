"""How sure FedUAB's CIFAR-10 model is of images from elsewhere: AUROC of each kind of uncertainty, and a gallery.

`fedbayes table feduab-6 --only CIFAR-10,FedUAB-1,All-IID --rounds 400 --keep --device cuda` keeps the posterior that it
reads; needs CIFAR-10, SVHN and CIFAR-100 in the folder named by FEDBAYES_DATA. A minute on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from measure import commit
from torch import Tensor

from fedbayes.data import load as load_data
from fedbayes.experiments.build import build
from fedbayes.model.predictive import Predictive
from fedbayes.papers.feduab import experiment_of
from fedbayes.posterior.values import load
from fedbayes.scores.ranking import auroc
from fedbayes.training.tested import predict_with

MOST, DRAWS, SHOWN = 2000, 20, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("posterior", type=Path)
    parser.add_argument("--output", type=Path, default=Path("docs/results/ood-cifar.json"))
    given = parser.parse_args()
    task, parts = build(experiment_of("CIFAR-10", "FedUAB-1", "All-IID")), load(given.posterior)
    data = task.clients.data
    places = {"CIFAR-10 test": data.test_x, "SVHN": load_data("svhn").test_x, "CIFAR-100": load_data("cifar100").test_x}
    kinds: dict[str, dict[str, Tensor]] = {}
    for name, x in places.items():
        places[name] = x[torch.linspace(0, len(x) - 1, min(MOST, len(x))).long()]
        kinds[name] = uncertainties(predict_with(task, parts, places[name], draws=DRAWS))
    inside = kinds["CIFAR-10 test"]
    tables = {
        name: {
            kind: {"auroc": auroc(inside[kind], u), "mean against CIFAR-10's": float(u.mean() / inside[kind].mean())}
            for kind, u in found.items()
        }
        for name, found in kinds.items()
        if found is not inside
    }
    about = {"draws": DRAWS, "images": {name: len(x) for name, x in places.items()}, "commit": commit()}
    given.output.write_text(json.dumps({**about, "elsewhere": tables}, indent=1) + "\n")
    print(json.dumps(tables, indent=1))
    gallery(places, {name: found["epistemic"] for name, found in kinds.items()}, given.output.with_suffix(".png"))


def uncertainties(p: Predictive) -> dict[str, Tensor]:
    return {
        "epistemic": p.epistemic.sum(-1),
        "mutual information": p.mutual_information,
        "aleatoric": p.aleatoric.sum(-1),
        "entropy": p.entropy,
    }


def gallery(places: dict[str, Tensor], epistemic: dict[str, Tensor], path: Path) -> None:
    """Of each set the images of least and of most epistemic uncertainty, which is written above them."""
    figure, axes = plt.subplots(2 * len(places), SHOWN, figsize=(1.15 * SHOWN, 2.75 * len(places)), dpi=120)
    for block, (name, x) in enumerate(places.items()):
        order = epistemic[name].argsort()
        for row, (word, chosen) in enumerate((("least", order[:SHOWN]), ("most", order.flip(0)[:SHOWN]))):
            for axis, k in zip(axes[2 * block + row], chosen.tolist()):
                axis.imshow(x[k].permute(1, 2, 0))
                axis.set_title(f"{float(epistemic[name][k]):.2g}", fontsize=8, pad=2)
                axis.set_xticks([])
                axis.set_yticks([])
            axes[2 * block + row][0].set_ylabel(f"{name}\n{word}", fontsize=8)
    figure.tight_layout(pad=0.4)
    figure.savefig(path)


if __name__ == "__main__":
    main()
