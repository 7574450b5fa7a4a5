"""FedPPD's tables 1 to 4, the supplement's tables 3 and 4, and figures 2 and 3.

FEMNIST's and CIFAR-100's cells are absent: their data is not at hand, so they are no part of a table that is run; the
experiments and the published figures are here all the same (`experiment_of`, `ABSENT`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch

from fedbayes.data import load
from fedbayes.experiments.experiment import Experiment
from fedbayes.papers.cells import Cell, Table
from fedbayes.papers.fedppd_settings import MAIN, ROWS, SCALES, experiment_of
from fedbayes.papers.layout import Layout
from fedbayes.papers.seeds import SEEDS, Cells
from fedbayes.runs.active import Active, area, run_active
from fedbayes.scores.ranking import auroc, misclassification_auroc, resampled
from fedbayes.training.run import Run


def _figures(names: str, text: str) -> dict[str, dict[str, float]]:
    """Lines `method  number ...` as method -> name -> number; a dash is nothing."""
    figures = {}
    for line in text.strip().splitlines():
        method, *numbers = line.split()
        figures[method.replace("_", " ")] = {n: float(v) for n, v in zip(names.split(), numbers) if v != "-"}
    return figures


TABLE_1 = _figures(
    "MNIST FEMNIST CIFAR-10 CIFAR-100",
    """
    FedAvg            97.74 87.40 57.20 47.02
    FedAvg_+_SWAG     97.75 87.45 57.34 47.07
    FedBE             97.82 88.12 60.18 47.52
    FedPPD            97.85 88.81 61.86 53.00
    FedPPD_+_Distill  98.08 88.80 64.62 54.60
    FedPA             96.86 86.47 50.88 42.18
    """,
)
TABLE_2 = _figures(
    "ece mce brier",
    """
    FedAvg            .1688 .2471 .60
    FedAvg_+_SWAG     .1669 .2316 .60
    FedBE             .1926 .2754 .59
    FedPPD            .0431 .0662 .50
    FedPPD_+_Distill  .1083 .1671 .49
    """,
)
TABLE_3_4 = _figures(
    "auroc misclassified",
    """
    FedAvg            .728 .742
    FedAvg_+_SWAG     .728 .743
    FedBE             .728 .753
    FedPPD            .701 .755
    FedPPD_+_Distill  .765 .769
    """,
)
SUPPLEMENT_4 = _figures(
    "CIFAR-10 CIFAR-100",
    """
    FedAvg            73.80 53.38
    FedBE             73.99 53.16
    FedPPD            74.91 63.67
    FedPPD_+_Distill  75.26 63.43
    """,
)
ABSENT = {
    "FEMNIST": "LEAF's file of writers is not at hand",
    "CIFAR-100": "the whole set is not at hand, nor the teacher that ImageNet had trained",
}


def known_and_unknown(run: Run) -> dict[str, float]:
    """AUROC by entropy of SVHN against the test set (five draws of equal numbers), and of errors against hits."""
    data = run.task.clients.data
    p = run.predict(data.test_x)
    entropy, right = p.entropy.cpu(), (p.probs.argmax(-1).cpu() == data.test_y)
    far = run.predict(_svhn()).entropy.cpu()
    areas = resampled(auroc, entropy, far)
    misses = misclassification_auroc(entropy, right)
    return {"auroc": areas.mean, "auroc_spread": areas.spread, "misclassified": misses}


@cache
def _svhn() -> torch.Tensor:
    return load("svhn").test_x


def asked_for_labels(experiment: Experiment, active: Active) -> Callable[[Run], Mapping[str, float]]:
    """Figure 3's curve for an experiment: accuracy after each stage, and the area under it."""

    def measure(run: Run) -> Mapping[str, float]:
        x = replace(experiment, seed=run.task.seed, device=str(run.task.device), rounds=run.task.rounds)
        with tempfile.TemporaryDirectory() as folder:
            stages = run_active(x, active, folder, clients=run.task.clients)
        return {"area": area(stages)} | {f"at_{s['labelled']}": s["scores"]["accuracy"] for s in stages}

    return measure


def _cells(data: str, published: Mapping[str, Mapping[str, float]], *, iid: bool = False) -> list[Cell[Experiment]]:
    measure = known_and_unknown if data == "CIFAR-10" else None
    column = "IID" if iid else "non-IID"
    rows = [row for row in ROWS if not iid or row in SUPPLEMENT_4]
    return [Cell(row, column, experiment_of(data, row, iid=iid), published.get(row, {}), measure, data) for row in rows]


