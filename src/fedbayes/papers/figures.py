"""Every published figure by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedbayes.errors import unknown
from fedbayes.papers import aggregation_figures, attacks, fedag_figures, learning_figures, pfedpf_figures

Draw = Callable[[Path, str], list[Path]]  # folder of the cells and figures, scale


def _whatever_scale(draw: Callable[[Path], list[Path]]) -> Draw:
    return lambda output, scale: draw(output)


FIGURES: dict[str, Draw] = {
    **{name: _whatever_scale(draw) for name, draw in (fedag_figures.FIGURES | pfedpf_figures.FIGURES).items()},
    **learning_figures.FIGURES,
    **aggregation_figures.FIGURES,
    **attacks.FIGURES,
}


def draw(name: str, output: str | Path, scale: str = "paper") -> list[Path]:
    """A figure by its name, as SVG and PNG files."""
    if name not in FIGURES:
        raise unknown("figure", name, FIGURES)
    return FIGURES[name](Path(output), scale)
