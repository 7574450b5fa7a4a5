"""What the sites agree on: how columns become numbers, by statistics of all training rows. Kept with a run."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbayes.data.events import refuse_without_event, survival_targets
from fedbayes.data.frames import SiteTable
from fedbayes.data.preparation import Seen, TableColumns
from fedbayes.data.summary import (
    CATEGORY,
    DATE,
    KINDS,
    NUMBER,
    ORDERED,
    Told,
    numbers_of,
)
from fedbayes.data.survival import check_times
from fedbayes.data.values import Values, alike, canonical, refuse_gaps
from fedbayes.errors import InputError, shown
from fedbayes.files import reading, text_of, write_atomically

FILLS = {"median": "the federation's median", "mean": "its mean", "drop": "rows with a missing value are left out"}
SCALES = {
    "federation": "by mean and deviation of all training rows",
    "site": "by those of the row's own site, as FLamby does",
    "none": "not at all",
}
LONGEST = 1 << 26  # bytes of a file of summaries or of a coding
SITE = "site"  # the column that says whose a row is
UNSEEN = -1.0  # stored in place of a category that no training row has
YEARS = 3_000_000  # days that a date may be away from 1970 to be written as one
SHIFTED, SURE = 1.0, 5.0  # deviations that a mean is off, and standard errors, before it is reported


class Column(NamedTuple):
    """A column as all sites see it; `gaps`: some training rows lack it, which the network is told."""

    name: str
    kind: str
    values: tuple[str, ...] = ()  # of a category or an ordered column
    gaps: bool = False
    fill: float = 0.0  # in place of a missing value
    mean: float = 0.0
    deviation: float = 1.0
    missing: float = 0.0  # share of training rows that lack it


class Agreed(NamedTuple):
    """How columns and targets are to be coded, as the user says it."""

    target: str
    kind: str
    kinds: Told
    labels: Mapping[str, str] | None  # class by value; None: values are classes
    classes: tuple[str, ...]  # in their order; empty: as they are found
    missing: str
    scale: str
    event: str | None = None  # the column of events beside a target of times
    times: tuple[float, ...] = ()  # where survival curves are cut


@dataclass(frozen=True)
class Coding:
    """Columns, target and classes that all sites share."""

    target: str
    kind: str  # of the target
    columns: tuple[Column, ...]
    classes: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = None  # class by value of the target; None: values are classes
    scale: str = "federation"
    sites: tuple[str, ...] = ()
    site_scales: tuple[tuple[tuple[float, float], ...], ...] = ()  # mean and deviation by site and column
    target_scale: tuple[float, float] | None = None  # mean and deviation of numbers or times
    site_effects: bool = False  # whether the column `site` says whose a row is
    event: str | None = None  # the column of events, where the target is a time
    times: tuple[float, ...] = ()  # where survival curves are cut

    @property
    def names(self) -> tuple[str, ...]:
        """What a stored row holds: the columns, and the number of its site where sites have scales of their own."""
        return (*(column.name for column in self.columns), *(["site number"] if self.scale == "site" else []))

    @property
    def seen(self) -> tuple[str, ...]:
        """What the numbers that the network sees are called."""
        return tuple(name for column in self.columns for name in _seen_names(column))

    def preparation(self) -> TableColumns:
        """What the network sees of stored rows."""
        parts, scaled = [], self.scale != "none"
        for place, column in enumerate(self.columns):
            if column.kind == CATEGORY:
                parts += [Seen("equal", place, float(code)) for code in range(len(column.values))]
            else:
                moments = (column.mean, column.deviation) if scaled else (0.0, 1.0)
                sites = tuple(scales[place] for scales in self.site_scales) if self.scale == "site" else ()
                parts.append(Seen("number", place, column.fill, *moments, sites))
            if column.gaps:
                parts.append(Seen("missing", place))
        return TableColumns(tuple(parts), len(self.columns) if self.scale == "site" else None)

    @property
    def odd(self) -> list[str]:
        """What is odd about what was agreed on, one line for each column."""
        pairs = ((column.name, alike(column.values)) for column in self.columns if column.kind == CATEGORY)
        return [
            f"column {name!r}: {shown(pair[0])} and {shown(pair[1])} differ in case alone and are two categories; "
            "write them alike if they are one"
            for name, pair in pairs
            if pair is not None
        ]

    @property
    def agreed(self) -> Agreed:
        """How columns and targets are coded, as the user said it."""
        kinds = {column.name: column.kind for column in self.columns}
        return Agreed(
            self.target, self.kind, kinds, self.labels, self.classes, "median", self.scale, self.event, self.times
        )

    def rows(self, table: SiteTable, *, shifts: bool = True) -> tuple[np.ndarray, list[str]]:
        """A table's rows as they are stored, float64 [n, F], and what is odd about them, one line for each column."""
        columns, notes = [], []
        for column in self.columns:
            where = f"site {table.site}, column {column.name!r}"
            if column.name == SITE and self.site_effects and SITE not in table.columns:
                columns.append(np.full(table.rows, UNSEEN))
                notes.append(f"{table.site} has no column {SITE!r}; its rows are seen as those of no known site")
                continue
            if column.name not in table.columns:
                raise InputError(
                    f"site {table.site} has no column {column.name!r}; add it there (an empty field is a missing "
                    f"value), or drop it everywhere; it has {', '.join(table.columns)}"
                )
            stored, odd = _stored(column, table.columns[column.name], where, shifts and table.rows > 0)
            if shifts and table.rows > 1 and np.isnan(stored).all():
                odd = [*odd, f"all {table.rows} values are missing; what other sites have stands in their place"]
            columns.append(stored)
            notes += [f"{where}: {note}" for note in odd]
        if self.scale == "site":
            known = self.sites.index(table.site) if table.site in self.sites else -1
            columns.append(np.full(table.rows, float(known)))
        return np.stack(columns, 1) if columns else np.zeros((table.rows, 0)), notes

    def targets(self, table: SiteTable) -> np.ndarray:
        """A table's targets: class numbers, numbers in their own units, or pairs of a time and an event."""
        where = f"site {table.site}, target {self.target!r}"
        if self.target not in table.columns:
            raise InputError(f"site {table.site} has no column {self.target!r}, the target; add it there")
        if self.event is not None:
            refuse_without_event(table, self.event)
            return survival_targets(table, self.target, self.event)
        values = table.columns[self.target]
        if self.kind == "real":
            numbers = numbers_of(values, "number", where)
            refuse_gaps(np.isnan(numbers), where)
            return numbers
        known = self.labels or {name: name for name in self.classes}
        number = {name: i for i, name in enumerate(self.classes)}
        words = checked_labels(canonical(values.data), known, where)
        return np.array([number[known[word]] for word in words], np.int64)

    def target_notes(self, table: SiteTable, targets: np.ndarray) -> list[str]:
        """A line where real targets or times are far from those of all sites, and where no event was seen."""
        if self.target_scale is None:
            return []
        mean, deviation = self.target_scale
        numbers = targets if self.event is None else targets[:, 0].astype(np.float64)
        notes = _shift_notes(Column(self.target, NUMBER, mean=mean, deviation=deviation), numbers)
        notes = [f"site {table.site}, target {self.target!r}: {note}" for note in notes]
        if self.event is not None and table.rows and not targets[:, 1].any():
            notes.append(f"site {table.site}, event {self.event!r}: none was seen in {table.rows} training rows")
        return notes

    def as_table(self) -> dict[str, Any]:
        """Plain values, as a file holds them; `coding_of` is the inverse."""
        return {**asdict(self), "columns": [column._asdict() for column in self.columns]}

    def save(self, path: str | Path) -> None:
        """Write it as a JSON file; `read_coding` is the inverse."""
        write_atomically(path, json.dumps(self.as_table(), indent=1, ensure_ascii=False) + "\n")