def _accuracies(table: Mapping[str, Mapping[str, float]], data: str) -> dict[str, dict[str, float]]:
    return {row: {"accuracy": figures[data] / 100} for row, figures in table.items() if data in figures}


def _labelling() -> list[Cell[Experiment]]:
    cells = []
    for row in ("FedAvg", "FedBE", "FedPPD", "FedPPD + Distill"):
        whole = experiment_of("CIFAR-10", row)
        # FedBE and +Distill need inputs at the server; all get the same clients.
        options = {**MAIN, "volume": 3600}
        x = replace(whole, partition_options=options, evaluate_every=whole.rounds)
        cells.append(Cell(row, "active", x, {}, asked_for_labels(x, Active("entropy", 400, 400)), "CIFAR-10"))
    return cells


DEPARTURES = (
    "MNIST: rates of .09 (teacher and baselines) and .22 (student, falling like the teacher's) in place of .045 and"
    " .055, chosen on training rows that nobody holds, after some had been tried on test rows; pixels in [0, 1], where"
    " the authors' code standardises them",
    "FedPPD is as the authors' code has it (temperature 4 / n, epochs in turn, the last draw sent), not as the"
    " algorithm is printed, which is the row at T = 1",
    "a client's few rows of other classes, crops and flips, and the schedules of rates are from the authors' code",
    "a server's rates are the printed ones over the number of classes: its loss is their sum here, their mean there",
    "CIFAR-10: products in TF32",
)


def _table(title: str, cells: Cells, metrics: Mapping[str, str]) -> Table[Experiment]:
    layout = Layout(departures=DEPARTURES)
    return Table(f"FedPPD, {title}", cells, metrics, SCALES, "fedppd", SEEDS, layout=layout)


def _cifar(title: str, published: Mapping[str, Mapping[str, float]], metrics: Mapping[str, str]) -> Table[Experiment]:
    """A table of CIFAR-10; they share their cells."""
    return _table(title, lambda: _cells("CIFAR-10", published), metrics)


def _accuracy_cells() -> list[Cell[Experiment]]:
    return [cell for data in ("MNIST", "CIFAR-10") for cell in _cells(data, _accuracies(TABLE_1, data))]


def _iid_cells() -> list[Cell[Experiment]]:
    return _cells("CIFAR-10", _accuracies(SUPPLEMENT_4, "CIFAR-10"), iid=True)


WITHOUT = f"{' and '.join(ABSENT)} absent"
GLOBAL = {"accuracy": "test.accuracy", "nll": "test.nll", "ece": "test.ece"}
TABLES: dict[str, Table[Experiment]] = {
    "fedppd-1": _table(f"table 1 and the supplement's table 3: accuracy ({WITHOUT})", _accuracy_cells, GLOBAL),
    "fedppd-2": _cifar(
        "table 2: calibration on CIFAR-10 (CIFAR-100 absent)",
        TABLE_2,
        {"ece": "test.ece", "mce": "test.mce", "brier": "test.brier"},
    ),
    "fedppd-3": _cifar(
        f"table 3: AUROC of SVHN against CIFAR-10 by entropy ({WITHOUT})",
        {row: {"auroc": figures["auroc"]} for row, figures in TABLE_3_4.items()},
        {"auroc": "measured.auroc", "spread over draws": "measured.auroc_spread"},
    ),
    "fedppd-4": _cifar(
        f"table 4: AUROC of errors on CIFAR-10 by entropy ({WITHOUT})",
        {row: {"misclassified": figures["misclassified"]} for row, figures in TABLE_3_4.items()},
        {"misclassified": "measured.misclassified"},
    ),
    "fedppd-suppl-4": _table("the supplement's table 4: IID clients (CIFAR-100 absent)", _iid_cells, GLOBAL),
    "fedppd-fig-2": _cifar("figure 2: accuracy by round on CIFAR-10", {}, GLOBAL),
    "fedppd-fig-3": _table(
        "figure 3: active learning by entropy on CIFAR-10",
        _labelling,
        {"area": "measured.area", **{str(n): f"measured.at_{n}" for n in range(4000, 36_001, 4000)}},
    ),
}
