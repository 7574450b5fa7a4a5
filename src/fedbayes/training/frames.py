"""A run's journal, scores and predictions as tables: columns by name, and data frames where a library for them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedbayes.errors import InputError, unknown
from fedbayes.training.flat import flat
from fedbayes.training.personal import in_units
from fedbayes.training.tested import Trained, by_site, predictions

TABLES = ("journal", "scores", "predictions")
LIBRARIES = ("pandas", "polars")

Columns = dict[str, list[Any]]


def columns_of(run: Trained, journal: Sequence[Mapping[str, Any]], what: str) -> Columns:
    """The columns of one of the tables."""
    if what not in TABLES:
        raise unknown("table", what, TABLES)
    if what == "journal":
        rows = [flat(record) for record in journal]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}
    return _scores(run) if what == "scores" else _predictions(run)


def frame_of(columns: Columns) -> Any:
    """Columns as a data frame of pandas, or of polars where that alone is installed."""
    for name in LIBRARIES:
        try:
            return import_module(name).DataFrame(columns)
        except ImportError:
            continue
    raise InputError("to_frame needs pandas or polars, and neither is installed; run.to_columns gives the same columns")


def _scores(run: Trained) -> Columns:
    """One row per site and score, and the same of all rows together."""
    table = by_site(run)
    rows = [(site, n, f.value, f.error) for site in table.sites for n, f in table[site].items()]
    rows += [("all", name, figure.value, figure.error) for name, figure in table.all.items()]
    return {name: [row[i] for row in rows] for i, name in enumerate(("site", "score", "value", "error"))}


def _predictions(run: Trained) -> Columns:
    """One row per test row: its target, what was predicted of it, and the parts of the uncertainty."""
    p, at, _ = predictions(run)
    data = run.task.clients.data
    if p is None:
        raise InputError(f"{data.name} has no test rows to predict: give a test share with the data")
    y = in_units(run.task, data.test_y[at].cpu())
    columns: Columns = {"row": at.tolist()}
    if p.kind == "classes":
        names = data.class_names or tuple(map(str, range(data.classes)))
        columns["target"] = [names[c] for c in y.tolist()]
        columns["predicted"] = [names[c] for c in p.probs.argmax(-1).tolist()]
    elif p.kind == "survival":
        names = tuple(f"{t:g}" for t in p.times)
        columns |= {"time": y[:, 0].tolist(), "event": y[:, 1].tolist()}
    else:
        names = tuple(map(str, range(y.shape[1])))
        columns |= {f"target_{name}": y[:, j].tolist() for j, name in enumerate(names)}
    start = {"real": "mean", "survival": "alive"}.get(p.kind, "p")
    columns |= {f"{start}_{name}": p.mean[:, j].tolist() for j, name in enumerate(names)}
    columns |= {part: getattr(p, part).sum(-1).tolist() for part in ("aleatoric", "epistemic")}
    if p.kind in ("classes", "labels"):
        columns |= {part: getattr(p, part).tolist() for part in ("entropy", "mutual_information")}
    return columns
