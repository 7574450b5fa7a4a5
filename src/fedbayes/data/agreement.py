"""How sites agree on a coding: from the statistics of each, which add up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbayes.data.coding import LONGEST, Agreed, Coding, Column
from fedbayes.data.frames import refuse_other_columns
from fedbayes.data.summary import (
    CATEGORY,
    EMPTY,
    MOST_VALUES,
    ORDERED,
    ColumnSummary,
    Moments,
    SiteSummary,
    median_of,
)
from fedbayes.data.survival import check_times
from fedbayes.data.values import alike, canonical, is_number
from fedbayes.errors import InputError, shown
from fedbayes.files import reading, text_of, write_atomically

SMALLEST_UNIT, LARGEST_UNIT = 1e-5, 1e15  # of a real target's standard deviation


def agree(summaries: Sequence[SiteSummary], how: Agreed) -> Coding:
    """The coding that follows from the statistics of all sites."""
    refuse_other_columns("site", [(site.site, site.columns) for site in summaries])
    first, *others = summaries
    columns, moments = [], []
    for name in first.columns:
        check_kinds(name, summaries)
        total = first.columns[name]
        for site in others:
            total = total + site.columns[name]
        columns.append(_column(name, total, how.missing))
        moments.append([_moments(site.columns[name], columns[-1]) for site in summaries])
    _check_events(summaries, how.event)
    target = first.target
    for site in others:
        target = target + site.target
    if how.kind == "classes" and not how.classes and (pair := alike(target.counts)):
        raise InputError(
            f"target {how.target!r}: {shown(pair[0])} and {shown(pair[1])} differ in case alone; write them alike, or "
            f'say by labels what a class is: labels = {{ "{pair[0]}" = ["{pair[0]}", "{pair[1]}"], ... }}'
        )
    scales = (
        [
            [(m.mean, m.deviation) if m.rows > 1 else (c.mean, c.deviation) for m, c in zip(per, columns)]
            for per in zip(*moments)
        ]
        if how.scale == "site"
        else []
    )
    if how.kind != "classes":
        check_unit(target.moments.deviation, how.target)
    return Coding(
        how.target,
        how.kind,
        tuple(columns),
        how.classes or tuple(sorted(target.counts, key=_in_order)) if how.kind == "classes" else (),
        how.labels,
        how.scale,
        tuple(site.site for site in summaries),
        tuple(tuple(per) for per in scales),
        (target.moments.mean, target.moments.deviation) if how.kind != "classes" else None,
        all(site.site_effects for site in summaries),
        how.event,
        how.times,
    )


def _check_events(summaries: Sequence[SiteSummary], event: str | None) -> None:
    """Refuse sites of which some count events and others do not, and events that nobody has seen."""
    for site in summaries:
        if event is None and site.event is not None:
            raise InputError(f"site {site.site} counts events; name their column: event = ...")
        if event is not None and site.event is None:
            raise InputError(f"site {site.site} counts no events; have it write its summary with event = {event!r}")
    if event is not None and not any(site.event.counts.get("1") for site in summaries if site.event is not None):
        raise InputError(
            f"event {event!r}: no event was seen in any training row ({', '.join(s.site for s in summaries)}); are 0 "
            "and 1 swapped?"
        )


def check_unit(deviation: float, target: str) -> None:
    """Refuse targets whose squares float32 does not hold, or whose variance is below what scores are made of."""
    if not SMALLEST_UNIT < deviation < LARGEST_UNIT:
        raise InputError(
            f"target {target!r}: its standard deviation is {deviation:.3g}, and must be between {SMALLEST_UNIT:g} and "
            f"{LARGEST_UNIT:g}; give it in another unit"
        )


Labels = Mapping[str, Sequence[Any]] | Sequence[Any]


def given_times(times: Sequence[float], event: str | None, labels: Labels | None = None) -> tuple[float, ...]:
    """Where survival curves are cut, as the user says it; options that do not fit the kind of target are refused."""
    if isinstance(times, str) or not isinstance(times, Sequence | np.ndarray):
        raise InputError(f"times: give a list of them, such as times = [365, 730], not {shown(times)}")
    if event is None and len(times):
        raise InputError("times: curves of survival alone are cut; name the column of events: event = ...")
    if event is not None and labels is not None:
        raise InputError(f"labels: the target is a time beside the event {event!r}, no class; leave labels out")
    return check_times(times) if len(times) else ()


def class_by_value(labels: Labels | None) -> tuple[dict[str, str] | None, tuple[str, ...]]:
    """Class by value of the target, where classes are sets of values; and the classes in their order."""
    if labels is None:
        return None, ()
    if not isinstance(labels, Mapping):
        return None, tuple(_words(labels))
    by_value: dict[str, str] = {}
    for name, values in labels.items():
        for value in _words(values if isinstance(values, list | tuple) else [values]):
            if value in by_value:
                raise InputError(f"labels: {value!r} is of class {by_value[value]!r} and of {name!r}; give it once")
            by_value[value] = str(name)
    return by_value, tuple(map(str, labels))


def _words(values: Sequence[Any]) -> list[str]:
    words: list[str] = canonical(np.array(list(values), object)).tolist()
    return words


def _in_order(word: str) -> tuple[int, float, str]:
    """Numbers by value before words by their letters."""
    try:
        return 0, float(word), word
    except ValueError:
        return 1, 0.0, word


def check_kinds(name: str, summaries: Sequence[SiteSummary]) -> None:
    """Refuse a column that is of one kind here and of another there."""
    kinds = {site.site: site.columns[name].kind for site in summaries if site.columns[name].kind != EMPTY}
    if not kinds or all(site.columns[name].missing == site.columns[name].rows for site in summaries):
        raise InputError(
            f"column {name!r} has no value at any site ({', '.join(s.site for s in summaries)}); drop = [{name!r}]"
        )
    usual = max(set(kinds.values()), key=lambda kind: (list(kinds.values()).count(kind), kind))
    odd = next((site for site, kind in kinds.items() if kind != usual), None)
    if odd is None:
        orders = {site.columns[name].order for site in summaries if site.columns[name].order}
        if len(orders) > 1:
            raise InputError(f"column {name!r}: sites order its values differently; give the order once, by kinds")
        return
    held = next(site for site in summaries if site.site == odd).columns[name]
    examples = sorted(held.counts, key=is_number)  # words first: it is for them that it is a category
    example = f" ({', '.join(examples[:2])})" if examples else ""
    raise InputError(
        f"site {odd}, column {name!r} is a {kinds[odd]}{example}, at other sites a {usual}; write it there as they do, "
        "or say what it is by kinds"
    )


def _column(name: str, total: ColumnSummary, missing: str) -> Column:
    share = total.missing / total.rows
    gaps = total.missing > 0 and missing != "drop"
    if total.kind == CATEGORY:
        values = tuple(sorted(total.counts, key=_in_order))
        if len(values) > MOST_VALUES:
            raise InputError(
                f"column {name!r} has {len(values)} different values, such as {shown(values[0])}; is it a name or a "
                f"number of patients? drop = [{name!r}]"
            )
        return Column(name, CATEGORY, values, gaps, missing=share)
    moments = _moments(total, Column(name, total.kind, total.order))
    if total.kind == ORDERED:
        ranks = np.repeat([float(i) for i in range(len(total.order))], [total.counts.get(v, 0) for v in total.order])
        fill = moments.mean if missing == "mean" else float(np.median(ranks))
        return Column(name, ORDERED, total.order, gaps, fill, moments.mean, moments.deviation, share)
    fill = moments.mean if missing == "mean" else median_of(total.bins)
    return Column(name, total.kind, (), gaps, fill, moments.mean, moments.deviation, share)


def _moments(summary: ColumnSummary, column: Column) -> Moments:
    """Moments of a column's numbers, or of the ranks of an ordered one."""
    if column.kind != ORDERED:
        return summary.moments
    ranks = [Moments(n, float(i), 0.0, i, i) for i, v in enumerate(column.values) if (n := summary.counts.get(v, 0))]
    total = Moments()
    for one in ranks:
        total = total + one
    return total


