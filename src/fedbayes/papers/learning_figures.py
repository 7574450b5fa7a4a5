"""Scores by round, from the cells of tables: FedUAB's figures 6 and 7 (of personal models), FedPPD's figure 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError
from fedbayes.papers import fedppd, feduab
from fedbayes.papers.cells import curves_of
from fedbayes.papers.drawing import looks, save

Draw = Callable[[Path, str], list[Path]]
Curves = dict[str, list[list[dict[str, Any]]]]  # by row and seed: evaluated rounds


def _figure(table: str, column: str, prefix: str, stem: str) -> Draw:
    def draw(output: Path, scale: str) -> list[Path]:
        from matplotlib.figure import Figure

        curves_by_group = _curves(table, column, output, scale)
        if not curves_by_group:
            raise InputError(f"no cell of {column} has been run yet: fedbayes table {table} --only {column}")
        figure = Figure(figsize=(10.5, 3.2 * len(curves_by_group)), layout="constrained")
        grid = figure.subplots(len(curves_by_group), 2, squeeze=False)
        for line, (group, curves) in zip(grid, curves_by_group.items()):
            for ax, metric in zip(line, ("accuracy", "nll")):
                for (row, seeds), look in zip(curves.items(), looks(curves)):
                    name = prefix + metric
                    points = [[(r["round"], r[name]) for r in seed if name in r] for seed in seeds]
                    mean = [sum(seed[i][1] for seed in points) / len(points) for i in range(len(points[0]))]
                    marker = "o" if len(mean) < 12 else ""
                    ax.plot([at for at, _ in points[0]], mean, marker=marker, ms=3, **look, lw=1.3, label=row)
                ax.set(title=f"{group}, {column}", xlabel="round", ylabel=metric if metric == "accuracy" else "NLL")
                ax.spines[["top", "right"]].set_visible(False)
                _zoom(ax, curves, prefix + metric)
            line[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return save(figure, output / stem)

    return draw


def _curves(table: str, column: str, output: Path, scale: str) -> dict[str, Curves]:
    """The curves of one column by group, where cells have run."""
    published = (feduab.TABLES | fedppd.TABLES)[table]
    cells = [cell for cell in published.cells() if cell.column == column]
    groups = {
        group: curves_of(published, output, scale, [cell for cell in cells if cell.group == group])
        for group in dict.fromkeys(cell.group for cell in cells)
    }
    return {group: curves for group, curves in groups.items() if curves}


def _zoom(ax: Any, curves: Curves, name: str) -> None:
    """Leave the first rounds out of the range: what matters comes after them."""
    rows = [r for seeds in curves.values() for seed in seeds for r in seed[len(seed) // 10 :]]
    late = [r[name] for r in rows if name in r]
    margin = 0.08 * (max(late) - min(late) or 1.0)
    ax.set_ylim(min(late) - margin, max(late) + margin)


FIGURES: dict[str, Draw] = {
    "feduab-6": _figure("feduab-7", "Small-Dirichlet", "", "feduab-figure-6"),
    "feduab-7": _figure("feduab-8", "Small-Only2", "personal_", "feduab-figure-7"),
    "fedppd-2": _figure("fedppd-fig-2", "non-IID", "", "fedppd-figure-2"),
}
