"""The table of clients that disagree: its cells build, at both scales, and its findings are sentences."""

from dataclasses import replace

from fedbayes.experiments.build import build
from fedbayes.methods import method_named
from fedbayes.papers.admm import SETS, TABLES, cells, findings, measured, small
from fedbayes.training.fit import train


def test_every_method_is_on_every_set_with_options_that_it_takes() -> None:
    rows = cells()
    assert len(rows) == 11 * len(SETS) - 1  # CIFAR-10 has PVI once
    for cell in rows:
        for x in (cell.experiment, small(cell.experiment)):
            method_named(x.method, x.options)
    assert {cell.row for cell in rows} >= {"SCAFFOLD", "FedLap-Cov", "Bayes-ADMM", "FedIVON", "PVI"}


def test_a_small_cell_is_measured() -> None:
    (cell,) = [c for c in cells() if (c.group, c.row) == ("MNIST", "FedDyn")]
    x = replace(small(cell.experiment), rounds=1, evaluate_every=1)
    assert measured(train(build(x))) == {}


def test_findings_name_the_best_of_the_others() -> None:
    figures = {"FedAvg": (0.9, 0.5), "FedDyn": (0.95, 0.3), "Bayes-ADMM": (0.97, 0.2)}
    rows = [
        {"group": "MNIST", "row": row, "metric": metric, "ours": value}
        for row, pair in figures.items()
        for metric, value in zip(("accuracy", "nll"), pair)
    ]
    lines = findings(rows)
    assert len(lines) == 2
    assert all("FedDyn" in line for line in lines)
    assert "admm" in TABLES
