"""How tables of sites are read, and what is checked of them before anything is fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbayes.data.coding import SITE, Agreed, checked_labels
from fedbayes.data.events import refuse_without_event, survival_targets
from fedbayes.data.frames import BLANKS, SiteTable, site_tables
from fedbayes.data.summary import AS_CATEGORY, CATEGORY, DATE, NUMBER, numbers_of, refuse_words_among_numbers
from fedbayes.data.values import Values, canonical, refuse_gaps, texts
from fedbayes.errors import InputError


class Reading(NamedTuple):
    """How tables are read: what is where in them, and what is left out; without a target they are only looked at."""

    target: str | None
    site: str | None = None
    columns: Sequence[str] = ()
    drop: Sequence[str] = ()
    blanks: Sequence[str] = BLANKS
    missing: str = "median"
    site_effects: bool = False
    event: str | None = None

    def tables(self, sites: Any) -> list[SiteTable]:
        """The tables of all sites, with the target and at least one column beside it."""
        tables = site_tables(sites, site=self.site, columns=self.columns, drop=self.drop, blanks=self.blanks)
        for table in tables:
            held = ", ".join(table.columns)
            if self.target is not None and self.target not in table.columns:
                raise InputError(f"site {table.site} has no column {self.target!r}, the target; it has {held}")
            if self.event is not None:
                refuse_without_event(table, self.event)
            if len(table.columns) < (2 if self.event is None else 3):
                both = "" if self.event is None else f" and the event {self.event!r}"
                raise InputError(f"site {table.site} has no column but the target {self.target!r}{both}; add one")
        tables = [_whole_rows(table) for table in tables] if self.missing == "drop" else tables
        return [_with_site(table) for table in tables] if self.site_effects else tables


def _with_site(table: SiteTable) -> SiteTable:
    if SITE in table.columns:
        raise InputError(
            f"site {table.site} has a column {SITE!r} already; drop or rename it, or leave out site_effects"
        )
    return table._replace(columns={**table.columns, SITE: Values(texts([table.site] * table.rows), CATEGORY)})


def _whole_rows(table: SiteTable) -> SiteTable:
    """The rows that lack nothing."""
    gaps = {name: np.array([v is None or v != v for v in c.data.tolist()]) for name, c in table.columns.items()}
    gone = np.any(list(gaps.values()), axis=0)
    if gone.all():
        most = max(gaps, key=lambda name: int(gaps[name].sum()))
        raise InputError(
            f"site {table.site} has no row without a missing value (column {most!r}: {int(gaps[most].sum())} of "
            f"{len(gone)}); drop = [{most!r}], or missing = 'median'"
        )
    return table.pick(~gone)


def check_values(table: SiteTable, how: Agreed) -> None:
    """Refuse labels that are missing or not agreed on, and values that are not what their column is told to be."""
    target, where = table.columns[how.target], f"site {table.site}, target {how.target!r}"
    if how.event is not None:
        survival_targets(table, how.target, how.event)
    elif how.kind == "classes":
        checked_labels(canonical(target.data), how.labels or how.classes, where)
    else:
        refuse_gaps(np.isnan(numbers_of(target, NUMBER, where)), where)
    check_columns(table, how)


def check_columns(table: SiteTable, how: Agreed) -> None:
    """Refuse values that are not what their column is told to be, and measurements with words between them."""
    for name, kind in how.kinds.items():
        if kind in (NUMBER, DATE) and name in table.columns and name != how.event:
            numbers_of(table.columns[name], str(kind), f"site {table.site}, column {name!r}")
    for name, values in table.columns.items():
        if name not in (how.target, how.event, *how.kinds) and values.data.dtype == object and not values.kind:
            where = f"site {table.site}, column {name!r}"
            refuse_words_among_numbers(values.data.tolist(), where, f"name it among blanks, {AS_CATEGORY}")
