"""A published table and ours as Markdown and as one page, with the curves of its cells."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from fedbayes.papers.cells import Printed, curves_of

PERCENT = ("accuracy", "ece", "mce")
CAPITALS = ("nll", "ece", "mce", "auroc", "aupr", "fpr95", "rmse")
BETTER_HIGH = ("accuracy", "auroc", "aupr")
INKS = ("#1b6ca8", "#b5482a", "#5b8c3e", "#7a4fa3", "#c08a1e", "#3c8f8f", "#8a8a8a", "#b03a6f")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2733; }
table { border-collapse: collapse; margin: 1rem 0 2rem; } td, th { padding: .3rem .7rem; text-align: right; }
th { border-bottom: 1px solid #8a97a5; font-weight: 600; } td:first-child, th:first-child { text-align: left; }
tr:nth-child(even) td { background: #f3f6f9; } small { color: #5a6875; }
.good { color: #1e7a3c; } .bad { color: #a8431f; }
figure { margin: 1rem 0; overflow-x: auto; } .wide { overflow-x: auto; } svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { body { background: #14191f; color: #dde4ea; }
  tr:nth-child(even) td { background: #1c232b; }
  small { color: #9aa7b3; } .good { color: #6fca8b; } .bad { color: #e08a63; } figure { background: #fff; } }
"""


def markdown(printed: Printed, rows: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown, one block a group and metric: ours, published, the difference."""
    lines = [f"# {printed.title}", "", f"{LEGEND} {made_of(rows)}", ""]
    if others := made_otherwise(rows):
        lines += [OTHERWISE, "", *(f"- {line}" for line in others), ""]
    for (group, metric), block in blocks(rows).items():
        columns = list(dict.fromkeys(row["column"] for row in block))
        at = {(row["row"], row["column"]): row for row in block}
        lines += [f"## {heading(group, metric, block)}", ""]
        lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for name in dict.fromkeys(row["row"] for row in block):
            lines.append(f"| {name} | " + " | ".join(_text(at.get((name, c))) for c in columns) + " |")
        lines.append("")
    return "\n".join(lines)


LEGEND = "Ours at the last round, ± its standard error over seeds / published (ours - published)."


def made_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """How the figures came about, in a sentence."""
    counts = sorted({row["rounds"] for row in rows})
    seeds = sorted({len(row["seeds"]) for row in rows})
    devices = sorted({row["device"] for row in rows})
    commits = sorted({row["commit"] for row in rows if row["commit"]})

    several = [f"{span(n)} {word}{'s' * (n[-1] > 1)}" for n, word in ((counts, "round"), (seeds, "seed"))]
    made = f"{', '.join(several)}, on {', '.join(devices)}"
    less = dict.fromkeys(setting for row in rows for setting in row["scaled"])
    return (
        made
        + (f", commit {', '.join(commits)}." if commits else ".")
        + (f" {SCALED} {', '.join(less)}." if less else "")
    )


SCALED = "Scaled down:"


OTHERWISE = "Made with other settings than the table has now:"


def made_otherwise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells that were made with other settings than the table has now, a line each."""
    found = {f"{row['group']} {row['row']} {row['column']}".strip(): row["otherwise"] for row in rows}
    return [f"{name}: {other}" for name, other in found.items() if other]


def span(values: Sequence[int]) -> str:
    """Sorted numbers as one, or as the first and the last."""
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def heading(group: str, metric: str, block: Sequence[Mapping[str, Any]]) -> str:
    """What a block shows: `MNIST: NLL, 50 draws (2000 rounds)`."""
    words = [word.upper() if word in CAPITALS else word for word in re.split("[_ ]", metric)]
    name = f"{words[0]}, {words[1]} draws" if len(words) == 2 and words[1].isdigit() else " ".join(words)
    rounds = span(sorted({row["rounds"] for row in block}))
    return f"{f'{group}: ' if group else ''}{name} ({rounds} round{'' if rounds == '1' else 's'})"


def blocks(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["group"], row["metric"]), []).append(row)
    return found


def _number(metric: str, value: float, sign: str = "") -> str:
    if metric.split("_")[0].split()[-1] in PERCENT:
        return f"{100 * value:{sign}.2f}"
    return f"{value:{sign}.3f}"


