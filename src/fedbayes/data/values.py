"""A column of a table: numbers, or texts, with what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbayes.errors import InputError

WHOLE = re.compile(r"([+-]?)(\d+)(?:\.0*)?", re.ASCII)  # a whole number as tables have it, with or without a point


class Values(NamedTuple):
    """A column: float64 with nan where a value is missing, or texts with None; `kind` where its source says it.

    `kind` is "number", "date" (days since 1970), "ordered" (with `order`), "category", or "" for texts that may be
    anything.
    """

    data: np.ndarray
    kind: str = ""
    order: tuple[str, ...] = ()


def texts(words: Sequence[str | None]) -> np.ndarray:
    column = np.empty(len(words), object)
    column[:] = words
    return column


def canonical(values: np.ndarray) -> np.ndarray:
    """Values as texts by which categories are told apart: 1, 1.0 and "1.0" are all "1"; None where one is missing.

    Codes such as 1E2 and 1_0 are texts of their own, whatever Python takes them for.
    """
    return texts([_word(v) for v in values.tolist()])


def alike(words: Iterable[str]) -> tuple[str, str] | None:
    """Two of the words that differ in case alone, if any do."""
    first: dict[str, str] = {}
    for word in words:
        before = first.setdefault(word.strip().casefold(), word)
        if before != word:
            return before, word
    return None


def _word(value: Any) -> str | None:
    if value is None or value != value:
        return None
    if isinstance(value, str):
        if not (whole := WHOLE.fullmatch(value.strip())):
            return value
        digits = whole[2].lstrip("0")
        return f"{'-' if whole[1] == '-' else ''}{digits}" if digits else "0"
    try:
        number = float(value)
        return str(int(number)) if number.is_integer() else str(value)
    except (ValueError, OverflowError):
        return str(value)


def is_number(text: str) -> bool:
    """Whether a text is a number, as tables have them; 1_000 is one in Python alone."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def refuse_gaps(gone: np.ndarray, where: str) -> None:
    """Refuse targets that are missing."""
    if gone.any() and gone.all():
        raise InputError(f"{where} has no value in any of its {len(gone)} rows; leave the site out, or fill them in")
    if gone.any():
        row = int(gone.argmax()) + 1
        raise InputError(f"{where} is missing in {int(gone.sum())} of {len(gone)} rows (first: row {row}); drop those")
