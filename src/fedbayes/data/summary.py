"""What a site says of its table: statistics of its training rows that add up over sites. No row leaves it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedbayes.data.frames import SiteTable
from fedbayes.data.values import Values, canonical, is_number
from fedbayes.errors import InputError, shown

NUMBER, DATE, ORDERED, CATEGORY, EMPTY = "number", "date", "ordered", "category", "empty"
KINDS = {
    NUMBER: "a measurement, standardised",
    DATE: "a day (2024-05-31), as a number of days",
    ORDERED: "one of some values in their order, as their rank",
    CATEGORY: "one of some values, a column for each",
}
GROWTH = math.log(1.01)  # widths of the bins by which medians are found: one in a hundred
LARGEST = 1e100  # of a number: the squares of larger ones, in a sum, are none that float64 holds
MEASURED = 10  # different numbers at least in a column of measurements: fewer may be codes, beside which words stand
MOST_VALUES = 100  # of a category: more are names or numbers of patients
ISO_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ][\d:.]+)?(Z|[+-]\d\d:?\d\d)?")
OTHER_DATE = re.compile(r"\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{4}[./]\d{1,2}[./]\d{1,2}")

COMMA = re.compile(r"[+-]?\d+,\d+")  # a number that is written with a decimal comma


AS_CATEGORY = "drop the column, or say by kinds that it is a category"


class Moments(NamedTuple):
    """Number of rows, mean, and sum of squares about the mean; with the range."""

    rows: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: np.ndarray) -> Moments:
        if not len(values):
            return cls()
        mean = float(values.mean())
        return cls(len(values), mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))

    def __add__(self, other: Any) -> Moments:
        """Those of both sets of rows (Chan, Golub & LeVeque, 1979): no digits are lost far from zero."""
        rows = self.rows + other.rows
        if not rows:
            return self
        shift = other.mean - self.mean
        mean = self.mean + shift * other.rows / rows
        squares = self.squares + other.squares + shift**2 * self.rows * other.rows / rows
        return Moments(rows, mean, squares, min(self.low, other.low), max(self.high, other.high))

    @property
    def deviation(self) -> float:
        """The standard deviation; 1 for a column that is constant to its precision."""
        deviation = math.sqrt(self.squares / self.rows) if self.rows else 0.0
        return deviation if deviation > 1e-12 * abs(self.mean) else 1.0


Bins = dict[str, tuple[int, float]]  # count and sum of the values of a bin, by its number


def bins_of(values: np.ndarray) -> Bins:
    """Counts and sums of values in bins of one per cent (Masson et al., 2019): they add, and give any quantile."""
    signs = np.sign(values)
    sizes = np.floor(np.log(np.where(values == 0, 1.0, np.abs(values))) / GROWTH)
    keys, places = np.unique(np.stack([signs, np.where(values == 0, 0, sizes)]), axis=1, return_inverse=True)
    places = places.ravel()
    counts, sums = np.bincount(places), np.bincount(places, weights=values)
    return {f"{int(s)}:{int(n)}": (int(c), float(t)) for (s, n), c, t in zip(keys.T.tolist(), counts, sums)}


def added(one: Bins, two: Bins) -> Bins:
    """The bins of both sets of values."""
    empty = (0, 0.0)
    keys = {**one, **two}
    return {k: (one.get(k, empty)[0] + two.get(k, empty)[0], one.get(k, empty)[1] + two.get(k, empty)[1]) for k in keys}


def median_of(bins: Bins) -> float:
    """The median, off by at most one per cent; exact where a bin holds one value many times."""
    rows = sorted((total / count, count) for count, total in bins.values())
    ends = np.cumsum([count for _, count in rows])
    n = int(ends[-1])
    middle = [rows[int(np.searchsorted(ends, place, side="right"))][0] for place in ((n - 1) // 2, n // 2)]
    return sum(middle) / 2


@dataclass(frozen=True)
class ColumnSummary:
    """A column at one site, or at several together."""

    kind: str
    rows: int
    missing: int = 0
    moments: Moments = field(default_factory=Moments)
    bins: Bins = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    order: tuple[str, ...] = ()

    def __add__(self, other: ColumnSummary) -> ColumnSummary:
        kind = other.kind if self.kind == EMPTY else self.kind
        values = {**self.counts, **other.counts}
        return ColumnSummary(
            kind,
            self.rows + other.rows,
            self.missing + other.missing,
            self.moments + other.moments,
            added(self.bins, other.bins),
            {v: self.counts.get(v, 0) + other.counts.get(v, 0) for v in values},
            self.order or other.order,
        )


@dataclass(frozen=True)
class SiteSummary:
    """All that is agreed on of one site's table: its training rows, its columns, its targets."""

    site: str
    rows: int
    columns: Mapping[str, ColumnSummary]
    target: ColumnSummary
    site_effects: bool = False  # whether the column `site` was made of the site's name
    event: ColumnSummary | None = None  # of the column beside a target of times

    def as_table(self) -> dict[str, Any]:
        """Plain values, as a file holds them; `from_table` is the inverse."""
        return asdict(self)

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> SiteSummary:
        columns = {str(name): _column_of(row) for name, row in table["columns"].items()}
        effects = table.get("site_effects") is True
        event = None if table.get("event") is None else _column_of(table["event"])
        return cls(str(table["site"]), int(table["rows"]), columns, _column_of(table["target"]), effects, event)


