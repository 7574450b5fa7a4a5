"""Published tables of trained methods: each cell is an experiment over seeds, trained once, kept as a file a seed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import unknown
from fedbayes.experiments.experiment import Experiment, table_of
from fedbayes.files import write_atomically
from fedbayes.methods import METHODS, method_named
from fedbayes.options import options_of
from fedbayes.papers.regression_tables import commit, device_name
from fedbayes.posterior.values import save
from fedbayes.runs.folder import Watch, locked
from fedbayes.runs.recording import Recording
from fedbayes.runs.sweep import build_members, can_join, mean_record, program_of, record_together
from fedbayes.training.run import Run

Measure = Callable[[Run], Mapping[str, float]]
SECONDS = 20.0  # between checkpoints of cells that are being trained
RUNNING = "running"  # below the cells' folder: run folders of cells that are not done
EVALUATED = ("seed", "evaluate_every")
TOLD = ("rounds", *EVALUATED)  # beside a cell's figures
WHERE = ("device", "engine", "compile", "at_once")  # how it was executed, which is no part of a cell
CURVE = ("accuracy", "nll", "ece", "rmse")  # scores that a cell keeps of every evaluated round


class Cell(NamedTuple):
    """One place of a published table: an experiment, and the figures that are printed there, by metric."""

    row: str
    column: str
    experiment: Experiment
    published: Mapping[str, float] = {}
    measure: Measure | None = None  # figures beyond the scores of the last round
    group: str = ""  # such as the data set, where a table has several blocks


class Printed(NamedTuple):
    """A published table: its cells, what each metric is in a cell's file, and how it is made smaller."""

    title: str
    cells: Sequence[Cell]
    metrics: Mapping[str, str]  # name -> path in the file: test.accuracy, personal.clients_nll, measured.nll_50
    scales: Mapping[str, Callable[[Experiment], Experiment]]
    family: str  # tables of one family share their files
    variants: Mapping[str, str] = {}  # first words of metrics that are rows of their own -> what follows the row's name


Say = Callable[[str], None]


def run_cells(
    printed: Printed,
    output: Path,
    *,
    only: Iterable[str] = (),
    scale: str = "paper",
    seeds: Sequence[int] = (0,),
    changes: Mapping[str, Any] | None = None,
    keep: bool = False,
    say: Say = lambda line: None,
    watch: Watch | None = None,
) -> None:
    """Train the seeds of the chosen cells that have no file yet; those that share a program are trained together.

    `changes` are laid over every experiment (device, rounds, ...). `keep` writes each posterior beside
    its file. Killed, it goes on with the files that are missing, those that were being trained from their last
    checkpoints (in the folder `running`).
    """
    if scale not in printed.scales:
        raise unknown("scale", scale, printed.scales)
    missing: dict[str, tuple[Cell, Experiment]] = {}
    for cell in chosen(printed.cells, only):
        base = replace(printed.scales[scale](cell.experiment), **dict(changes or {}))
        for seed in seeds:
            experiment = replace(base, seed=seed)
            name = file_name(printed.family, cell, experiment)
            path = output / "cells" / scale / name
            if not path.is_file():
                missing[name] = cell, experiment
            elif other := otherwise(json.loads(path.read_text()), experiment):
                say(f"{_title(cell)}: kept, though made with {other}; without {path} it is trained anew")
    for names in _groups(missing):
        _train({name: missing[name] for name in names}, output / "cells" / scale, keep, say, watch or Watch())


def chosen(cells: Sequence[Cell], only: Iterable[str]) -> list[Cell]:
    """The cells that match: of the words asked for, those that name groups, rows and columns each narrow the choice."""
    kinds = [lambda c: c.group, lambda c: c.row, lambda c: c.column]
    asked = [word.casefold() for word in only]
    known = [{kind(cell).casefold() for cell in cells} for kind in kinds]
    for word in asked:
        if not any(word in names for names in known):
            names = {kind(cell) for cell in cells for kind in kinds}
            raise unknown("group, row or column", word, sorted(names - {""}))
    wanted = [[word for word in asked if word in names] for names in known]
    return [c for c in cells if all(not w or kind(c).casefold() in w for w, kind in zip(wanted, kinds))]