def _seen_names(column: Column) -> list[str]:
    names = [f"{column.name}={v}" for v in column.values] if column.kind == CATEGORY else [column.name]
    return [*names, *([f"{column.name} missing"] if column.gaps else [])]


def checked_labels(words: np.ndarray, known: Collection[str], where: str) -> list[str]:
    """Labels as texts, each of which must be known, where any are; none may be missing."""
    refuse_gaps(np.array([word is None for word in words], bool), where)
    strange = [(row, word) for row, word in enumerate(words.tolist(), 1) if word not in known]
    if known and strange:
        row, word = strange[0]
        raise InputError(
            f"{where}: label {shown(word)} (row {row}, {len(strange)} in all) is none of the agreed ones, "
            f"{', '.join(known)}; mend it, or add it to labels"
        )
    return list(words)


def _stored(column: Column, values: Values, where: str, shifts: bool) -> tuple[np.ndarray, list[str]]:
    if column.kind in (CATEGORY, ORDERED):
        words, number = canonical(values.data).tolist(), {v: float(i) for i, v in enumerate(column.values)}
        strange = sorted({word for word in words if word is not None and word not in number})
        codes = np.array([math.nan if word is None else number.get(word, UNSEEN) for word in words])
        notes = []
        if strange:
            count, few = int((codes == UNSEEN).sum()), ", ".join(map(shown, strange[:3]))
            more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
            what = "coded as none of those known" if column.kind == CATEGORY else "taken for missing"
            notes.append(f"{few}{more} in {count} of {len(codes)} rows is in no training row; {what}")
            codes = codes if column.kind == CATEGORY else np.where(codes == UNSEEN, math.nan, codes)
        return codes, [*notes, *_gap_notes(column, codes)]
    numbers = numbers_of(values, column.kind, where)
    return numbers, [*(_shift_notes(column, numbers) if shifts else ()), *_gap_notes(column, numbers)]


