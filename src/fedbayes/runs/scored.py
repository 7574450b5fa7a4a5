"""The clients by whose rows a run folder is scored: of tables those of then, and no others."""

from __future__ import annotations

from pathlib import Path

from fedbayes.data import Clients
from fedbayes.experiments.experiment import folder_name
from fedbayes.runs import coding
from fedbayes.runs.home import experiment_in


def scored_clients(folder: str | Path) -> Clients | None:
    """The clients of a run on tables, coded as then; refused where the tables have changed. None: not on tables."""
    experiment = experiment_in(folder).settled
    for home in [Path(folder) / folder_name(method) for method in experiment.methods] or [Path(folder)]:
        clients = coding.same_clients(experiment, home)
        if clients is not None:
            return clients
    return None