def file_name(family: str, cell: Cell, experiment: Experiment) -> str:
    """One file a cell, number of rounds and seed."""
    words = [family, cell.group, cell.row, cell.column, f"r{experiment.rounds}", f"s{experiment.seed}"]
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.casefold()).strip("-") for word in words if word) + ".json"


def _groups(missing: Mapping[str, tuple[Cell, Experiment]]) -> Iterator[list[str]]:
    groups: dict[str, list[str]] = {}
    for name, (_, experiment) in missing.items():
        lengths = (experiment.rounds, experiment.evaluate_every, experiment.personal_every)
        groups.setdefault(f"{program_of(experiment)} {lengths}", []).append(name)
    yield from groups.values()


def _train(members: Mapping[str, tuple[Cell, Experiment]], folder: Path, keep: bool, say: Say, watch: Watch) -> None:
    tasks = list(build_members({name: x for name, (_, x) in members.items()}).values())
    titles = list(dict.fromkeys(_title(cell) for cell, _ in members.values()))
    say(f"{', '.join(titles)}: {len(tasks)} runs of {tasks[0].rounds} rounds")
    folders = [folder / RUNNING / Path(name).stem for name in members]
    with ExitStack() as held:
        for at in folders:
            held.enter_context(locked(at))
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


def _write(path: Path, cell: Cell, x: Experiment, recording: Recording, keep: bool) -> str:
    """The file of a trained cell, and one line that says what it came to."""
    run = Run(recording.task, recording.progress, recording.records, recording.own)
    spent = sum(record["seconds"] for record in run.journal)
    content = cell_of(cell, x, run) | {"seconds": round(spent, 1)}
    if keep:
        save(path.with_suffix(".safetensors"), run.parts)
    write_atomically(path, (json.dumps(content) + "\n").encode())
    last = ", ".join(f"{name} {content['test'][name]:.4f}" for name in CURVE if name in content["test"])
    return f"{cell.group} {cell.row} {cell.column} seed {x.seed}: {last}; {spent:.0f} s".strip()


