"""A run of `fit` as a folder: what reports are made from, and its posterior, without a checkpoint to go on from."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from fedbayes.data import Clients
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.experiments.keys import SAVED
from fedbayes.files import new_folder, write_atomically
from fedbayes.runs import coding, evaluation, journal
from fedbayes.runs.recording import CONFIG
from fedbayes.training import published
from fedbayes.training.private import PrivateRun
from fedbayes.training.run import Run

MODEL = "model"  # the folder of the posterior, as it would be on the Hub


def _private(privacy: PrivateRun) -> dict[str, Any]:
    return {
        **{"private": privacy.level, "epsilon": privacy.budget, "delta": privacy.delta, "private_clip": privacy.clip},
        **{"noise_multiplier": privacy.noise, "private_seed": privacy.random.seed, "public_test": privacy.public_test},
        **({} if privacy.scoring is None else {"private_scores": privacy.scoring.share}),
    }


def save(run: Run, folder: str | Path, *, network: str | None = None) -> Path:
    """Write a run's posterior, journal, scores and predictions of its test rows into a new folder; gives the folder.

    `network` is a name of the library's own, so that nobody has to give it to `fb.load` again.
    """
    folder, task = new_folder(folder), run.task
    if any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; give another folder")
    experiment = Experiment(
        data=task.clients.data.name,
        network=SAVED,
        partition="natural" if task.clients.names else "own",
        clients=len(task.clients),
        method=task.method,
        rounds=task.rounds,
        seed=task.seed,
        **({} if task.privacy is None else _private(task.privacy)),
    )
    write_atomically(folder / CONFIG, to_toml(experiment))
    for record in run.journal:
        journal.append(folder, record)
    journal.write_table(folder, run.journal)
    coding.keep(folder, task.clients.data.coding)
    evaluation.write(folder, run)
    try:
        published.write_model(run, folder / MODEL, network)
    except InputError as error:
        shutil.rmtree(folder / MODEL, ignore_errors=True)
        warnings.warn(f"{folder} is for reports, and holds no posterior: {error}", UserWarning, stacklevel=2)
    return folder


def loaded(folder: Path, network: nn.Module | None, clients: Clients | None, device: str) -> Run:
    """The run that `save` has written: it predicts, and is scored on the rows of `clients`."""
    if not (folder / MODEL / published.ABOUT).is_file():
        raise InputError(
            f"{folder} was written by fb.save for reports, and holds no posterior; to predict, export or go on, keep "
            "the run in Python, or train an experiment file by `fedbayes run`"
        )
    task, progress = published.read(folder / MODEL, network, device, name=str(folder), clients=clients)
    told = (folder / journal.LINES).is_file()  # a client's own model, and one of the Hub, have no journal
    return Run(task, progress, journal.upto(folder, progress.state.round) if told else [])
