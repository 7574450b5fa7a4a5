"""Survival: predicted curves with their bands beside what was seen, and how honest they are at a horizon."""

from __future__ import annotations

import numpy as np

from fedbayes.report.certainty import PANELS
from fedbayes.report.charts import LEFT, UNIT, Axes, ticks
from fedbayes.report.drawing import Area, Dots, Drawing, Line, Text
from fedbayes.report.material import Figure, Material, Section, Shown
from fedbayes.runs.numbers import kaplan_meier
from fedbayes.runs.records import Arrays

THIRDS = ("low", "middle", "high")  # risks
GROUPS = 5


def survival(m: Material) -> Section | None:
    """Curves of the thirds of test rows by risk, and calibration at the middle of the times."""
    runs = [run for run in m.runs if run.survival][:PANELS]
    figures = [figure for run in runs for figure in (_curves(run), _calibration(run))]
    lead = (
        "Test rows in three equally large groups by predicted risk: the mean predicted curve with the band that holds "
        "90 % of the posterior's draws, and as dashed steps what was seen (Kaplan-Meier). Beside it, for five groups, "
        "predicted against observed survival at the middle of the times: dots on the diagonal are honest."
    )
    return Section("survival", "Survival", lead, figures) if figures else None


def _curves(run: Shown) -> Figure:
    arrays = run.survival
    times = np.r_[0.0, arrays["times"]]
    axes = Axes(ticks(0, times[-1]), UNIT, "time", "without event", size=(420, 290))
    for name, rows in zip(THIRDS, _by_risk(arrays, len(THIRDS))):
        mean, low, high = (np.r_[1.0, arrays[part][rows].mean(0)] for part in ("survival", "low", "high"))
        x, edge = axes.put(np.r_[times, times[::-1]], np.r_[low, high[::-1]])
        axes.marks.append(Area(x, edge, run.ink, run.number))
        axes.marks.append(Line(*axes.put(times, mean), run.ink, run.number, 1.8))
        fall, left = kaplan_meier(*arrays["labels"][rows].T)
        inside = fall <= times[-1]
        steps = np.repeat(np.r_[0.0, fall[inside], times[-1]], 2)[1:]
        levels = np.repeat(np.r_[1.0, left[inside]], 2)
        axes.marks.append(Line(*axes.put(steps[: len(levels)], levels), "ink", run.number, 1, dash="4 3"))
        end, height = axes.put(times[-1], mean[-1])
        axes.marks.append(Text(float(end) - 4, float(height) - 14, f"{name} risk ({len(rows)})", "end", ink="ink"))
    label = f"Survival curves of {run.name} by thirds of predicted risk, with bands, and Kaplan-Meier curves"
    return Figure(f"survival-{run.number}-{run.name}", run.name, axes.drawing(label), run=run.number)


def _calibration(run: Shown) -> Figure:
    arrays = run.survival
    middle = len(arrays["times"]) // 2
    horizon = float(arrays["times"][middle])
    axes = Axes(UNIT, UNIT, f"predicted survival at {horizon:g}", "observed", size=(360, 290))
    axes.diagonal()
    gaps = []
    for rows in _by_risk(arrays, GROUPS, middle):
        fall, left = kaplan_meier(*arrays["labels"][rows].T)
        observed = float(np.r_[1.0, left][np.searchsorted(fall, horizon, side="right")])
        predicted = float(arrays["survival"][rows, middle].mean())
        gaps.append((len(rows), abs(predicted - observed)))
        hint = [f"{run.name}: {len(rows)} rows, predicted {predicted:.2f}, observed {observed:.2f}"]
        x, y = axes.put(np.array([predicted]), np.array([observed]))
        axes.marks += [Dots(x, y, run.ink, run.number, 4), Dots(x, y, run.ink, run.number, 7, hint=hint)]
    error = sum(n * gap for n, gap in gaps) / sum(n for n, _ in gaps)
    axes.marks.append(Text(LEFT + 8, 26, f"error {error:.3f}", ink="ink", size=13, bold=True))
    drawing: Drawing = axes.drawing(f"Predicted and observed survival of {run.name} at {horizon:g}, error {error:.3f}")
    return Figure(f"survival-calibration-{run.number}-{run.name}", f"{run.name}, calibration", drawing, run=run.number)


def _by_risk(arrays: Arrays, groups: int, place: int | None = None) -> list[np.ndarray]:
    """Rows in equally large groups, the safest first: by the mean of their curves, or their chance at one time."""
    chances = arrays["survival"]
    order = np.argsort(-(chances.mean(1) if place is None else chances[:, place]), kind="stable")
    return [rows for rows in np.array_split(order, groups) if len(rows)]
