"""Sections on what a prediction's certainty is worth: calibration, retention, the plane of its two parts."""

from __future__ import annotations

import numpy as np

from fedbayes.report.charts import LEFT, RIGHT, UNIT, Axes, line_chart, thinned, ticks
from fedbayes.report.drawing import Box, Dots, Drawing, Line, Text, bounds
from fedbayes.report.learning import key, table
from fedbayes.report.material import Card, Figure, Material, Section, Shown
from fedbayes.runs.numbers import (
    PARTS,
    confidences,
    coverage,
    deviations,
    kind_of,
    reliability,
    retention,
    right,
    total_scale,
    uncertainty,
)

PANELS = 12  # runs with a chart of their own
DOTS = 1500


def calibration(m: Material) -> Section | None:
    """Reliability diagrams of classifications, one per run."""
    runs = m.predicting("classes", "labels")[:PANELS]
    figures = [
        Figure(f"reliability-{run.number}-{run.name}", run.name, _reliability(run), run=run.number) for run in runs
    ]
    lead = (
        "Of the predictions made with some confidence, how many are right? Bars on the dashed diagonal are honest, "
        "below it over-confident (the red gap), bars above it too modest. Pale bars hold few predictions; the strip "
        "underneath says how many."
    )
    if any(kind_of(run.predictions) == "labels" for run in runs):
        lead += " Of several labels each counts: its probability is its confidence, and right is that the row has it."
    return Section("calibration", "Reliability", lead, figures) if figures else None


def _reliability(run: Shown) -> Drawing:
    bins = reliability(*confidences(run.predictions))
    several = kind_of(run.predictions) == "labels"
    sureness, share_right = ("probability of a label", "rows with it") if several else ("confidence", "accuracy ↑")
    axes = Axes(UNIT, UNIT, sureness, share_right, size=(360, 290))
    for lower, upper, rows, sure, hits in zip(*bins):
        of, met = ("probability", "have the label") if several else ("confidence", "right")
        hint = f"{run.name}: {rows} predictions of {of} {sure:.2f} on average, {hits:.1%} {met}"
        axes.box((lower, upper), (0, hits), run.ink, opacity=0.3 + 0.5 * min(1.0, rows / 20), hint=hint)
        if sure > hits:
            axes.box((lower, upper), (hits, sure), "wrong", opacity=0.25, hint=hint)
    axes.diagonal()
    share = bins.rows / bins.rows.sum()
    gap = float((share * np.abs(bins.confidence - bins.accuracy)).sum())
    axes.marks.append(Text(LEFT + 8, 26, f"ECE {gap:.3f}", ink="ink", size=13, bold=True))
    drawing = axes.drawing(f"Reliability of {run.name}: {share_right.rstrip(' ↑')} by {sureness}, ECE {gap:.3f}")
    return _with_strip(drawing, run, bins.lower, bins.upper, share)


def _with_strip(drawing: Drawing, run: Shown, lower: np.ndarray, upper: np.ndarray, share: np.ndarray) -> Drawing:
    """How the predictions spread over the bins, as bars under the diagram."""
    base, tall, wide = drawing.height + 40, 36.0, drawing.width - LEFT - RIGHT
    bars = [
        Box(
            LEFT + a * wide,
            base - tall * s,
            (b - a) * wide - 0.6,
            tall * s,
            "soft",
            opacity=0.6,
            hint=f"{s:.1%} of all",
        )
        for a, b, s in zip(lower, upper, share)
    ]
    line = Line(np.array([LEFT, LEFT + wide]), np.array([base, base]), "line", width=1)
    label = Text(LEFT - 6, base, "share", "end")
    return Drawing(drawing.width, base + 6, drawing.label, [*drawing.marks, line, *bars, label])


