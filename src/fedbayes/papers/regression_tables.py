"""Published tables, run again: each cell is trained once, kept as a file, and set beside the published figure."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedbayes.errors import InputError, unknown
from fedbayes.files import write_atomically
from fedbayes.papers import folds

Figure = tuple[float, float | None]  # mean, standard error where there is one


class Table(NamedTuple):
    """A published table: by set and column, with the score that it holds."""

    title: str
    score: str
    published: dict[str, dict[str, Figure]]


def _rows(columns: str, text: str) -> dict[str, dict[str, Figure]]:
    """Lines `set  a e  b e ...` as figures with their errors; a dash is no error, a dot no figure."""
    names = [name.strip() for name in columns.split("|")]
    table = {}
    for line in text.strip().splitlines():
        name, *numbers = line.split()
        pairs = zip(names, numbers[::2], numbers[1::2])
        table[name] = {column: (float(a), None if e == "-" else float(e)) for column, a, e in pairs if a != "."}
    return table


FIVE = "BLR | VI | FedAG linear | FedAG network | DE"
TABLES: dict[str, Table] = {
    "fedag-2": Table(
        "FedAG, table 2: NLL on UCI regression",
        "nll",
        _rows(
            FIVE,
            """
            boston    3.07 0.03   2.90 0.07   3.02 0.03   2.58 0.06   2.41 0.25
            concrete  3.78 0.02   3.39 0.02   3.76 0.03   3.21 0.04   3.06 0.18
            energy    5.12 0.05   2.39 0.03   5.31 0.06   2.07 0.04   1.38 0.22
            kin8nm    1.17 0.04  -0.90 0.01   1.03 0.04  -0.87 0.01  -1.20 0.02
            naval    -3.55 0.02  -3.73 0.12  -3.45 0.01  -3.21 0.01  -5.63 0.05
            power     2.97 0.01   2.89 0.01   2.94 0.01   2.92 0.01   2.79 0.04
            protein   3.07 0.00   2.99 0.01   3.08 0.00   2.95 0.00   2.83 0.04
            wine      1.50 0.07   0.98 0.01   1.01 0.03   0.99 0.02   0.94 0.12
            yacht     3.63 0.05   3.44 0.16   4.02 0.07   1.92 0.06   1.18 0.21
            """,
        ),
    ),
    "fedag-3": Table(
        "FedAG, table 3: RMSE on UCI regression",
        "rmse",
        _rows(
            FIVE,
            """
            boston    4.87 0.22   4.32 0.29   4.96 0.22   4.07 0.18   3.28 1.00
            concrete 10.58 0.33   7.13 0.12  10.52 0.33   6.50 0.20   6.03 0.58
            energy    4.35 0.14   2.65 0.08   4.36 0.14   2.02 0.07   2.09 0.29
            kin8nm    0.20 0.00   0.10 0.00   0.20 0.00   0.10 0.00   0.09 0.00
            naval     0.01 0.00   0.00 0.00   0.01 0.00   0.01 0.00   0.00 0.00
            power     4.74 0.05   4.33 0.04   4.56 0.05   4.45 0.05   4.11 0.17
            protein   5.18 0.02   4.84 0.03   5.18 0.02   4.63 0.02   4.71 0.06
            wine      0.65 0.02   0.65 0.01   0.65 0.02   0.65 0.02   0.64 0.04
            yacht     9.12 0.52   6.89 0.67   9.12 0.52   2.29 0.15   1.58 0.48
            """,
        ),
    ),
    "fedag-4": Table(
        "FedAG, table 4: determinant sharpness on UCI regression",
        "sharpness",
        _rows(
            "FedAG network | DE",
            """
            boston    4.05 -  4.79 -
            concrete  6.37 -  7.07 -
            energy    2.16 -  2.67 -
            kin8nm    0.10 -  0.14 -
            naval     0.01 -  0.02 -
            power     4.30 -  5.48 -
            protein   3.88 -  4.59 -
            wine      0.79 -  0.69 -
            yacht     2.85 -  0.94 -
            """,
        ),
    ),
}
SCALES: dict[str, int | None] = {"small": 2, "paper": None}  # folds of each set
OF_KIND = {row: kind for kind, (_, rows) in folds.CELLS.items() for row in rows}
ROUNDS = {"fedag_network": folds.ROUNDS, "feduab": folds.ROUNDS}
TEST_DRAWS = {"VI": 100, "FedUAB": 100, "FedAG Monte Carlo": 100, "DE": folds.MEMBERS}


def run_table(
    name: str,
    output: str | Path,
    *,
    only: Iterable[str] = (),
    scale: str = "paper",
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Train the cells that are not there yet, write NAME.json and NAME.md, and give the rows.

    `only` are sets and columns; without, all of the table. Columns beyond the published ones are those of the cells.
    """
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    table, output = TABLES[name], Path(output)
    sets, columns = _chosen(table, only)
    cells = output / "cells" / scale
    for kind in dict.fromkeys(OF_KIND[column] for column in columns):
        for data in sets:
            train_cell(kind, data, cells, SCALES[scale], device, say)
    rows = rows_of(name, cells)
    stem = name if scale == "paper" else f"{name}-{scale}"
    write_atomically(output / f"{stem}.json", (json.dumps(rows, indent=1) + "\n").encode())
    write_atomically(output / f"{stem}.md", page(table, rows).encode())
    return rows


