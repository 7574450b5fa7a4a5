"""The aggregation study's figures from the cells that have been trained: retention, learning curves, the ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.papers.aggregation import GAMMAS, INITIAL, POOLS, PRIORS, RETAINED, SPLITS, TABLES
from fedbayes.papers.cells import Cell, Table, contents_of, curves_of
from fedbayes.papers.drawing import save

INK = {
    "NWA": "#b5482a",
    "LP": "#d9822b",
    "WS": "#1b6ca8",
    "WC": "#5b8c3e",
    "Conflation": "#7a5195",
    "DWC": "#444444",
    "DWC pre-trained": "#7a5195",
    "WS pre-trained": "#1b6ca8",
    "MC dropout": "#5b8c3e",
}
KINDS = {"entropy": "normalised entropy", "epistemic": "epistemic uncertainty"}
RULE_ROWS = {"NWA": "NWA size", "WS": "WS size", "LP": "LP size", "WC": "WC size", "Conflation": "Conflation"}
DROPOUT_ROWS = {"MC dropout": "MC dropout", "WS": "WS size"}


class Drawn(NamedTuple):
    """A figure of the paper: what it shows of which rows (by label) and columns of a table."""

    table: str
    rows: Mapping[str, str]
    columns: Sequence[str]
    curve: bool  # learning curves; else accuracy by fraction retained


DRAWN: dict[str, Drawn] = {
    "agg-2": Drawn("agg-2", RULE_ROWS, ("IID", "2-class"), curve=False),
    "agg-3": Drawn("agg-2", RULE_ROWS, tuple(SPLITS), curve=True),
    "agg-4": Drawn("agg-3", RULE_ROWS, ("IID", "2-class"), curve=False),
    "agg-5": Drawn("agg-3", RULE_ROWS, tuple(SPLITS), curve=True),
    "agg-6": Drawn(
        "agg-4", {row: row for row in ("DWC", "DWC pre-trained", "WS pre-trained")}, ("IID", "2-class"), curve=False
    ),
    "agg-7": Drawn("agg-2", DROPOUT_ROWS, ("IID", "2-class"), curve=False),
    "agg-8": Drawn("agg-2", DROPOUT_ROWS, tuple(SPLITS), curve=True),
    "agg-9": Drawn("agg-3", DROPOUT_ROWS, tuple(SPLITS), curve=True),
}


def aggregation_figure(name: str, output: Path, scale: str) -> list[Path]:
    """A figure of the paper from the cells of its table, as SVG and PNG."""
    drawn = DRAWN[name]
    draw = _learning if drawn.curve else _retention
    figure = draw(TABLES[drawn.table], drawn, output, scale)
    return save(figure, output / f"{_stem(name.replace('agg-', 'agg-figure-'), scale)}")


def _cells(table: Table[Experiment], drawn: Drawn, column: str) -> dict[str, Cell[Experiment]]:
    return {
        label: cell
        for label, row in drawn.rows.items()
        for cell in table.cells()
        if (cell.row, cell.column) == (row, column)
    }


def _columns(table: Table[Experiment], drawn: Drawn, output: Path, scale: str) -> list[str]:
    """The figure's columns of which a cell has been trained, or all where none has been."""

    def trained(column: str) -> bool:
        return any(contents_of(table, cell, output, scale) for cell in _cells(table, drawn, column).values())

    return [column for column in drawn.columns if trained(column)] or list(drawn.columns)


def _learning(table: Table[Experiment], drawn: Drawn, output: Path, scale: str) -> Any:
    from matplotlib.figure import Figure

    columns = _columns(table, drawn, output, scale)
    figure = Figure(figsize=(3.4 * len(columns), 3.2), layout="constrained")
    for ax, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns):
        for label, cell in _cells(table, drawn, column).items():
            for seed in curves_of(table, output, scale, [cell]).get(cell.row, []):
                ax.plot(
                    [r["round"] for r in seed], [r["accuracy"] for r in seed], color=INK[label], lw=1.5, label=label
                )
        _finish(ax, column, "federation round", "test accuracy")
    return _with_legend(figure, drawn.table, scale)