def retained(m: Material) -> Section | None:
    """Accuracy (or RMSE) of what is kept when the most uncertain predictions are handed on."""
    figures: list[Figure | Card] = []
    areas: dict[tuple[int, str], float] = {}
    runs = [run for run in m.runs if run.predictions]
    real = bool(runs) and all(kind_of(run.predictions) == "real" for run in runs)
    score = "exact match" if runs and all(kind_of(run.predictions) == "labels" for run in runs) else "accuracy"
    for part, title in PARTS.items():
        lines = []
        for run in runs:
            arrays = run.predictions
            measure = uncertainty(arrays).get(part)
            if measure is None or (kind_of(arrays) == "real") != real:
                continue
            wrong = (arrays["labels"].reshape(arrays["mean"].shape) - arrays["mean"]) ** 2 if real else None
            share, value = retention(measure, right(arrays) if wrong is None else wrong.mean(-1))
            if np.ptp(measure) > 0:  # a point has no epistemic part to sort by
                areas[run.number, part] = float(value.mean())
            # The first few rows are noise: a curve starts where it is a mean of some.
            steady = np.arange(len(share)) >= min(len(share) - 1, max(4, len(share) // 50))
            lines.append(run.curve(share[steady], np.sqrt(value[steady]) if real else value[steady]))
        up = None
        if lines and not real:
            up = ticks(min(bounds(line.y for line in lines)[0], 0.95), 1.0)
        if not any(len(np.unique(line.y)) > 1 for line in lines):
            continue  # a measure that is the same for all rows sorts nothing
        label = "RMSE of the kept ↓" if real else f"{score} of the kept ↑"
        chart = line_chart(f"Retention by {title}", lines, "share kept", label, across=UNIT, up=up)
        if chart:
            figures.append(Figure(f"retention-{part}", f"By {title}", chart))
    if not figures:
        return None
    if not real:
        figures.append(_areas(runs, areas, score))
    lead = (
        "Hand the most uncertain predictions to someone else and keep the rest: from right to left fewer are kept. "
        + ("A curve that falls" if real else "A curve that climbs")
        + " to the left knows where its errors are; a level one does not. "
        + ("Lower" if real else "Higher")
        + " is better."
    )
    return Section("retention", "Retention", lead, figures)


def _areas(runs: list[Shown], areas: dict[tuple[int, str], float], score: str) -> Card:
    parts = [part for part in PARTS if any((run.number, part) in areas for run in runs)]
    head = "".join(f"<th scope=col>by {PARTS[part]}&nbsp;↑</th>" for part in parts)
    rows = []
    for run in runs:
        values = [areas.get((run.number, part)) for part in parts]
        cells = "".join(f"<td>{'–' if v is None else f'{v:.4f}'}</td>" for v in values)
        rows.append(f'<tr class="r{run.number}"><th scope=row>{key(run)}</th>{cells}</tr>')
    return Card(f"Mean {score} over all shares kept", table(head, rows))


def plane(m: Material) -> Section | None:
    """Aleatoric against epistemic part of every test row, coloured by whether it is right."""
    runs = [run for run in m.runs if {"aleatoric", "epistemic"} <= {*uncertainty(run.predictions)}][:PANELS]
    if not runs:
        return None
    parts = [_parts(run) for run in runs]
    across, up = (
        ticks(0, bounds(np.quantile(p[part], [0.5, 0.999]) for p in parts)[1] or 1, 4)
        for part in ("aleatoric", "epistemic")
    )
    figures = [Figure(f"plane-{r.number}-{r.name}", r.name, _plane(r, across, up), run=r.number) for r in runs]
    real = kind_of(runs[0].predictions) == "real"
    lead = (
        "Each dot is a test row. To the right: what the data leave open, even with known weights (aleatoric). Upwards: "
        "what draws of the weights disagree on (epistemic). "
        + (
            "Both are standard deviations. Red dots lie outside their 90 % interval. "
            if real
            else "Red dots are wrong; good uncertainty has them far from the corner. "
        )
        + "A point estimate has no epistemic part: its dots lie on the floor."
    )
    return Section("plane", "The uncertainty plane", lead, figures)


def _parts(run: Shown) -> dict[str, np.ndarray]:
    """The two parts: variances of a classification, deviations in the target's units of a regression."""
    parts = uncertainty(run.predictions)
    return {k: np.sqrt(v) for k, v in parts.items()} if kind_of(run.predictions) == "real" else parts


def _plane(run: Shown, across: list[float], up: list[float]) -> Drawing:
    p, hit = _parts(run), right(run.predictions)
    real = kind_of(run.predictions) == "real"
    axes = Axes(across, up, "aleatoric", "epistemic", size=(360, 290))
    names = ("inside", "outside") if real else ("right", "wrong")
    for name, rows, ink in zip(names, (np.flatnonzero(hit), np.flatnonzero(~hit)), ("right", "wrong")):
        some = rows[thinned(len(rows), DOTS)]
        x, y = axes.put(p["aleatoric"][some], p["epistemic"][some])
        axes.marks.append(Dots(x, y, ink, radius=2.4, opacity=0.55 if ink == "right" else 0.85))
        left = axes.width - 110
        row = 24 if ink == "right" else 40
        axes.marks += [Dots(np.array([left]), np.array([row - 4.0]), ink, radius=4)]
        axes.marks.append(Text(left + 10, row, f"{name} ({len(rows)})", ink="ink"))
    return axes.drawing(f"Uncertainty plane of {run.name}: epistemic by aleatoric part, {int((~hit).sum())} wrong")


def intervals(m: Material) -> Section | None:
    """Regression: predicted against true, and whether intervals hold what they promise."""
    runs = m.predicting("real")
    if not runs:
        return None
    levels = np.linspace(0.05, 0.99, 48)
    lines = [run.curve(levels, coverage(run.predictions, levels)) for run in runs]
    chart = line_chart("Coverage", lines, "promised", "observed", across=UNIT, up=UNIT, diagonal=True)
    figures = [_predicted(run, d) for run in runs[:PANELS] for d in range(run.predictions["mean"].shape[1])][:PANELS]
    if chart:
        caption = (
            "Share of targets inside central intervals. On the diagonal is right; below it intervals are too narrow."
        )
        figures.append(Figure("coverage", "Calibration of intervals", chart, caption))
    lead = (
        "Each line runs over the 90 % interval of one test row: dots on the dashed diagonal are exact, red intervals "
        "miss the truth. One in ten should."
    )
    return Section("intervals", "Predicted and true", lead, figures)


def _predicted(run: Shown, d: int) -> Figure:
    arrays = run.predictions
    some, targets = thinned(len(arrays["mean"]), 160), arrays["mean"].shape[1]
    mean, scale = arrays["mean"][some, d], total_scale(arrays)[some, d]
    truth = arrays["labels"].reshape(arrays["mean"].shape)[some, d]
    half = 1.6449 * scale
    low, high = bounds([truth, mean])
    room = ticks(low, high)
    axes = Axes(room, room, "true", "predicted", size=(360, 290))
    axes.diagonal()
    inside = np.abs(deviations(arrays)[some, d]) <= 1.6449
    for flag, ink in ((True, run.ink), (False, "wrong")):
        for t, p, h in zip(truth[inside == flag], mean[inside == flag], half[inside == flag]):
            x, y = axes.put(np.array([t, t]), np.array([p - h, p + h]))
            axes.marks.append(Line(x, y, ink, width=0.8))
        axes.marks.append(Dots(*axes.put(truth[inside == flag], mean[inside == flag]), ink, radius=2.2))
    title, end = (run.name, "") if targets == 1 else (f"{run.name}, target {d + 1} of {targets}", f"-{d + 1}")
    label = f"Predicted against true targets of {title}, {int((~inside).sum())} of {len(some)} outside"
    return Figure(f"predicted-{run.number}-{run.name}{end}", title, axes.drawing(label), run=run.number)
