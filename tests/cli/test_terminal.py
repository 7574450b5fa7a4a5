"""Tables for a terminal: figures as they are, and names as they are, whatever signs they hold."""

import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedbayes.cli.terminal import site_table
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.records import RunFiles
from fedbayes.scores.by_site import Figure


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
