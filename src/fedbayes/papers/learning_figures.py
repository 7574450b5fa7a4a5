"""Scores by round, from the cells of tables: FedUAB's figures 6 and 7 (of personal models), FedPPD's figure 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError
from fedbayes.papers import fedppd as printed_fedppd
from fedbayes.papers import feduab as printed_feduab
from fedbayes.papers.cells import curves_of
from fedbayes.papers.page import looks
from fedbayes.papers.regression_figures import save

Draw = Callable[[Path, str], list[Path]]
Curves = dict[str, list[list[dict[str, Any]]]]  # by row and seed: evaluated rounds


def _figure(table: str, column: str, prefix: str, stem: str) -> Draw:
    def draw(output: Path, scale: str) -> list[Path]:
        from matplotlib.figure import Figure

        printed = (printed_feduab.tables() | printed_fedppd.tables())[table]()
        found = {}
        for group in dict.fromkeys(cell.group for cell in printed.cells):
            cells = [c for c in printed.cells if (c.group, c.column) == (group, column)]
            curves = curves_of(printed, output, scale, cells)
            if curves:
                found[group] = curves
        if not found:
            raise InputError(f"no cell of {column} has been run yet: fedbayes table {table} --only {column}")
        figure = Figure(figsize=(10.5, 3.2 * len(found)), layout="constrained")
        for line, (group, curves) in zip(figure.subplots(len(found), 2, squeeze=False), found.items()):
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
