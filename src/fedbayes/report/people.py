"""The section on the clients: who is well served, who badly, and what labels they hold."""

from __future__ import annotations

from html import escape

import numpy as np

from fedbayes.report.charts import BOTTOM, LEFT, RIGHT, Axes, line_chart, thinned, ticks
from fedbayes.report.drawing import Box, Dots, Drawing, Mark, Text, bounds
from fedbayes.report.learning import key, table
from fedbayes.report.material import Card, Figure, Material, Section, Shown
from fedbayes.report.wording import TITLES
from fedbayes.runs.numbers import by_site
from fedbayes.runs.records import Arrays

WIDEST = 160  # clients in a picture
WORST = 8
MOST_SITES = 40  # in a table
HOMES = 4  # spreads of data with a picture of their own
SCORES = {"accuracy": "accuracy ↑", "exact_match": "exact match ↑", "concordance": "concordance ↑", "rmse": "RMSE ↓"}
SURE = {"nll": "NLL ↓", "ece": "ECE ↓", "crps": "CRPS ↓"}  # what a client's confidence is worth
DOUBT = {"entropy": "entropy", "epistemic": "epistemic part"}  # means over a client's test rows
TITLE = {**SCORES, **SURE, **DOUBT}


def clients(m: Material) -> Section | None:
    """Per-client spread: scores on own test rows in order, label mix beside it, the worst served by name."""
    runs = [run for run in m.runs if "client_sizes" in run.files.evaluation or "label_counts" in run.files.evaluation]
    if not runs:
        return None
    body: list[Figure | Card | str] = []
    score = next((s for s in SCORES if any(_scores(r, s) is not None for r in runs)), None)
    body += [figure for name in ([score] if score else []) + [*SURE, *DOUBT] if (figure := _spread(runs, name, score))]
    body += [card for run in runs[:HOMES] if (card := _sites(run) or _each(run, score))]
    homes = _homes(runs)
    for number, group in enumerate(homes[:HOMES]):
        body += _home(group, score, number)
    if len(homes) > HOMES:
        body.append(f"<p>The first {HOMES} of {len(homes)} ways in which the data were spread.</p>")
    lead = "Each client's score is of its own test rows, which have its own mix of labels where there are labels."
    return Section("clients", "Clients", lead, body)


def _sites(run: Shown) -> Card | None:
    """Every score of every named site with its error, the worst marked; all rows together, and the spread."""
    found = by_site(run.files.evaluation)
    if found is None:
        return None
    shown = [(j, name) for j, name in enumerate(found.names) if name in TITLES]
    worst = {j: found.worst(j, TITLES[name][-1]) for j, name in shown}
    count = found.names.index("count")
    head = "<th scope=col>rows</th>" + "".join(f"<th scope=col>{escape(TITLES[name])}</th>" for _, name in shown)
    doubt = {name: values for name in DOUBT if (values := _scores(run, name)) is not None}
    head += "".join(f"<th scope=col>{escape(DOUBT[name])}</th>" for name in doubt)
    rows = []
    for k in range(min(len(found.sites), MOST_SITES)):
        cells = "".join(_cell(found.values[k, j], found.errors[k, j], worst[j] == k) for j, _ in shown)
        cells += "".join(_cell(values[k]) for values in doubt.values())
        size = f"<td>{np.nan_to_num(found.values[k, count]):.0f}</td>"
        rows.append(f"<tr><th scope=row>{escape(found.sites[k])}</th>{size}{cells}</tr>")
    whole = "".join(_cell(found.all[j], found.all_errors[j]) for j, _ in shown)
    rows.append(f"<tr><th scope=row>all</th><td>{found.all[count]:.0f}</td>{whole}{'<td></td>' * len(doubt)}</tr>")
    spread = "".join(_cell(found.spread(j)) for j, _ in shown)
    rows.append(f"<tr><th scope=row>spread</th><td></td>{spread}{'<td></td>' * len(doubt)}</tr>")
    title = f"{run.name}: scores by site, on their own test rows; the worst is bold"
    return Card(title, table(head, rows, "site"), broad=True)


