"""Curves of cells as drawings, and figures as files."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from fedbayes.papers.cells import E, Table, curves_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INKS = ("#1b6ca8", "#b5482a", "#5b8c3e", "#7a4fa3", "#c08a1e", "#3c8f8f", "#8a8a8a", "#b03a6f")


def looks(rows: Iterable[str]) -> list[dict[str, str]]:
    """A line for each row: another colour, then other dashes; "A with B" has the colour of A and is dashed."""
    lines: dict[str, dict[str, str]] = {}
    own = cycle({"color": ink, "linestyle": line} for line in ("-", "--", ":") for ink in INKS)
    for row in rows:
        base, changed, _ = row.partition(" with ")
        lines[row] = {**lines[base], "linestyle": "--"} if changed and base in lines else next(own)
    return list(lines.values())


def curves(table: Table[E], output: Path, scale: str, group: str, column: str) -> str:
    """Accuracy and NLL by round of all rows of one column, as SVG; empty where nothing was evaluated twice."""
    from matplotlib.figure import Figure

    cells = [c for c in table.cells() if (c.group, c.column) == (group, column)]
    evaluated = {
        row: [[r for r in seed if "nll" in r] for seed in seeds]
        for row, seeds in curves_of(table, output, scale, cells).items()
    }
    evaluated = {row: seeds for row, seeds in evaluated.items() if min(len(seed) for seed in seeds) > 1}
    if not evaluated:
        return ""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("accuracy", "nll")):
        for (row, seeds), look in zip(evaluated.items(), looks(evaluated)):
            at = [r["round"] for r in seeds[0]]
            mean = [sum(seed[i][metric] for seed in seeds) / len(seeds) for i in range(len(at))]
            axes.plot(at, mean, **look, lw=1.4, label=row)
        axes.set(xlabel="round", ylabel=metric)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    return svg_of(figure)


def heat_map(maps: Mapping[str, Mapping[tuple[str, str], float]], label: str, factor: float = 1) -> Figure:
    """Numbers by row and column as colours, one map per name, all on one scale; each place has its number."""
    from matplotlib.figure import Figure

    shapes = {name: [list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1)] for name, cells in maps.items()}
    heights = [len(rows) + 3.2 for rows, _ in shapes.values()]
    figure = Figure(figsize=(11, 0.3 * sum(heights)), layout="constrained")
    low = min(v for cells in maps.values() for v in cells.values())
    high = max(v for cells in maps.values() for v in cells.values())
    panels = figure.subplots(len(maps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, cells) in zip(panels, maps.items()):
        rows, columns = shapes[name]
        grid = [[cells.get((row, column), float("nan")) for column in columns] for row in rows]
        axes.imshow(grid, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        for i, row in enumerate(grid):
            for j, value in enumerate(row):
                if value == value:
                    ink = "white" if value < low + 0.6 * (high - low) else "black"
                    axes.text(j, i, f"{factor * value:.1f}", ha="center", va="center", fontsize=7.5, color=ink)
        axes.set_xticks(range(len(columns)), columns, rotation=25, ha="right", fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.set_title(f"{name}: {label}{' in percent' * (factor == 100)}", fontsize=9, loc="left")
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    return figure


def svg_of(figure: Figure) -> str:
    """A figure as SVG text that can stand inside a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def save(figure: Figure, stem: Path) -> list[Path]:
    """A figure as SVG and PNG."""
    import matplotlib

    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    with matplotlib.rc_context({"svg.hashsalt": "fedbayes"}):  # with it and no date the same figure is the same file
        for path in paths:
            figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
