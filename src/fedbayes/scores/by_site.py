"""Scores of each site with their errors: who is served well, who badly, and how sure that is.

An error is the standard deviation of a score over resamples of the site's own rows (Efron, 1979), which are weights on
the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from fedbayes.errors import unknown
from fedbayes.scores.additive import SUMS, Sums

RESAMPLES = 200
WIDE = 13  # characters of a score with its error in a table
PAIRED = 500  # rows of a resample where pairs are compared; errors of more rows follow by the root of their number
NAMED = 8  # sites that a line names
CELLS = 1 << 21  # rows times resamples that are summed at once
HIGHER = ("accuracy", "exact_match", "auroc", "aupr", "concordance")  # scores of which more is better
TARGETS = {"coverage50": 0.5, "coverage90": 0.9}  # scores that should be a number


class Figure(NamedTuple):
    """A score and its error; nan where there is none."""

    value: float
    error: float

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "-"
        return f"{self.value:.3f}" + ("" if np.isnan(self.error) else f" ±{self.error:.3f}".replace("±0.", "±.", 1))


@dataclass(frozen=True)
class SiteScores:
    """Scores by site: `scores["va"]["nll"]` is a figure, `scores.all` are those of all rows together."""

    sites: tuple[str, ...]
    rows: tuple[int, ...]
    names: tuple[str, ...]  # of the scores
    values: np.ndarray  # [sites, scores], nan where a site has no rows, or not what a score needs
    errors: np.ndarray
    all: dict[str, Figure]

    def __getitem__(self, site: str) -> dict[str, Figure]:
        if site not in self.sites:
            raise unknown("site", site, self.sites)
        k = self.sites.index(site)
        return {n: Figure(float(self.values[k, j]), float(self.errors[k, j])) for j, n in enumerate(self.names)}

    def worst(self, score: str) -> str | None:
        """The site that a score serves worst; None where no site has it."""
        values = self._column(score)
        if np.isnan(values).all():
            return None
        goal = TARGETS.get(score)
        badness = -values if score in HIGHER else values if goal is None else np.abs(values - goal)
        return self.sites[int(np.nanargmax(badness))]

    def spread(self, score: str) -> float:
        """The largest difference of a score between two sites."""
        values = self._column(score)
        return float("nan") if np.isnan(values).all() else float(np.nanmax(values) - np.nanmin(values))

    def _column(self, score: str) -> np.ndarray:
        if score not in self.names:
            raise unknown("score", score, self.names)
        return self.values[:, self.names.index(score)]

    def table(self, width: int = 1000) -> Table:
        """One line per site, the worst of each score marked; then all together, and the spread.

        In a narrow terminal an error goes below its score.
        """
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("site", overflow="fold")
        for name in ("rows", *self.names):
            table.add_column(name, justify="right")
        between = " " if 20 + WIDE * len(self.names) <= width else "\n"
        worst = {name: self.worst(name) for name in self.names}
        for site, rows in zip(self.sites, self.rows):
            cells = {n: str(f).replace(" ", between) for n, f in self[site].items()}
            marked = (f"[red]{f}[/]" if worst[n] == site and len(self.sites) > 1 else f for n, f in cells.items())
            table.add_row(escape(site), str(rows), *marked)
        table.add_section()
        whole = (str(self.all[name]).replace(" ", between) for name in self.names)
        table.add_row("all", str(sum(self.rows)), *whole)
        table.add_row("spread", "", *(f"{self.spread(name):.3f}" for name in self.names))
        if alone := [site for site, rows in zip(self.sites, self.rows) if rows == 1]:
            more = f" and {len(alone) - NAMED} more" if len(alone) > NAMED else ""
            table.caption = escape(f"no error can be given where there is one row: {', '.join(alone[:NAMED])}{more}")
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        console = Console(width=30 + 16 * len(self.names), no_color=True)
        with console.capture() as text:
            console.print(self.table())
        return text.get()

    __repr__ = __str__


class Rows(NamedTuple):
    """What scores are made of: targets [N] and what was predicted of them, as the kind's sums take it.

    `options` are what they take beside it, by name.
    """

    predicted: tuple[Tensor, ...]
    y: Tensor
    options: Mapping[str, Any] = {}

    def at(self, rows: Tensor) -> Rows:
        """Some of the rows."""
        return self._replace(predicted=tuple(part[rows] for part in self.predicted), y=self.y[rows])

    def sums(self, kind: str, **weights: Tensor) -> Sums:
        """The sums behind the scores."""
        return SUMS[kind][0](*self.predicted, self.y, **self.options, **weights)


def site_scores(
    kind: str, rows: Rows, homes: Sequence[Tensor], sites: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> SiteScores:
    """Scores of each site's own rows (`homes` says which), and of all rows; errors by so many resamples (0: none)."""
    whole = figures(kind, rows, resamples, seed)
    names = tuple(name for name in whole if name != "count")
    values, errors = (np.full((len(sites), len(names)), np.nan) for _ in range(2))
    for k, home in enumerate(homes):
        own = figures(kind, rows.at(home), resamples, seed + k + 1) if len(home) else {}
        for j, name in enumerate(names):
            values[k, j], errors[k, j] = own.get(name, (np.nan, np.nan))
    counts = tuple(len(home) for home in homes)
    return SiteScores(tuple(sites), counts, names, values, errors, {name: whole[name] for name in names})


