"""What each site holds, from its own statistics: rows, missing values, label mix, shift; as tables and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from fedbayes.data.agreement import check_kinds
from fedbayes.data.frames import refuse_other_columns
from fedbayes.data.summary import CATEGORY, EMPTY, ORDERED, ColumnSummary, SiteSummary

FEW = 6  # different whole numbers at most in a column that may be a category


class Holdings(NamedTuple):
    """The sites' summaries, their columns together, and the share missing and the shift by site and column."""

    sites: Sequence[SiteSummary]
    columns: Mapping[str, ColumnSummary]
    target: ColumnSummary
    missing: np.ndarray  # [sites, columns], shares
    shift: np.ndarray  # [sites, columns]: deviations from the other sites' mean, of categories the share that differs


def holdings(sites: Sequence[SiteSummary], labels: Mapping[str, str] | None = None) -> Holdings:
    """Sites side by side; tables that do not fit together are refused by site and column."""
    refuse_other_columns("site", [(site.site, site.columns) for site in sites])
    names = list(sites[0].columns)
    for name in names:
        check_kinds(name, sites)
    sites = [_with_labels(site, labels or {}) for site in sites]
    columns = {name: reduce(add, [site.columns[name] for site in sites]) for name in names}
    missing = np.array([[s.columns[n].missing / max(1, s.columns[n].rows) for n in names] for s in sites])
    shift = np.array([[_shift(s, n, sites) for n in names] for s in sites])
    return Holdings(sites, columns, reduce(add, [site.target for site in sites]), missing, shift)


def _with_labels(site: SiteSummary, labels: Mapping[str, str]) -> SiteSummary:
    """Counts of classes in place of those of the values that stand for them."""
    counts: dict[str, int] = {}
    for value, count in site.target.counts.items():
        counts[labels.get(value, value)] = counts.get(labels.get(value, value), 0) + count
    return replace(site, target=replace(site.target, counts=counts))


def _shift(site: SiteSummary, name: str, sites: Sequence[SiteSummary]) -> float:
    """How far a site's column lies from that of the others; nan where there is nothing to compare."""
    others = [other.columns[name] for other in sites if other.site != site.site]
    own = site.columns[name]
    if not others or own.kind == EMPTY:
        return float("nan")
    rest = reduce(add, others)
    if own.kind in (CATEGORY, ORDERED):
        here, there = (max(1, sum(part.counts.values())) for part in (own, rest))
        values = {**own.counts, **rest.counts}
        return sum(abs(own.counts.get(v, 0) / here - rest.counts.get(v, 0) / there) for v in values) / 2
    if not own.moments.rows or not rest.moments.rows:
        return float("nan")
    return (own.moments.mean - rest.moments.mean) / (own.moments + rest.moments).deviation


def site_table(held: Holdings) -> Table:
    """One line per site: rows, missing values, targets, and the columns that differ most from the other sites'."""
    names = list(held.columns)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("site", "rows", "missing", "target", "farthest from the others"):
        table.add_column(title, justify="right" if title in ("rows", "missing") else "left", overflow="fold")
    for k, site in enumerate(held.sites):
        sizes = np.nan_to_num(np.abs(held.shift[k]))
        far = [f"{names[j]} {_amount(held, k, int(j))}" for j in np.argsort(-sizes)[:3] if sizes[j] >= 0.5]
        missing = f"{held.missing[k].mean():.1%}"
        row = (site.site, str(site.rows), missing, _mix(site, held), ", ".join(far) or "-")
        table.add_row(*map(escape, row))
    return table


def _mix(site: SiteSummary, held: Holdings) -> str:
    target = site.target
    if site.event is not None:
        seen, rows = site.event.counts["1"], sum(site.event.counts.values())
        return f"{_spread(target)}, {seen / max(1, rows):.0%} events"
    if target.counts:
        total = sum(target.counts.values())
        return ", ".join(f"{v} {target.counts.get(v, 0) / total:.0%}" for v in sorted(held.target.counts)[:6])
    return _spread(target)


def _spread(target: ColumnSummary) -> str:
    return f"{target.moments.mean:.4g} ± {target.moments.deviation:.4g}" if target.moments.rows else "-"


def _counts(site: SiteSummary) -> Mapping[str, int]:
    """Rows by target: of each class, or with an event and without."""
    if site.event is None:
        return site.target.counts
    return {"event": site.event.counts["1"], "no event": site.event.counts["0"]}


def _amount(held: Holdings, k: int, j: int) -> str:
    name = list(held.columns)[j]
    by_share = held.columns[name].kind in (CATEGORY, ORDERED)
    return f"{held.shift[k, j]:.0%} differ" if by_share else f"{held.shift[k, j]:+.1f} sd"


def column_table(held: Holdings) -> Table:
    """One line per column: its kind, what it holds, and the share missing at each site."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("column", overflow="fold")
    table.add_column("kind")
    table.add_column("holds", overflow="fold")
    table.add_column("% missing, by site", overflow="fold", max_width=max(18, 4 * min(len(held.sites), 10)))
    for j, (name, column) in enumerate(held.columns.items()):
        shares = [f"{100 * share:3.0f}" if share else "  ." for share in held.missing[:, j]]
        table.add_row(*map(escape, (name, column.kind, _content(column), " ".join(shares))))
    return table


def _content(column: ColumnSummary) -> str:
    if column.kind in (CATEGORY, ORDERED):
        values = list(column.order or column.counts)
        return ", ".join(values[:8]) + (f" and {len(values) - 8} more" if len(values) > 8 else "")
    m = column.moments
    if column.kind == "date":
        low, high = (np.datetime64(int(day), "D") for day in (m.low, m.high))
        return f"{low} to {high}"
    whole = all(total / count == round(total / count) for count, total in column.bins.values())
    hint = f"; {len(column.bins)} values: a category?" if whole and 2 < len(column.bins) <= FEW else ""
    return f"{m.mean:.4g} ± {m.deviation:.4g}, {m.low:.4g} to {m.high:.4g}{hint}"


def figure(held: Holdings, path: str | Path | None = None) -> Any:
    """Rows and targets of each site, and two maps of site by column: what is missing, and what is shifted.

    Gives the matplotlib figure; with `path` also writes it there.
    """
    from matplotlib.figure import Figure

    sites, names = [site.site for site in held.sites], list(held.columns)
    tall, wide = max(1.6, 0.32 * len(sites) + 1.1), max(7.0, 2.2 + 0.34 * len(names))
    drawing = Figure(figsize=(wide, 3 * tall), layout="constrained")
    top, *maps = drawing.subplots(3, 1)
    left = np.zeros(len(sites))
    rows = [_counts(site) for site in held.sites]
    classes = sorted({value for one in rows for value in one})
    for i, value in enumerate(classes or ["rows"]):
        counts = [one.get(value, 0) if classes else s.rows for s, one in zip(held.sites, rows)]
        top.barh(sites, counts, left=left, label=value, color=f"C{i}")
        left = left + np.array(counts)
    top.invert_yaxis()
    top.set_title("rows, by target", fontsize=10, loc="left")
    if classes:
        top.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    top.spines[["top", "right"]].set_visible(False)
    looks = (
        (held.missing, "share missing", "Greys", 0, 1),
        (held.shift, "shift from the other sites (deviations; of categories the share that differs)", "RdBu_r", -2, 2),
    )
    for axes, (values, title, colours, low, high) in zip(maps, looks):
        image = axes.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto")
        axes.set_yticks(range(len(sites)), sites)
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        drawing.colorbar(image, ax=axes, pad=0.01)
    if path is not None:
        drawing.savefig(path, dpi=160)
    return drawing
