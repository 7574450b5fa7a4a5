"""Drawings as PNG files for papers and slides, by matplotlib."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from fedbayes.report.drawing import INKS, Area, Box, Dots, Drawing, Line, Mark, Picture, Text

POINTS = 0.72  # of a pixel at 100 per inch


def png_of(drawing: Drawing, scale: float = 3) -> bytes:
    """The drawing in its light inks as PNG bytes, `scale` pixels for each of its own."""
    # Imported here: a page without files beside it needs no matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tall = drawing.height - drawing.top
    figure = Figure(figsize=(drawing.width / 100, tall / 100), dpi=100 * scale)
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    for order, mark in enumerate(drawing.marks):
        _draw(axes, mark, order)
    axes.set_aspect("auto")
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, drawing.top)
    file = io.BytesIO()
    figure.savefig(file, format="png", pil_kwargs={"compress_level": 3})  # a third of the time, a few bytes more
    return file.getvalue()


def _draw(axes: Any, mark: Mark, order: int) -> None:
    ink = "" if isinstance(mark, Picture) else INKS[mark.ink][0]
    match mark:
        case Line():
            dash = tuple(float(d) / mark.width for d in mark.dash.split()) if mark.dash else ()
            look = {"linestyle": (0, dash)} if dash else {}
            axes.plot(mark.x, mark.y, color=ink, linewidth=mark.width * POINTS, zorder=order, **look)
        case Area():
            axes.fill(mark.x, mark.y, color=ink, alpha=mark.opacity, linewidth=0, zorder=order)
        case Dots() if not mark.hint:
            size = (2 * mark.radius * POINTS) ** 2
            axes.scatter(mark.x, mark.y, s=size, color=ink, alpha=mark.opacity, linewidths=0, zorder=order)
        case Box():
            x, y = np.array([0, 1, 1, 0]) * mark.width, np.array([0, 0, 1, 1]) * mark.height
            axes.fill(mark.x + x, mark.y + y, color=ink, alpha=mark.opacity, linewidth=0, zorder=order)
        case Text():
            style: dict[str, Any] = {
                "ha": {"start": "left", "middle": "center", "end": "right"}[mark.anchor],
                "va": "baseline",
            }
            style |= {"rotation": 90, "rotation_mode": "anchor"} if mark.upright else {}
            style |= {"weight": "bold"} if mark.bold else {}
            # A dollar sign would start a formula.
            text = mark.text.replace("$", r"\$")
            axes.text(mark.x, mark.y, text, color=ink, size=mark.size * POINTS, zorder=order, **style)
        case Picture():
            place = (mark.x, mark.x + mark.width, mark.y + mark.height, mark.y)
            axes.imshow(mark.pixels, cmap="gray", vmin=0, vmax=255, extent=place, interpolation="nearest", zorder=order)