def figures(kind: str, rows: Rows, resamples: int = 0, seed: int = 0) -> dict[str, Figure]:
    """All scores of rows with their errors: those that are sums, and of two classes AUROC and AUPR of the second."""
    decode = SUMS[kind][1]
    values = decode(rows.sums(kind))
    ranked = kind == "classes" and rows.predicted[0].shape[1] == 2 and bool((rows.y == 1).any() & (rows.y != 1).any())
    if ranked:
        values |= {name: float(area[0]) for name, area in _areas(rows, torch.ones(1, len(rows.y)).double()).items()}
    drawn: dict[str, list[float]] = {name: [] for name in values}
    random = np.random.default_rng(seed)
    step = max(1, CELLS // (16 * len(rows.y)))
    size = min(len(rows.y), PAIRED) if kind == "survival" else len(rows.y)
    for start in range(0, resamples if len(rows.y) > 1 else 0, step):
        counts = random.multinomial(size, np.full(len(rows.y), 1 / len(rows.y)), min(step, resamples - start))
        for scores in map(decode, _resampled(kind, rows, torch.from_numpy(counts))):
            for name, value in scores.items():
                drawn.setdefault(name, []).append(value)
        if ranked:
            for name, area in _areas(rows, torch.from_numpy(counts).double()).items():
                drawn[name] += area[area.isfinite()].tolist()
    root = (size / max(len(rows.y), 1)) ** 0.5
    spreads = {name: root * float(np.std(v, ddof=1)) if len(v) > 1 else np.nan for name, v in drawn.items()}
    return {name: Figure(value, spreads[name]) for name, value in values.items()}


def _resampled(kind: str, rows: Rows, counts: Tensor) -> Iterator[Sums]:
    """The sums of each resample: rows weighed by how often they were drawn, or taken so often."""
    if kind == "survival":  # of pairs, which weights do not resample
        for drawn in counts:
            yield rows.at(torch.repeat_interleave(torch.arange(len(drawn)), drawn)).sums(kind)
        return
    sums = torch.func.vmap(lambda weights: rows.sums(kind, mask=weights))(counts.double())
    yield from ({key: v[r] for key, v in sums.items()} for r in range(len(counts)))


def _areas(rows: Rows, weights: Tensor) -> dict[str, Tensor]:
    """AUROC and AUPR [R] of the second class under weights [R, N], ties shared; nan where a class has no weight."""
    _, place = rows.predicted[0][:, 1].double().unique(return_inverse=True)  # of each row among the rising scores
    counts = torch.zeros(2, len(weights), int(place.max()) + 1, dtype=torch.float64)
    for side in range(2):
        counts[side].index_add_(1, place, weights * (rows.y == side).double())
    inside, outside = counts
    below = inside.cumsum(1) - inside
    auroc = (outside * (below + inside / 2)).sum(1) / inside.sum(1) / outside.sum(1)
    hits, misses = outside.flip(1).cumsum(1), inside.flip(1).cumsum(1)
    aupr = (outside.flip(1) * hits / (hits + misses).clamp_min(1)).sum(1) / outside.sum(1)
    return {"auroc": auroc, "aupr": aupr}
