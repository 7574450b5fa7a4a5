"""Predictions repeated with draws of their own: the Monte Carlo error of any score of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedbayes.noise import address
from fedbayes.posterior.values import Draws, Point
from fedbayes.training.run import Run

REPEATS = 5


def draw_seeds(run: Run, repeats: int) -> list[int]:
    """Seeds of repeated predictions, the run's own first; one where prediction has no randomness."""
    program = run.task.program
    random = program.prediction.dropout or not all(
        isinstance(run.parts[part], Point | Draws) for part in program.model.layouts
    )
    return [run.task.seed, *(address(run.task.seed, "repeat", r) for r in range(1, repeats if random else 1))]


def figure(values: Sequence[float | None]) -> dict[str, float | None]:
    """The first of repeated values, and their standard deviation (n - 1); 0 for one, None where a value is missing."""
    known = [v for v in values if v is not None]
    if len(known) < len(values):
        return {"value": values[0], "error": None}
    return {"value": known[0], "error": float(np.std(known, ddof=1)) if len(known) > 1 else 0.0}
