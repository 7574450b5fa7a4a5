"""Published tables as cells: what is trained for each place, the figures printed there, and how it is written down."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fedbayes.errors import unknown
from fedbayes.papers.layout import Layout
from fedbayes.runs.folder import Watch
from fedbayes.training.run import Run

E = TypeVar("E")  # what is trained for a cell: an Experiment over seeds, or the folds of a set
Content = Mapping[str, Any]  # what is kept of a trained cell
Measure = Callable[[Run], Mapping[str, float]]
Say = Callable[[str], None]


class Cell(NamedTuple, Generic[E]):
    """One place of a published table: an experiment, and the figures that are printed there, by metric."""

    row: str
    column: str
    experiment: E
    published: Mapping[str, float] = {}
    measure: Measure | None = None  # figures beyond the scores of the last round
    group: str = ""  # such as the data set, where a table has several blocks

    @property
    def title(self) -> str:
        """The cell in a line of text."""
        return f"{self.group} {self.row} {self.column}".strip()


class Request(NamedTuple):
    """Which cells of a table are trained, and how."""

    only: Sequence[str] = ()  # groups, rows and columns; all by default
    scale: str = "paper"
    seeds: Sequence[int] = (0,)
    changes: Mapping[str, Any] = {}  # laid over every experiment: device, rounds, ...
    keep: bool = False  # write each posterior beside its file
    say: Say = lambda line: None
    watch: Watch | None = None


class Source(NamedTuple, Generic[E]):
    """How the cells of a table are trained, how their files are read, and what a row tells of them beside figures."""

    train: Callable[[Table[E], Path, Request], None]
    contents: Callable[[Table[E], Cell[E], Path, str], list[Content]]
    notes: Callable[[Table[E], Cell[E], str, Sequence[Content]], Mapping[str, Any]]


class Table(NamedTuple, Generic[E]):
    """A published table: its cells, built on demand, what each metric is in a cell's file, and its smaller scales."""

    title: str
    cells: Callable[[], Sequence[Cell[E]]]
    metrics: Mapping[str, str]  # name -> path in the file: test.accuracy, personal.clients_nll, measured.nll_50
    scales: Mapping[str, Callable[[E], E]]
    family: str  # tables of one family share their files
    source: Source[E]
    variants: Mapping[str, str] = {}  # first words of metrics that are rows of their own -> what follows the row's name
    layout: Layout = Layout()


def chosen(cells: Sequence[Cell[E]], only: Iterable[str]) -> list[Cell[E]]:
    """The cells that match: the words that name groups, rows and columns each narrow the choice."""
    kinds: list[Callable[[Cell[E]], str]] = [lambda c: c.group, lambda c: c.row, lambda c: c.column]
    words = [word.casefold() for word in only]
    known = [{kind(cell).casefold() for cell in cells} for kind in kinds]
    for word in words:
        if not any(word in names for names in known):
            names = {kind(cell) for cell in cells for kind in kinds}
            raise unknown("group, row or column", word, sorted(names - {""}))
    wanted = [[word for word in words if word in names] for names in known]
    return [c for c in cells if all(not w or kind(c).casefold() in w for w, kind in zip(wanted, kinds))]


def plain_name(*words: str) -> str:
    """Words as a file's name: small letters, digits and dots, the rest as dashes.

    >>> plain_name("agg", "", "γ = 1e-6", "Dirichlet .5")
    'agg-1e-6-dirichlet-.5'
    """
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", word.casefold()).strip("-") for word in words if word)


def contents_of(table: Table[E], cell: Cell[E], output: Path, scale: str) -> list[Content]:
    """What is kept of a cell, one content per seed."""
    return table.source.contents(table, cell, output, scale)


def curves_of(
    table: Table[E], output: Path, scale: str, cells: Sequence[Cell[E]]
) -> dict[str, list[list[dict[str, Any]]]]:
    """The curves of some cells, by row: one list of evaluated rounds per seed."""
    curves = {cell.row: [content["curve"] for content in contents_of(table, cell, output, scale)] for cell in cells}
    return {row: seeds for row, seeds in curves.items() if seeds}


def device_name(device: str) -> str:
    """What a figure was made on."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def commit() -> str:
    """The commit that runs, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return answer.stdout.strip()
