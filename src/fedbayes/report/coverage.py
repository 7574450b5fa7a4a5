"""The section on promises: sites as dots around the promised level, and within what chance allows for so few rows."""

from __future__ import annotations

import json
from html import escape

import numpy as np

from fedbayes.evaluate.binomial import exact_band
from fedbayes.report.charts import Axes, ticks
from fedbayes.report.drawing import Area, Dots, Drawing, Line, Text
from fedbayes.report.learning import key, table
from fedbayes.report.material import Figure, Material, Section, Shown
from fedbayes.runs.records import Arrays

SIZES = {"classes": "classes in a set", "real": "width", "survival": "lower bound"}


def coverage(m: Material) -> Section | None:
    """How often sets, intervals or bounds hold at each site, for runs that were calibrated."""
    runs = [run for run in m.runs if "judged_rows" in run.calibration and run.calibration["judged_rows"].max() > 0]
    if not runs:
        return None
    body: list[Figure | str] = [
        Figure(
            f"coverage-{run.name}",
            f"{run.name}: coverage by site",
            _dots(run),
            f"A dot is a site: how often its {_head(run.calibration)['coverage']:.0%} promise held on rows that did "
            "not calibrate. The band is where 95 % of sites lie by chance alone if the promise is kept exactly.",
            run.number,
        )
        for run in runs
    ]
    body.append(_table(runs))
    lead = (
        "A promise is kept at a site if its dot lies in the band, or above. Dots below it are sites whose truths are "
        "missed more often than was promised."
    )
    return Section("coverage", "Promises by site", lead, body)


def _head(arrays: Arrays) -> dict[str, object]:
    head: dict[str, object] = json.loads(str(arrays["head"]))
    return head


def _judged(run: Shown) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]:
    """Rows, coverage, size and name of sites that have judging rows."""
    arrays = run.calibration
    rows = arrays["judged_rows"].astype(float)
    some = rows > 0
    share = arrays["judged_hits"].astype(float)[some] / rows[some]
    return rows[some], share, arrays["judged_size"].astype(float)[some], arrays["sites"][some].tolist()


def _dots(run: Shown) -> Drawing:
    rows, share, size, names = _judged(run)
    level = float(_head(run.calibration)["coverage"])  # type: ignore[arg-type]
    low, high = max(1.0, rows.min() * 0.8), rows.max() * 1.25
    grid = np.unique(np.geomspace(low, high, 80).round())
    least, most = exact_band(level, grid)
    bottom = min(float(share.min()), float(least.min()), level - 0.05)
    axes = Axes([], ticks(max(0.0, bottom), 1.0), "judging rows of a site", "coverage", span=(0.0, 1.0))

    def place(n: np.ndarray) -> np.ndarray:
        return (np.log(n) - np.log(low)) / (np.log(high) - np.log(low))

    x, y = axes.put(np.r_[place(grid), place(grid)[::-1]], np.r_[least, most[::-1]])
    axes.marks.append(Area(x, y, "soft", opacity=0.14))
    axes.marks.append(Line(*axes.put(np.array([0.0, 1.0]), np.array([level, level])), "soft", width=1.5, dash="4 3"))
    marks = _round_numbers(low, high)
    _under(axes, place(marks), [f"{t:g}" for t in marks])
    band = exact_band(level, rows)[0]
    at_x, at_y = axes.put(place(rows), share)
    for ink, chosen in ((run.ink, share >= band), ("wrong", share < band)):
        if chosen.any():
            axes.marks.append(Dots(at_x[chosen], at_y[chosen], ink, run.number, 3.5, 0.8))
    sizes = ["" if np.isnan(z) else f", size {z:.3g}" for z in size]  # under epsilon they are not told
    hints = [f"{n}: {s:.3f} of {r:.0f} rows{z}" for n, s, r, z in zip(names, share, rows, sizes)]
    axes.marks.append(Dots(at_x, at_y, run.ink, run.number, 7, hint=hints))
    return axes.drawing(f"Coverage of {len(rows)} sites of {run.name} by their number of judging rows")


def _round_numbers(low: float, high: float) -> np.ndarray:
    """Marks of a logarithmic scale: the roundest numbers of which there are two at least."""
    powers = 10.0 ** np.arange(7)
    for digits in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)):
        marks = np.outer(powers, digits).ravel()
        marks = marks[(marks >= low) & (marks <= high) & (marks == marks.round())]
        if len(marks) > 1:
            break
    return marks


def _under(axes: Axes, places: np.ndarray, words: list[str]) -> None:
    """A scale of rows."""
    for place, word in zip(places, words):
        x, _ = axes.put(float(place), axes.y0)
        axes.marks.append(Text(float(x), axes.height - 25, word, "middle"))


def _table(runs: list[Shown]) -> str:
    heads = ["way", "score", "promised", "all rows", "worst site", "worst tenth", "in the band or above", "mean size"]
    lines = []
    for run in runs:
        rows, share, size, names = _judged(run)
        head = _head(run.calibration)
        worst = int(share.argmin())
        tenth = np.sort(share)[: max(1, len(share) // 10)].mean()
        mean = (size * rows).sum() / rows.sum()
        kept = int((share >= exact_band(float(head["coverage"]), rows)[0]).sum())  # type: ignore[arg-type]
        cells = [
            *(str(head["way"]).replace("_", " "), str(head["score"]).replace("_", " "), f"{head['coverage']:.2f}"),
            f"{(share * rows).sum() / rows.sum():.3f}",
            f"{share[worst]:.3f} ({names[worst]})",
            f"{tenth:.3f}",
            f"{kept} of {len(rows)}",
            "not told" if np.isnan(mean) else f"{mean:.3g} {SIZES[str(head['kind'])]}",
        ]
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr class="r{run.number}"><th scope=row>{key(run)}</th>{text}</tr>')
    return table("".join(f"<th scope=col>{head}</th>" for head in heads), lines)
