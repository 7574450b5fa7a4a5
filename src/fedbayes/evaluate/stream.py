"""A site's stream from a file: rows in order, and beside them labels and times where columns have them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedbayes.data.inputs import read_inputs
from fedbayes.errors import InputError
from fedbayes.files import memory, reading, size_of
from fedbayes.training.run import Run


class Stream(NamedTuple):
    """Rows as the data are stored, targets with nan where not known (None: no column of them), and times as text."""

    x: Tensor
    y: np.ndarray | None
    times: list[str]


def read_stream(source: Path, run: Run, *, label: str | None = None, time: str | None = None) -> Stream:
    """The rows of a file, as `predict` reads them, with a column of labels and one of times."""
    data = run.task.clients.data
    x = read_inputs(source, data, [name for name in (label, time) if name])
    if label is None and time is None:
        return Stream(x, None, [])
    if source.suffix != ".csv":
        raise InputError(f"{source}: columns of labels and times are read from .csv files")
    with reading(source, "save it as UTF-8 text with a comma between fields"):
        size_of(source, memory() // 16)
        with source.open(newline="", encoding="utf-8-sig") as file:
            head, *rows = [row for row in csv.reader(file) if row]
    columns = {}
    for name in filter(None, (label, time)):
        if head.count(name) != 1:
            raise InputError(f"{source} has no column {name!r}; its columns are {', '.join(head)[:200]}")
        columns[name] = [row[head.index(name)].strip() for row in rows]
    if len(rows) != len(x):
        raise InputError(f"{source} has {len(rows)} lines under its head, but {len(x)} rows")
    y = None if label is None else np.array([_label(text, data.class_names, source) for text in columns[label]])
    return Stream(x, y, columns[time] if time else [])


def _label(text: str, names: tuple[str, ...], source: Path) -> float:
    """A label by its name or number; nan where it is empty."""
    if not text:
        return float("nan")
    if text in names:
        return float(names.index(text))
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{source}: {text[:40]!r} is no label; there are {', '.join(names)[:200]}") from error
