"""How a run's tables were coded, and a digest of their rows, kept beside its checkpoints: predictions code new rows
alike, whatever becomes of the tables, and only rows that were kept from training are scored."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

from fedbayes.data import Clients, Coding, read_coding
from fedbayes.data.site_tables import without_rows
from fedbayes.errors import InputError
from fedbayes.experiments.build import clients_of
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.keys import TABLES
from fedbayes.files import reading, text_of, write_atomically
from fedbayes.runs.sealed import checksum
from fedbayes.training.task import Task

FILE, ROWS = "coding.json", "rows.json"


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


def keep_rows(folder: Path, experiment: Experiment, task: Task) -> None:
    """Write the digests of a run's rows where they come from tables; refuse others than those that are there.

    Of private rows none is kept, by which a guess at them could be tried.
    """
    if experiment.data != TABLES:
        return
    path, privacy = folder / ROWS, task.privacy
    sides = ("train", "test") if privacy is None else ("test",) if privacy.public_test else ()
    if path.is_file():
        check_rows(folder, task.clients)
    elif sides:
        write_atomically(path, json.dumps({side: _digest(task.clients, side) for side in sides}) + "\n")


def _digest(clients: Clients, side: str) -> str:
    """A checksum of the stored rows of the training or the test side, with their targets."""
    data = clients.data
    x, y = (data.x, data.y) if side == "train" else (data.test_x, data.test_y)
    return checksum(side, {"x": x, "y": y})


def check_rows(folder: Path, clients: Clients) -> None:
    """Refuse clients whose rows are others than the run's; a folder of before has no digests."""
    path = folder / ROWS
    if not path.is_file():
        return
    with reading(path, "put it back from a copy, or delete it where the tables are those of then"):
        kept = {str(side): str(digest) for side, digest in json.loads(text_of(path)).items()}
    if any(_digest(clients, side) != digest for side, digest in kept.items()):
        raise InputError(
            f"the tables have changed since the run in {folder} began (see {path}): which rows it was tested on can't "
            "be told; put them back, or run into another folder"
        )


def same_clients(experiment: Experiment, folder: Path) -> Clients | None:
    """The clients of a run on tables as they were, by the coding that it keeps; None where it keeps none."""
    path = folder / FILE
    if experiment.data != TABLES or not path.is_file():
        return None
    options = {**experiment.data_options, "coding": str(path)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* deviations\\)")  # which was said when it was trained
        clients = clients_of(replace(experiment, data_options=options))
    check_rows(folder, clients)
    return clients


def clients_by(experiment: Experiment, folder: Path) -> Clients | None:
    """The clients of a run on tables, by the coding that it keeps; None where it keeps none.

    Where the tables are not here, or not as they were, one typical row stands for them: enough to predict, not to
    score.
    """
    try:
        return same_clients(experiment, folder)
    except InputError as error:
        warnings.warn(
            f"{error}: without the tables of then the run can predict, and not be scored", UserWarning, stacklevel=3
        )
    return without_rows(read_coding(folder / FILE))
