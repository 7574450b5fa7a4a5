"""Predictions for new inputs from a run folder: files in, files out, flags for what was never seen."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor

from fedbayes.data import Coding, Dataset
from fedbayes.data.frames import SiteTable, table_of
from fedbayes.data.site_tables import coded
from fedbayes.errors import InputError
from fedbayes.evaluate.unseen import Flags, flagged
from fedbayes.files import array_in, arrays_in, is_archive, memory, reading, size_of, write_atomically
from fedbayes.runs.evaluation import prediction_arrays, save
from fedbayes.runs.folder import load
from fedbayes.runs.records import Arrays

SHOWN = 20


def predict_file(
    folder: Path,
    source: Path,
    output: Path | None = None,
    *,
    draws: int | None = None,
    device: str | None = None,
    ood: str | None = None,
) -> tuple[Arrays, Flags | None]:
    """Predict the inputs of a file with a run's posterior; `output` (.npz or .csv) takes all arrays.

    `ood` names what rows are flagged by: usual (distance and doubt), distance, entropy or epistemic.
    """
    if output is not None and output.suffix not in (".npz", ".csv"):
        raise InputError(f"output {output} must end in .npz or .csv")
    run = load(folder, device=device)
    data = run.task.clients.data
    x = read_inputs(source, data)
    p = run.predict(x, draws=draws)
    arrays = prediction_arrays(p)
    if data.class_names:
        arrays["class_names"] = np.array(data.class_names, dtype=str)
    flags = flagged(run, run.stored(x), p, ood, draws=draws) if ood else None
    if flags:
        arrays["ood"] = flags.outside
        arrays["ood_measure"] = np.array(list(flags.thresholds))
        arrays["ood_threshold"] = np.array(list(flags.thresholds.values()))
    if output is not None and output.suffix == ".csv":
        write_atomically(output, as_csv(arrays))
    elif output is not None:
        save(output, arrays)
    return arrays, flags


def read_inputs(source: Path, data: Dataset) -> Tensor:
    """Inputs of a .npy, .npz or .csv file, in the units in which the data came.

    An .npz file holds one array, or one named `x`. A row of a CSV file is one input, flattened; a first line that is
    no numbers is taken for names, by which the columns are found where the data's own have names.
    """
    if data.coding is not None and source.suffix not in (".npy", ".npz"):
        return coded(_with_names(source, data.coding), data.coding)
    x = _csv(source, data.columns) if source.suffix == ".csv" else _numpy(source)
    if x.dtype.kind not in "fiub" or not x.ndim:
        raise InputError(f"{source} must hold rows of numbers, not {x.dtype} {list(x.shape)}; write it with numpy.save")
    if source.suffix == ".csv":
        if x.shape[1] != prod(data.shape):
            raise InputError(
                f"{source} has {x.shape[1]} columns; an input of {data.name} has {prod(data.shape)} numbers"
            )
        x = x.reshape(-1, *data.shape)
    return torch.from_numpy(np.ascontiguousarray(x))


def _with_names(source: Path, coding: Coding) -> SiteTable:
    """A table whose columns are found by name; one without a head has the run's columns, in their order."""
    try:
        return table_of(source)
    except InputError as error:
        if "no line of names" not in str(error):
            raise
    return table_of(source, [column.name for column in coding.columns])


def _numpy(source: Path) -> np.ndarray:
    mend = "give .npy, .npz or .csv, such as numpy.save writes"
    with reading(source, mend):
        size_of(source)
        archive = is_archive(source)
    if not archive:
        return array_in(source, mend)
    arrays = arrays_in(source, mend)
    name = "x" if "x" in arrays else next(iter(arrays)) if len(arrays) == 1 else None
    if name is None:
        held = ", ".join(arrays)
        raise InputError(f"{source} holds {held}; name the array of inputs x, or write it alone with numpy.save")
    return arrays[name]


