"""The section on data of another kind: how well uncertainty tells it from the test set."""

from __future__ import annotations

from html import escape

import numpy as np

from fedbayes.report.charts import UNIT, histogram, line_chart
from fedbayes.report.learning import key, table
from fedbayes.report.material import Card, Figure, Material, Section, Shown
from fedbayes.report.pictures import data_address
from fedbayes.runs.numbers import PARTS, roc

DRAWN = 3  # scores with figures; the table has all
SETS = 4
PANELS = 12  # runs with histograms
THUMBS = 12


def outside(m: Material) -> Section | None:
    """Histograms of inside and outside scores, ROC curves, a table of areas."""
    runs = [run for run in m.runs if sets_of(run)]
    if not runs:
        return None
    names = list(dict.fromkeys(name for run in runs for name in sets_of(run)))
    scores = list(dict.fromkeys(score for run in runs for name in sets_of(run) for score in scores_of(run, name)))
    drawn = [s for s in (*PARTS, *scores) if s in scores]
    drawn = [s for s in dict.fromkeys(drawn) if s != "aleatoric" or len(scores) == 1][:DRAWN]
    body: list[Figure | Card | str] = [_areas(runs, names, scores)]
    for name in names[:SETS]:
        body.append(f"<h3>{escape(name)}</h3>" + _pictures(runs, name))
        body += [figure for score in drawn if (figure := _roc(runs, name, score))]
        body += [figure for run in runs[:PANELS] for score in drawn if (figure := _histogram(run, name, score))]
    if len(names) > SETS:
        body.append(f"<p>Figures are of the first {SETS} sets of {len(names)}; the table has all.</p>")
    lead = (
        "Rows of other sets that no client ever held, beside the test set. Good uncertainty is low for the test set "
        "and high outside: histograms that part, ROC curves that reach the upper left corner, areas (AUROC) near 1. An "
        "area of 0.5, the dashed diagonal, is a coin toss."
    )
    return Section("outside", "Out of distribution", lead, body)


def sets_of(run: Shown) -> list[str]:
    """The outside sets of a run's ood.npz."""
    return list(dict.fromkeys(k.split("/")[1] for k in run.ood if k.startswith("outside/") and k.count("/") >= 2))


def scores_of(run: Shown, name: str) -> list[str]:
    """The scores that a run has of a set and of its own test rows."""
    start = f"outside/{name}/"
    scores = [k.removeprefix(start) for k in run.ood if k.startswith(start)]
    return [s for s in scores if len(run.ood.get(f"inside/{s}", ())) and len(run.ood[start + s])]


def _pair(run: Shown, name: str, score: str) -> tuple[np.ndarray, np.ndarray] | None:
    if name not in sets_of(run) or score not in scores_of(run, name):
        return None
    inside, outer = run.ood[f"inside/{score}"], run.ood[f"outside/{name}/{score}"]
    return inside[np.isfinite(inside)].astype(float), outer[np.isfinite(outer)].astype(float)


def _title(score: str) -> str:
    return PARTS.get(score, score.replace("_", " "))


def _roc(runs: list[Shown], name: str, score: str) -> Figure | None:
    lines = []
    for run in runs:
        pair = _pair(run, name, score)
        if pair:
            false, true, _ = roc(*pair)
            lines.append(run.curve(false, true))
    labels = ("test rows flagged ↓", "outside flagged ↑")
    chart = line_chart(f"ROC, {name}, {_title(score)}", lines, *labels, across=UNIT, up=UNIT, diagonal=True)
    return Figure(f"roc-{name}-{score}", f"{name}: ROC by {_title(score)}", chart) if chart else None


def _histogram(run: Shown, name: str, score: str) -> Figure | None:
    pair = _pair(run, name, score)
    if not pair:
        return None
    groups = [("test set", run.ink, pair[0]), (name, "wrong", pair[1])]
    chart = histogram(f"{run.name}, {name}", groups, _title(score))
    title = f"{run.name}, {name}: {_title(score)}"
    return Figure(f"ood-{name}-{score}-{run.number}-{run.name}", title, chart, run=run.number) if chart else None


def _areas(runs: list[Shown], names: list[str], scores: list[str]) -> str:
    head = "".join(f"<th scope=col>{escape(_title(score))}&nbsp;↑</th>" for score in scores)
    rows = []
    for name in names:
        for run in runs:
            pairs = [_pair(run, name, score) for score in scores]
            values = [None if pair is None else roc(*pair)[2] for pair in pairs]
            best = max((v for v in values if v is not None), default=None)
            cells = "".join(
                f"<td{' class=best' if v == best and len(scores) > 1 else ''}>{v:.3f}</td>"
                if v is not None
                else "<td>–</td>"
                for v in values
            )
            head_cell = f"<th scope=row>{key(run)} <small>{escape(name)}</small></th>"
            rows.append(f'<tr class="r{run.number}">{head_cell}{cells}</tr>')
    return "<h3>AUROC</h3>" + table(head, rows, "run and set")


def _pictures(runs: list[Shown], name: str) -> str:
    """A few inputs of the set."""
    pictures = next((run.ood[f"thumbs/{name}"] for run in runs if f"thumbs/{name}" in run.ood), None)
    if pictures is None or pictures.ndim not in (3, 4):
        return ""
    images = "".join(
        f'<img src="{data_address(image)}" alt="one of {escape(name)}" width="48" height="48">'
        for image in pictures[:THUMBS]
    )
    return f'<p class="thumbs">{images}</p>'
