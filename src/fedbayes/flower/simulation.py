"""Flower's local simulation: every client a virtual node on this machine, in worker processes of Ray."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
from pathlib import Path

from fedbayes.errors import InputError
from fedbayes.experiments.build import clients_of
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.federation.cohorts import cohort_size
from fedbayes.flower.federated import carried, run
from fedbayes.flower.settings import settings_of
from fedbayes.runs.folder import Run, Watch


def simulate(experiment: Experiment, folder: str | Path, watch: Watch | None = None) -> dict[str, Run]:
    """Train into a folder on virtual nodes; where the folder holds this experiment already, go on with it."""
    if importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None:
        raise InputError('engine flower needs Flower and Ray: pip install "fedbayes[flower]"')
    nodes = len(clients_of(carried(experiment)))
    settings_of(experiment.flower, cohort_size(experiment.cohort, nodes))  # a mistake is said before Ray is started
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Virtual nodes are the run itself: by Ray's own 15 they would starve beside any other busy process.
    os.environ.setdefault("RAY_worker_niceness", "0")
    return _simulated(carried(experiment), Path(folder), watch, nodes)


def _simulated(experiment: Experiment, folder: Path, watch: Watch | None, nodes: int) -> dict[str, Run]:
    from fedbayes.flower.apps import client_app
    from fedbayes.flower.grid import GridPost
    from fedbayes.flower.library import Grid, ServerApp, run_simulation

    made: dict[str, Run] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: object) -> None:
        made.update(run(experiment, folder, GridPost(grid, pause=0.02, keys=False), watch))

    logging.getLogger("flwr").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "experiment.toml"
        file.write_text(to_toml(experiment), encoding="utf-8")
        run_simulation(
            server,
            client_app(file, state=folder.resolve() / "nodes"),
            num_supernodes=nodes,
            backend_config={
                "init_args": {"logging_level": "error", "log_to_driver": False},
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            },
        )
    return made
