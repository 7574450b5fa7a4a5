"""FedAG's tables 2 to 4: methods on the folds of UCI sets, all folds of a cell kept as one file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import InputError
from fedbayes.files import write_atomically
from fedbayes.papers import folds
from fedbayes.papers.cells import Cell, Content, Request, Say, Source, Table, chosen, commit, device_name
from fedbayes.papers.layout import Layout, Row, Texts

Figures = dict[str, dict[str, dict[str, float]]]  # set -> column -> the figure and, where it is printed, its error


class Folds(NamedTuple):
    """What is trained for a cell: a method (of `folds.CELLS`) on the folds of a set."""

    method: str
    data: str
    most: int | None = None  # folds, the first ones; all by default

    @property
    def file(self) -> str:
        """Cells of one training share a file."""
        return f"fedag-{self.method}-{self.data}.json"


def _figures(metric: str, columns: str, text: str) -> Figures:
    """Lines `set  a e  b e ...` as figures with their errors; a dash is no error."""
    names = [name.strip() for name in columns.split("|")]
    table: Figures = {}
    for line in text.strip().splitlines():
        data, *numbers = line.split()
        table[data] = {
            column: {metric: float(figure)} | ({} if error == "-" else {"error": float(error)})
            for column, figure, error in zip(names, numbers[::2], numbers[1::2])
        }
    return table


FIVE = "BLR | VI | FedAG linear | FedAG network | DE"
TABLE_2 = _figures(
    "nll",
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
)
TABLE_3 = _figures(
    "rmse",
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
)
TABLE_4 = _figures(
    "sharpness",
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
)
SCALES: Mapping[str, Callable[[Folds], Folds]] = {"paper": lambda x: x, "small": lambda x: x._replace(most=2)}
ROUNDS = {"fedag_network": folds.ROUNDS, "feduab": folds.ROUNDS}
TEST_DRAWS = {"VI": 100, "FedUAB": 100, "FedAG Monte Carlo": 100, "DE": folds.MEMBERS}
COVERAGES = ("coverage50", "coverage90")


def cells(figures: Figures) -> list[Cell[Folds]]:
    """Every set and method; those that are not printed have no figures beside them."""
    return [
        Cell(data, column, Folds(method, data), figures[data].get(column, {}))
        for data in figures
        for method, (_, columns) in folds.CELLS.items()
        for column in columns
    ]


def train(table: Table[Folds], output: Path, request: Request) -> None:
    """Train the chosen methods on the sets that have no file yet; those that are not printed, where they are named."""
    others = {name: value for name, value in request.changes.items() if name != "device"}
    others |= {} if tuple(request.seeds) == (0,) else {"seeds": request.seeds}
    others |= {"keep": True} if request.keep else {}
    if others:
        raise InputError(f"{next(iter(others))}: a table over folds has all of them in one setting; leave it out")
    words = [word.casefold() for word in request.only]
    choice = [c for c in chosen(table.cells(), request.only) if c.published or c.column.casefold() in words]
    for trained in dict.fromkeys(table.scales[request.scale](cell.experiment) for cell in choice):
        path = output / "cells" / request.scale / trained.file
        if not path.is_file():
            _train_cell(trained, path, request.changes.get("device", "cpu"), request.say)


def _train_cell(trained: Folds, path: Path, device: str, say: Say) -> None:
    started = time.perf_counter()
    scores = folds.cell(trained.method, trained.data, trained.most, device)
    seconds = time.perf_counter() - started
    content = {
        "rounds": ROUNDS.get(trained.method, 1),
        "device": device_name(device),
        "commit": commit(),
        "seconds": round(seconds, 1),
        "rows": scores,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    say(f"{trained.data}: {', '.join(scores)} in {seconds:.0f} s")


def contents(table: Table[Folds], cell: Cell[Folds], output: Path, scale: str) -> list[Content]:
    """What is kept of a cell: its scores as means over folds, with their standard errors."""
    path = output / "cells" / scale / table.scales[scale](cell.experiment).file
    if not path.is_file():
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    scores = content.pop("rows")[cell.column]
    moments = {name: mean_and_error([fold[name] for fold in scores]) for name in scores[0]}
    return [
        {
            **content,
            "test": {name: mean for name, (mean, _) in moments.items()},
            "error": {"test": {name: error for name, (_, error) in moments.items()}},
            "folds": len(scores),
            "seed": 0,
            "test_draws": TEST_DRAWS.get(cell.column, folds.CLIENTS),
            "curve": [],
        }
    ]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over folds, and its standard error.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = sum(values) / len(values)
    spread = sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)
    return mean, math.sqrt(spread / len(values))


def notes(table: Table[Folds], cell: Cell[Folds], scale: str, files: Sequence[Content]) -> dict[str, Any]:
    """The number of folds, the printed error, and how many targets lie inside the predicted intervals."""
    (content,) = files
    shares = {name: round(content["test"][name], 4) for name in COVERAGES}
    return {"seeds": content["folds"], "published_error": cell.published.get("error"), **shares}


FOLDS: Source[Folds] = Source(train, contents, notes)


def texts_of(row: Row) -> Texts:
    """Two digits, as printed; four of ours where two would show nothing."""
    digits = 4 if row["metric"] != "nll" and abs(row["ours"]) < 0.1 else 2
    ours, error = f"{row['ours']:.{digits}f}", f"{row['error']:.{digits}f}"
    if row["published"] is None:
        return Texts(ours, error, "", "")
    return Texts(ours, error, f"{row['published']:.2f}", f"{row['ours'] - row['published']:+.2f}")


def shares_of(row: Row) -> str:
    """Coverage of the two intervals, in percent."""
    return " / ".join(f"{100 * row[name]:.0f}" for name in COVERAGES)


DEPARTURES = (
    "half squared error, a rate of .06 (linear: .03) that falls to 0 within a round, gradients cut at norm 10,"
    " standardised rows: none is printed; chosen on training rows, after .03 and .01 had been tried on test folds",
    "a prediction has an observation noise beside the networks' disagreement, judged on a client's rows by the others",
)
LAYOUT = Layout(
    departures=DEPARTURES,
    legend="Ours ± standard error over the folds / published (ours - published).",
    corner="set",
    headed=False,
    texts=texts_of,
    keys=(
        *("table", "row", "column", "metric", "ours", "error", "published", "published_error", "rounds", "seeds"),
        *("test_draws", "seconds", "device", "commit", *COVERAGES),
    ),
)
SHARES = {"Share of test targets inside the central 50 % / 90 % intervals, in percent:": shares_of}


def _table(title: str, metric: str, figures: Figures, layout: Layout = LAYOUT) -> Table[Folds]:
    metrics = {metric: f"test.{metric}"}
    return Table(f"FedAG, {title}", lambda: cells(figures), metrics, SCALES, "fedag", FOLDS, layout=layout)


TABLES: dict[str, Table[Folds]] = {
    "fedag-2": _table("table 2: NLL on UCI regression", "nll", TABLE_2, LAYOUT._replace(extra=SHARES)),
    "fedag-3": _table("table 3: RMSE on UCI regression", "rmse", TABLE_3),
    "fedag-4": _table("table 4: determinant sharpness on UCI regression", "sharpness", TABLE_4),
}
