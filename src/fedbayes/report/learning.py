"""Sections on training: learning curves, and the cost of sending and computing."""

from __future__ import annotations

import re
from functools import partial
from html import escape

import numpy as np

from fedbayes.report.charts import line_chart
from fedbayes.report.material import Figure, Material, Section, Shown
from fedbayes.report.wording import TITLES

CURVES = {
    "accuracy": ("Accuracy", "Share of test rows that are right. Higher is better."),
    "exact_match": ("Exact match", "Share of test rows with all labels right. Higher is better."),
    "concordance": ("Concordance", "Share of pairs of test rows whose order of events was foreseen. Higher is better."),
    "rmse": ("RMSE", "Root mean square error, in the target's units. Lower is better."),
    "nll": ("NLL", "Negative log-likelihood of the true target: punishes being sure and wrong. Lower is better."),
    "ece": ("ECE", "How far confidence is from accuracy, on average over 15 bins. Lower is better."),
    "crps": ("CRPS", "Distance of the predicted distribution from the target. Lower is better."),
}


def curves(m: Material) -> Section | None:
    """Test scores of all runs by round, one chart per score."""
    figures = []
    for score, (title, caption) in CURVES.items():
        lines = [run.curve(*map(np.array, run.files.curve(score))) for run in m.runs]
        chart = line_chart(title, [line for line in lines if len(line.y)], "round", TITLES[score])
        if chart:
            figures.append(Figure(f"learning-{score}", title, chart, caption))
    lead = "Scores on the whole test set after each evaluated round."
    return Section("learning", "Learning curves", lead, figures) if figures else None


def sent(run: Shown) -> np.ndarray:
    """Megabytes sent up to and with each round, both ways, all clients."""
    return np.cumsum([r.get("bytes_up", 0) + r.get("bytes_down", 0) for r in run.files.records]) / 1e6


def costs(m: Material) -> Section | None:
    """Communication and time: totals as a table, and the score that a megabyte or a second buys."""
    runs = [run for run in m.runs if run.files.records]
    if not runs:
        return None
    figures: list[Figure | str] = [_table(runs)]
    score = next(
        (s for s in ("accuracy", "exact_match", "concordance", "rmse") if any(s in r.files.scores for r in runs)), None
    )
    if score:
        by_bytes, by_time = [], []
        for run in runs:
            at = [(i, r["test"][score]) for i, r in enumerate(run.files.records) if score in r.get("test", {})]
            rows, values = np.array([i for i, _ in at], int), np.array([v for _, v in at])
            seconds = np.cumsum([float(r.get("seconds", 0)) for r in run.files.records]) - run.files.start
            by_bytes.append(run.curve(sent(run)[rows], values))
            if run.files.seconds:  # a private journal does not tell them
                by_time.append(run.curve(seconds[rows], values))
        title, better = CURVES[score][0], "up" if "↑" in TITLES[score] else "down"
        for name, lines, label in (("bytes", by_bytes, "MB sent"), ("time", by_time, "seconds")):
            chart = line_chart(title, lines, label, TITLES[score])
            if chart:
                what = "up and down, all clients together" if name == "bytes" else "evaluation included, start-up not"
                caption = f"{title} against {label}, {what}. Further left and further {better} is better."
                figures.append(Figure(f"cost-{name}", f"{title} by {label}", chart, caption))
    lead = (
        "Messages are counted in the numbers that travel: a Gaussian sends a mean and a scale for each weight, a point "
        "one number. Times are of the machine that ran it, all clients in turn. Start-up is what the first round took "
        "beyond a usual one: loading, tracing, compiling, and for the first run of a comparison the start of the "
        "whole program. Seconds per round are without it."
    )
    return Section("costs", "Communication and time", lead, figures)


def _table(runs: list[Shown]) -> str:
    titles = (
        "rounds",
        "clients per round",
        "MB up",
        "MB down",
        "KB per client and round",
        "seconds",
        "of which start-up",
        "seconds per round",
    )
    head = "".join(f"<th scope=col>{escape(title)}</th>" for title in titles)
    rows = []
    for run in runs:
        records = run.files.records
        up, down = (sum(r.get(f"bytes_{way}", 0) for r in records) for way in ("up", "down"))
        took = sum(r.get("cohort", 0) for r in records)
        seconds, start = run.files.seconds, run.files.start
        times = f"{seconds:.1f}", f"{start:.1f}", f"{(seconds - start) / len(records):.3f}"
        cells = (
            f"{len(records)}",
            f"{took / len(records):.3g}",
            f"{up / 1e6:.2f}",
            f"{down / 1e6:.2f}",
            f"{up / took / 1e3:.1f}" if took else "",
            *(times if seconds else ("", "", "")),
        )
        cells_text = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr class="r{run.number}"><th scope=row>{key(run)}</th>{cells_text}</tr>')
    return table(head, rows)


def key(run: Shown) -> str:
    """A run's name beside its colour and dash."""
    dash = f' stroke-dasharray="{run.dash}"' if run.dash else ""
    line = f'<path class="l s-{run.ink}" stroke-width="4"{dash} d="M0 5h20"/>'
    return f'<svg class="key" viewBox="0 0 20 10" aria-hidden="true">{line}</svg>{escape(run.name)}'


def table(head: str, rows: list[str], corner: str = "run") -> str:
    """A table that scrolls by itself where it is wider than the page; on a phone each row becomes a block."""
    titles = [re.sub("<[^>]*>", "", title) for title in re.findall(r"<th[^>]*>(.*?)</th>", head)]
    named = "".join(map(partial(_named, titles), rows))
    return (
        '<div class="wide" tabindex="0"><table class="rows"><thead><tr>'
        f'<th scope=col class="first">{corner}</th>{head}</tr></thead><tbody>{named}</tbody></table></div>'
    )


def _named(titles: list[str], row: str) -> str:
    """A row whose cells carry the titles of their columns."""
    start, *cells = row.split("<td")
    return start + "".join(f'<td data-title="{title}"{cell}' for title, cell in zip(titles, cells, strict=True))
