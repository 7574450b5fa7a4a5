"""The section on classes: which are taken for which, and how well each is told from the others."""

from __future__ import annotations

from html import escape

import numpy as np

from fedbayes.report.certainty import PANELS
from fedbayes.report.charts import UNIT, line_chart
from fedbayes.report.drawing import Box, Drawing, Mark, Text
from fedbayes.report.learning import key, table
from fedbayes.report.material import Card, Figure, Material, Section, Shown
from fedbayes.runs.numbers import confusion, roc
from fedbayes.runs.records import Arrays

MOST = 30  # classes of a picture
WORDS = 12  # classes up to which its cells carry their numbers
GRID = np.linspace(0, 1, 101)


def confusions(m: Material) -> Section | None:
    """A confusion matrix per run, ROC curves, and the area under them by class."""
    runs = m.predicting("classes")
    if not runs:
        return None
    drawn = [run for run in runs if run.predictions["probs"].shape[1] <= MOST][:PANELS]
    body: list[Figure | Card | str] = [
        Figure(f"confusion-{run.number}-{run.name}", run.name, _matrix(run), run=run.number) for run in drawn
    ]
    found = [(run, by_class(run).values()) for run in runs]
    curves = [run.curve(GRID, np.mean([np.interp(GRID, *roc) for roc, _ in some], 0)) for run, some in found if some]
    labels = ("others taken for it ↓", "of a class found ↑")
    chart = line_chart("ROC of the classifier", curves, *labels, across=UNIT, up=UNIT, diagonal=True)
    if chart:
        caption = "One class against all others by its probability, the mean over classes (of two: the second)."
        body.append(Figure("roc-classes", "ROC of the classifier", chart, caption))
    body.append(Card("Area under the ROC of each class against the others", _areas(runs)))
    lead = (
        "A row of a matrix holds the test rows of one true class, its columns what they were taken for: right ones are "
        "on the diagonal, red ones are taken for another. Below, how well the probability of a class sorts its rows "
        "from all others (AUROC): 1 is perfect, 0.5 a coin toss."
    )
    return Section("classes", "Which classes are confused", lead, body)


def by_class(run: Shown) -> dict[int, tuple[tuple[np.ndarray, np.ndarray], float]]:
    """ROC (falsely found, rightly found) and its area of each class that has rows, as have others."""
    probs, labels = run.predictions["probs"], run.predictions["labels"].astype(int)
    classes = [1] if probs.shape[1] == 2 else range(probs.shape[1])
    curves = {}
    for c in classes:
        of, others = probs[labels == c, c], probs[labels != c, c]
        if len(of) and len(others):
            false, true, area = roc(others, of)
            curves[c] = ((false, true), area)
    return curves


def _names(arrays: Arrays) -> list[str]:
    names = arrays["class_names"].tolist() if "class_names" in arrays else []
    return names or [str(c) for c in range(arrays["probs"].shape[1])]


def _matrix(run: Shown) -> Drawing:
    counts = confusion(run.predictions)
    names, many = _names(run.predictions), len(counts)
    left, top, side = 62.0, 24.0, 290.0 / len(counts)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    marks: list[Mark] = [Text(left + side * many / 2, 10, "taken for", "middle")]
    for i in range(many):
        if side >= 9:
            marks.append(Text(left - 6, top + (i + 0.5) * side + 4, names[i][:8], "end"))
            short = names[i][: max(1, int(side / 6.5))]
            marks.append(Text(left + (i + 0.5) * side, top + side * many + 14, short, "middle"))
        for j in range(many):
            place = (left + j * side, top + i * side, side - 0.8, side - 0.8)
            marks.append(Box(*place, "line", opacity=0.35))
            if counts[i, j]:
                hint = f"{names[i]} taken for {names[j]}: {counts[i, j]} ({shares[i, j]:.1%})"
                ink = run.ink if i == j else "wrong"
                marks.append(Box(*place, ink, opacity=0.12 + 0.78 * float(shares[i, j]), hint=hint))
                if many <= WORDS:
                    middle = left + (j + 0.5) * side, top + (i + 0.5) * side + 4
                    marks.append(Text(*middle, str(counts[i, j]), "middle", ink="ink", size=min(11.0, side / 2.4)))
    wrong = int(counts.sum() - np.trace(counts))
    label = f"Confusion matrix of {run.name}: {wrong} of {counts.sum()} test rows taken for another class"
    return Drawing(left + 290 + 8, top + side * many + 22, label, marks)


def _areas(runs: list[Shown]) -> str:
    titles = ("mean over classes&nbsp;↑", "worst class", "its AUROC&nbsp;↑", "least found class", "share found&nbsp;↑")
    head = "".join(f"<th scope=col>{title}</th>" for title in titles)
    rows = []
    for run in runs:
        names, areas = _names(run.predictions), {c: area for c, (_, area) in by_class(run).items()}
        counts = confusion(run.predictions)
        held = counts.sum(1)
        found = np.where(held > 0, np.diag(counts) / np.maximum(held, 1), np.inf)
        least = int(found.argmin())
        worst = min(areas, key=lambda c: areas[c], default=None)
        cells = ["–"] * 3
        if worst is not None:
            cells = [f"{np.mean(list(areas.values())):.4f}", escape(names[worst]), f"{areas[worst]:.4f}"]
        cells += [escape(names[least]), f"{found[least]:.1%} of {held[least]}"]
        text = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr class="r{run.number}"><th scope=row>{key(run)}</th>{text}</tr>')
    return table(head, rows)
