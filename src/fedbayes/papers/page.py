"""A published table and ours as Markdown and as one page, with the curves of its cells."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedbayes.papers.cells import E, Table
from fedbayes.papers.drawing import curves
from fedbayes.papers.layout import Layout, Row

CAPITALS = ("nll", "ece", "mce", "auroc", "aupr", "fpr95", "rmse")
BETTER_HIGH = ("accuracy", "auroc", "aupr", "misclassified")  # the last is an AUROC too, of errors
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


WORSE = "Clearly worse than print"
DEPARTURES = "Not as printed, or of our own choice where nothing is printed:"
SCALED = "Scaled down:"
OTHERWISE = "Made with other settings than the table has now:"


class Grid(NamedTuple):
    """One block of a page: a heading or a sentence, the columns, and the text of each place by row."""

    heading: str
    sentence: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]


def grids(layout: Layout, rows: Sequence[Row], text: Callable[[Row], str]) -> Iterator[Grid]:
    """The blocks of a page: one per group and metric, then those that the layout has beside them."""
    blocks: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        blocks.setdefault((row["group"], row["metric"]), []).append(row)
    for (group, metric), block in blocks.items():
        yield _grid(block, text, heading=heading(group, metric, block) if layout.headed else "")
    for sentence, extra in layout.extra.items():
        yield _grid(rows, extra, sentence=sentence)


def _grid(block: Sequence[Row], text: Callable[[Row], str], *, heading: str = "", sentence: str = "") -> Grid:
    columns = list(dict.fromkeys(row["column"] for row in block))
    texts = {(row["row"], row["column"]): text(row) for row in block}
    names = dict.fromkeys(row["row"] for row in block)
    return Grid(heading, sentence, columns, {name: [texts.get((name, c), "") for c in columns] for name in names})


def legend(layout: Layout, rows: Sequence[Row]) -> str:
    """What the numbers are, and how they came about."""
    return f"{layout.legend} {provenance(rows)}" if layout.headed else layout.legend


def provenance(rows: Sequence[Row]) -> str:
    """How the figures came about, in a sentence."""
    counts = sorted({row["rounds"] for row in rows})
    seeds = sorted({len(row["seeds"]) for row in rows})
    devices = sorted({device for row in rows for device in row["device"].split(", ")})
    commits = sorted({commit for row in rows for commit in row["commit"].split(", ") if commit})
    less = dict.fromkeys(setting for row in rows for setting in row["scaled"])
    several = [f"{span(n)} {word}{'s' * (n[-1] > 1)}" for n, word in ((counts, "round"), (seeds, "seed"))]
    start = f"{', '.join(several)}, on {', '.join(devices)}"
    end = f", commit {', '.join(commits)}." if commits else "."
    return start + end + (f" {SCALED} {', '.join(less)}." if less else "")


def made_otherwise(rows: Sequence[Row]) -> list[str]:
    """The cells that were made with other settings than the table has now, one line for each difference."""
    cells: dict[str, dict[str, None]] = {}
    for row in rows:
        if other := row.get("otherwise"):
            cells.setdefault(other, {})[f"{row['group']} {row['row']} {row['column']}".strip()] = None
    return [f"{'; '.join(names)}: {other}" for other, names in cells.items()]


def span(values: Sequence[int]) -> str:
    """Sorted numbers as one, or as the first and the last."""
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def heading(group: str, metric: str, block: Sequence[Row]) -> str:
    """What a block shows: `MNIST: NLL, 50 draws (2000 rounds)`."""
    words = [word.upper() if word in CAPITALS else word for word in re.split("[_ ]", metric)]
    name = f"{words[0]}, {words[1]} draws" if len(words) == 2 and words[1].isdigit() else " ".join(words)
    rounds = span(sorted({row["rounds"] for row in block}))
    return f"{f'{group}: ' if group else ''}{name} ({rounds} round{'' if rounds == '1' else 's'})"


def markdown(table: Table[E], rows: Sequence[Row], worse: Sequence[Sequence[str]] = ()) -> str:
    """The table in Markdown: ours ± its standard error / published (the difference), then what is clearly worse."""
    layout = table.layout

    def text(row: Row) -> str:
        ours, error, published, gap = layout.texts(row)
        return f"{ours}{f' ± {error}' if error else ''}" + (f" / {published} ({gap})" if published else "")

    lines = [f"# {table.title}", "", legend(layout, rows), ""]
    if layout.departures:
        lines += [DEPARTURES, "", *(f"- {line}" for line in layout.departures), ""]
    if others := made_otherwise(rows):
        lines += [OTHERWISE, "", *(f"- {line}" for line in others), ""]
    if findings := layout.findings(rows):
        lines += [*(f"- {line}" for line in findings), ""]
    for grid in grids(layout, rows, text):
        lines += [f"## {grid.heading}", ""] if grid.heading else []
        lines += [grid.sentence, ""] if grid.sentence else []
        lines += [f"| {layout.corner}".rstrip() + " | " + " | ".join(grid.columns) + " |"]
        lines += ["|---" * (len(grid.columns) + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(texts) + " |" for name, texts in grid.rows.items()]
        lines.append("")
    if worse:
        lines += [f"## {WORSE}", "", "| place | metric | ours | printed | seeds or folds | cause |", "|---" * 6 + "|"]
        lines += [*(f"| {' | '.join(one)} |" for one in worse), ""]
    return "\n".join(lines)


def page(table: Table[E], rows: Sequence[Row], output: Path, scale: str) -> str:
    """The table as a self-contained HTML page, followed by the curves of each column."""
    title = html.escape(table.title)
    pieces = [f"<h1>{title}</h1><p>{html.escape(legend(table.layout, rows))}</p>"]
    if departures := table.layout.departures:
        pieces.append(f"<p>{DEPARTURES}</p><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in departures)}</ul>")
    if others := made_otherwise(rows):
        pieces.append(f"<p>{OTHERWISE}</p><ul>{''.join(f'<li>{html.escape(line)}</li>' for line in others)}</ul>")
    if findings := table.layout.findings(rows):
        pieces.append(f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in findings)}</ul>")
    if picture := table.layout.drawing(rows):
        pieces.append(f"<figure>{picture}</figure>")
    pieces += [_table(grid, table.layout.corner) for grid in grids(table.layout, rows, _place(table.layout))]
    for group, column in dict.fromkeys((row["group"], row["column"]) for row in rows):
        drawing = curves(table, output, scale, group, column)
        if drawing:
            caption = html.escape(f"{group} {column}".strip())
            pieces.append(
                f"<figure><figcaption>{caption}: test scores by round, mean over seeds</figcaption>{drawing}</figure>"
            )
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    return f'{head}<meta name="viewport" content="width=device-width"><style>{STYLE}</style>{"".join(pieces)}</html>\n'


def _table(grid: Grid, corner: str) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in (corner, *grid.columns))
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
        for name, texts in grid.rows.items()
    )
    title = f"<h2>{html.escape(grid.heading)}</h2>" if grid.heading else ""
    sentence = f"<p>{html.escape(grid.sentence)}</p>" if grid.sentence else ""
    return f"{title}{sentence}<div class=wide><table><tr>{heads}</tr>{body}</table></div>"


def _place(layout: Layout) -> Callable[[Row], str]:
    """A row as HTML: the difference is coloured by whether ours is better."""

    def text(row: Row) -> str:
        ours, error, published, gap = layout.texts(row)
        number = f"{ours}{f' <small>± {error}</small>' if error else ''}"
        if not published:
            return number
        difference = row["ours"] - row["published"]
        high = any(word in row["metric"] for word in BETTER_HIGH)
        kind = "good" if difference == 0 or (difference > 0) == high else "bad"
        return f"{number}<br><small>{published} <span class={kind}>{gap}</span></small>"

    return text
