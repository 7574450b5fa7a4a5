"""One self-contained page from run folders, and its figures as files; reads files, needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbayes.files import write_atomically
from fedbayes.report.drawing import Drawing, Line, Mark, Text, moved, paper_style, svg
from fedbayes.report.gallery import gallery_figures
from fedbayes.report.material import Figure, Material, gather
from fedbayes.report.page import figures_in, page, sections_of
from fedbayes.report.raster import png_of


def write(folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write the report of run folders to an HTML file that needs nothing beside it."""
    homes = [Path(folder) for folder in folders]
    title = ", ".join(dict.fromkeys(home.resolve().name for home in homes))
    write_atomically(path, page(gather(homes), title))
    return Path(path)


def write_report(*folders: str | Path) -> Path:
    """Write report.html of run folders into the first of them; gives its path."""
    return write(folders, Path(folders[0]) / "report.html")


def write_figures(folders: Sequence[str | Path], into: str | Path) -> list[Path]:
    """Write every figure of the report as SVG and PNG into a folder; each carries its title and its key."""
    material = gather([Path(folder) for folder in folders])
    into = Path(into)
    into.mkdir(parents=True, exist_ok=True)
    paths = []
    for figure in [*figures_in(sections_of(material)), *gallery_figures(material)]:
        drawing = _titled(figure, material)
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", figure.name)
        for suffix, content in ((".svg", svg(drawing, paper_style()).encode()), (".png", png_of(drawing))):
            write_atomically(into / f"{stem}{suffix}", content)
            paths.append(into / f"{stem}{suffix}")
    return paths


def _titled(figure: Figure, material: Material) -> Drawing:
    """The drawing under its title and the key of the runs in it."""
    drawing = figure.drawing
    seen = {mark.run for mark in drawing.marks}
    key: list[Mark] = []
    x, y = 8.0, 0.0
    for run in (run for run in material.runs if run.number in seen):
        wide = 34 + 6.2 * len(run.name)
        if x + wide > drawing.width and x > 8:
            x, y = 8.0, y + 16
        key.append(Line(np.array([x, x + 18]), np.array([y, y]), run.ink, width=3, dash=run.dash))
        key.append(Text(x + 24, y + 4, run.name, ink="ink"))
        x += wide
    lift = y + 22 if key else 0.0
    title = Text(8, -lift - 8, figure.title, ink="ink", size=13, bold=True)
    marks = [*drawing.marks, title, *(moved(mark, 0, 10 - lift) for mark in key)]
    return replace(drawing, marks=marks, top=-26 - lift)


__all__ = ["gather", "write", "write_figures", "write_report"]
