"""Tables for a terminal: figures as they are, and names as they are, whatever signs they hold."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import fedbayes as fb
from fedbayes.cli.score_tables import ood_table, score_table
from fedbayes.cli.terminal import closing_table, site_table
from fedbayes.data import holdings
from fedbayes.data.own import from_arrays
from fedbayes.data.show import label_table
from fedbayes.experiments.experiment import Experiment
from fedbayes.export.predictions import prediction_table
from fedbayes.runs.records import RunFiles
from fedbayes.scores.by_site import Figure, SiteScores


def text_of(table) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def run_by_site(sites: list[str], value: float, error: float, name: str = "fedavg") -> RunFiles:
    many = len(sites)
    arrays = {
        "client_names": np.array(sites),
        "score_names": np.array(["count", "rmse"]),
        "client_scores": np.tile([10.0, value], (many, 1)),
        "client_errors": np.tile([0.0, error], (many, 1)),
        "scores": np.array([10.0 * many, value]),
        "score_errors": np.array([0.0, error]),
    }
    return RunFiles(name, Path("a"), Experiment(), [], arrays)


@pytest.mark.parametrize(
    ("error", "shown"), [(10.123, "±10.123"), (20.0, "±20.000"), (1.05, "±1.050"), (0.023, "±.023")]
)
def test_errors_are_shown_in_full(error, shown):
    assert str(Figure(54.2, error)) == f"54.200 {shown}"
    assert text_of(site_table(run_by_site(["a", "b"], 54.2, error))).count(f"54.200 {shown}") == 3


STRANGE = ("A [north]", "[/q]")


def predicted():
    parts = np.full((1, 2), 0.1)
    arrays = {"probs": np.array([[0.9, 0.1]]), "aleatoric": parts, "epistemic": parts, "set": np.array([[True, True]])}
    return prediction_table({**arrays, "class_names": np.array(STRANGE)})


def by_site():
    values = np.full((2, 1), 0.5)
    return SiteScores(STRANGE, (1, 1), ("nll",), values, values, {"nll": Figure(0.5, 0.1)}).table()


def labels():
    data = from_arrays(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), class_names=STRANGE)
    return label_table(data.split(fb.partition.iid(), clients=2))


def held_by_sites(folder):
    for site in ("A [north]", "[q]"):
        (folder / f"{site}.csv").write_text("[/q],ill\n1,A [north]\n2,no\n3,no\n")
    held = holdings.holdings(fb.data.summary_of(folder, "ill", test=0.0, seed=None))
    return text_of(holdings.site_table(held)) + text_of(holdings.column_table(held))


def scored():
    runs = {name: {"scores": {}, "ood": {"tables": {"[/q]": {}}}} for name in STRANGE}
    return text_of(score_table(runs)) + text_of(ood_table(runs, "[/q]"))


TABLES = {
    "predictions": predicted,
    "scores by site": by_site,
    "site table": lambda: site_table(run_by_site(["A [north]"], 1.0, 0.1, "[/q]")),
    "closing table": lambda: closing_table([run_by_site(["a"], 1.0, 0.1, name) for name in STRANGE]),
    "labels": labels,
    "scores": scored,
}


@pytest.mark.parametrize("table", TABLES)
def test_names_are_printed_as_they_are(table):
    made = TABLES[table]()
    shown = made if isinstance(made, str) else text_of(made)
    assert all(name in shown for name in STRANGE)


def test_names_of_tables_are_printed_as_they_are(tmp_path):
    assert all(name in held_by_sites(tmp_path) for name in STRANGE)
