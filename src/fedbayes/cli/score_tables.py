"""Scores of evaluated runs as tables for a terminal: one column per method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedbayes.report.wording import TITLES

MORE = {
    **TITLES,
    "sharpness": "sharpness",
    "classwise_ece": "classwise ECE ↓",
}
PARTS = {
    "entropy": "entropy",
    "aleatoric": "aleatoric",
    "epistemic": "epistemic",
    "mutual_information": "mutual information",
}
CONFORMAL = {
    "coverage": "coverage",
    "class_least": "least class",
    "site_tenth": "10 % of sites below",
    "size": "classes in a set ↓",
    "empty": "empty sets",
    "width": "width ↓",
}
SHORT = {"mutual_information": "mutual inf."}
Scores = Mapping[str, Any]


def score_table(runs: Mapping[str, Scores]) -> Table:
    """Every score of the test set with its error (rows and draws together), then what calibration makes of it."""
    columns = [dict(_rows(scores)) for scores in runs.values()]
    caption = "± one standard error, of test rows and draws together; scores.json has both"
    table = Table(
        "score", *map(escape, runs), box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for title in dict.fromkeys(title for column in columns for title in column):
        table.add_row(title, *(column.get(title, "") for column in columns))
    return table


def ood_table(runs: Mapping[str, Scores], name: str) -> Table:
    """How well each score tells one set from the test set: AUROC with the spread of its resamples, AUPR, FPR95."""
    table = Table("score", title=escape(f"outside: {name}"), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for method in runs:
        for title in (f"{escape(method)}\nAUROC ↑", "\nAUPR ↑", "\nFPR95 ↓"):
            table.add_column(title, justify="right")
    each = [scores["ood"]["tables"][name] for scores in runs.values()]
    for score in dict.fromkeys(score for rows in each for score in rows):
        cells = [cell for rows in each for cell in _ranked(rows.get(score))]
        table.add_row(SHORT.get(score, score.replace("_", " ")), *cells)
    return table


def _ranked(row: Mapping[str, Mapping[str, float]] | None) -> list[str]:
    if row is None:
        return ["–", "", ""]
    area = row["auroc"]
    return [
        f"{area['value']:.3f}±{area['spread']:.3f}",
        f"{row['aupr']['value']:.3f}",
        f"{row['fpr95']['value']:.3f}",
    ]


def _rows(scores: Scores) -> Iterator[tuple[str, str]]:
    figures = scores["scores"]
    for name, title in MORE.items():
        if name in figures:
            yield title, _cell(figures[name])
    for start, title in (("misclassification", "AUROC of errors ↑"), ("retention", "retention area ↑")):
        for part, word in PARTS.items():
            if f"{start}_{part}" in figures:
                yield f"{title}, {word}", _cell(figures[f"{start}_{part}"])
    if "temperature" in scores:
        tempered = scores["temperature"]
        yield "temperature", f"{tempered['temperature']:.3f}"
        for name in ("nll", "ece"):
            yield f"{TITLES[name]} tempered", f"{tempered[f'{name}_before']:.4f} → {tempered[f'{name}_after']:.4f}"
    for way, row in scores.get("conformal", {}).items():
        for name, title in CONFORMAL.items():
            if name in row:
                kind = "intervals" if "width" in row else "sets by class" if way == "by_class" else "sets"
                yield f"{row['promised']:.0%} {kind}: {title}", f"{row[name]:.4f}"


def _cell(figure: Mapping[str, float | None]) -> str:
    if figure["value"] is None:
        return "–"
    error = math.hypot(figure["error"] or 0, figure.get("sampling") or 0)
    return f"{figure['value']:.4f}" + (f" ± {error:.4f}" if error else "")
