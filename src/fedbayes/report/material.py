"""What a report is made from: the runs of the folders, their looks, and what is missing, in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import InputError, one_line
from fedbayes.experiments.experiment import Experiment, experiment_of, folder_name, read, table_in
from fedbayes.experiments.keys import SAVED
from fedbayes.files import FAULTS, TEXT, bytes_of, text_of
from fedbayes.report.charts import Curve
from fedbayes.report.drawing import COLOURS, DASHES, Drawing
from fedbayes.runs import journal
from fedbayes.runs.margins import Measured
from fedbayes.runs.numbers import PARTS, kind_of
from fedbayes.runs.records import Arrays, RunFiles, arrays_in

CONFIG = "config.toml"
LONGEST = 1 << 28  # bytes of a JSON file
ANEW = {  # what makes the files anew that stand beside a run
    "scores.json": "fedbayes evaluate {}",
    "ood.npz": "fedbayes evaluate {} --ood uniform-noise",
    "calibration.npz": "fedbayes calibrate {}",
}


class Shown(NamedTuple):
    """A run on the page: its number, name and look there, and its files."""

    number: int
    name: str
    ink: str
    dash: str
    files: RunFiles
    ood: Arrays
    errors: dict[str, Measured]  # of each score, where `fedbayes evaluate` has measured it
    calibration: Arrays = {}  # noqa: RUF012  what `fedbayes calibrate` wrote; never changed

    @property
    def predictions(self) -> Arrays:
        """The evaluation where it holds predictions with their targets, else nothing."""
        arrays = self.files.evaluation
        whole = "labels" in arrays and ("probs" in arrays or "mean" in arrays)
        return arrays if whole else {}

    @property
    def survival(self) -> Arrays:
        """The evaluation where it holds survival curves with their targets, else nothing."""
        arrays = self.files.evaluation
        return arrays if "labels" in arrays and "survival" in arrays else {}

    def curve(self, x: object, y: object) -> Curve:
        """A line in this run's look."""
        return Curve(self.name, self.ink, self.dash, self.number, x, y)  # type: ignore[arg-type]


class Material(NamedTuple):
    """All that the sections are made from."""

    runs: list[Shown]
    samples: list[tuple[str, Arrays]]  # folder's name and its samples.npz
    missing: list[str]
    active: list[tuple[str, list[dict[str, Any]]]] = []  # noqa: RUF012  folder's name and its stages of active learning

    def predicting(self, *kinds: str) -> list[Shown]:
        """The runs with predictions of these kinds."""
        return [run for run in self.runs if run.predictions and kind_of(run.predictions) in kinds]


class Figure(NamedTuple):
    """A drawing with its file's name, title and caption; `run` is the one it belongs to alone."""

    name: str
    title: str
    drawing: Drawing
    caption: str = ""
    run: int = -1


class Card(NamedTuple):
    """A table that stands among figures."""

    title: str
    content: str
    broad: bool = False  # over the whole page


class Section(NamedTuple):
    """A part of the page: text on how to read it, then figures, cards and pieces of HTML in order."""

    key: str
    title: str
    lead: str
    body: Sequence[Figure | Card | str]


def gather(folders: Sequence[Path]) -> Material:
    """Read the folders; names carry the folder where there are several."""
    missing: list[str] = []
    named_runs: list[tuple[str, RunFiles]] = []
    samples, active = [], []
    for folder in folders:
        home = folder.resolve().name
        for files in _runs(folder, missing):
            named_runs.append((files.name if len(folders) == 1 else _join(home, folder, files), files))
        arrays = _arrays(folder / "samples.npz", missing)
        if arrays:
            samples.append((home, arrays))
        if stages := _stages(folder / "active.json", missing):
            active.append((home, stages))
    if not named_runs:
        raise InputError(f"{', '.join(map(str, folders))}: no method of the comparison has begun; train it first")
    runs = _looks(named_runs, missing)
    for run in runs:
        missing += _lacking(run)
    return Material(runs, samples, missing, active)


def _looks(named_runs: list[tuple[str, RunFiles]], missing: list[str]) -> list[Shown]:
    """One colour per method, or per run where all are of one method. Runs of one colour differ in their dashes."""
    methods = {folder_name(files.experiment.method) for _, files in named_runs}
    inks: dict[str, list[int]] = {}
    runs = []
    for number, (name, files) in enumerate(named_runs):
        key = folder_name(files.experiment.method) if len(methods) > 1 else str(number)
        inks.setdefault(key, []).append(number)
        colour, dash = list(inks).index(key), len(inks[key]) - 1
        dash += colour // COLOURS
        ood, promises = _beside(files, "ood.npz", "meta", missing), _beside(files, "calibration.npz", "head", missing)
        errors = _errors(files, missing)
        look = f"c{colour % COLOURS}", DASHES[dash % len(DASHES)]
        runs.append(Shown(number, name, *look, files, ood, errors, promises))
    return runs


def _runs(folder: Path, missing: list[str]) -> list[RunFiles]:
    """The runs of a folder, one per method of a comparison or member of a sweep; what can't be read is named."""
    if (folder / CONFIG).is_file():
        experiment = _experiment(folder / CONFIG, missing)
    elif (folder / journal.LINES).is_file() or (folder / "evaluation.npz").is_file():
        missing.append(f"{folder.name} has no {CONFIG}: what was run is not known.")
        experiment = replace(Experiment(), method=folder.name)
    else:
        members = [path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))]
        if not members:
            raise InputError(
                f"{folder} is no run folder: it has no {CONFIG}; give the folder that `fedbayes run` wrote"
            )
        return [replace(f, name=_join(m.name, m, f)) for m in members for f in _runs(m, missing)]
    if not experiment.methods:
        return [_run(folder_name(experiment.method), folder, experiment, missing)]
    runs = []
    for method in experiment.methods:
        name = folder_name(method)
        if (folder / name).is_dir():
            runs.append(_run(name, folder / name, experiment.only(method), missing))
        else:
            missing.append(f"{name} has not begun.")
    return runs