def _shift_notes(column: Column, numbers: np.ndarray) -> list[str]:
    """A line where a column's mean is far from the training rows', as when it comes in another unit."""
    held = numbers[~np.isnan(numbers)]
    if not len(held):
        return []
    shift = (float(held.mean()) - column.mean) / column.deviation
    if abs(shift) < SHIFTED or abs(shift) * math.sqrt(len(held)) < SURE:
        return []
    own, usual = (_figure(column, value) for value in (float(held.mean()), column.mean))
    asks = "" if column.kind == DATE else "; is it the same unit?"
    return [f"the mean of {len(held)} rows is {own}, in training {usual} ({shift:+.1f} deviations){asks}"]


def _figure(column: Column, value: float) -> str:
    """A number of a column as people read it; a date as a day."""
    days = column.kind == DATE and abs(value) < YEARS
    return str(np.datetime64("1970-01-01", "D") + round(value)) if days else f"{value:.4g}"


def _gap_notes(column: Column, codes: np.ndarray) -> list[str]:
    gone = int(np.isnan(codes).sum())
    if not gone or column.gaps:
        return []
    fill = "is coded as none" if column.kind == CATEGORY else f"is taken for {_figure(column, column.fill)}"
    return [f"missing in {gone} of {len(codes)} rows, and in no training row; it {fill}"]


def read_coding(path: str | Path) -> Coding:
    """A coding from the file that `save` wrote."""
    with reading(path, "put it back from a copy, or have the sites agree anew", "is no whole coding"):
        return coding_of(json.loads(text_of(path, LONGEST)))


def coding_of(table: Mapping[str, Any]) -> Coding:
    """A coding from plain values, each checked."""
    columns = []
    for row in table["columns"]:
        column = Column(**{**row, "values": tuple(map(str, row["values"]))})
        numbers = [float(v) for v in (column.fill, column.mean, column.deviation, column.missing)]
        if (
            not isinstance(column.name, str)
            or column.kind not in KINDS
            or not all(map(math.isfinite, numbers))
            or not column.deviation > 0
        ):
            raise ValueError(f"column {shown(column.name)} is {shown(row)}")
        columns.append(column)
    event, times = table.get("event"), tuple(table.get("times", ()))
    if (table["kind"] == "survival") != (event is not None):
        raise ValueError(f"kind is {shown(table['kind'])}, event {shown(event)}")
    if table["kind"] not in ("classes", "real", "survival") or table["scale"] not in SCALES:
        raise ValueError(f"kind is {shown(table['kind'])}, scale {shown(table['scale'])}")
    scales = tuple(tuple((float(m), float(d)) for m, d in site) for site in table["site_scales"])
    if scales and (len(scales) != len(table["sites"]) or any(len(site) != len(columns) for site in scales)):
        raise ValueError("the scales of sites are not one for each column")
    labels, target_scale = table["labels"], table["target_scale"]
    return Coding(
        str(table["target"]),
        table["kind"],
        tuple(columns),
        tuple(map(str, table["classes"])),
        None if labels is None else {str(k): str(v) for k, v in labels.items()},
        table["scale"],
        tuple(map(str, table["sites"])),
        scales,
        None if target_scale is None else (float(target_scale[0]), float(target_scale[1])),
        table.get("site_effects") is True,
        None if event is None else str(event),
        () if event is None else check_times(times),
    )
