"""Sections of single predictions: the three of a comparison, and the extremes of each run's test set."""

from __future__ import annotations

from html import escape

import numpy as np

from fedbayes.report.drawing import Box, Drawing, Line, Mark, Picture, Text, beside, svg
from fedbayes.report.learning import key
from fedbayes.report.material import Figure, Material, Section, Shown
from fedbayes.report.pictures import data_address
from fedbayes.report.wording import beyond
from fedbayes.runs.numbers import extremes, uncertainty
from fedbayes.runs.records import Arrays

EACH = 6
SHOWN = 8  # runs
GROUPS = {
    "certain": "Most certain: least entropy",
    "aleatoric": "Most aleatoric: between classes, whatever the weights",
    "epistemic": "Most epistemic: draws of the weights disagree",
    "wrong": "Most wrong: the true class is given least",
}
BARS = 10


def gallery(m: Material) -> Section | None:
    """The extremes of each run with their pictures and probabilities, as FedUAB's figures 8 and 9."""
    runs = [run for run in m.predicting("classes") if "probs" in run.predictions]
    body: list[Figure | str] = []
    for run in runs[-SHOWN:]:
        rows = run.predictions.get("thumbnail_rows")
        groups = extremes(run.predictions, EACH, rows)
        # The last run is open: a comparison names its own method last.
        blocks = [_group(run, name, chosen) for name, chosen in groups.items()]
        opened = " open" if run is runs[-1] else ""
        body.append(
            f'<details class="gallery r{run.number}"{opened}><summary>{key(run)}</summary>{"".join(blocks)}</details>'
        )
    lead = (
        "The test rows at the four ends. Bars are the probabilities of the classes; the frame marks the true one, red "
        "is a wrong first choice. Beneath, the two parts of the variance on a common scale from 0 to 1."
    )
    if len(runs) > SHOWN:
        body.append(f"<p>The last {SHOWN} of {len(runs)} runs.</p>")
    return Section("gallery", "Gallery", lead, body) if body else None


def gallery_figures(m: Material) -> list[Figure]:
    """The same as sheets for files: one per run and group."""
    sheets = []
    for run in m.predicting("classes")[-SHOWN:]:
        for name, chosen in extremes(run.predictions, EACH, run.predictions.get("thumbnail_rows")).items():
            sheet = beside([card(run, row) for row in chosen.tolist()], GROUPS[name])
            sheets.append(Figure(f"gallery-{name}-{run.number}-{run.name}", f"{run.name}. {GROUPS[name]}", sheet))
    return sheets


def _group(run: Shown, name: str, rows: np.ndarray) -> str:
    cards = "".join(f"<li>{svg(card(run, row))}</li>" for row in rows.tolist())
    return f"<h3>{escape(GROUPS[name])}</h3><ul class=samples>{cards}</ul>"


def card(run: Shown, row: int) -> Drawing:
    """One test row: its picture where there is one, its bars, its two parts."""
    arrays = run.predictions
    probs, label = arrays["probs"][row], int(arrays["labels"][row])
    names = _names(arrays)
    guess = int(probs.argmax())
    marks: list[Mark] = []
    left = 8.0
    pixels = _pixels(arrays, row)
    if pixels is not None:
        marks.append(Picture(8, 8, 56, 56, pixels))
        left = 74
    marks.append(Text(left, 24, f"is {_short(names[label])}", ink="ink", size=13, bold=True))
    ink = "ink" if guess == label else "wrong"
    marks.append(Text(left, 42, f"says {_short(names[guess])}", ink=ink, size=13))
    marks.append(Text(left, 58, f"{probs[guess]:.0%} · row {row}", size=11))
    marks += _bars(probs, label, names, run.ink)
    parts = {part: v[row] for part, v in uncertainty(arrays).items() if part in ("aleatoric", "epistemic")}
    for i, (part, value) in enumerate(parts.items()):
        y = 146.0 + 16 * i
        marks.append(Text(8, y + 8, part, size=10))
        marks.append(Box(62, y, 76, 8, "line"))
        marks.append(Box(62, y, 76 * min(1.0, float(value)), 8, part))
        marks.append(Text(172, y + 8, f"{value:.3f}", "end", "ink", 10))
    words = f"row {row}: is {names[label]}, {run.name} says {names[guess]} with {probs[guess]:.0%}"
    return Drawing(180, 178, words + "".join(f", {p} {v:.3f}" for p, v in parts.items()), marks)


