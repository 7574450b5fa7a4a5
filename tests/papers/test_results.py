"""The tables in docs/results are those of the cells beside them: every figure again from the files."""

import json
from pathlib import Path

import pytest

from fedbayes.papers.page import WORSE, markdown
from fedbayes.papers.rows import rows_of
from fedbayes.papers.tables import TABLES

RESULTS = Path("docs/results")
PAGES = [
    (name, scale)
    for name, table in TABLES.items()
    for scale in table.scales
    if (RESULTS / f"{name}{'' if scale == 'paper' else f'-{scale}'}.json").is_file()
]
FIGURES = ("table", "row", "column", "metric", "ours", "error", "published", "rounds", "seeds", "seconds", "commit")


def blocks(text: str) -> list[str]:
    """The headings and rows of a page."""
    return [line for line in text.splitlines() if line.startswith(("#", "|"))]


def test_the_walk_finds_the_results():
    assert len(PAGES) >= 29


@pytest.mark.parametrize(("name", "scale"), PAGES)
def test_every_figure_is_that_of_the_cells(name, scale):
    stem = name if scale == "paper" else f"{name}-{scale}"
    committed = json.loads((RESULTS / f"{stem}.json").read_text())
    rows = rows_of(name, TABLES[name], RESULTS, scale)
    assert len(rows) == len(committed)
    for row, before in zip(rows, committed):
        # Means over seeds are summed in another order by other versions of NumPy.
        same = [pytest.approx(v, rel=1e-12) if isinstance(v, float) else v for v in (before[key] for key in FIGURES)]
        assert [row[key] for key in FIGURES] == same
    # How settings are listed above a table follows the order of the methods' options: blocks are compared.
    # What is clearly worse than print is judged by all tables at once, on the page of their index.
    page = (RESULTS / f"{stem}.md").read_text().partition(f"## {WORSE}")[0]
    assert blocks(markdown(TABLES[name], rows)) == blocks(page)


@pytest.mark.parametrize(("name", "scale"), PAGES)
def test_a_page_beside_print_tells_where_it_is_not_as_printed(name, scale):
    departures = TABLES[name].layout.departures
    assert departures or not any(cell.published for cell in TABLES[name].cells())
    page = (RESULTS / f"{name}{'' if scale == 'paper' else f'-{scale}'}.md").read_text()
    assert all(f"- {line}\n" in page for line in departures)