def _retention(table: Table[Experiment], drawn: Drawn, output: Path, scale: str) -> Any:
    from matplotlib.figure import Figure

    columns = _columns(table, drawn, output, scale)
    figure = Figure(figsize=(4.2 * len(columns), 6.2), layout="constrained")
    grid = figure.subplots(len(KINDS), len(columns), squeeze=False)
    for line, (kind, title) in zip(grid, KINDS.items()):
        for ax, column in zip(line, columns):
            for label, cell in _cells(table, drawn, column).items():
                seeds = [content["measured"] for content in contents_of(table, cell, output, scale)]
                if seeds:
                    mean = [sum(one[f"{kind}_{part}"] for one in seeds) / len(seeds) for part in RETAINED]
                    ax.plot([p / 100 for p in RETAINED], mean, color=INK[label], lw=1.5, marker=".", label=label)
            _finish(ax, f"{column}, by {title}", "fraction of test data retained", "accuracy")
    return _with_legend(figure, drawn.table, scale)


def _finish(ax: Any, title: str, across: str, up: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set(xlabel=across, ylabel=up)
    ax.spines[["top", "right"]].set_visible(False)


def _with_legend(figure: Any, table: str, scale: str) -> Any:
    """One legend for all panels, below them, where it covers no curve."""
    entries = [entry for ax in figure.axes for entry in zip(*ax.get_legend_handles_labels())]
    if not entries:
        raise InputError(f"no cell of {table} has been trained at scale {scale}: fedbayes table {table}")
    once = {label: handle for handle, label in entries}
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=len(once), frameon=False, fontsize=9)
    return figure


def _stem(name: str, scale: str) -> str:
    return name if scale == "paper" else f"{name}-{scale}"


def prior_figure(output: Path, scale: str) -> list[Path]:
    """The ablation: accuracy and NLL by KL weight, prior fixed or replaced, for each initial scale and rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), layout="constrained")
    grid = figure.subplots(2, len(POOLS) * len(INITIAL), squeeze=False, sharey="row")
    inks = {"fixed": "#1b6ca8", "replaced": "#b5482a"}
    places = [(pool, initial) for pool in POOLS for initial in INITIAL]
    for line, (metric, called) in zip(grid, (("accuracy", "accuracy"), ("nll", "NLL"))):
        scores = _prior_scores(metric, output, scale)
        for ax, (pool, initial) in zip(line, places):
            for prior in PRIORS:
                cells = [(f"γ = {gamma} scale {initial:g}", f"{prior} {pool}") for gamma in GAMMAS]
                points = {place: scores[cell] for place, cell in enumerate(cells) if cell in scores}
                if points:
                    ax.plot(list(points), list(points.values()), "o-", color=inks[prior], label=prior)
            _finish(ax, f"{pool}, initial scale {initial:g}", "KL weight", called)
            ax.set_xticks(range(len(GAMMAS)), list(GAMMAS))
    return save(_with_legend(figure, "agg-prior", scale), output / _stem("agg-figure-prior", scale))


def _prior_scores(metric: str, output: Path, scale: str) -> dict[tuple[str, str], float]:
    """A score of the ablation's cells that have run, by row and column: the mean over seeds."""
    table = TABLES["agg-prior"]
    seeds = {
        (cell.row, cell.column): [content["test"][metric] for content in contents_of(table, cell, output, scale)]
        for cell in table.cells()
    }
    return {place: sum(values) / len(values) for place, values in seeds.items() if values}


def _named(name: str) -> Callable[[Path, str], list[Path]]:
    return lambda output, scale: aggregation_figure(name, output, scale)


FIGURES: dict[str, Callable[[Path, str], list[Path]]] = {
    **{name: _named(name) for name in DRAWN},
    "agg-prior": prior_figure,
}
