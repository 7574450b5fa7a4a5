"""Charts: axes that turn data into marks, and the shapes that several sections share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedbayes.report.drawing import EVERYBODY, Area, Box, Dots, Drawing, Line, Mark, Text, bounds

WIDTH, HEIGHT = 360.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 20.0, 10.0, 40.0
MOST = 240  # points of a curve
FEW = 12  # curves that tell their numbers under a pointer


class Curve(NamedTuple):
    """A named line in the look of its run."""

    name: str
    ink: str
    dash: str
    run: int
    x: np.ndarray
    y: np.ndarray


class Axes:
    """A frame with a scale on each side; `put` turns data into pixels, `marks` collects what is drawn."""

    def __init__(
        self,
        across: Sequence[float],
        up: Sequence[float],
        x_label: str,
        y_label: str,
        *,
        size: tuple[float, float] = (WIDTH, HEIGHT),
        span: tuple[float, float] | None = None,
    ) -> None:
        self.width, self.height = size
        self.x0, self.x1 = span or (across[0], across[-1])
        self.y0, self.y1 = up[0], up[-1]
        right, bottom = self.width - RIGHT, self.height - BOTTOM
        self.marks: list[Mark] = []
        for t in up:
            _, y = self.put(self.x0, t)
            self.marks.append(Line(np.array([LEFT, right]), np.array([y, y]), "line", width=1))
            self.marks.append(Text(LEFT - 6, float(y) + 4, f"{t:g}", "end"))
        for t in across:
            x, _ = self.put(t, self.y0)
            self.marks.append(Text(float(x), bottom + 15, f"{t:g}", "middle"))
        self.marks.append(Text((LEFT + right) / 2, self.height - 6, x_label, "middle"))
        self.marks.append(Text(12, (TOP + bottom) / 2, y_label, "middle", upright=True))

    def put(self, x: float | np.ndarray, y: float | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Data as pixels; what lies outside the frame is held at its edge."""
        wide = np.clip((np.asarray(x, float) - self.x0) / ((self.x1 - self.x0) or 1), 0, 1)
        tall = np.clip((np.asarray(y, float) - self.y0) / ((self.y1 - self.y0) or 1), 0, 1)
        across = LEFT + wide * (self.width - LEFT - RIGHT)
        return across, self.height - BOTTOM - tall * (self.height - TOP - BOTTOM)

    def diagonal(self) -> None:
        """Where both sides are equal."""
        ends = np.array([max(self.x0, self.y0), min(self.x1, self.y1)])
        self.marks.append(Line(*self.put(ends, ends), "soft", width=1, dash="3 3"))

    def curve(self, curve: Curve, *, targets: bool = True) -> None:
        """A line, with targets for a pointer; values that are not finite are left out."""
        finite = np.isfinite(curve.x) & np.isfinite(curve.y)
        x, y = np.asarray(curve.x, float)[finite], np.asarray(curve.y, float)[finite]
        some = thinned(len(x), MOST)
        self.marks.append(Line(*self.put(x[some], y[some]), curve.ink, curve.run, dash=curve.dash))
        if len(some) == 1:
            self.marks.append(Dots(*self.put(x, y), curve.ink, curve.run, 3))
        some = thinned(len(x), 60 if targets else 0)
        hints = [f"{curve.name}: {b:.4g} at {a:.4g}" for a, b in zip(x[some], y[some])]
        self.marks.append(Dots(*self.put(x[some], y[some]), curve.ink, curve.run, 5, hint=hints))

    def box(self, x: tuple[float, float], y: tuple[float, float], ink: str, *, opacity: float, hint: str = "") -> None:
        """A bar from one corner to the other."""
        (a, b), (c, d) = self.put(np.array(x), np.array(y))
        self.marks.append(Box(a, min(c, d), max(b - a - 0.6, 0.5), abs(c - d), ink, opacity=opacity, hint=hint))

    def drawing(self, label: str) -> Drawing:
        return Drawing(self.width, self.height, label, self.marks)


def thinned(n: int, most: int) -> np.ndarray:
    """At most `most` of n row numbers, evenly spaced, first and last among them."""
    some = np.linspace(0, n - 1, min(n, most)).round() if n and most else np.zeros(0)
    return np.unique(some.astype(int))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover [low, high]."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    step = 10 ** math.floor(math.log10((high - low) / about))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


UNIT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    across: Sequence[float] | None = None,
    up: Sequence[float] | None = None,
    diagonal: bool = False,
) -> Drawing | None:
    """Lines over a common x; None where no value is finite."""
    curves = [c for c in curves if np.isfinite(np.asarray(c.y, float)).any()]
    if not curves:
        return None
    low, high = bounds(c.x for c in curves)
    inside = [t for t in ticks(low, high) if low <= t <= high] or [low]
    if up is None:
        up = ticks(*bounds(_usual(c.y) for c in curves))
    axes = Axes(across or inside, up, x_label, y_label, span=None if across else (low, high))
    if diagonal:
        axes.diagonal()
    for curve in curves:
        axes.curve(curve, targets=len(curves) <= FEW)
    return axes.drawing(f"{title}: {y_label} by {x_label} of {', '.join(c.name for c in curves)}")


def _usual(y: np.ndarray) -> np.ndarray:
    """Values without the spikes of the first rounds, which would press all else to the floor."""
    y = np.asarray(y, float)
    y = y[np.isfinite(y)]
    return np.minimum(y, 3 * np.quantile(y, 0.9)) if len(y) > 10 and y.min() >= 0 else y


def histogram(
    title: str, groups: Sequence[tuple[str, str, np.ndarray]], x_label: str, run: int = EVERYBODY
) -> Drawing | None:
    """Shares of each group (name, ink, values) by bins over their common range."""
    groups = [(name, ink, v[np.isfinite(v)]) for name, ink, v in groups]
    if not any(len(v) for _, _, v in groups):
        return None
    low, high = bounds(np.quantile(v, [0, 0.995]) for _, _, v in groups if len(v))
    across = ticks(low, high if high > low else low + 1)
    edges = np.linspace(across[0], across[-1], 41)
    shares = [np.histogram(np.clip(v, edges[0], edges[-1]), edges)[0] / max(len(v), 1) for _, _, v in groups]
    axes = Axes(across, ticks(0, max(float(s.max()) for s in shares), 4), x_label, "share")
    for (name, ink, _), share in zip(groups, shares):
        steps, tops = np.repeat(edges, 2)[1:-1], np.repeat(share, 2)
        x, y = axes.put(np.r_[steps[0], steps, steps[-1]], np.r_[0, tops, 0])
        axes.marks += [Area(x, y, ink, run), Line(x[1:-1], y[1:-1], ink, run, 1.5)]
        row = TOP + 14 + 15 * [g[0] for g in groups].index(name)
        axes.marks += [Box(axes.width - 118, row - 8, 9, 9, ink), Text(axes.width - 104, row, name, ink="ink")]
    return axes.drawing(f"{title}: {x_label} of {' and '.join(name for name, _, _ in groups)}")
