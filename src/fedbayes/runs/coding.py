"""How a run's tables were coded, kept beside its checkpoints: predictions code new rows by it, whatever becomes of the
tables."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from fedbayes.data import Clients, Coding, read_coding
from fedbayes.data.site_tables import without_rows
from fedbayes.errors import InputError
from fedbayes.experiments.build import clients_of
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.keys import TABLES

FILE = "coding.json"


def keep(folder: Path, coding: Coding | None) -> None:
    """Write a run's coding; refuse another than the one that is there."""
    path = folder / FILE
    if coding is None:
        return
    if not path.is_file():
        coding.save(path)
    elif read_coding(path) != coding:
        raise InputError(
            f"the tables have changed since the run in {folder} began (see {path}): put them back, or run into another "
            "folder"
        )


def clients_by(experiment: Experiment, folder: Path) -> Clients | None:
    """The clients of a run on tables, by the coding that it keeps; None where it keeps none.

    Where the tables are not here, one typical row stands for them: enough to predict, not to score.
    """
    path = folder / FILE
    if experiment.data != TABLES or not path.is_file():
        return None
    options = {**experiment.data_options, "coding": str(path)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*same unit")  # which was said when it was trained
            return clients_of(replace(experiment, data_options=options))
    except InputError as error:
        warnings.warn(f"{error}: without its tables the run can predict, and not be scored", UserWarning, stacklevel=3)
    return without_rows(read_coding(path))
