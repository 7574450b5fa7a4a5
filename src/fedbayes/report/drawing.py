"""A drawing as plain marks in pixels, and its SVG; inks are names that a style fills in, light or dark."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np

from fedbayes.report.pictures import png

# Each ink in the light scheme and in the dark one.
INKS = {
    "ink": ("#1c2024", "#e8e9eb"),
    "soft": ("#60646c", "#a2a7af"),
    "line": ("#e4e4e1", "#31353c"),
    "c0": ("#1d5fd0", "#6aa5ff"),
    "c1": ("#b4530a", "#f2994a"),
    "c2": ("#0f7b53", "#4cc38a"),
    "c3": ("#8b3fb8", "#c58af0"),
    "c4": ("#b8294f", "#ff7d9c"),
    "c5": ("#4d6a7a", "#9fb8c6"),
    "c6": ("#7a6a00", "#d6c04a"),
    "c7": ("#00758a", "#4fc3d9"),
    "right": ("#8b9aa8", "#7c8a98"),
    "wrong": ("#c8102e", "#ff6b7d"),
    "aleatoric": ("#c98a1b", "#e0ac4f"),
    "epistemic": ("#2f7dd1", "#6ab0f5"),
}
COLOURS = 8
DASHES = ("", "7 3", "2 3", "8 3 2 3")
EVERYBODY = -1  # the run of a mark that belongs to none


class Line(NamedTuple):
    """A line through points."""

    x: np.ndarray
    y: np.ndarray
    ink: str
    run: int = EVERYBODY
    width: float = 2
    dash: str = ""


class Area(NamedTuple):
    """A filled polygon."""

    x: np.ndarray
    y: np.ndarray
    ink: str
    run: int = EVERYBODY
    opacity: float = 0.25


class Dots(NamedTuple):
    """Discs of one size; `hint` makes them invisible targets that show their number under a pointer."""

    x: np.ndarray
    y: np.ndarray
    ink: str
    run: int = EVERYBODY
    radius: float = 2
    opacity: float = 1
    hint: Sequence[str] = ()


class Box(NamedTuple):
    """A rectangle, with an optional word under a pointer."""

    x: float
    y: float
    width: float
    height: float
    ink: str
    run: int = EVERYBODY
    opacity: float = 1
    hint: str = ""


class Text(NamedTuple):
    """A word; `anchor` is start, middle or end; `upright` turns it to read from below."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    ink: str = "soft"
    size: float = 11
    run: int = EVERYBODY
    upright: bool = False
    bold: bool = False


class Picture(NamedTuple):
    """Pixels, bytes [H, W] or [H, W, 3]."""

    x: float
    y: float
    width: float
    height: float
    pixels: np.ndarray
    run: int = EVERYBODY


Mark = Line | Area | Dots | Box | Text | Picture


@dataclass(frozen=True)
class Drawing:
    """Marks on a sheet from (0, top) to (width, height); `label` says it in words."""

    width: float
    height: float
    label: str
    marks: list[Mark] = field(default_factory=list, repr=False)
    top: float = 0


def beside(drawings: Sequence[Drawing], label: str, gap: float = 12) -> Drawing:
    """Drawings side by side on one sheet."""
    marks: list[Mark] = []
    x = 0.0
    for drawing in drawings:
        marks += [moved(mark, x, 0) for mark in drawing.marks]
        x += drawing.width + gap
    return Drawing(x - gap, max(d.height for d in drawings), label, marks)


def moved(mark: Any, right: float, down: float) -> Any:
    """The mark at another place."""
    return mark._replace(x=mark.x + right, y=mark.y + down)


def svg(drawing: Drawing, style: str = "") -> str:
    """The drawing as an SVG element; with a style it stands alone as a file."""
    alone = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
    tall = drawing.height - drawing.top
    size = f' width="{drawing.width:g}" height="{tall:g}"' if style else ""
    parts = [
        f'<svg{alone}{size} viewBox="0 {drawing.top:g} {drawing.width:g} {tall:g}" role="img" '
        f'aria-label="{escape(drawing.label)}">'
    ]
    if style:
        parts.append(f"<style>{style}</style>")
    run = EVERYBODY
    for mark in drawing.marks:
        if mark.run != run:
            parts.append("</g>" if run != EVERYBODY else "")
            parts.append(f'<g class="r{mark.run}">' if mark.run != EVERYBODY else "")
            run = mark.run
        parts.append(_element(mark))
    return "".join([*parts, "</g>" if run != EVERYBODY else "", "</svg>"])


def paper_style() -> str:
    """A style for files: the light inks."""
    inks = "".join(f".f-{name}{{fill:{light}}}.s-{name}{{stroke:{light}}}" for name, (light, _) in INKS.items())
    return f"text{{font-family:sans-serif}}.l{{fill:none}}.dot{{opacity:0}}image{{image-rendering:pixelated}}{inks}"


def page_style() -> str:
    """Inks as custom properties that follow the page's scheme, and the classes that use them."""
    names = "".join(f"--{name}:light-dark({light},{dark});" for name, (light, dark) in INKS.items())
    inks = "".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name})}}" for name in INKS)
    return f":root{{{names}}}\n{inks}\n"


def _element(mark: Mark) -> str:
    match mark:
        case Line():
            dash = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
            return f'<polyline class="l s-{mark.ink}" stroke-width="{mark.width:g}"{dash} points="{_points(mark)}"/>'
        case Area():
            return f'<polygon class="f-{mark.ink}" opacity="{mark.opacity:g}" points="{_points(mark)}"/>'
        case Dots() if mark.hint:
            return "".join(
                f'<circle class="dot f-{mark.ink}" cx="{x:.1f}" cy="{y:.1f}" r="{mark.radius:g}">'
                f"<title>{escape(hint)}</title></circle>"
                for x, y, hint in zip(mark.x, mark.y, mark.hint)
            )
        case Dots():  # segments of no length with round ends: a tenth of the bytes of circles
            path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(mark.x, mark.y))
            look = f'stroke-width="{2 * mark.radius:g}" stroke-linecap="round" opacity="{mark.opacity:g}"'
            return f'<path class="l s-{mark.ink}" {look} d="{path}"/>' if path else ""
        case Box():
            title = f"<title>{escape(mark.hint)}</title>" if mark.hint else ""
            seen = f' opacity="{mark.opacity:.2g}"' if mark.opacity < 1 else ""
            place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" width="{mark.width:.1f}" height="{mark.height:.1f}"'
            return f'<rect class="f-{mark.ink}" {place}{seen}>{title}</rect>'
        case Text():
            turn = f' transform="rotate(-90 {mark.x:.1f} {mark.y:.1f})"' if mark.upright else ""
            bold = ' font-weight="600"' if mark.bold else ""
            place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" text-anchor="{mark.anchor}" font-size="{mark.size:g}"'
            return f'<text class="f-{mark.ink}" {place}{bold}{turn}>{escape(mark.text)}</text>'
        case Picture():
            place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" width="{mark.width:.1f}" height="{mark.height:.1f}"'
            return f'<image {place} href="data:image/png;base64,{base64.b64encode(png(mark.pixels)).decode()}"/>'


def _points(mark: Line | Area) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(mark.x, mark.y))


def bounds(values: Iterable[np.ndarray]) -> tuple[float, float]:
    """Least and largest finite value; (0, 1) where there is none."""
    whole = np.concatenate([np.ravel(v).astype(float) for v in values] or [np.zeros(0)])
    whole = whole[np.isfinite(whole)]
    return (float(whole.min()), float(whole.max())) if len(whole) else (0.0, 1.0)
