"""The aggregation study's figures from the cells that have been trained: retention, learning curves, the ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import InputError
from fedbayes.papers.agg import GAMMAS, INITIAL, POOLS, PRIORS, RETAINED, SPLITS, tables
from fedbayes.papers.cells import Cell, Printed, curves_of, files_of
from fedbayes.papers.regression_figures import save

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
    printed = tables()[drawn.table]()
    draw = _learning if drawn.curve else _retention
    figure = draw(printed, drawn, output, scale)
    return save(figure, output / f"{_stem(name.replace('agg-', 'agg-figure-'), scale)}")


def _cells(printed: Printed, drawn: Drawn, column: str) -> dict[str, Cell]:
    return {
        label: cell
        for label, row in drawn.rows.items()
        for cell in printed.cells
        if (cell.row, cell.column) == (row, column)
    }


def _columns(printed: Printed, drawn: Drawn, output: Path, scale: str) -> list[str]:
    """The figure's columns of which a cell has been trained, or all where none has been."""

    def trained(column: str) -> bool:
        return any(files_of(printed, cell, output, scale) for cell in _cells(printed, drawn, column).values())

    return [column for column in drawn.columns if trained(column)] or list(drawn.columns)


def _learning(printed: Printed, drawn: Drawn, output: Path, scale: str) -> Any:
    from matplotlib.figure import Figure

    columns = _columns(printed, drawn, output, scale)
    figure = Figure(figsize=(3.4 * len(columns), 3.2), layout="constrained")
    for ax, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns):
        for label, cell in _cells(printed, drawn, column).items():
            for seed in curves_of(printed, output, scale, [cell]).get(cell.row, []):
                ax.plot(
                    [r["round"] for r in seed], [r["accuracy"] for r in seed], color=INK[label], lw=1.5, label=label
                )
        _finish(ax, column, "federation round", "test accuracy")
    return _with_legend(figure, drawn.table, scale)


def _retention(printed: Printed, drawn: Drawn, output: Path, scale: str) -> Any:
    from matplotlib.figure import Figure

    columns = _columns(printed, drawn, output, scale)
    figure = Figure(figsize=(4.2 * len(columns), 6.2), layout="constrained")
    grid = figure.subplots(len(KINDS), len(columns), squeeze=False)
    for line, (kind, title) in zip(grid, KINDS.items()):
        for ax, column in zip(line, columns):
            for label, cell in _cells(printed, drawn, column).items():
                kept = [content["measured"] for content in files_of(printed, cell, output, scale)]
                if kept:
                    mean = [sum(one[f"{kind}_{part}"] for one in kept) / len(kept) for part in RETAINED]
                    ax.plot([p / 100 for p in RETAINED], mean, color=INK[label], lw=1.5, marker=".", label=label)
            _finish(ax, f"{column}, by {title}", "fraction of test data retained", "accuracy")
    return _with_legend(figure, drawn.table, scale)


def _finish(ax: Any, title: str, across: str, up: str) -> None:
    ax.set_title(title, fontsize=10)
    ax.set(xlabel=across, ylabel=up)
    ax.spines[["top", "right"]].set_visible(False)


def _with_legend(figure: Any, table: str, scale: str) -> Any:
    """One legend for all panels, below them, where it covers no curve."""
    found = [entry for ax in figure.axes for entry in zip(*ax.get_legend_handles_labels())]
    if not found:
        raise InputError(f"no cell of {table} has been trained at scale {scale}: fedbayes table {table}")
    once = {label: handle for handle, label in found}
    figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=len(once), frameon=False, fontsize=9)
    return figure


def _stem(name: str, scale: str) -> str:
    return name if scale == "paper" else f"{name}-{scale}"


def prior_figure(output: Path, scale: str) -> list[Path]:
    """The ablation: accuracy and NLL by KL weight, prior fixed or replaced, for each initial scale and rule."""
    from matplotlib.figure import Figure

    printed = tables()["agg-prior"]()
    figure = Figure(figsize=(11, 6.2), layout="constrained")
    grid = figure.subplots(2, len(POOLS) * len(INITIAL), squeeze=False, sharey="row")
    inks = {"fixed": "#1b6ca8", "replaced": "#b5482a"}
    places = [(pool, initial) for pool in POOLS for initial in INITIAL]
    for line, (metric, called) in zip(grid, (("accuracy", "accuracy"), ("nll", "NLL"))):
        for ax, (pool, initial) in zip(line, places):
            for prior in PRIORS:
                found = {}
                for cell in printed.cells:
                    files = files_of(printed, cell, output, scale)
                    gamma, _, rest = cell.row.removeprefix("γ = ").partition(" scale ")
                    if files and cell.column == f"{prior} {pool}" and rest == f"{initial:g}":
                        found[gamma] = sum(content["test"][metric] for content in files) / len(files)
                at = [i for i, gamma in enumerate(GAMMAS) if gamma in found]
                if at:
                    scores = [found[gamma] for gamma in GAMMAS if gamma in found]
                    ax.plot(at, scores, "o-", color=inks[prior], label=prior)
            _finish(ax, f"{pool}, initial scale {initial:g}", "KL weight", called)
            ax.set_xticks(range(len(GAMMAS)), list(GAMMAS))
    return save(_with_legend(figure, "agg-prior", scale), output / _stem("agg-figure-prior", scale))


def _named(name: str) -> Callable[[Path, str], list[Path]]:
    return lambda output, scale: aggregation_figure(name, output, scale)


FIGURES: dict[str, Callable[[Path, str], list[Path]]] = {
    **{name: _named(name) for name in DRAWN},
    "agg-prior": prior_figure,
}
