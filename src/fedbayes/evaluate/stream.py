"""A site's stream from a file: rows in order, and beside them labels and times where columns have them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedbayes.data.dataset import Dataset
from fedbayes.data.frames import BLANKS
from fedbayes.data.inputs import read_inputs
from fedbayes.data.values import canonical, is_number
from fedbayes.errors import InputError
from fedbayes.files import memory, reading, size_of
from fedbayes.training.run import Run


class Stream(NamedTuple):
    """Rows as the data are stored, targets with nan where not known (None: no column of them), and times as text."""

    x: Tensor
    y: np.ndarray | None
    times: list[str]


def read_stream(
    source: Path, run: Run, *, label: str | None = None, time: str | None = None, site: str | None = None
) -> Stream:
    """The rows of a file, as `predict` reads them, with a column of labels and one of times; all are of `site`."""
    data = run.task.clients.data
    x = read_inputs(source, data, [name for name in (label, time) if name], site)
    if label is None and time is None:
        return Stream(x, None, [])
    if source.suffix not in (".csv", ".tsv"):
        raise InputError(f"{source}: columns of labels and times are read from .csv and .tsv files")
    with reading(source, "save it as UTF-8 text with a comma between fields"):
        size_of(source, memory() // 16)
        with source.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            sign = "," if data.coding is None else max(",;\t", key=first.count)  # as tables are read
            head, *rows = [row for row in csv.reader(file, delimiter=sign) if any(field.strip() for field in row)]
    head = [name.strip() for name in head]
    columns = {}
    for name in filter(None, (label, time)):
        if head.count(name) != 1:
            raise InputError(f"{source} has no column {name!r}; its columns are {', '.join(head)[:200]}")
        columns[name] = [row[head.index(name)].strip() for row in rows]
    if len(rows) != len(x):
        raise InputError(f"{source} has {len(rows)} lines under its head, but {len(x)} rows")
    y = None if label is None else np.array([_label(text, data, source) for text in columns[label]])
    return Stream(x, y, columns[time] if time else [])


def _label(text: str, data: Dataset, source: Path) -> float:
    """A label by its name or number, or by a value of the target that the run's tables give a name; nan where blank."""
    if text in BLANKS:
        return float("nan")
    names, values = data.class_names, {} if data.coding is None else data.coding.labels or {}
    word = str(canonical(np.array([text]))[0])
    for name in (values.get(word, text), word):
        if name in names:
            return float(names.index(name))
    # Where names are numbers themselves, a number that is none of them is not a place among them.
    if is_number(text) and not any(map(is_number, names)):
        return float(text)
    there = ", ".join(names)[:200] or (f"0 to {data.classes - 1}" if data.kind == "classes" else "numbers")
    raise InputError(f"{source}: {text[:40]!r} is no label; there are {there}")
