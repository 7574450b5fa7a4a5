"""Every figure of a page can be looked up: its files are linked there, and numbers of three digits or more are in them.

A file that is large holds nearly every number of three digits, so that this finds figures that were never kept and
slips of the pen rather than a wrong row; `test_claims.py` holds the figures that matter most to their own rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parents[2]
RESULTS = HOME / "docs/results"
WRITTEN = ("feduab", "fedag")  # pages among the results that no program writes
PAGES = [
    "README.md",
    *sorted(str(path.relative_to(HOME)) for path in (HOME / "docs").glob("*.md")),
    *(f"docs/results/{name}.md" for name in WRITTEN),
]
NUMBER = re.compile(r"(?<![\w.])\d*\.\d+(?!\w|\.\d)")
LINK = re.compile(r"\]\(([\w./-]+)\.(?:md|json|html|svg|png)\b")
VERSION = re.compile(r"(?:Python|[Tt]orch|PyTorch|Flower|[Nn]um[Pp]y)(?: \d+(?:\.\d+)+(?:,| and| or| to| \(.*?\))?)+")
EXACT = {".9999": "what 99 x N(0, .1^2) and N(1, 1e-4^2) pool to; a test has it"}


def numbers_in(content: Any) -> Iterator[float]:
    if isinstance(content, dict | list):
        for one in content.values() if isinstance(content, dict) else content:
            yield from numbers_in(one)
    elif isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content):
        yield abs(float(content))


def means(rows: list[dict[str, Any]], *keys: str) -> Iterator[float]:
    """Of every number over the rows that have these values in common."""

    def place(row: dict[str, Any]) -> list[str]:
        return [str(row[key]) for key in keys]

    for _, group in groupby(sorted(rows, key=place), key=place):
        some = list(group)
        for name in set.intersection(*map(set, some)):
            values = [row[name] for row in some]
            if all(isinstance(v, int | float) for v in values):
                yield abs(sum(values) / len(values))


@cache
def known(file: Path) -> frozenset[float]:
    """The numbers of a file of figures, and of the page that is made of it."""
    name, page = file.stem, file.with_suffix(".md")
    content = json.loads(file.read_text(encoding="utf-8"))
    found = set(numbers_in(content))
    if page.is_file():
        found |= {float(text) for text in NUMBER.findall(page.read_text(encoding="utf-8"))}
    if name == "coverage":
        rows = content["parts"]["simulation"]["rows"]
        found |= {*means(rows, "way", "rows"), *means(rows, "way", "rows", "alpha")}
    if name.startswith("adapters-"):
        found |= {*means([{**row, "what": row["what"].split(", seed")[0]} for row in content["rows"]], "what")}
    return frozenset(found)


def sources(page: str, text: str) -> set[float]:
    linked = {(HOME / page).parent / f"{link}.json" for link in LINK.findall(text)}
    side = json.loads((RESULTS / "side-runs.json").read_text(encoding="utf-8"))["rows"]
    beside = {abs(value) for row in side if row["page"] == page for value in row["figures"]}
    return beside.union(*(known(file) for file in linked if file.is_file()))


def quoted(text: str) -> list[str]:
    """Numbers of three digits or more with a point, outside of code, addresses and versions."""
    for without in (r"```.*?```", r"`[^`]*`", r"\]\([^)]*\)"):
        text = re.sub(without, "", text, flags=re.DOTALL)
    found = NUMBER.findall(VERSION.sub("", text))
    return [number for number in found if len(number.replace(".", "").lstrip("0")) >= 3 and number not in EXACT]


def is_among(number: str, values: Iterable[float]) -> bool:
    """As it is, or as a percentage, or seconds as milliseconds, rounded as it is written."""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) * (1 + 1e-6)
    return any(abs(unit * v - float(number)) <= half for v in values for unit in (1, 100, 1000))


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_in_the_files_that_the_page_links_to(page: str) -> None:
    text = (HOME / page).read_text(encoding="utf-8")
    values = sources(page, text)
    assert [number for number in dict.fromkeys(quoted(text)) if not is_among(number, values)] == []


def test_a_number_that_is_in_no_file_is_found() -> None:
    assert quoted("with Flower 1.41 it had .915, `0.123` in 0.5 s ([here](results/x-1.234.md))") == [".915"]
    for number, value in {".915": 0.9149, "91.5": 0.9149, "38.8": 0.0388}.items():
        assert is_among(number, [value])
    assert not is_among(".915", [0.9139, 0.9161])
