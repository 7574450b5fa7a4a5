"""Columns of polars frames and Arrow tables, as lists of Python values: polars has no interchange protocol any more,
and Arrow's knows no dates."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from fedbayes.data.values import Values, texts
from fedbayes.errors import InputError

START = datetime(1970, 1, 1, tzinfo=UTC)


class Listed(NamedTuple):
    """A column: its name, its values with None where one is missing, its categories, and whether they are ordered."""

    name: str
    values: list[Any]
    categories: tuple[str, ...] = ()
    ordered: bool = False


def has_lists(frame: Any) -> bool:
    """Whether this is an Arrow table or a polars frame, by what it can be asked for."""
    arrow = hasattr(frame, "column_names") and hasattr(frame, "schema") and hasattr(frame, "column")
    return arrow or (hasattr(frame, "get_columns") and hasattr(frame, "iter_rows"))


def is_frame(table: Any) -> bool:
    """Whether this is a data frame of any library that is known."""
    return hasattr(table, "__dataframe__") or has_lists(table)


def columns_of_lists(frame: Any, blanks: tuple[str, ...]) -> dict[str, Values]:
    """The columns of such a table."""
    columns = _of_polars(frame) if hasattr(frame, "get_columns") else _of_arrow(frame)
    return {column.name: _values(column, blanks) for column in columns}


def _of_polars(frame: Any) -> Iterator[Listed]:
    for series in frame.get_columns():
        kind = type(series.dtype).__name__  # an Enum has its values in an order, a Categorical none
        words = tuple(series.dtype.categories.to_list()) if kind == "Enum" else ()
        yield Listed(series.name, series.to_list(), words or (("",) if kind == "Categorical" else ()), kind == "Enum")


def _of_arrow(table: Any) -> Iterator[Listed]:
    for name in table.column_names:
        column, kind = table.column(name), table.schema.field(name).type
        words: tuple[str, ...] = ()
        if hasattr(kind, "ordered"):
            words = tuple(str(word) for word in column.unify_dictionaries().combine_chunks().dictionary.to_pylist())
        yield Listed(name, column.to_pylist(), words, bool(words) and kind.ordered)


def _values(column: Listed, blanks: tuple[str, ...]) -> Values:
    present = [v for v in column.values if v is not None]
    if column.categories:
        words = texts([None if v is None else str(v) for v in column.values])
        return Values(words, "ordered", column.categories) if column.ordered else Values(words, "category")
    if present and all(isinstance(v, date) for v in present):
        return Values(np.array([np.nan if v is None else _days(v) for v in column.values]), "date")
    if present and all(isinstance(v, Real) or hasattr(v, "as_tuple") for v in present):  # decimals are no Real
        return Values(np.array([np.nan if v is None else float(v) for v in column.values]), "number")
    if all(isinstance(v, str) for v in present):
        stripped = [None if v is None else v.strip() for v in column.values]
        return Values(texts([None if v in blanks else v for v in stripped]))
    kinds = ", ".join(sorted({type(v).__name__ for v in present}))
    raise InputError(f"column {column.name!r} of the data frame holds {kinds}; turn it into numbers, texts or dates")


def _days(value: date) -> float:
    """Days since 1970; a moment without a zone is taken for one in UTC."""
    if not isinstance(value, datetime):
        return float(value.toordinal() - START.toordinal())
    moment = value if value.tzinfo else value.replace(tzinfo=UTC)
    return (moment - START).total_seconds() / 86400
