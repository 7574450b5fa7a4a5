"""Run folders as plain records, for tables and reports. Reads files alone, needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes import files
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, folder_name, read
from fedbayes.runs import journal
from fedbayes.runs.shapes import CHECKS

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class RunFiles:
    """What one run has left behind so far; arrays are empty where a file is not there yet."""

    name: str
    folder: Path
    experiment: Experiment
    records: list[dict[str, Any]]
    evaluation: Arrays = field(repr=False)

    @property
    def scores(self) -> dict[str, float]:
        """Closing scores on the test set, or those of the last evaluated round of an unfinished run."""
        if "score_names" in self.evaluation:
            return dict(zip(self.evaluation["score_names"].tolist(), self.evaluation["scores"].tolist()))
        tested = [record["test"] for record in self.records if record.get("test")]
        return tested[-1] if tested else {}

    @property
    def seconds(self) -> float:
        return sum(float(record.get("seconds", 0)) for record in self.records)

    @property
    def start(self) -> float:
        """Seconds of the first round beyond a usual one: loading, tracing, compiling. Of a comparison's first method
        it is the start of the whole program."""
        times = [float(record.get("seconds", 0)) for record in self.records]
        return max(0.0, times[0] - float(np.median(times[1:]))) if len(times) > 2 else 0.0

    def curve(self, score: str) -> tuple[list[int], list[float]]:
        """Rounds and values of a test score, where it was measured."""
        rows = [(r["round"], r["test"][score]) for r in self.records if score in r.get("test", {})]
        return [n for n, _ in rows], [v for _, v in rows]


def runs_in(folder: str | Path) -> list[RunFiles]:
    """The runs of a folder: one, or one per method, member of a sweep or stage; those begun so far."""
    folder = Path(folder)
    path = folder / "config.toml"
    if (folder / "sweep.toml").is_file() or (folder / "active.toml").is_file():
        members = sorted(sub for sub in folder.iterdir() if (sub / "config.toml").is_file())
        return [_run(sub.name, sub, read(sub / "config.toml")) for sub in members]
    if not path.is_file():
        raise InputError(f"{folder} is no run folder: it has no config.toml; give the folder that `fedbayes run` wrote")
    experiment = read(path)
    if not experiment.methods:
        return [_run(folder_name(experiment.method), folder, experiment)]
    parts = [(folder_name(method), experiment.only(method)) for method in experiment.methods]
    return [_run(name, folder / name, only) for name, only in parts if (folder / name).is_dir()]


def arrays_in(path: Path) -> Arrays:
    """The arrays of an .npz file; none where it is missing."""
    if not path.is_file():
        return {}
    mend = f"delete it and run `fedbayes resume {path.parent}`"
    arrays = files.arrays_in(path, mend)
    if path.name in CHECKS:
        with files.reading(path, mend):
            CHECKS[path.name](arrays)
    return arrays


def _run(name: str, folder: Path, experiment: Experiment) -> RunFiles:
    return RunFiles(name, folder, experiment, journal.read(folder), arrays_in(folder / "evaluation.npz"))
