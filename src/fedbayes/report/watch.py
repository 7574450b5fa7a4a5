"""A page on the watches of a run: one line per site, how near to an alarm it is, and what has changed where."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

import numpy as np

from fedbayes.errors import InputError
from fedbayes.files import write_atomically
from fedbayes.report.charts import Axes, thinned, ticks
from fedbayes.report.drawing import Dots, Drawing, Line, page_style, svg
from fedbayes.runs.watched import KINDS, State, states_in
from fedbayes.version import __version__

PAGE = "watch.html"
SPARK = (300.0, 44.0)
FLOOR = -4.0  # powers of ten below the limit that are drawn


def write_page(folder: str | Path) -> Path:
    """Write watch.html into a run's folder, from its watches; gives its path."""
    states = states_in(folder)
    if not states:
        raise InputError(f"{folder} has no watch yet: `fedbayes watch {folder} --input stream.csv --site A` begins one")
    path = Path(folder) / PAGE
    write_atomically(path, page(states, Path(folder).resolve().name))
    return path


def page(states: list[State], title: str) -> str:
    """The page as one HTML text; sites that have alarmed first, then the nearest to it."""
    states = sorted(states, key=lambda s: (s.alarm is None, -s.level, s.site))
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    alarmed = sum(s.alarm is not None for s in states)
    quiet = f"{alarmed} of {len(states)} sites have changed" if alarmed else f"all {len(states)} sites are quiet"
    alpha = states[0].alpha
    lead = (
        f"Each line is a site's evidence that its rows no longer come as its held-out rows did, from left to right as "
        f"rows came. It passes the dashed line with probability {alpha:g} at most while nothing changes, over all time "
        "and however often one looks."
    )
    heads = "".join(f"<th scope=col>{head}</th>" for head in ("rows", "evidence", "of the limit", "state"))
    rows = "".join(map(_row, states))
    body = (
        f'<div class="wide" tabindex="0"><table><thead><tr><th scope=col class="first">site</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    figure = (
        f'<figure class="broad"><h3>All sites</h3><div class="wide" tabindex="0">{svg(_all(states))}</div></figure>'
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>watch on {escape(title)} · fedbayes</title>\n<style>\n{page_style()}{style}"
        "td svg{width:300px;height:44px;display:block}"
        "td:last-child,th:last-child{text-align:left;white-space:normal;min-width:15em}</style>\n</head>\n<body>\n"
        f"<header><h1>Watch on {escape(title)}</h1><p><b>{escape(quiet)}</b></p></header>\n"
        f"<main><section><p>{escape(lead)}</p>{body}{figure}</section></main>\n"
        f"<footer>fedbayes {escape(__version__)}</footer>\n</body>\n</html>\n"
    )


def _levels(state: State) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and how near the nearest score is to its limit, in powers of ten."""
    points = np.array(state.history, dtype=float).reshape(-1, 1 + len(state.channels))
    if not len(points):
        return np.array([0.0]), np.array([-state.limit / math.log(10)])
    return points[:, 0], (points[:, 1:].max(1) - state.limit) / math.log(10)


def _row(state: State) -> str:
    x, y = _levels(state)
    width, height = SPARK
    top = max(0.0, float(y.max()))
    across = 2 + (x - x[0]) / max(x[-1] - x[0], 1) * (width - 4)
    up = height - 3 - (np.clip(y, FLOOR, top) - FLOOR) / (top - FLOOR) * (height - 6)
    limit = height - 3 - (0 - FLOOR) / (top - FLOOR) * (height - 6)
    ink = "wrong" if state.alarm else "c0"
    some = thinned(len(x), 240)
    marks = [
        Line(np.array([0.0, width]), np.array([limit, limit]), "soft", width=1, dash="3 3"),
        Line(across[some], up[some], ink, width=1.6),
    ]
    drawing = Drawing(width, height, f"evidence of a change at {state.site} by row", list(marks))
    level = f"10<sup>{state.level:+.1f}</sup>"
    words = "quiet"
    if state.alarm:
        a = state.alarm
        when = f", {escape(a.time)}" if a.time else ""
        words = f"<b>changed</b> by row {a.row}{when}: {escape(KINDS[a.kind])} ({escape(a.score)} {escape(a.how)})"
    cells = "".join(f"<td>{cell}</td>" for cell in (state.rows, svg(drawing), level, words))
    return f"<tr><th scope=row>{escape(state.site)}</th>{cells}</tr>"


def _all(states: list[State]) -> Drawing:
    """All sites over the rows that they have seen."""
    lines = [_levels(state) for state in states]
    last = max(float(x[-1]) for x, _ in lines)
    top = max(1.0, *(float(y.max()) for _, y in lines))
    axes = Axes(ticks(0, max(last, 1)), ticks(FLOOR, top), "rows", "evidence, powers of ten", size=(760.0, 280.0))
    for state, (x, y) in zip(states, lines):
        some = thinned(len(x), 240)
        axes.marks.append(Line(*axes.put(x[some], y[some]), "wrong" if state.alarm else "c0", width=1.4))
        end_x, end_y = axes.put(x[-1:], y[-1:])
        axes.marks.append(Dots(end_x, end_y, "soft", radius=6, hint=[f"{state.site}: {state.rows} rows"]))
    axes.marks.append(Line(*axes.put(np.array([axes.x0, axes.x1]), np.zeros(2)), "ink", width=1, dash="4 3"))
    return axes.drawing("evidence of a change by row, one line for each site; the dashed line is the limit")
