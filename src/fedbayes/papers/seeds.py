"""Cells that are experiments over seeds: trained once, those of one program together, each seed kept as one file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedbayes.experiments.experiment import Experiment
from fedbayes.files import write_atomically
from fedbayes.papers.cells import Cell, Content, Request, Say, Source, Table, chosen, commit, device_name, plain_name
from fedbayes.papers.settings import otherwise, scaled, setting_of
from fedbayes.posterior.values import save
from fedbayes.runs.folder import Watch
from fedbayes.runs.home import locked
from fedbayes.runs.recording import Recording
from fedbayes.runs.sweep import build_members, can_join, mean_record, program_of, record_together
from fedbayes.training.run import Run

SECONDS = 20.0  # between checkpoints of cells that are being trained
NAMED = 4  # cells of a group whose names are shown
RUNNING = "running"  # below the cells' folder: run folders of cells that are not done
LENGTH_AND_SEED = re.compile(r"\d+-s\d+\.json")
CURVE = ("accuracy", "nll", "ece", "rmse")  # scores that a cell keeps of every evaluated round
Cells = Callable[[], list[Cell[Experiment]]]  # built on demand
Members = Mapping[str, tuple[Cell[Experiment], Experiment]]  # by the name of the file


def train(table: Table[Experiment], output: Path, request: Request) -> None:
    """Train the seeds of the chosen cells that have no file yet; those that share a program are trained together.

    Killed, it goes on with the files that are missing, those that were being trained from their last checkpoints (in
    the folder `running`).
    """
    folder = output / "cells" / request.scale
    missing: dict[str, tuple[Cell[Experiment], Experiment]] = {}
    there = 0
    for cell in chosen(table.cells(), request.only):
        base = replace(table.scales[request.scale](cell.experiment), **request.changes)
        for seed in request.seeds:
            experiment = replace(base, seed=seed)
            name = file_name(table.family, cell, experiment)
            path = folder / name
            there += path.is_file()
            if not path.is_file():
                missing[name] = cell, experiment
            elif other := otherwise(json.loads(path.read_text(encoding="utf-8")), experiment):
                request.say(f"{cell.title}: kept, though made with {other}; without {path} it is trained anew")
    groups = list(_groups(missing))
    if missing:
        kept = f", {there} are there already" if there else ""
        request.say(f"{len(missing)} runs to train, those of one program together ({len(groups)}){kept}")
    for names in groups:
        members = {name: missing[name] for name in names}
        _train_group(members, folder, request.keep, request.say, request.watch or Watch())


def file_name(family: str, cell: Cell[Experiment], experiment: Experiment) -> str:
    """One file per cell, number of rounds and seed."""
    place = (family, cell.group, cell.row, cell.column)
    return plain_name(*place, f"r{experiment.rounds}", f"s{experiment.seed}") + ".json"


def _groups(missing: Members) -> Iterator[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, (_, experiment) in missing.items():
        lengths = (experiment.rounds, experiment.evaluate_every, experiment.personal_every)
        groups.setdefault(f"{program_of(experiment)} {lengths}", []).append(name)
    yield from groups.values()


def _train_group(members: Members, folder: Path, keep: bool, say: Say, watch: Watch) -> None:
    tasks = list(build_members({name: x for name, (_, x) in members.items()}).values())
    titles = list(dict.fromkeys(cell.title for cell, _ in members.values()))
    named = titles if len(titles) <= NAMED else [*titles[: NAMED - 1], f"{len(titles) - NAMED + 1} more"]
    say(f"{', '.join(named)}: {len(tasks)} runs of {tasks[0].rounds} rounds")
    folders = [folder / RUNNING / Path(name).stem for name in members]
    with ExitStack() as locks:
        for at in folders:
            locks.enter_context(locked(at))
        recordings = [
            Recording(x, task, at, seconds=SECONDS) for (_, x), task, at in zip(members.values(), tasks, folders)
        ]
        for group in [recordings] if all(map(can_join, tasks)) else [[one] for one in recordings]:
            first = group[0]
            watch.begun(titles[0] if len(group) == 1 else f"{len(group)} runs", first.task, first.records)
            for records in record_together(group):
                watch.round(mean_record(records))
        for (name, (cell, x)), recording in zip(members.items(), recordings):
            say(_write(folder / name, cell, x, recording, keep))
            shutil.rmtree(recording.folder)
    with suppress(OSError):  # where others are being trained
        (folder / RUNNING).rmdir()


def _write(path: Path, cell: Cell[Experiment], x: Experiment, recording: Recording, keep: bool) -> str:
    """The file of a trained cell, and one line that says what it came to."""
    run = Run(recording.task, recording.progress, recording.records, recording.own)
    spent = sum(record["seconds"] for record in run.journal)
    content = content_of(cell, x, run) | {"seconds": round(spent, 1)}
    if keep:
        save(path.with_suffix(".safetensors"), run.parts)
    write_atomically(path, (json.dumps(content) + "\n").encode())
    last = ", ".join(f"{name} {content['test'][name]:.4f}" for name in CURVE if name in content["test"])
    return f"{cell.title} seed {x.seed}: {last}; {spent:.0f} s"


def content_of(cell: Cell[Experiment], experiment: Experiment, run: Run) -> dict[str, Any]:
    """What a trained cell keeps: last scores, personal ones, the best round on test data, and the curve."""
    tested = [r for r in run.journal if r.get("test")]
    curve = [{"round": r["round"], **_some(r["test"]), **_some(r.get("personal"), "personal_")} for r in tested]
    personal = [r["personal"] for r in run.journal if r.get("personal")]
    return {
        "row": cell.row,
        "column": cell.column,
        "group": cell.group,
        "experiment": setting_of(experiment),
        "rounds": run.progress.state.round,
        "seed": experiment.seed,
        "test_draws": run.task.program.prediction.draws,
        "test": tested[-1]["test"] if tested else {},
        "personal": personal[-1] if personal else {},
        "oracle_best": _best(tested),
        "measured": {k: float(v) for k, v in cell.measure(run).items()} if cell.measure else {},
        "left_out": sum(len(r["left_out"]) for r in run.journal),
        "curve": curve,
        "bytes_up": run.journal[-1]["bytes_up"] if run.journal else 0,
        "device": device_name(run.task.device.type),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _some(scores: Mapping[str, float] | None, prefix: str = "") -> dict[str, float]:
    return {f"{prefix}{k}": round(v, 5) for k, v in (scores or {}).items() if k in CURVE}


def _best(tested: list[dict[str, Any]]) -> dict[str, float]:
    """The best round by each score on test data: what nobody could have known to stop at."""
    names = [name for name in CURVE if tested and name in tested[0]["test"]]
    return {n: (max if n == "accuracy" else min)(r["test"][n] for r in tested) for n in names}


def contents(table: Table[Experiment], cell: Cell[Experiment], output: Path, scale: str) -> list[Content]:
    """What is kept of a cell, one content per seed; of several lengths of training the longest."""
    folder = output / "cells" / scale
    start = file_name(table.family, cell, table.scales[scale](cell.experiment)).rpartition("-r")[0] + "-r"
    names = [name for name in (os.listdir(folder) if folder.is_dir() else ()) if name.startswith(start)]
    names = sorted(name for name in names if LENGTH_AND_SEED.fullmatch(name, len(start)))
    files = [json.loads((folder / name).read_text(encoding="utf-8")) for name in names]
    most = max((content["experiment"]["rounds"] for content in files), default=0)
    return [content for content in files if content["experiment"]["rounds"] == most]


def notes(
    table: Table[Experiment], cell: Cell[Experiment], scale: str, files: Sequence[Content]
) -> dict[str, str | list[str] | None]:
    """Where a cell was made otherwise than its table says, and with less than is printed."""
    current, first = table.scales[scale](cell.experiment), files[0]
    return {
        # What was published is of another set than a smaller scale may have been run on.
        **({} if first["experiment"]["data"] == cell.experiment.data else {"published": None}),
        "otherwise": "; ".join(dict.fromkeys(filter(None, (otherwise(content, current) for content in files)))),
        "scaled": scaled(replace(current, rounds=first["experiment"]["rounds"]), cell.experiment),
    }


SEEDS: Source[Experiment] = Source(train, contents, notes)
