"""Inputs from a file, as a trained network takes them: .npy, .npz, .csv, or a table whose columns have names."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.coding import Coding
from fedbayes.data.dataset import Dataset
from fedbayes.data.fields import Fields
from fedbayes.data.frames import SiteTable, table_of
from fedbayes.data.given import native
from fedbayes.data.site_tables import coded
from fedbayes.data.values import is_number
from fedbayes.errors import InputError
from fedbayes.files import array_in, arrays_in, is_archive, memory, reading, size_of


def read_inputs(source: Path, data: Dataset, beside: Sequence[str] = (), site: str | None = None) -> Tensor:
    """Inputs of a .npy, .npz or .csv file, in the units in which the data came.

    An .npz file holds one array, or one named `x`, or one for each field of a row. A row of a CSV file is one input,
    flattened; a first line in which nothing is a number, or which has the names of the data's columns, is taken for
    names, by which the columns are found where the data's own have names; those named `beside` are not looked at. Rows
    of a table that does not say whose they are are those of `site`, where that is given.
    """
    if isinstance(data.prepare, Fields) and source.suffix == ".npz":
        arrays = arrays_in(source, "save the fields of the rows with numpy.savez")
        if {*data.prepare.names} <= {*arrays}:
            return data.prepare.pack({name: arrays[name] for name in data.prepare.names}, str(source))
    if data.coding is not None and source.suffix not in (".npy", ".npz"):
        return coded(_with_names(source, data.coding), data.coding, site)
    x = _csv(source, data.columns, beside) if source.suffix == ".csv" else _numpy(source)
    if x.dtype.kind not in "fiub" or not x.ndim:
        raise InputError(f"{source} must hold rows of numbers, not {x.dtype} {list(x.shape)}; write it with numpy.save")
    if source.suffix == ".csv":
        if x.shape[1] != prod(data.shape):
            raise InputError(
                f"{source} has {x.shape[1]} columns; an input of {data.name} has {prod(data.shape)} numbers"
            )
        x = x.reshape(-1, *data.shape)
    return torch.from_numpy(native(np.ascontiguousarray(x)))


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


def _csv(source: Path, columns: Sequence[str], beside: Sequence[str] = ()) -> np.ndarray:
    with reading(source, "save it as UTF-8 text with a comma between numbers"):
        size_of(source, memory() // 16)
        with source.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    head = [name.strip() for name in rows[0]] if rows else []
    if _is_head(head, columns, beside):
        rows = rows[1:]
        wanted = columns or ([name for name in head if name not in beside] if beside else ())
        rows = _by_name(source, head, rows, wanted) if wanted else rows
    if not rows:
        raise InputError(f"{source} has no rows of numbers")
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]) or not all(map(is_number, row)):
            raise InputError(f"{source}: data row {number} is not {len(rows[0])} numbers: {','.join(row)[:60]}")
    return np.array(rows, dtype=np.float64)


def _is_head(fields: Sequence[str], columns: Sequence[str], beside: Sequence[str]) -> bool:
    """Whether a first line holds names; numbers with a gap among them are a row."""
    if any(fields) and not any(map(is_number, fields)):
        return True
    return (bool(columns) and {*columns} <= {*fields}) or not {*beside}.isdisjoint(fields)


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
