"""The section on waiting: scores against the clock of clients who take time, and who contributed how often."""

from __future__ import annotations

from html import escape

import numpy as np

from fedbayes.report.charts import line_chart
from fedbayes.report.learning import CURVES, key, table
from fedbayes.report.material import Card, Figure, Material, Section, Shown
from fedbayes.report.wording import TITLES

SCORES = ("accuracy", "exact_match", "concordance", "rmse", "nll")
SPEEDS = ("fast", "usual", "slow", "very slow")
UNITS = ((2 * 86400.0, 86400.0, "days"), (7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


def waiting(m: Material) -> Section | None:
    """Scores by the clients' clock, the age of what was added, and contributions by class of speed."""
    runs = [run for run in m.runs if any(record.get("clock") for record in run.files.records)]
    if not runs:
        return None
    body: list[Figure | Card | str] = []
    longest = max(float(record.get("clock", 0)) for run in runs for record in run.files.records)
    unit, label = next((unit, name) for least, unit, name in UNITS if longest >= least)
    for score in SCORES:
        lines = [run.curve(*_by_clock(run, score, unit)) for run in runs]
        chart = line_chart(CURVES[score][0], [line for line in lines if len(line.y)], label, TITLES[score])
        if chart:
            caption = f"{CURVES[score][0]} against the time that passed for the clients."
            body.append(Figure(f"waiting-{score}", CURVES[score][0], chart, caption))
    ages = [run.curve(*_ages(run)) for run in runs]
    chart = line_chart("Staleness", [line for line in ages if len(line.y)], "round", "closings")
    if chart:
        caption = "By how many closings the broadcast was older that answers came from, on average of a round."
        body.append(Figure("waiting-staleness", "Staleness", chart, caption))
    if any(_speeds(run) for run in runs):
        body.append(Card("Contributions by speed", _table(runs)))
    lead = (
        "In a simulation clients take time by a law of delays; on other machines it is the time that passed. A client "
        "is usual where it takes half to twice the usual time, slow up to ten times, and very slow beyond."
    )
    return Section("waiting", "Time and waiting", lead, body)


def _by_clock(run: Shown, score: str, unit: float) -> tuple[np.ndarray, np.ndarray]:
    timed = [r for r in run.files.records if "clock" in r and score in r.get("test", {})]
    rows = [(r["clock"] / unit, r["test"][score]) for r in timed]
    return np.array([x for x, _ in rows], float), np.array([y for _, y in rows], float)


def _ages(run: Shown) -> tuple[np.ndarray, np.ndarray]:
    rows = [(r["round"], r["staleness"]["mean"]) for r in run.files.records if "mean" in r.get("staleness", {})]
    return np.array([x for x, _ in rows], float), np.array([y for _, y in rows], float)


def _speeds(run: Shown) -> dict[str, int]:
    """Contributions of each class of speed."""
    totals: dict[str, int] = {}
    for record in run.files.records:
        for speed, count in record.get("speeds", {}).items():
            totals[speed] = totals.get(speed, 0) + int(count)
    return totals


def _table(runs: list[Shown]) -> str:
    """Of each class its share of the clients, of the contributions, and what one of its clients gave."""
    heads = ("clients", "contributions", "share", "share / clients")
    head = "<th scope=col>speed</th>" + "".join(f"<th scope=col>{escape(title)}</th>" for title in heads)
    rows = []
    for run in runs:
        totals = _speeds(run)
        whole = sum(totals.values())
        shares: dict[str, float] = next((r["registered"] for r in run.files.records if "registered" in r), {})
        for speed in SPEEDS:
            count, part = totals.get(speed, 0), shares.get(speed, 0.0)
            if not whole or not (count or part):
                continue
            ratio = f"{count / whole / part:.2f}" if part else "–"
            cells = (speed, f"{part:.1%}" if part else "–", f"{count}", f"{count / whole:.1%}", ratio)
            text = "".join(f"<td>{cell}</td>" for cell in cells)
            rows.append(f'<tr class="r{run.number}"><th scope=row>{key(run)}</th>{text}</tr>')
    return table(head, rows)