def _column_of(row: Mapping[str, Any]) -> ColumnSummary:
    if row["kind"] not in (*KINDS, EMPTY):
        raise ValueError(f"a column is of kind {shown(row['kind'])}")
    count, *rest = row["moments"]
    return ColumnSummary(
        row["kind"],
        int(row["rows"]),
        int(row["missing"]),
        Moments(int(count), *map(float, rest)),
        {str(k): (int(c), float(s)) for k, (c, s) in row["bins"].items()},
        {str(k): int(n) for k, n in row["counts"].items()},
        tuple(map(str, row["order"])),
    )


Told = Mapping[str, str | Sequence[str]]  # kinds that the user names; a list is an ordered column's values


def summarise(
    table: SiteTable, target: str | None, kinds: Told, classes: bool, site_effects: bool = False
) -> SiteSummary:
    """The statistics of a site's training rows; `classes`: whether targets are counted or measured."""
    columns = {
        name: column_summary(v, kinds.get(name), f"site {table.site}, column {name!r}")
        for name, v in table.columns.items()
        if name != target
    }
    if target is None:
        return SiteSummary(table.site, table.rows, columns, ColumnSummary(EMPTY, table.rows))
    where = f"site {table.site}, target {target!r}"
    told = CATEGORY if classes else NUMBER
    targets = column_summary(table.columns[target], told, where)
    return SiteSummary(table.site, table.rows, columns, targets, site_effects)


def column_summary(values: Values, told: str | Sequence[str] | None, where: str) -> ColumnSummary:
    """A column's kind, by what the user tells, its source says, or its values look like; and its statistics."""
    rows = len(values.data)
    kind, order = _kind(values, told, where)
    if kind in (CATEGORY, ORDERED):
        words = [word for word in canonical(values.data).tolist() if word is not None]
        counts = dict(sorted(Counter(words).items()))
        if strange := [word for word in counts if kind == ORDERED and word not in order]:
            raise InputError(
                f"{where}: {shown(strange[0])} is none of the ordered values {', '.join(order)}; add it there"
            )
        return ColumnSummary(kind, rows, rows - len(words), counts=counts, order=order)
    numbers = numbers_of(values, kind, where)
    held = numbers[~np.isnan(numbers)]
    return ColumnSummary(kind, rows, rows - len(held), Moments.of(held), bins_of(held) if len(held) else {})


