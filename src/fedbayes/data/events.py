"""Times and events of a site's table: read, checked, and what the site says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedbayes.data.frames import SiteTable
from fedbayes.data.summary import (
    CATEGORY,
    DATE,
    ISO_DATE,
    NUMBER,
    ColumnSummary,
    Moments,
    SiteSummary,
    Told,
    numbers_of,
    summarise,
)
from fedbayes.data.values import Values, canonical, is_number, refuse_gaps
from fedbayes.errors import InputError, shown

LATEST = 1e15  # of a time: float32 holds the squares of such
SEEN = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0}
MEANT = "1 where it was seen at that time, 0 where not until then"


def survival_targets(table: SiteTable, target: str, event: str) -> np.ndarray:
    """A table's targets of survival, float32 [n, 2]: a time, and an event, 1 or 0."""
    time_at, event_at = _places(table, target, event)
    times, events = times_of(table.columns[target], time_at), events_of(table.columns[event], event_at)
    refuse_gaps(np.isnan(times), time_at)
    refuse_gaps(np.isnan(events), event_at)
    return np.stack([times, events], 1).astype(np.float32)


def refuse_without_event(table: SiteTable, event: str) -> None:
    """Refuse a table without the column of events."""
    if event not in table.columns:
        held = ", ".join(table.columns)
        raise InputError(f"site {table.site} has no column {event!r}, the event; add it there, {MEANT}; it has {held}")


def summarise_survival(
    table: SiteTable, target: str, event: str, kinds: Told, site_effects: bool = False
) -> SiteSummary:
    """The statistics of a site's training rows whose targets are times and events.

    Of times the moments, of events the counts, and nothing of both together: nobody learns whose event was seen when.
    """
    time_at, event_at = _places(table, target, event)
    times, events = times_of(table.columns[target], time_at), events_of(table.columns[event], event_at)
    rest = {name: values for name, values in table.columns.items() if name not in (target, event)}
    told = summarise(table._replace(columns=rest), None, kinds, False)
    held = times[~np.isnan(times)]
    counts = {word: int((events == number).sum()) for word, number in (("0", 0), ("1", 1))}
    return replace(
        told,
        rows=table.rows,
        target=ColumnSummary(NUMBER, table.rows, table.rows - len(held), Moments.of(held)),
        event=ColumnSummary(CATEGORY, table.rows, int(np.isnan(events).sum()), counts=counts),
        site_effects=site_effects,
    )


def times_of(values: Values, where: str) -> np.ndarray:
    """Times from 0 on as float64, nan where one is missing."""
    words = values.data.tolist() if values.data.dtype == object else []
    if values.kind == DATE or any(word is not None and ISO_DATE.fullmatch(word) for word in words):
        raise InputError(f"{where} holds dates; give the time from entry to event as a number, such as of days")
    strange = [row for row, word in enumerate(words) if word is not None and not is_number(word)]
    if strange:
        raise InputError(
            f"{where}: time {shown(words[strange[0]])} (row {strange[0] + 1}, {len(strange)} in all) is no number; "
            "mend it, name it among blanks, or name the column of times as target"
        )
    infinite = np.array([v is not None and np.isinf(float(v)) for v in values.data.tolist()], bool)
    finite = values.data.copy()
    finite[infinite] = "0" if words else 0.0
    numbers = numbers_of(values._replace(data=finite), NUMBER, where)
    for wrong, what in ((infinite | (numbers > LATEST), "is no time"), (numbers < 0, "is below 0")):
        if wrong.any():
            row = int(wrong.argmax())
            raise InputError(
                f"{where}: time {shown(str(values.data[row]))} (row {row + 1}, {int(wrong.sum())} in all) {what}; mend "
                "it, or leave the row out"
            )
    return numbers


def events_of(values: Values, where: str) -> np.ndarray:
    """1 where an event was seen, 0 where not, nan where that is missing."""
    words = [None if word is None else word.strip().casefold() for word in canonical(values.data).tolist()]
    strange = [row for row, word in enumerate(words) if word is not None and word not in SEEN]
    if strange:
        raise InputError(
            f"{where}: {shown(str(values.data[strange[0]]))} (row {strange[0] + 1}, {len(strange)} in all) is neither "
            f"0 nor 1, false nor true; write {MEANT}"
        )
    return np.array([np.nan if word is None else SEEN[word] for word in words])


def _places(table: SiteTable, target: str, event: str) -> tuple[str, str]:
    return f"site {table.site}, target {target!r}", f"site {table.site}, event {event!r}"
