"""Where every printed number stands: counted by hand on made tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedbayes.papers import causes, index
from fedbayes.papers.causes import Cause
from fedbayes.papers.cells import Cell, Source, Table
from fedbayes.papers.page import WORSE, markdown
from fedbayes.papers.tables import TABLES

RESULTS = Path(__file__).parents[2] / "docs/results"

PRINTED = {"accuracy": 0.9, "nll": 0.30}
FILES: dict[tuple[str, str], list[dict[str, Any]]] = {  # by scale and row: one content for each seed
    ("paper", "full"): [
        {"test": {"accuracy": 0.91, "nll": 0.34}, "seed": 0},
        {"test": {"accuracy": 0.93, "nll": 0.30}, "seed": 1},
    ],
    ("paper", "worse"): [{"test": {"accuracy": 0.85, "nll": 0.3004}, "seed": 0}],
    ("paper", "otherwise"): [{"test": {"accuracy": 0.91}, "seed": 0, "otherwise": "lr 1"}],
    ("short", "shortened"): [{"test": {"accuracy": 0.91}, "seed": 0}],
    ("short", "full"): [{"test": {"accuracy": 0.1, "nll": 9.0}, "seed": 0}],  # what is full is not looked for again
}


def contents(table: Table[str], cell: Cell[str], output: Path, scale: str) -> list[dict[str, Any]]:
    made = {"rounds": 1, "test_draws": 1, "seconds": 1.0, "device": "cpu", "commit": "abc"}
    return [{**made, **content} for content in FILES.get((scale, cell.row), [])]


def notes(table: Table[str], cell: Cell[str], scale: str, files: Any) -> dict[str, Any]:
    return {"otherwise": files[0].get("otherwise", ""), "scaled": [] if scale == "paper" else ["rounds 1 for 9"]}


def made() -> dict[str, Table[Any]]:
    rows = ("full", "worse", "otherwise", "shortened", "missing")
    scales = {"paper": lambda x: x, "short": lambda x: x}
    metrics = {"accuracy": "test.accuracy", "nll": "test.nll"}
    source: Source[str] = Source(lambda *a: None, contents, notes)
    cells = [Cell(row, "IID", "", {**PRINTED, "elsewhere": 1.0}) for row in rows]
    return {"made-1": Table("Made, table 1", lambda: cells, metrics, scales, "made", source)}


def test_every_printed_number_stands_somewhere(tmp_path: Path) -> None:
    found = index.standings(made(), tmp_path)
    assert index.counted(found) == {
        **{"printed": 10, "full": 4, "other settings": 1, "shortened": 1, "missing": 4},
        **{"better": 1, "within noise": 2, "worse": 1},
    }
    # The full NLL .32 +- .02 is within noise; that of one seed, .3004, prints as .300; accuracy .85 is 5 points short,
    # where seeds spread by 1.4.
    worse = [one.row for one in found if one.verdict == "worse"]
    assert [(row["row"], row["metric"]) for row in worse if row] == [("worse", "accuracy")]
    text = index.index(made(), found, tmp_path)
    assert "| Made, table 1 | 10 | 4 | 1 | 1 | 4 | 1 | 2 | 1 |" in text
    assert "| made-1 | worse IID | accuracy | 85.00 | 90.00 | 1 | open |" in text
    (tmp_path / "made-1-short.md").touch()
    assert "[Made, table 1](made-1-short.md)" in index.index(made(), found, tmp_path)


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([0.85, 0.90] * 5, "within noise"),  # from one round to the next it moves by the 5 points that it lacks
        ([0.85, 0.90] * 4, "worse"),  # of too few rounds to say so
        ([0.81 + 0.005 * k for k in range(10)], "worse"),  # it still rises, by as much in all
        ([0.85] * 10, "worse"),
    ],
)
def test_a_single_seed_is_as_noisy_as_its_last_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curve: list[float], verdict: str
) -> None:
    records = [{"round": k, "accuracy": v, "nll": 0.3} for k, v in enumerate(curve)]
    worse = {"test": {"accuracy": 0.85, "nll": 0.3004}, "seed": 0, "curve": records}
    monkeypatch.setitem(FILES, ("paper", "worse"), [worse])
    found = {(s.row["row"], s.row["metric"]): s.verdict for s in index.standings(made(), tmp_path) if s.row}
    assert found["worse", "accuracy"] == verdict


def test_a_cause_is_shown_by_another_row_or_the_number_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table,), found = made().values(), index.standings(made(), tmp_path)

    def why(shown: str) -> str:
        monkeypatch.setattr(causes, "CAUSES", (Cause(("made-1",), "row", "worse", shown, "half the steps"),))
        (line,) = index.worse("made-1", table, found, tmp_path)
        assert " | ".join(line) in index.index(made(), found, tmp_path)
        assert " | ".join(line) in markdown(
            table, [one.row for one in found if one.row and one.state == "full"], [line]
        )
        return line[-1]

    assert why("full") == "half the steps (full): [92.00](made-1.json)"
    assert why("missing") == "open"  # a cause that has not been run is none
    monkeypatch.setitem(FILES, ("paper", "full"), [{"test": {"accuracy": 0.874, "nll": 0.3}, "seed": 0}])
    assert why("full") == "open"  # nor one that leaves more than half of the gap
    monkeypatch.setitem(FILES, ("paper", "full"), [{"test": {"accuracy": 0.876, "nll": 0.3}, "seed": 0}])
    assert why("full").startswith("half the steps")


def test_a_number_of_the_best_round_is_a_cause_where_print_may_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve = [{"accuracy": 0.88, "nll": 0.5}, {"accuracy": 0.85, "nll": 0.3004}]
    monkeypatch.setitem(FILES, ("paper", "worse"), [{"test": curve[-1], "seed": 0, "curve": curve}])
    (table,), found = made().values(), index.standings(made(), tmp_path)

    def why() -> str:
        (line,) = index.worse("made-1", table, found, tmp_path)
        return line[-1]

    assert why() == "open"
    monkeypatch.setattr(causes, "FEDUAB", ("made-1",))
    assert why() == f"{causes.AT_BEST}: [88.00](made-1.json)"
    monkeypatch.setattr(causes, "CLOSED", 0.3)
    assert why() == "open"


@pytest.mark.parametrize("cause", causes.CAUSES, ids=str)
def test_causes_name_places_of_their_tables(cause: Cause) -> None:
    for name in cause.tables:
        table = TABLES[name]
        suffixes = ["", *table.variants.values()] if cause.field == "row" else [""]
        places = {getattr(cell, cause.field) + suffix for cell in table.cells() for suffix in suffixes}
        assert {cause.worse, cause.shown} <= places


def test_every_worse_number_of_the_pages_has_a_cause_or_is_open() -> None:
    lines = (RESULTS / "index.md").read_text(encoding="utf-8").partition(f"### {WORSE}")[2].splitlines()
    entries = [[word.strip() for word in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert len(entries) == json.loads((RESULTS / "index.json").read_text(encoding="utf-8"))["all"]["worse"]
    for table, *entry in entries:
        whys = [causes.OPEN, *(c.why for c in causes.CAUSES if table in c.tables)]
        assert entry[-1].startswith((*whys, causes.AT_BEST) if table in causes.FEDUAB else tuple(whys))
        assert f"| {' | '.join(entry)} |" in (RESULTS / f"{table}.md").read_text(encoding="utf-8")


def test_scores_where_more_is_better_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, ("paper", "worse"), [{"test": {"accuracy": 0.95, "nll": 0.9}, "seed": 0}])
    found = index.standings(made(), tmp_path)
    assert [one.row["metric"] for one in found if one.verdict == "worse" and one.row] == ["nll"]


def test_what_was_written_by_hand_stays() -> None:
    page = index.below_head("# Results\n\nBy hand.\n", "first\n")
    assert page.startswith("# Results\n\nBy hand.\n")
    assert page.endswith("first\n")
    again = index.below_head(page, "second\n")
    assert again == page.replace("first", "second")
    assert index.below_head("", "x\n").endswith("x\n")
