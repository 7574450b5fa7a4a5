"""Federated active learning: clients ask for the labels of the rows that the federation's model knows least about.

Ahn et al. (2022); FedPPD's supplement, algorithm 2. Each stage is a run folder of its own (`stage-00`, ...), so that
reports, predictions and resumption work on each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbayes.data import Clients
from fedbayes.data.ragged import Ragged
from fedbayes.errors import InputError, unknown
from fedbayes.experiments import toml
from fedbayes.experiments.build import build, check_tables, clients_of
from fedbayes.experiments.experiment import Experiment, experiment_of, table_in, table_of
from fedbayes.experiments.keys import FLOWER
from fedbayes.experiments.tables import check_spread
from fedbayes.files import reading, text_of, write_atomically
from fedbayes.model.predictive import Predictive
from fedbayes.noise import generator
from fedbayes.runs.folder import Watch
from fedbayes.runs.folder import run as train
from fedbayes.runs.home import locked
from fedbayes.training.run import Run

SETTINGS, PROGRESS = "active.toml", "active.json"
LONGEST = 1 << 30  # bytes of active.json
Score = Callable[[Predictive, torch.Generator], Tensor]

# What makes a row worth a label, [N], higher first; each sees the prediction and random numbers of its own.
ACQUISITIONS: dict[str, Score] = {
    "entropy": lambda p, random: p.entropy,
    "mutual_information": lambda p, random: p.mutual_information,
    "random": lambda p, random: torch.rand(len(p.mean), generator=random),
}


@dataclass(frozen=True)
class Active:
    """How labels are asked for: by which score, how many rows a client begins with, how many it asks for per stage."""

    acquire: str = "entropy"
    labelled: int = 20
    budget: int = 20
    stages: int | None = None  # at most; without, until every pool is empty

    def check(self) -> None:
        if self.acquire not in ACQUISITIONS:
            raise unknown("acquisition", self.acquire, ACQUISITIONS)
        for name in ("labelled", "budget", "stages"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InputError(f"{name} must be a whole number of at least 1, not {value!r}")


def run_active(
    experiment: Experiment,
    active: Active,
    folder: str | Path,
    watch: Watch | None = None,
    *,
    clients: Clients | None = None,
) -> list[dict[str, Any]]:
    """Train stage after stage, each on the rows labelled so far, and give the curve: one record per stage.

    A folder that holds this already is continued; acquired rows are read from it, never chosen again.
    """
    folder = Path(folder)
    active.check()
    if experiment.private is not None:
        raise InputError("private: which rows ask for labels is in no account; leave --active or private out")
    if experiment.engine == FLOWER:
        raise InputError("active learning trains in one process; leave --active out, or set engine=auto")
    if experiment.methods:
        raise InputError("active learning has one method; set methods=[] and method=NAME")
    with locked(folder):
        return _stages(experiment, active, folder, watch, clients)


def _stages(
    experiment: Experiment, active: Active, folder: Path, watch: Watch | None, clients: Clients | None
) -> list[dict[str, Any]]:
    """The stages of a folder that is locked: those that are there, and those to come."""
    is_new = _is_new(folder, experiment, active)
    clients = clients_of(experiment) if clients is None else clients
    if clients.data.kind == "real" and active.acquire != "random":
        raise InputError(f"{active.acquire} ranks predicted classes; {clients.data.name} has real targets")
    known, acquired = _begun(clients, active, experiment.seed), _progress(folder, experiment, active)
    pools = [_without(clients.train_rows(k), rows) for k, rows in enumerate(known)]
    if not any(map(len, pools)):
        raise InputError(f"labelled = {active.labelled} leaves no client a row to ask for; lower it")
    if is_new:
        check_tables(experiment)
        check_spread(experiment)
        build(
            experiment, clients=replace(clients, train=Ragged.of_lists(known))
        )  # a wrong option leaves nothing behind
        write_atomically(folder / SETTINGS, _settings(experiment, active))
    records: list[dict[str, Any]] = []
    for stage in range(active.stages or 1 + max(-(-len(pool) // active.budget) for pool in pools)):
        some = replace(clients, train=Ragged.of_lists(known))
        (run,) = train(experiment, folder / f"stage-{stage:02d}", watch, clients=some).values()
        if stage == len(acquired):
            acquired_rows = [_choose(run, active, pools[k], (experiment.seed, stage, k)) for k in range(len(pools))]
            entry = {"rows": [rows.tolist() for rows in acquired_rows], **_record(run, known, pools)}
            acquired.append({**entry, "seal": _seal(entry, acquired, experiment, active)})
            write_atomically(folder / PROGRESS, (json.dumps(acquired) + "\n").encode())
        records.append({key: v for key, v in acquired[stage].items() if key not in ("rows", "seal")})
        acquired_rows = [torch.tensor(rows, dtype=torch.int64) for rows in acquired[stage]["rows"]]
        known = [torch.cat([old, new]) for old, new in zip(known, acquired_rows)]
        pools = [_without(pool, new) for pool, new in zip(pools, acquired_rows)]
    return records


def resume_active(folder: str | Path, watch: Watch | None = None) -> list[dict[str, Any]]:
    """Go on with the active learning of a folder."""
    experiment, active = settings_in(folder)
    return run_active(experiment, active, folder, watch)


def settings_in(folder: str | Path) -> tuple[Experiment, Active]:
    """The experiment of a folder, and how it asks for labels."""
    path = Path(folder) / SETTINGS
    with reading(path, "give the folder that `fedbayes run --active` wrote"):
        table = table_in(text_of(path), str(path))
        return experiment_of(table["experiment"], str(path)), Active(**table["active"])


def area(records: Sequence[Mapping[str, Any]], score: str = "accuracy") -> float:
    """The mean of a score over the number of labelled rows, by trapezoids: the area under the curve, normalised."""
    x = torch.tensor([float(r["labelled"]) for r in records], dtype=torch.float64)
    y = torch.tensor([float(r["scores"][score]) for r in records], dtype=torch.float64)
    return float(torch.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def _is_new(folder: Path, experiment: Experiment, active: Active) -> bool:
    """Whether the folder is empty; refuse one that holds something else than these settings."""
    if (folder / SETTINGS).is_file():
        if settings_in(folder) != (experiment, active):
            raise InputError(
                f"{folder} holds another active learning: go on with it by `fedbayes resume {folder}`, "
                "or give another --output"
            )
        return False
    if any(not entry.name.startswith(".") for entry in folder.iterdir()):  # hidden: the lock
        raise InputError(f"{folder} is not empty and holds no active learning; give another --output")
    return True


def _settings(experiment: Experiment, active: Active) -> str:
    chosen = {name: v for name, v in asdict(active).items() if v is not None}
    return toml.dumps({"active": chosen, "experiment": table_of(experiment)})


def _seal(entry: Mapping[str, Any], before: Sequence[Mapping[str, Any]], experiment: Experiment, active: Active) -> str:
    """A checksum of a stage, of all stages before it, and of what was asked for: labels are never chosen anew."""
    parts = [_settings(experiment, active), before[-1]["seal"] if before else "", json.dumps(entry)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _progress(folder: Path, experiment: Experiment, active: Active) -> list[dict[str, Any]]:
    """What was acquired so far, one entry for each stage."""
    path = folder / PROGRESS
    if not path.is_file():
        return []
    with reading(path, "put it back from a copy"):
        entries: list[dict[str, Any]] = json.loads(text_of(path, LONGEST))
        for stage, entry in enumerate(entries):
            plain = {key: v for key, v in entry.items() if key != "seal"}
            if entry["seal"] != _seal(plain, entries[:stage], experiment, active):
                raise ValueError(f"stage {stage} is not what was written, or {SETTINGS} has changed since")
    return entries


def _begun(clients: Clients, active: Active, seed: int) -> list[Tensor]:
    """The rows that each client has labels of at first, chosen at random by its address."""
    first_rows = []
    for k in range(len(clients)):
        rows = clients.train_rows(k)
        order = torch.randperm(len(rows), generator=generator(seed, k, "labelled"))
        first_rows.append(rows[order[: active.labelled]])
    return first_rows


def _without(rows: Tensor, taken: Tensor) -> Tensor:
    return rows[~torch.isin(rows, taken)]


def _choose(run: Run, active: Active, pool: Tensor, place: tuple[int, ...]) -> Tensor:
    """The rows of a client's pool that it asks labels for: those of the highest score."""
    if not len(pool):
        return pool
    p = run.predict(run.task.clients.data.x[pool])
    score = ACQUISITIONS[active.acquire](p, generator(*place, "acquire")).cpu()
    return pool[score.argsort(descending=True, stable=True)[: active.budget]]


def _record(run: Run, known: Sequence[Tensor], pools: Sequence[Tensor]) -> dict[str, Any]:
    return {
        "labelled": sum(map(len, known)),
        "pool": sum(map(len, pools)),
        "scores": run.scores() if len(run.task.clients.data.test_x) else {},
    }
