"""How a published table is written: its legend, its headings, and its numbers as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]  # a place and metric of a table: ours, published, and how it was made
PERCENT = ("accuracy", "ece", "mce")


class Texts(NamedTuple):
    """The numbers of a row as text; empty where there is none."""

    ours: str
    error: str
    published: str
    gap: str  # ours - published


def texts_of(row: Row) -> Texts:
    """Accuracies and calibration errors in percent with two digits, other scores with three."""
    percent = row["metric"].split("_")[0].split()[-1] in PERCENT

    def text(value: float | None, sign: str = "") -> str:
        if value is None:
            return ""
        return f"{100 * value:{sign}.2f}" if percent else f"{value:{sign}.3f}"

    gap = None if row["published"] is None else row["ours"] - row["published"]
    return Texts(text(row["ours"]), text(row["error"]), text(row["published"]), text(gap, "+"))


class Layout(NamedTuple):
    """What differs between the pages of tables."""

    legend: str = "Ours at the last round, ± its standard error over seeds / published (ours - published)."
    corner: str = ""  # over the names of the rows
    headed: bool = True  # a sentence on how the cells were made, and a heading over every block
    texts: Callable[[Row], Texts] = texts_of
    extra: Mapping[str, Callable[[Row], str]] = {}  # further blocks: the sentence before it -> a row's text
    departures: Sequence[str] = ()  # settings that are not the printed ones, or of which nothing is printed
    keys: tuple[str, ...] = ()  # of a row in the JSON file; all by default
    findings: Callable[[Sequence[Row]], Sequence[str]] = lambda rows: ()  # what the rows come to, in sentences
    drawing: Callable[[Sequence[Row]], str] = lambda rows: ""  # of all rows, as SVG, at the head of the page
