"""The section on active learning: scores by the number of labels that were asked for."""

from __future__ import annotations

import numpy as np

from fedbayes.report.charts import Curve, line_chart
from fedbayes.report.drawing import COLOURS, EVERYBODY
from fedbayes.report.learning import CURVES
from fedbayes.report.material import Figure, Material, Section
from fedbayes.report.wording import TITLES


def labelling(m: Material) -> Section | None:
    """One line per folder of active learning: each score after each of its stages."""
    figures = []
    for score, (title, caption) in CURVES.items():
        lines = []
        for number, (name, stages) in enumerate(m.active):
            measured = [(s["labelled"], s["scores"][score]) for s in stages if score in s["scores"]]
            x, y = (np.array(column, float) for column in zip(*measured)) if measured else (np.zeros(0), np.zeros(0))
            lines.append(Curve(name, f"c{number % COLOURS}", "", EVERYBODY, x, y))
        chart = line_chart(title, lines, "labelled rows, all clients", TITLES[score])
        if chart:
            figures.append(Figure(f"labels-{score}", f"{title} by labels", chart, caption))
    names = ", ".join(name for name, _ in m.active)
    lead = f"Scores on the test set after each stage in which clients asked for labels: {names}."
    return Section("labels", "Active learning", lead, figures) if figures else None
