"""Charts as SVG text: lines and a heat map, coloured by the page's style so that they follow its scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 34


class Curve(NamedTuple):
    """A named line; `colour` is the number of one of the style's colours."""

    name: str
    colour: int
    x: Sequence[float]
    y: Sequence[float]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def line_chart(title: str, curves: Sequence[Curve], x_label: str = "round") -> str:
    """Lines over a common x; values that are not finite break the line."""
    points = [(x, y) for c in curves for x, y in zip(c.x, c.y) if math.isfinite(y)]
    if not points:
        return ""
    across = ticks(min(x for x, _ in points), max(x for x, _ in points))
    # Whole rounds only, and none before the first or after the last.
    across = [t for t in across if t == int(t) and min(points)[0] <= t <= max(points)[0]] or [points[0][0]]
    up = ticks(min(y for _, y in points), max(y for _, y in points))
    left, right = min(x for x, _ in points), max(x for x, _ in points)

    def at(x: float, y: float) -> tuple[float, float]:
        wide = (x - left) / ((right - left) or 1)
        tall = (y - up[0]) / ((up[-1] - up[0]) or 1)
        return LEFT + wide * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - tall * (HEIGHT - TOP - BOTTOM)

    parts = [_open(WIDTH, HEIGHT, f"{title} by {x_label}: {', '.join(c.name for c in curves)}")]
    for t in up:
        _, y = at(left, t)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{t:g}</text>')
    for t in across:
        x, _ = at(t, up[0])
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{t:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts += [_line(c, at) for c in curves]
    return "".join([*parts, "</svg>"])


def _line(curve: Curve, at: object) -> str:
    assert callable(at)
    placed = [(x, y, *at(x, y)) for x, y in zip(curve.x, curve.y) if math.isfinite(y)]
    path = " ".join(f"{a:.1f},{b:.1f}" for _, _, a, b in placed)
    dots = "".join(
        f'<circle class="dot fill{curve.colour}" cx="{a:.1f}" cy="{b:.1f}" r="4">'
        f"<title>{escape(curve.name)}, {x:g}: {y:.4f}</title></circle>"
        for x, y, a, b in placed[:: max(1, len(placed) // 100)]
    )
    return f'<polyline class="line stroke{curve.colour}" points="{path}"/>{dots}'


def heat_map(title: str, counts: np.ndarray, row_names: Sequence[str], column: str, unit: str) -> str:
    """Counts [rows, columns] as cells, darker for more; hovering tells the number."""
    rows, columns = counts.shape
    cell = max(3.0, min(16.0, 660 / columns))
    tall = max(cell, 12.0)
    left = 10 + 7 * max(len(name) for name in row_names)
    width, height = left + columns * cell + 4, rows * tall + 24
    largest = max(1, int(counts.max()))
    parts = [_open(width, height, title)]
    for r in range(rows):
        parts.append(
            f'<text x="{left - 6}" y="{r * tall + tall - 3:.1f}" text-anchor="end">{escape(row_names[r])}</text>'
        )
        for c in range(columns):
            n = int(counts[r, c])
            if n:
                parts.append(
                    f'<rect class="heat" x="{left + c * cell:.1f}" y="{r * tall:.1f}" width="{cell - 0.6:.1f}" '
                    f'height="{tall - 0.6:.1f}" opacity="{0.15 + 0.85 * n / largest:.2f}">'
                    f"<title>{escape(column)} {c}: {n} {escape(unit)} {escape(row_names[r])}</title></rect>"
                )
    end = f"{escape(column)} 0 to {columns - 1}"
    parts.append(f'<text x="{left}" y="{height - 6:.1f}">{end}</text></svg>')
    return "".join(parts)


def _open(width: float, height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