def _each(run: Shown, score: str | None) -> Card | None:
    """Every score of every client and the uncertainty of its rows, the worst served first."""
    arrays = run.files.evaluation
    columns = {name: values for name in TITLE if (values := _scores(run, name)) is not None}
    if not columns or score not in columns:
        return None
    worth = columns[score] if "↑" in TITLE[score] else -columns[score]
    order = np.argsort(np.where(np.isfinite(worth), worth, np.inf), kind="stable")
    sizes = arrays.get("client_sizes")
    head = "" if sizes is None else "<th scope=col>training rows</th>"
    head += "".join(f"<th scope=col>{escape(TITLE[name])}</th>" for name in columns)
    rows = []
    for k in order[:MOST_SITES].tolist():
        cells = "" if sizes is None else f"<td>{sizes[k]}</td>"
        cells += "".join(_cell(values[k]) for values in columns.values())
        rows.append(f"<tr><th scope=row>{escape(_name(arrays, k))}</th>{cells}</tr>")
    many = f"All {len(order)}" if len(order) <= MOST_SITES else f"The worst served {MOST_SITES} of {len(order)}"
    content = f"<details><summary>{many}</summary>{table(head, rows, 'client')}</details>"
    return Card(f"Each client on its own test rows: {run.name}", f'<div class="r{run.number}">{content}</div>')


def _cell(value: float, error: float = np.nan, worst: bool = False) -> str:
    if not np.isfinite(value):
        return "<td>-</td>"
    sure = f" <small>± {error:.3f}</small>" if np.isfinite(error) else ""
    return f"<td>{f'<b>{value:.3f}</b>' if worst else f'{value:.3f}'}{sure}</td>"


def _scores(run: Shown, score: str) -> np.ndarray | None:
    """A score of each client, or the mean uncertainty of its rows."""
    arrays = run.files.evaluation
    names, table = ("uncertainty_names", "client_uncertainty") if score in DOUBT else ("score_names", "client_scores")
    if table not in arrays or names not in arrays or score not in arrays[names].tolist():
        return None
    values = arrays[table][:, arrays[names].tolist().index(score)].astype(float)
    return values if np.isfinite(values).any() else None


def _spread(runs: list[Shown], score: str, first: str | None) -> Figure | None:
    lines = []
    for run in runs:
        values = _scores(run, score)
        if values is not None and np.ptp(values[np.isfinite(values)]) > 0:  # a point has no epistemic part
            values = np.sort(values[np.isfinite(values)])
            values = values if "↑" in TITLE[score] else values[::-1]
            lines.append(run.curve((np.arange(len(values)) + 1) / len(values), values))
    across = (0, 0.25, 0.5, 0.75, 1)
    chart = line_chart("Spread over clients", lines, "share of clients", TITLE[score], across=across)
    if chart is None:
        return None
    name = TITLE[score].rstrip(" ↑↓")
    if score in DOUBT:
        caption = f"Clients in the order of the mean {name} of their own test rows, the least certain left."
    else:
        direction = "Higher" if "↑" in TITLE[score] else "Lower"
        caption = f"Clients in the order of their own {name}, the worst served left. {direction} is better"
        caption += "; few rows make large ECEs by chance." if score == "ece" else "; the flatter, the fairer."
    stem = "clients-spread" if score == first else f"clients-{score}"
    return Figure(stem, f"Spread over clients: {name}", chart, caption)


def _homes(runs: list[Shown]) -> list[list[Shown]]:
    """Runs grouped by who holds what: those of one comparison share it."""
    groups: dict[bytes, list[Shown]] = {}
    for run in runs:
        arrays = run.files.evaluation
        same = arrays["label_counts"] if "label_counts" in arrays else arrays["client_sizes"]
        groups.setdefault(same.tobytes(), []).append(run)
    return list(groups.values())


def _home(runs: list[Shown], score: str | None, number: int) -> list[Figure | Card | str]:
    arrays = runs[0].files.evaluation
    counts = arrays.get("label_counts")
    known = [(run, v) for run in runs if score and (v := _scores(run, score)) is not None]
    total = len(arrays["client_sizes"] if "client_sizes" in arrays else arrays["label_counts"])
    # The last run sets the order: a comparison names its own method last.
    worth = known[-1][1] if known else np.arange(total, dtype=float)
    if score and known and "↓" in SCORES[score]:
        worth = -worth
    order = np.argsort(np.where(np.isfinite(worth), worth, np.inf), kind="stable")
    body: list[Figure | Card | str] = [_worst(arrays, known, order, score)] if known and score else []
    if counts is not None and counts.ndim == 2:
        by = f"by {SCORES[score]} of {known[-1][0].name}, worst first" if known and score else "by number"
        few = "" if total <= WIDEST else f" {WIDEST} of {total} clients, evenly spaced in that order."
        caption = (
            f"A column is a client, {by}: above, its score under each run; below, its training rows by label.{few}"
        )
        name = ", ".join(run.name for run in runs)
        title = "Scores and labels of the clients" if number == 0 else f"Scores and labels of the clients: {name}"
        body.append(Figure(f"clients-{number}", title, _columns(arrays, known, order, score), caption))
    return body