def _csv(source: Path, columns: Sequence[str]) -> np.ndarray:
    with reading(source, "save it as UTF-8 text with a comma between numbers"):
        size_of(source, memory() // 16)
        with source.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    if rows and not all(map(_is_number, rows[0])):
        head, rows = [name.strip() for name in rows[0]], rows[1:]
        rows = _by_name(source, head, rows, columns) if columns else rows
    if not rows:
        raise InputError(f"{source} has no rows of numbers")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]) or not all(map(_is_number, row)):
            raise InputError(f"{source}: data row {number} is not {len(rows[0])} numbers: {','.join(row)[:60]}")
    return np.array(rows, dtype=np.float64)


def _by_name(source: Path, head: list[str], rows: list[list[str]], columns: Sequence[str]) -> list[list[str]]:
    """The fields of the columns that the run was trained on, in its order; others are not looked at."""
    for name in columns:
        if head.count(name) != 1:
            lacks = "no column" if name not in head else "two columns"
            raise InputError(f"{source} has {lacks} {name!r}; the run was trained on {', '.join(columns)}")
    for number, row in enumerate(rows, 1):
        if len(row) != len(head):
            raise InputError(f"{source}: data row {number} has {len(row)} fields under {len(head)} columns")
    places = [head.index(name) for name in columns]
    return [[row[i] for i in places] for row in rows]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _measure(arrays: Arrays, name: str) -> np.ndarray:
    values = arrays[name].astype(np.float64)
    return np.asarray(values.sum(-1) if values.ndim > 1 else values)


def as_csv(arrays: Arrays) -> str:
    """One line per row: the first choice, probabilities or means, traces of the parts, entropies, the flag."""
    centre = arrays[_centre(arrays)]
    columns: dict[str, list[object]] = {"row": list(range(len(centre)))}
    if "probs" in arrays:
        names = arrays["class_names"].tolist() if "class_names" in arrays else list(map(str, range(centre.shape[1])))
        first = centre.argmax(-1)
        columns["class"] = [names[c] for c in first]
        columns["confidence"] = _plain(centre.max(-1))
        columns |= {f"p_{name}": _plain(centre[:, c]) for c, name in enumerate(names)}
    elif "survival" in arrays:
        parts = {"alive": centre, "low": arrays["low"], "high": arrays["high"]}
        for name, values in parts.items():
            columns |= {f"{name}_{t:g}": _plain(values[:, j]) for j, t in enumerate(arrays["times"].tolist())}
    else:
        columns |= {f"mean_{d}": _plain(centre[:, d]) for d in range(centre.shape[1])}
    for part in ("aleatoric", "epistemic", "entropy", "expected_entropy", "mutual_information"):
        if part in arrays:
            columns[part] = _plain(_measure(arrays, part))
    if "ood" in arrays:
        columns["ood"] = arrays["ood"].astype(int).tolist()
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values()))
    return text.getvalue()


def _centre(arrays: Arrays) -> str:
    """What the prediction itself is called."""
    return next(name for name in ("probs", "survival", "mean") if name in arrays)


def _plain(values: np.ndarray) -> list[object]:
    return [f"{v:.9g}" for v in values]


def prediction_table(arrays: Arrays) -> Table:
    """The first rows of a prediction for reading."""
    table = Table(box=box.SIMPLE_HEAD)
    classes, marked = "probs" in arrays, "ood" in arrays
    what = "class" if classes else "survival by time" if "survival" in arrays else "mean"
    titles = ["row", what, *(["probability"] if classes else []), "aleatoric", "epistemic"]
    for title in [*titles, *(["never seen"] if marked else [])]:
        table.add_column(title, justify="right")
    centre = arrays[_centre(arrays)]
    for i in range(min(len(centre), SHOWN)):
        parts = [f"{float(arrays[part][i].sum()):.4g}" for part in ("aleatoric", "epistemic")]
        if classes:
            c = int(centre[i].argmax())
            prediction = [str(arrays["class_names"][c]) if "class_names" in arrays else str(c), f"{centre[i, c]:.4f}"]
        else:
            prediction = [", ".join(f"{v:.4g}" for v in centre[i])]
        flag = [("yes" if arrays["ood"][i] else "")] if marked else []
        table.add_row(str(i), *prediction, *parts, *flag)
    if len(centre) > SHOWN:
        table.add_row("...", *[""] * (len(table.columns) - 1))
    return table