def _kind(values: Values, told: str | Sequence[str] | None, where: str) -> tuple[str, tuple[str, ...]]:
    if isinstance(told, list | tuple):
        return ORDERED, tuple(canonical(np.array(told, object)).tolist())
    if told is not None:
        if told not in KINDS or told == ORDERED:
            mend = f"{', '.join(k for k in KINDS if k != ORDERED)}, or the list of its values in their order"
            raise InputError(f"kinds: {where.rpartition('column ')[2]} is told to be {shown(told)}; give {mend}")
        return str(told), ()
    if values.kind:
        return values.kind, values.order
    words = [word for word in values.data.tolist() if word is not None]
    if not words:
        return EMPTY, ()
    if all(_number(word) is not None for word in words):
        return NUMBER, ()
    if all(ISO_DATE.fullmatch(word) for word in words):
        return DATE, ()
    if like := next((word for word in words if OTHER_DATE.fullmatch(word)), None):
        raise InputError(
            f"{where}: {shown(like)} looks like a date; write dates as 2024-05-31, drop the column, or say by "
            "kinds that it is a category"
        )
    refuse_commas(words, where, AS_CATEGORY)
    refuse_words_among_numbers(values.data.tolist(), where, f"name it among blanks, {AS_CATEGORY}")
    return CATEGORY, ()


def refuse_commas(words: Iterable[str], where: str, otherwise: str) -> None:
    """Refuse numbers with a decimal comma, which would be one word each."""
    if like := next((word for word in words if COMMA.fullmatch(word)), None):
        raise InputError(
            f"{where}: {shown(like)} looks like a number with a decimal comma; write {like.replace(',', '.')[:20]}, "
            f"{otherwise}"
        )


def refuse_words_among_numbers(words: Sequence[str | None], where: str, otherwise: str) -> None:
    """Refuse measurements with a word such as <0.5 between them, each of which would be a category of its own."""
    held = [word for word in words if word is not None]
    numbers = [word for word in held if _number(word) is not None]
    if 2 * len(numbers) > len(held) > len(numbers) and len(set(numbers)) >= MEASURED:
        odd = next(word for word in held if _number(word) is None)
        raise InputError(
            f"{where}: {shown(odd)} (row {list(words).index(odd) + 1}) is no number, as {len(numbers)} of its "
            f"{len(held)} values are; mend it, {otherwise}"
        )


def _number(word: str) -> float | None:
    value = float(word) if is_number(word) else math.nan
    return value if math.isfinite(value) else None


def numbers_of(values: Values, kind: str, where: str) -> np.ndarray:
    """A column of numbers or dates as float64, nan where one is missing; a date is in days since 1970."""
    if kind == EMPTY:
        return np.full(len(values.data), np.nan)
    if values.data.dtype != object:
        if np.isinf(values.data).any():
            row = int(np.isinf(values.data).argmax()) + 1
            raise InputError(f"{where}: the value of row {row} is infinite; mend it, or leave it empty")
        return _bounded(values.data, where)
    read = _days if kind == DATE else _number
    numbers = np.full(len(values.data), np.nan)
    for row, word in enumerate(values.data.tolist()):
        if word is None:
            continue
        number = read(word)
        if number is None:
            what = "a date, such as 2024-05-31" if kind == DATE else "a number"
            raise InputError(
                f"{where}: {shown(word)} (row {row + 1}) is not {what}; mend it, name it among blanks, or say by kinds "
                "what the column is"
            )
        numbers[row] = number
    return _bounded(numbers, where)


def _bounded(numbers: np.ndarray, where: str) -> np.ndarray:
    huge = numbers[np.abs(numbers) > LARGEST]
    if len(huge):
        raise InputError(
            f"{where}: {huge[0]:g} is no measurement, numbers may have up to {LARGEST:g}; mend it, or leave it empty"
        )
    return numbers


def _days(word: str) -> float | None:
    if not ISO_DATE.fullmatch(word):
        return None
    try:
        day = "-".join(part.zfill(2) for part in word[:10].split("T")[0].split(" ")[0].split("-"))
        return float(np.datetime64(day, "D").astype(np.int64))
    except ValueError:
        return None