def _columns(arrays: Arrays, known: list[tuple[Shown, np.ndarray]], order: np.ndarray, score: str | None) -> Drawing:
    """Dots of each client's scores above a heat map of its labels, one column per client."""
    shown = order[thinned(len(order), WIDEST)]
    counts = arrays["label_counts"][shown]
    names = arrays["class_names"].tolist() if "class_names" in arrays else []
    names = names or [str(c) for c in range(counts.shape[1])]
    wide, tall = 1040.0, 150.0 if known else 10.0
    column = (wide - LEFT - RIGHT) / len(shown)
    marks: list[Mark] = []
    if known and score:
        low, high = bounds(v[shown] for _, v in known)
        axes = Axes((), ticks(low, high, 4), "", SCORES[score], size=(wide, tall + BOTTOM), span=(0, 1))
        for run, values in known:
            measured = np.flatnonzero(np.isfinite(values[shown]))
            _, y = axes.put(0.0, values[shown][measured])
            x = LEFT + (measured + 0.5) * column
            axes.marks.append(Dots(x, y, run.ink, run.number, min(3.5, column / 2)))
            hints = [f"{run.name}, {_name(arrays, shown[i])}: {values[shown[i]]:.3f}" for i in measured]
            axes.marks.append(Dots(x, y, run.ink, run.number, 5, hint=hints))
        marks += axes.marks
    row = 14.0 if counts.shape[1] <= 20 else max(3.0, 280 / counts.shape[1])
    top, most = tall + 12, max(1, int(counts.max()))
    for c in range(counts.shape[1]):
        if row >= 10:
            marks.append(Text(LEFT - 6, top + c * row + row - 3, names[c][:7], "end"))
        for i in np.flatnonzero(counts[:, c]):
            n = int(counts[i, c])
            hint = f"{_name(arrays, shown[i])}: {n} rows of {names[c]}"
            place = (LEFT + i * column, top + c * row, max(column - 0.6, 0.4), row - 0.6)
            marks.append(Box(*place, "c5", opacity=0.15 + 0.85 * n / most, hint=hint))
    end = top + counts.shape[1] * row
    marks.append(Text(LEFT, end + 14, "worst served" if known else _name(arrays, 0)))
    marks.append(Text(wide - RIGHT, end + 14, "best served" if known else _name(arrays, len(order) - 1), "end"))
    return Drawing(wide, end + 22, f"Scores and labels of {len(shown)} clients", marks)


def _worst(arrays: Arrays, known: list[tuple[Shown, np.ndarray]], order: np.ndarray, score: str) -> Card:
    """The clients that are served worst, what they hold, and what each run gives them."""
    head = "<th scope=col>training rows</th>" if "client_sizes" in arrays else ""
    head += "".join(f'<th scope=col class="r{run.number}">{key(run)}</th>' for run, _ in known)
    head += '<th scope=col class="text">training labels</th>' if "label_counts" in arrays else ""
    rows = []
    for k in order[:WORST].tolist():
        cells = f"<td>{arrays['client_sizes'][k]}</td>" if "client_sizes" in arrays else ""
        cells += "".join(f'<td class="r{run.number}">{v[k]:.3f}</td>' for run, v in known)
        cells += f'<td class="text">{escape(_mix(arrays, k))}</td>' if "label_counts" in arrays else ""
        rows.append(f"<tr><th scope=row>{escape(_name(arrays, k).removeprefix('client '))}</th>{cells}</tr>")
    return Card(f"The worst served, {SCORES[score]} on their own test rows", table(head, rows, "client"))


def _name(arrays: Arrays, k: int) -> str:
    """What a client is called."""
    return str(arrays["client_names"][k]) if "client_names" in arrays else f"client {k}"


def _mix(arrays: Arrays, client: int) -> str:
    counts = arrays["label_counts"][client]
    names = arrays["class_names"].tolist() if "class_names" in arrays else []
    names = names or [str(c) for c in range(len(counts))]
    held = [c for c in np.argsort(-counts, kind="stable").tolist() if counts[c]]
    text = ", ".join(f"{names[c]} × {counts[c]}" for c in held[:5])
    return text + (f", {len(held) - 5} more" if len(held) > 5 else "")