def _text(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    metric, ours = row["metric"], row["ours"]
    error = "" if row["error"] is None else f" ± {_number(metric, row['error'])}"
    if row["published"] is None:
        return f"{_number(metric, ours)}{error}"
    there = row["published"]
    return f"{_number(metric, ours)}{error} / {_number(metric, there)} ({_number(metric, ours - there, '+')})"


def page(printed: Printed, rows: Sequence[Mapping[str, Any]], output: Path, scale: str) -> str:
    """The table as a self-contained HTML page, followed by the curves of each column."""
    made = [f"<h1>{html.escape(printed.title)}</h1><p>{LEGEND} {html.escape(made_of(rows))}</p>"]
    if others := made_otherwise(rows):
        made.append(f"<p>{OTHERWISE}</p><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in others)}</ul>")
    for (group, metric), block in blocks(rows).items():
        columns = list(dict.fromkeys(row["column"] for row in block))
        at = {(row["row"], row["column"]): row for row in block}
        heads = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
        body = "".join(
            f"<tr><td>{html.escape(name)}</td>{''.join(_cell(at.get((name, c))) for c in columns)}</tr>"
            for name in dict.fromkeys(row["row"] for row in block)
        )
        title = html.escape(heading(group, metric, block))
        made.append(f"<h2>{title}</h2><div class=wide><table><tr><th></th>{heads}</tr>{body}</table></div>")
    for group, column in dict.fromkeys((row["group"], row["column"]) for row in rows):
        drawn = curves(printed, output, scale, group, column)
        if drawn:
            caption = html.escape(f"{group} {column}".strip())
            made.append(
                f"<figure><figcaption>{caption}: test scores by round, mean over seeds</figcaption>{drawn}</figure>"
            )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(printed.title)}</title>'
    return f'{head}<meta name="viewport" content="width=device-width"><style>{STYLE}</style>{"".join(made)}</html>\n'


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "<td></td>"
    metric, ours = row["metric"], row["ours"]
    error = "" if row["error"] is None else f" <small>± {_number(metric, row['error'])}</small>"
    if row["published"] is None:
        return f"<td>{_number(metric, ours)}{error}</td>"
    gap = ours - row["published"]
    high = any(word in metric for word in BETTER_HIGH)
    kind = "good" if gap == 0 or (gap > 0) == high else "bad"
    there = f"{_number(metric, row['published'])} <span class={kind}>{_number(metric, gap, '+')}</span>"
    return f"<td>{_number(metric, ours)}{error}<br><small>{there}</small></td>"


def looks(rows: Iterable[str]) -> list[dict[str, str]]:
    """A line for each row: another colour, then other dashes; "A with B" has the colour of A and is dashed."""
    made: dict[str, dict[str, str]] = {}
    own = cycle({"color": ink, "linestyle": line} for line in ("-", "--", ":") for ink in INKS)
    for row in rows:
        base, changed, _ = row.partition(" with ")
        made[row] = {**made[base], "linestyle": "--"} if changed and base in made else next(own)
    return list(made.values())


def curves(printed: Printed, output: Path, scale: str, group: str, column: str, prefix: str = "") -> str:
    """Accuracy and NLL by round of all rows of one column, as SVG; empty where nothing was evaluated twice."""
    from matplotlib.figure import Figure

    cells = [c for c in printed.cells if (c.group, c.column) == (group, column)]
    found = {
        row: [[r for r in seed if f"{prefix}nll" in r] for seed in seeds]
        for row, seeds in curves_of(printed, output, scale, cells).items()
    }
    found = {row: seeds for row, seeds in found.items() if min(len(seed) for seed in seeds) > 1}
    if not found:
        return ""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), (f"{prefix}accuracy", f"{prefix}nll")):
        for (row, seeds), look in zip(found.items(), looks(found)):
            at = [r["round"] for r in seeds[0]]
            mean = [sum(seed[i][metric] for seed in seeds) / len(seeds) for i in range(len(at))]
            axes.plot(at, mean, **look, lw=1.4, label=row)
        axes.set(xlabel="round", ylabel=metric.replace("_", " "))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(fontsize=8, frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]
