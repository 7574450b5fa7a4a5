"""A table per site as clients: read, split, agreed on and coded, with one clear line where a table does not fit."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.data.agreement import Labels, agree, given_times
from fedbayes.data.coding import FILLS, SCALES, SITE, Agreed, Coding, read_coding
from fedbayes.data.dataset import Clients, Dataset, place_of
from fedbayes.data.events import summarise_survival, survival_targets
from fedbayes.data.frames import BLANKS, SiteTable, table_of
from fedbayes.data.partition import natural
from fedbayes.data.preparation import Scale
from fedbayes.data.ragged import Ragged
from fedbayes.data.reading import Reading, check_columns, check_values
from fedbayes.data.summary import (
    CATEGORY,
    SiteSummary,
    Told,
    summarise,
)
from fedbayes.data.survival import cut_times
from fedbayes.data.targets import checked_target, told_of
from fedbayes.data.values import Values, canonical, texts
from fedbayes.errors import InputError, shown, unknown

THIN = {"refuse": "an error", "keep": "trained with all the same", "drop": "left out, with a warning"}


def from_tables(
    sites: Any,
    target: str | None = None,
    *,
    site: str | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    kinds: Told | None = None,
    labels: Labels | None = None,
    kind: str | None = None,
    event: str | None = None,
    times: Sequence[float] = (),
    missing: str = "median",
    blanks: Sequence[str] = BLANKS,
    scale: str = "federation",
    test: Any = 0.2,
    seed: int | None = 0,
    thin: str = "refuse",
    site_effects: bool = False,
    left_out: int | str | None = None,
    coding: Coding | str | Path | None = None,
    name: str = "tables",
) -> Clients:
    """A table per site as clients, ready to train: columns coded, missing values filled, all by training rows alone.

    `sites` is a folder or a pattern of CSV or Parquet files, one per site; a list of files; a mapping from names of
    sites to files or data frames; or one table whose column `site` says whose a row is. `target` is the column to
    predict. Rows are stored in their own units, and the model prepares them: all that predicts takes such tables.

    - `columns`: the head of files that have none; `drop`: columns to leave out; `blanks`: texts that are missing values
    - `kinds`: what a column is where its values do not tell: "number", "category", "date", or a list of its values in
      their order
    - `labels`: the classes, as a list, or as a mapping from classes to values of the target
    - `kind`: "classes" or "real", where the target's values may be either
    - `event`: the column that says whether the event was seen at the time that is the target (1), or not until then (0)
    - `times`: where survival curves are cut; by default ten with equally many of the training rows' events between them
    - `missing`: "median", "mean" (in place of a missing value, with a flag beside it) or "drop" (such rows)
    - `scale`: "federation", "site" (each site by its own rows) or "none"
    - `test`: the share of each site's rows that is kept for the test, drawn by `seed` (by class; None: evenly spread),
      or tables of their own, named as the sites
    - `site_effects`: whether a row's site is a column too, `site`: for predictions at the sites that trained
    - `left_out`: a site, by name or number, whose rows nothing is fitted on
    - `thin`: a site with one row or one class: "refuse", "keep" or "drop"
    - `coding`: what sites have agreed on before (`agree_on`, or a run's coding.json), in place of all that is fitted
    """
    for what, value, choices in (("missing", missing, FILLS), ("scale", scale, SCALES), ("thin", thin, THIN)):
        if value not in choices:
            raise unknown(what, value, choices)
    coding = read_coding(coding) if isinstance(coding, str | Path) else coding
    target, event = (target, event) if coding is None else (coding.target, coding.event)
    target = checked_target(target, event, kind if coding is None else None)
    cuts = given_times(times, event, labels) if coding is None else coding.times
    effects = site_effects if coding is None else coding.site_effects
    read = Reading(target, site, columns, drop, blanks, missing, effects, event)
    tables = read.tables(sites)
    how = told_of(tables, read, kinds, labels, kind, scale) if coding is None else coding.agreed
    for table in tables:  # before rows are drawn, so that a row's number is that of the table
        check_values(table, how)
    tests = None if isinstance(test, int | float) else read.tables(test)
    parts = _apart(tables, tests) if tests is not None else _split(tables, how, test, seed)
    parts = [pair for pair in parts if not _is_thin(pair[0], how, thin)]
    if not parts:
        raise InputError("no site is left: each has one row or one class; give thin='keep'")
    if coding is None:
        names = [train.site for train, _ in parts]
        gone = None if left_out is None else place_of(left_out, names, len(names))
        fitted = [train for k, (train, _) in enumerate(parts) if k != gone]
        if not fitted:
            raise InputError(f"{names[0]} is the only site; without it nothing is left to fit on: add a site")
        coding = agree([_summary(train, how, effects) for train in fitted], _with_times(how, fitted, cuts))
        _warn(coding.odd)
    return _clients(parts, coding, name)


def summary_of(
    sites: Any,
    target: str | None,
    *,
    kinds: Told | None = None,
    labels: Labels | None = None,
    kind: str | None = None,
    test: float = 0.2,
    seed: int | None = 0,
    **reading: Any,
) -> list[SiteSummary]:
    """What each site tells the others of its table: statistics of its training rows. Options as in `from_tables`.

    Without a target: of all its rows and columns.
    """
    read = Reading(target, **reading)
    if target is not None or read.event is not None:
        checked_target(target, read.event, kind)
        given_times((), read.event, labels)
    tables = read.tables(sites)
    if target is None:
        return [summarise(table, None, kinds or {}, False) for table in tables]
    how = told_of(tables, read, kinds, labels, kind, "federation")
    for table in tables:
        check_columns(table, how)
    parts = _split(tables, how, test, seed)
    return [_summary(train, how, read.site_effects) for train, _ in parts]


def _summary(table: SiteTable, how: Agreed, effects: bool) -> SiteSummary:
    if how.event is not None:
        return summarise_survival(table, how.target, how.event, how.kinds, effects)
    return summarise(table, how.target, how.kinds, how.kind == "classes", effects)


def _with_times(how: Agreed, tables: Sequence[SiteTable], times: tuple[float, ...]) -> Agreed:
    """With the times at which survival curves are cut: those that were given, or by the events of training rows."""
    if how.event is None or times:
        return how._replace(times=times)
    targets = [survival_targets(table, how.target, how.event) for table in tables]
    return how._replace(times=cut_times(torch.from_numpy(np.concatenate(targets))))


def blank(coding: Coding | str | Path, name: str = "tables") -> Dataset:
    """A data set of one typical row, for a machine that has the coding and no rows: a server, or a run without data."""
    coding = read_coding(coding) if isinstance(coding, str | Path) else coding
    row = [0.0 if column.values else column.fill for column in coding.columns]
    x = np.array([[*row, *([-1.0] if coding.scale == "site" else [])]])
    y = np.zeros(1, np.int64 if coding.kind == "classes" else np.float64)
    if coding.kind == "survival":
        y = np.array([[coding.times[-1], 0.0]], np.float32)
    return _dataset(x, y, x[:0], y[:0], coding, name)


def without_rows(coding: Coding) -> Clients:
    """Clients in name only: one typical row stands for the rows of each."""
    sites, row = len(coding.sites), torch.zeros(1, dtype=torch.int64)
    none = Ragged.of_lists([row[:0]] * sites)
    return Clients(blank(coding), Ragged.of_lists([row] * sites), none, none.flat, coding.sites)


def coded(table: Any, coding: Coding, site: str | None = None) -> Tensor:
    """Rows of a file, a data frame or a mapping of columns as they are stored, with a warning for what is odd.

    Where sites have effects or scales of their own, a column `site` says whose a row is; without one all are of `site`.
    """
    whole = table if isinstance(table, SiteTable) else table_of(table)
    by_site = coding.site_effects or coding.scale == "site"
    if by_site and site in coding.sites and SITE not in whole.columns:
        whole = whole._replace(columns={**whole.columns, SITE: Values(texts([site] * whole.rows), CATEGORY)})
    if coding.scale != "site" or SITE not in whole.columns:
        x, notes = coding.rows(whole)
        if coding.scale == "site" and whole.site not in coding.sites and not coding.site_effects:
            notes.append(f"{whole.site} has no column {SITE!r}; its rows are scaled as those of no known site")
        _warn(notes)
        return torch.from_numpy(x)
    owners = canonical(whole.columns[SITE].data)
    if strange := sorted({str(owner) for owner in owners} - {*coding.sites}):
        known = ", ".join(coding.sites[:8])
        _warn([f"{whole.site}: no site {shown(strange[0])} trained, its rows have the federation's scale; {known} did"])
    x = np.zeros((whole.rows, len(coding.names)))
    for owner in sorted(set(owners.tolist()), key=str):
        x[owners == owner], notes = coding.rows(whole.pick(owners == owner)._replace(site=str(owner)))
        _warn(notes)
    return torch.from_numpy(x)


def _apart(tables: Sequence[SiteTable], tests: Sequence[SiteTable]) -> list[tuple[SiteTable, SiteTable]]:
    """Each site's table and its test rows, which came in tables of their own."""
    given = {table.site: table for table in tests}
    names = [table.site for table in tables]
    for site in given:
        if site not in names:
            raise unknown("site of the test tables", site, names)
    return [(table, given.get(table.site, table.pick(np.zeros(0, int)))) for table in tables]


def _split(
    tables: Sequence[SiteTable], how: Agreed, share: float, seed: int | None
) -> list[tuple[SiteTable, SiteTable]]:
    """Training and test rows of each site."""
    if not 0 <= share < 1:
        raise InputError(f"test must be a share in [0, 1), or tables, not {share}")
    flags = [_test_rows(table, how, share, seed) for table in tables]
    return [(table.pick(~rows), table.pick(rows)) for table, rows in zip(tables, flags)]


def _test_rows(table: SiteTable, how: Agreed, share: float, seed: int | None) -> np.ndarray:
    """True for a share of a site's rows, of each class the same, but not all of one.

    A site draws by its own name, so that it can alone.
    """
    order = np.arange(table.rows)
    if seed is not None:
        order = np.random.default_rng([seed, zlib.crc32(table.site.encode())]).permutation(order)
    if how.kind == "classes":
        words = canonical(table.columns[how.target].data)
        order = order[np.argsort(words[order].astype(str), kind="stable")]
    rows = np.zeros(table.rows, bool)
    rows[order] = np.diff(np.floor(np.arange(table.rows + 1) * share + 0.5)) > 0
    if rows.all():
        rows[order[:1]] = False
    if how.kind == "classes":
        classes = [(how.labels or {}).get(word, word) for word in words[order]]
        _, first, place = np.unique(classes, return_index=True, return_inverse=True)
        whole = np.bincount(place, ~rows[order]) == 0
        rows[order[first[whole]]] = False
    return rows


def _is_thin(train: SiteTable, how: Agreed, thin: str) -> bool:
    """Whether a site is to be left out, as it has one row or one class."""
    what = f"site {train.site} has {train.rows} row{'s' * (train.rows != 1)} to train on" if train.rows < 2 else ""
    if how.kind == "classes" and not what:
        values = canonical(train.columns[how.target].data).tolist()
        classes = {(how.labels or {}).get(value, value) for value in values}
        if len(classes) == 1:
            what = f"site {train.site}, target {how.target!r}: all {train.rows} training rows are {classes.pop()!r}"
    if not what or (thin == "keep" and train.rows):
        return False
    if thin == "refuse" or not train.rows:
        raise InputError(f"{what}; leave the site out (thin='drop'), or train with it all the same (thin='keep')")
    warnings.warn(f"{what}; it is left out", UserWarning, stacklevel=4)
    return True


def _clients(parts: Sequence[tuple[SiteTable, SiteTable]], coding: Coding, name: str) -> Clients:
    train = [coding.rows(table) for table, _ in parts]
    test = [coding.rows(table, shifts=False) for _, table in parts]
    _warn([note for pair in zip(train, test) for _, notes in pair for note in notes])
    for table, _ in parts:
        _warn(coding.target_notes(table, coding.targets(table)))
    x, test_x = (np.concatenate([rows for rows, _ in side]) for side in (train, test))
    y, test_y = (np.concatenate([coding.targets(pair[i]) for pair in parts]) for i in (0, 1))
    owner, test_owner = (
        torch.repeat_interleave(torch.arange(len(parts)), torch.tensor([pair[i].rows for pair in parts]))
        for i in (0, 1)
    )
    data = _dataset(x, y, test_x, test_y, coding, name)
    names = tuple(table.site for table, _ in parts)
    data = replace(data, owner=owner, test_owner=test_owner if len(test_owner) else None, owner_names=names)
    return data.split(natural(), len(parts))


def _dataset(
    x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray, coding: Coding, name: str
) -> Dataset:
    inputs, targets, test_inputs, test_targets = (torch.from_numpy(part) for part in (x, y, test_x, test_y))
    scale = None
    if coding.target_scale is not None and coding.kind == "real":
        scale = Scale(*(torch.tensor([v], dtype=torch.float32) for v in coding.target_scale))
        targets, test_targets = (scale.apply(part.reshape(-1, 1)) for part in (targets, test_targets))
    return Dataset(
        name,
        inputs,
        targets,
        test_inputs,
        test_targets,
        coding.kind,
        len(coding.classes) or 1,
        coding.preparation(),
        coding.classes,
        scale,
        columns=coding.names,
        coding=coding,
        times=coding.times,
    )


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=4)