def _join(home: str, folder: Path, files: RunFiles) -> str:
    return home if files.folder == folder else f"{home}/{files.name}"


def _run(name: str, folder: Path, experiment: Experiment, missing: list[str]) -> RunFiles:
    try:
        records = journal.read(folder)
    except InputError as error:
        missing.append(f"{name}: {error}. Its learning curves are left out.")
        records = []
    return RunFiles(name, folder, experiment, records, _arrays(folder / "evaluation.npz", missing))


def _experiment(path: Path, missing: list[str]) -> Experiment:
    """The record of a folder; of one that another version wrote, the keys that are known here."""
    try:
        return read(path)
    except InputError as error:
        missing.append(f"{error}. The rest of that file is used.")
    try:
        table = table_in(bytes_of(path, TEXT).decode("utf-8", errors="replace"), str(path))
    except InputError:
        return replace(Experiment(), method=path.parent.name)
    known = {}
    for key, value in table.items():
        try:
            experiment_of({key: value})
            known[key] = value
        except InputError:
            pass
    return experiment_of(known)


def _arrays(path: Path, missing: list[str]) -> Arrays:
    try:
        return arrays_in(path)
    except InputError as error:
        missing.append(f"{error}.")
        return {}


def _beside(files: RunFiles, name: str, head: str, missing: list[str]) -> Arrays:
    """Arrays that a command has written beside a run; none where they are of another round than the run's."""
    arrays = _arrays(files.folder / name, missing)
    try:
        rounds = json.loads(str(arrays[head]))["rounds"]
    except FAULTS:  # an earlier version did not write it
        return arrays
    return arrays if _is_current(files, name, rounds, missing) else {}


def _is_current(files: RunFiles, name: str, rounds: object, missing: list[str]) -> bool:
    """Whether a file beside a run is of the run's last round; says so where it is not."""
    now = len(files.records)
    if not now or not isinstance(rounds, int) or rounds == now:
        return True
    missing.append(
        f"{files.folder / name} is of round {rounds}, the run is at round {now}: it is left out. "
        f"`{ANEW[name].format(files.folder)}` makes it anew."
    )
    return False


def _stages(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """The stages of active learning that a folder holds; none where it is something else."""
    if not path.is_file():
        return []
    try:
        stages = json.loads(text_of(path, LONGEST))
        return [{"labelled": int(s["labelled"]), "scores": _numbers(s["scores"])} for s in stages]
    except FAULTS as error:
        missing.append(f"{path} can't be read ({one_line(error)}); put it back from a copy.")
        return []


def _numbers(table: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in table.items()}


def _errors(files: RunFiles, missing: list[str]) -> dict[str, Measured]:
    path = files.folder / "scores.json"
    if not path.is_file():
        return {}
    try:
        table = json.loads(text_of(path, LONGEST))
        if not _is_current(files, path.name, table.get("rounds"), missing):
            return {}
        rows = table["scores"]
        return {n: Measured(float(r.get("sampling") or 0), float(r.get("error") or 0)) for n, r in rows.items()}
    except FAULTS as error:
        missing.append(f"{path} can't be read ({one_line(error)}); `fedbayes evaluate` writes it anew.")
        return {}


def _whole(folder: Path) -> Path:
    """The folder of the comparison that a run is of, where it is of one."""
    return folder.parent if (folder.parent / CONFIG).is_file() else folder


def _is_personal(files: RunFiles) -> bool:
    """Whether a run has personal models alone: their scores stand for the test scores then."""
    tested = [record for record in files.records if record.get("test")]
    return bool(tested) and tested[-1]["test"].items() <= tested[-1].get("personal", {}).items()


def _lacking(run: Shown) -> list[str]:
    """What a run's folder does not hold, and how to get it."""
    files, arrays = run.files, run.files.evaluation
    notes = []
    if not files.records:
        notes.append(f"{run.name} has no journal (rounds.jsonl): no learning curves, no times.")
    if not arrays:
        done, of = len(files.records), files.experiment.rounds
        notes.append(
            f"{run.name} is not finished: round {done} of {of}. Its predictions are missing: "
            f"`fedbayes resume {_whole(files.folder)}` completes them."
        )
        return notes
    if run.survival:
        return notes
    if not run.predictions:
        notes.append(
            f"{run.name} has no predictions in evaluation.npz: its data has no test set, or the file is older."
        )
    else:
        wanted = [*PARTS] if "probs" in arrays else ["aleatoric", "epistemic"]
        each = [] if files.experiment.private else ["client_scores", "client_sizes"]  # a private run tells of nobody
        lacks = [name for name in [*wanted, *each] if name not in arrays]
        if lacks:
            notes.append(f"{run.name}: evaluation.npz has no {', '.join(lacks)} (an earlier version wrote it).")
    able = files.experiment.network != SAVED and not _is_personal(files)
    if able and not (files.folder / "ood.npz").is_file() and kind_of(arrays) == "classes":
        command = ANEW["ood.npz"].format(files.folder)
        notes.append(f"{run.name} has no out-of-distribution scores (ood.npz): `{command}` makes some.")
    return notes