def _chosen(table: Table, only: Iterable[str]) -> tuple[list[str], list[str]]:
    published = list(dict.fromkeys(column for row in table.published.values() for column in row))
    asked = list(only)
    for name in asked:
        if name not in table.published and name not in OF_KIND:
            raise unknown("set or column", name, [*table.published, *OF_KIND])
    sets = [name for name in table.published if name in asked] or list(table.published)
    return sets, [name for name in OF_KIND if name in asked] or published


def train_cell(kind: str, data: str, cells: Path, count: int | None, device: str, say: Callable[[str], None]) -> None:
    """One method on all folds of one set, unless its file is there."""
    path = cells / f"fedag-{kind}-{data}.json"
    if path.exists():
        return
    started = time.perf_counter()
    scores = folds.cell(kind, data, count, device)
    seconds = time.perf_counter() - started
    content = {
        "rounds": ROUNDS.get(kind, 1),
        "device": device_name(device),
        "commit": commit(),
        "seconds": round(seconds, 1),
    }
    cells.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps({**content, "rows": scores}, indent=1) + "\n").encode())
    say(f"{data}: {', '.join(scores)} in {seconds:.0f} s")


def device_name(device: str) -> str:
    """What a figure was made on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def commit() -> str:
    """The commit that runs, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def rows_of(name: str, cells: Path) -> list[dict[str, Any]]:
    """Every cell that is there as one row: ours, the published figure, and how it was made."""
    table, rows = TABLES[name], []
    for data in table.published:
        for kind, (_, columns) in folds.CELLS.items():
            path = cells / f"fedag-{kind}-{data}.json"
            if not path.exists():
                continue
            cell = json.loads(path.read_text())
            for column in columns:
                mean, error = mean_and_error([fold[table.score] for fold in cell["rows"][column]])
                published, their_error = table.published[data].get(column, (None, None))
                rows.append(
                    {
                        "table": name,
                        "row": data,
                        "column": column,
                        "metric": table.score,
                        "ours": mean,
                        "error": error,
                        "published": published,
                        "published_error": their_error,
                        "rounds": cell["rounds"],
                        "seeds": len(cell["rows"][column]),
                        "test_draws": TEST_DRAWS.get(column, folds.CLIENTS),
                        "seconds": cell["seconds"],
                        "device": cell["device"],
                        "commit": cell["commit"],
                        **_coverage(cell["rows"][column]),
                    }
                )
    return rows


def _coverage(scores: list[dict[str, float]]) -> dict[str, float]:
    return {
        level: round(mean_and_error([fold[level] for fold in scores])[0], 4) for level in ("coverage50", "coverage90")
    }


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean over folds, and its standard error.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = sum(values) / len(values)
    spread = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return mean, math.sqrt(spread / len(values))


def page(table: Table, rows: list[dict[str, Any]]) -> str:
    """The table in Markdown: ours +- its standard error, the published figure, and the difference."""
    if not rows:
        raise InputError("no cell of this table has been run yet")
    columns = list(dict.fromkeys(row["column"] for row in rows))
    at = {(row["row"], row["column"]): row for row in rows}
    lines = [f"# {table.title}", "", "Ours ± standard error over the folds / published (ours - published).", ""]
    lines += ["| set | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for data in dict.fromkeys(row["row"] for row in rows):
        cells = [_text(at.get((data, column))) for column in columns]
        lines.append(f"| {data} | " + " | ".join(cells) + " |")
    if table.score == "nll":
        lines += ["", "Share of test targets inside the central 50 % / 90 % intervals, in percent:", ""]
        lines += ["| set | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for data in dict.fromkeys(row["row"] for row in rows):
            shares = [_shares(at.get((data, column))) for column in columns]
            lines.append(f"| {data} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def _text(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    digits = 4 if row["metric"] != "nll" and abs(row["ours"]) < 0.1 else 2
    ours = f"{row['ours']:.{digits}f} ± {row['error']:.{digits}f}"
    if row["published"] is None:
        return ours
    return f"{ours} / {row['published']:.2f} ({row['ours'] - row['published']:+.2f})"


def _shares(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{100 * row['coverage50']:.0f} / {100 * row['coverage90']:.0f}"