def agree_on(
    summaries: Sequence[SiteSummary | str | Path],
    target: str,
    *,
    labels: Labels | None = None,
    missing: str = "median",
    scale: str = "federation",
    event: str | None = None,
    times: Sequence[float] = (),
) -> Coding:
    """The coding that follows from summaries, or files of them, of all sites: what each site codes its rows by.

    With an `event` beside a target of times, survival curves are cut at `times`: no site tells when its events came.
    """
    sites: list[SiteSummary] = []
    for given in summaries:
        sites += [given] if isinstance(given, SiteSummary) else read_summaries(given)
    if not sites:
        raise InputError("no summary of a site; give at least one")
    by_value, classes = class_by_value(labels)
    kind = "survival" if event else "classes" if any(site.target.counts for site in sites) else "real"
    if event is not None and not len(times):
        raise InputError(
            "times: no site tells when its events came; say where survival curves are cut, such as times = [365, 730]"
        )
    cuts = given_times(times, event, labels)
    return agree(sites, Agreed(target, kind, {}, by_value, classes, missing, scale, event, cuts))


def save_summaries(summaries: Sequence[SiteSummary], path: str | Path) -> None:
    """Write summaries as one JSON file."""
    write_atomically(path, json.dumps([one.as_table() for one in summaries], indent=1, ensure_ascii=False) + "\n")


def read_summaries(path: str | Path) -> list[SiteSummary]:
    """Summaries of a file that `save_summaries` wrote."""
    with reading(path, "have the site write it anew", "holds no summaries of sites"):
        return [SiteSummary.from_table(row) for row in json.loads(text_of(path, LONGEST))]