def cell_of(cell: Cell, experiment: Experiment, run: Run) -> dict[str, Any]:
    """What a trained cell keeps: last scores, personal ones, the best round on test data, and the curve."""
    tested = [r for r in run.journal if r.get("test")]
    curve = [{"round": r["round"], **_some(r["test"]), **_some(r.get("personal"), "personal_")} for r in tested]
    personal = [r["personal"] for r in run.journal if r.get("personal")]
    return {
        "row": cell.row,
        "column": cell.column,
        "group": cell.group,
        "experiment": {k: v for k, v in table_of(experiment).items() if k not in WHERE},
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


def rows_of(name: str, printed: Printed, output: Path, scale: str) -> list[dict[str, Any]]:
    """Every cell that has files as one row a metric: ours over seeds, the published figure, and how it was made."""
    rows = []
    for cell in printed.cells:
        files, asked = files_of(printed, cell, output, scale), printed.scales[scale](cell.experiment)
        others = "; ".join(dict.fromkeys(filter(None, (otherwise(content, asked) for content in files))))
        for metric, path in printed.metrics.items():
            having = [content for content in files if _at(content, path) is not None]
            if having:
                row = _row(name, cell, metric, path, having) | {"otherwise": others}
                row["scaled"] = scaled(replace(asked, rounds=row["rounds"]), cell.experiment)
                rows.append(_as_variant(printed, row))
    return rows


def otherwise(content: Mapping[str, Any], asked: Experiment) -> str:
    """Where a cell's file was made with another setting than is asked for: `options.server_lr 0.001 (now 0.0001)`.

    What a file does not name had its default; an option that there is no more can't be compared. Rounds and seed are
    told elsewhere.
    """
    unlike = _unlike(content["experiment"], table_of(asked), (*TOLD, *WHERE))
    return ", ".join(f"{name} {a} (now {b})" for name, (a, b) in unlike.items())


def scaled(made: Experiment, printed: Experiment) -> list[str]:
    """Where a cell is made with less than is printed: `rounds 30 for 400`."""
    unlike = _unlike(table_of(made), table_of(printed), (*EVALUATED, *WHERE))
    return [f"{name.removeprefix('options.')} {a} for {b}" for name, (a, b) in unlike.items()]


def _unlike(table: Mapping[str, Any], other: Mapping[str, Any], but: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """The settings that two tables of experiments do not share, but those of some keys."""
    a, b = _settings(table), _settings(other)
    names = [name for name in b | a if name.partition(".")[0] not in but]
    pairs = {name: (_told(a.get(name)), _told(b.get(name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _told(value: Any) -> Any:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else value


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of an experiment's table by name, with defaults in place of what it does not name."""
    whole = {**vars(Experiment()), **table}
    known = options_of(METHODS[whole["method"]])
    options = {name: v for name, v in whole["options"].items() if name in known}
    whole["options"] = method_named(whole["method"], options).options
    flat = {name: v for name, v in whole.items() if not isinstance(v, Mapping)}
    flat |= {f"{name}.{k}": v for name, inner in whole.items() if isinstance(inner, Mapping) for k, v in inner.items()}
    return json.loads(json.dumps(flat, default=str))


def _title(cell: Cell) -> str:
    return f"{cell.group} {cell.row} {cell.column}".strip()


def _as_variant(printed: Printed, row: dict[str, Any]) -> dict[str, Any]:
    """`FedAvg` with the metric `pf nll` as `FedAvg-pf` with `nll`, where the table has such rows."""
    word, _, rest = row["metric"].partition(" ")
    if word not in printed.variants:
        return row
    return {**row, "row": row["row"] + printed.variants[word], "metric": rest}


def _row(name: str, cell: Cell, metric: str, path: str, files: list[dict[str, Any]]) -> dict[str, Any]:
    values = [v for v in (_at(content, path) for content in files) if v is not None]
    mean = sum(values) / len(values)
    spread = (sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
    best = [_at(content, f"oracle_best.{path.removeprefix('test.')}") for content in files]
    known = [b for b in best if b is not None] if path.startswith("test.") else []
    return {
        "table": name,
        "group": cell.group,
        "row": cell.row,
        "column": cell.column,
        "metric": metric,
        "ours": mean,
        "error": spread / len(values) ** 0.5 if len(values) > 1 else None,
        "oracle_best": sum(known) / len(known) if known else None,
        # What was published is of another set than a smaller scale may have been run on.
        "published": cell.published.get(metric) if files[0]["experiment"]["data"] == cell.experiment.data else None,
        "rounds": files[0]["rounds"],
        "seeds": sorted(content["seed"] for content in files),
        "test_draws": files[0]["test_draws"],
        "seconds": sum(content["seconds"] for content in files),
        "device": files[0]["device"],
        "commit": files[0]["commit"],
        "date": files[0]["date"],
    }


def _at(content: Mapping[str, Any], path: str) -> float | None:
    found: Any = content
    for step in path.split("."):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def files_of(printed: Printed, cell: Cell, output: Path, scale: str) -> list[dict[str, Any]]:
    """What is kept of a cell, one content a seed; of several lengths of training the longest."""
    start = file_name(printed.family, cell, printed.scales[scale](cell.experiment)).rpartition("-r")[0]
    paths = sorted((output / "cells" / scale).glob(f"{start}-r*-s*.json"))
    found = [json.loads(path.read_text()) for path in paths]
    most = max((content["experiment"]["rounds"] for content in found), default=0)
    return [content for content in found if content["experiment"]["rounds"] == most]


def curves_of(
    printed: Printed, output: Path, scale: str, cells: Sequence[Cell]
) -> dict[str, list[list[dict[str, Any]]]]:
    """The curves of some cells, by row: one list of evaluated rounds a seed."""
    made = {cell.row: [content["curve"] for content in files_of(printed, cell, output, scale)] for cell in cells}
    return {row: curves for row, curves in made.items() if curves}
