"""All published tables in one: how many printed numbers have one of ours, at which schedule, and how they compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fedbayes.papers.causes import OPEN, cause_of
from fedbayes.papers.cells import Table
from fedbayes.papers.layout import Row
from fedbayes.papers.page import BETTER_HIGH, WORSE
from fedbayes.papers.rows import as_variant, rows_of

PAPER = "paper"
STATES = ("full", "other settings", "shortened", "missing")
VERDICTS = ("better", "within noise", "worse")
LEGEND = (
    "One row for each published table. A printed number is *full* where ours has the printed schedule, has *other "
    "settings* where a cell was made with others than its table has now, is *shortened* where ours was trained with "
    "less on the same data, and *missing* where we have none. Full ones are *better* than print (or equal to it), "
    "*within noise*, or *worse*. Noise is half of the last printed digit and two standard errors of the difference: of "
    "ours over seeds or folds, and of the printed one where it is known; of a single seed, the median spread over "
    "seeds of all full numbers of that metric or, where that is more, by how much its last ten evaluated rounds differ."
)
CAUSE = (
    "A cause is shown by another row of the same table, with that one thing done otherwise: it leaves no more than "
    "half of the gap to print, and its number stands behind. FedUAB's paper measures the highest accuracy attainable "
    "and does not say whether its tables do: there the round of the highest accuracy on test rows, which nobody could "
    "have known to stop at, may be the cause. Everything else is open."
)
MADE = "<!-- fedbayes table --all: made anew from here on -->"


class Standing(NamedTuple):
    """Where a printed number stands."""

    table: str
    row: Row | None  # ours, where there is one
    state: str
    verdict: str = ""  # of full ones


def standings(tables: Mapping[str, Table[Any]], output: Path) -> list[Standing]:
    """Every printed number of every table."""
    places = [place for name, table in tables.items() for place in _places(name, table, output)]
    spreads: dict[str, list[float]] = {}
    for _, row, state in places:
        if row is not None and state == "full" and _runs(row) > 1 and row["error"]:
            spreads.setdefault(_kind(row), []).append(row["error"] * _runs(row) ** 0.5)
    usual = {kind: median(values) for kind, values in spreads.items()}
    return [
        Standing(name, row, state, _verdict(tables[name], row, usual) if row is not None and state == "full" else "")
        for name, row, state in places
    ]


def _places(name: str, table: Table[Any], output: Path) -> Iterator[tuple[str, Row | None, str]]:
    scales = {scale: rows_of(name, table, output, scale) for scale in (PAPER, *(s for s in table.scales if s != PAPER))}
    found: dict[tuple[str, ...], tuple[Row, str]] = {}
    for rows in scales.values():
        for row in rows:
            if row["published"] is not None:
                found.setdefault(_key(row), (row, _state(row)))
    wanted = [
        as_variant(table, {"group": cell.group, "row": cell.row, "column": cell.column, "metric": metric})
        for cell in table.cells()
        for metric in cell.published
        if metric in table.metrics
    ]
    for place in wanted:
        ours, state = found.get(_key(place), (None, "missing"))
        yield name, ours, state


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["group"], row["row"], row["column"], row["metric"]


def _state(row: Row) -> str:
    if row.get("scaled"):
        return "shortened"
    return "other settings" if row.get("otherwise") else "full"


def _runs(row: Row) -> int:
    """Of how many seeds, or folds, the number is the mean."""
    return row["seeds"] if isinstance(row["seeds"], int) else len(row["seeds"])


def _kind(row: Row) -> str:
    """A metric without the set or the score that it is of: `EMNIST auroc` is `auroc`."""
    return str(row["metric"]).split()[-1]


def _verdict(table: Table[Any], row: Row, usual: Mapping[str, float]) -> str:
    gap = row["ours"] - row["published"]
    if gap == 0 or (gap > 0) == any(word in row["metric"] for word in BETTER_HIGH):
        return "better"
    one = max(usual.get(_kind(row), 0.0), row.get("jitter", 0.0))
    ours = one if row["error"] is None else row["error"]
    noise = 2 * (ours**2 + (row.get("published_error") or 0.0) ** 2) ** 0.5 + _rounding(table, row)
    return "within noise" if abs(gap) <= noise else "worse"


def _rounding(table: Table[Any], row: Row) -> float:
    """Half a unit of the last digit that is printed."""
    printed = table.layout.texts(row).published
    units = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return units / 100 if float(printed) and abs(float(printed)) > 50 * abs(row["published"]) else units


def index(tables: Mapping[str, Table[Any]], found: Sequence[Standing], output: Path) -> str:
    """The state of all tables as part of a page, and each number that is clearly worse than print."""
    lines = ["## The published tables", "", LEGEND, ""]
    lines += [
        "| table | printed | " + " | ".join((*STATES, *VERDICTS)) + " |",
        "|---" * (2 + len(STATES + VERDICTS)) + "|",
    ]
    printed = {name: [s for s in found if s.table == name] for name in tables}
    for name, table in tables.items():
        if printed[name]:
            pages = [f"{name}.md", *(f"{name}-{scale}.md" for scale in table.scales)]
            page = next((page for page in pages if (output / page).is_file()), None)
            lines.append(_line(f"[{table.title}]({page})" if page else table.title, printed[name]))
    lines += [_line("**all**", found), "", f"### {WORSE}", "", CAUSE, ""]
    lines += ["| table | place | metric | ours | printed | seeds or folds | cause |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {' | '.join(one)} |" for name in tables for one in worse(name, tables[name], printed[name], output)
    ]
    return "\n".join([*lines, ""])


def worse(name: str, table: Table[Any], found: Sequence[Standing], output: Path) -> Sequence[Sequence[str]]:
    """Each number of a table that is clearly worse than print: place, metric, ours, printed, runs, and why."""
    lines, rows = [], None
    for one in found:
        if one.table == name and one.verdict == "worse" and one.row is not None:
            row = one.row
            rows = rows_of(name, table, output, PAPER) if rows is None else rows
            ours, error, published, _ = table.layout.texts(row)
            place = f"{row['group']} {row['row']} {row['column']}".strip()
            shown = cause_of(row, rows)
            why = OPEN if shown is None else f"{shown[0]}: [{table.layout.texts(shown[1]).ours}]({name}.json)"
            lines.append(
                (place, row["metric"], f"{ours}{f' ± {error}' if error else ''}", published, str(_runs(row)), why)
            )
    return lines


def below_head(page: str, made: str) -> str:
    """A page with what is made anew in place of what was; what was written by hand before it stays."""
    head = page.partition(MADE)[0].rstrip()
    return f"{head}\n\n{MADE}\n\n{made}" if head else f"{MADE}\n\n{made}"


def counted(found: Sequence[Standing]) -> dict[str, int]:
    """How many numbers are printed, and how many of them stand where."""
    states = {state: sum(one.state == state for one in found) for state in STATES}
    verdicts = {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}
    return {"printed": len(found), **states, **verdicts}


def _line(title: str, found: Sequence[Standing]) -> str:
    return f"| {title} | " + " | ".join(map(str, counted(found).values())) + " |"
