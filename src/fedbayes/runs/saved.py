"""A run of `fit` as a folder that reports are made from; it holds no checkpoint, so it can't be loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.files import write_atomically
from fedbayes.runs import coding, evaluation, journal
from fedbayes.runs.recording import CONFIG, SAVED
from fedbayes.training.private import PrivateRun
from fedbayes.training.run import Run


def _private(privacy: PrivateRun) -> dict[str, Any]:
    return {
        **{"private": privacy.level, "epsilon": privacy.budget, "delta": privacy.delta, "private_clip": privacy.clip},
        **{"noise_multiplier": privacy.noise, "private_seed": privacy.random.seed, "public_test": privacy.public_test},
        **({} if privacy.scoring is None else {"private_scores": privacy.scoring.share}),
    }


def save(run: Run, folder: str | Path) -> Path:
    """Write a run's journal, scores and predictions of its test rows into a new folder; gives the folder."""
    folder, task = Path(folder), run.task
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; give another folder")
    folder.mkdir(parents=True, exist_ok=True)
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
    return folder