def _bars(probs: np.ndarray, label: int, names: list[str], ink: str) -> list[Mark]:
    """Bars of the classes in their order; of many classes the likeliest, and the true one."""
    shown = list(range(len(probs)))
    if len(probs) > BARS:
        shown = sorted({*np.argsort(-probs)[: BARS - 1].tolist(), label})
    wide, base, tall = 164 / len(shown), 124.0, 48.0
    guess = int(probs.argmax())
    marks: list[Mark] = [Line(np.array([8, 172]), np.array([base, base]), "line", width=1)]
    for i, c in enumerate(shown):
        x, up = 8 + i * wide, tall * float(probs[c])
        if c == label:
            x0, x1, y0 = x + 0.5, x + wide - 0.5, base - tall
            frame = np.array([x0, x1, x1, x0, x0]), np.array([y0, y0, base, base, y0])
            marks.append(Line(*frame, "soft", width=1))
        colour = ink if c != guess or guess == label else "wrong"
        marks.append(Box(x + 2, base - up, wide - 4, up, colour, hint=f"{names[c]}: {probs[c]:.1%}"))
        text = names[c][: max(1, int(wide / 6))]
        marks.append(
            Text(x + wide / 2, base + 12, text, "middle", "ink" if c == label else "soft", 10, bold=c == label)
        )
    return marks


def _names(arrays: Arrays) -> list[str]:
    class_names = arrays["class_names"].tolist() if "class_names" in arrays else []
    return class_names or [str(c) for c in range(arrays["probs"].shape[1])]


def _short(name: str) -> str:
    return name if len(name) <= 10 else name[:9] + "…"


def _pixels(arrays: Arrays, row: int) -> np.ndarray | None:
    if "thumbnails" not in arrays or "thumbnail_rows" not in arrays:
        return None
    at = np.flatnonzero(arrays["thumbnail_rows"] == row)
    return arrays["thumbnails"][at[0]] if len(at) else None


def three(m: Material) -> Section | None:
    """Three inputs as every method sees them: its likeliest classes and the parts of its uncertainty."""
    blocks = []
    for name, arrays in m.samples:
        if len(m.samples) > 1:
            blocks.append(f"<h3>{escape(name)}</h3>")
        inks = {run.files.name: run.ink for run in m.runs}
        cards = "".join(_sample(arrays, i, inks) for i in range(len(arrays["names"])))
        blocks.append(f'<div class="cards">{cards}</div>')
    lead = (
        "Aleatoric is the variance that stays when the weights are known, epistemic the variance between draws of the "
        "weights. A point estimate has no epistemic part: it can't say that it has never seen such a thing."
    )
    return Section("three", "Three predictions", lead, blocks) if blocks else None


def _sample(arrays: Arrays, i: int, inks: dict[str, str]) -> str:
    classes = arrays["class_names"].tolist()
    label = int(arrays["labels"][i])
    truth = f"a {classes[label]}" if label >= 0 else "stripes, of no class"
    head = f"<h3>{escape(str(arrays['names'][i]))}: {escape(truth)}</h3>"
    picture = f'<img src="{data_address(arrays["images"][i])}" alt="{escape(truth)}" width="96" height="96">'
    columns = []
    for method in arrays["methods"].tolist():
        probs = arrays[f"{method}/probs"][i]
        ink = inks.get(method, "soft")
        bars = [_bar(classes[c], float(probs[c]), ink) for c in (-probs).argsort()[:3].tolist()]
        bars += [_bar(p, float(arrays[f"{method}/{p}"][i].sum()), p) for p in ("aleatoric", "epistemic")]
        if arrays[f"{method}/epistemic"][i].any() and f"{method}/rank" in arrays:
            bars.append(f"<small>epistemic {beyond(float(arrays[f'{method}/rank'][i]))}</small>")
        columns.append(f"<div><h4>{escape(method)}</h4>{''.join(bars)}</div>")
    return f'<article>{head}<div class="sample">{picture}<div class="said">{"".join(columns)}</div></div></article>'


def _bar(name: str, value: float, ink: str) -> str:
    width = max(0.0, min(1.0, value)) * 100
    return (
        f'<div class="bar"><span>{escape(name)}</span>'
        f'<i style="--w:{width:.1f}%;--ink:var(--{ink})"></i><b>{value:.2f}</b></div>'
    )
