"""The journal: lines that every reader of JSON takes, whatever the numbers are, and the same numbers back."""

import json
from math import inf, nan
from pathlib import Path

import pytest

from fedbayes.errors import InputError
from fedbayes.runs import journal

RECORD = {
    "round": 1,
    "cohort": 2,
    "train": {"loss": nan, "gain": -inf, "steps": [1.0, inf]},
    "test": {"nll": inf, "accuracy": 0.5},
    "left_out": {"0": "NaN", "1": "Infinity"},
    "notes": ["-Infinity", "NaN"],
    "took_part": ["NaN"],
    "stopped": "NaN",
    "seconds": 0.25,
}


def strict(line: str) -> dict:
    """JSON as other programs read it: without Python's own words for what is not finite."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_what_is_not_finite_is_json_and_comes_back(tmp_path: Path) -> None:
    journal.append(tmp_path, RECORD)
    (line,) = (tmp_path / journal.LINES).read_text().splitlines()
    assert strict(line)["train"] == {"loss": "NaN", "gain": "-Infinity", "steps": [1.0, "Infinity"]}
    (record,) = journal.read(tmp_path)
    assert repr(record) == repr(RECORD)  # nan equals nothing, but reads the same
    assert repr(journal.cut(tmp_path, 1)) == repr([RECORD])
    assert (tmp_path / journal.LINES).read_text() == line + "\n"


def test_a_journal_with_pythons_words_still_reads_and_is_mended_where_a_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / journal.LINES).write_text('{"round": 1, "train": {"loss": NaN}}\n{"round": 2, "test": {"nll": NaN}}\n')
    assert [record["round"] for record in journal.read(tmp_path)] == [1, 2]
    journal.cut(tmp_path, 1)
    (line,) = (tmp_path / journal.LINES).read_text().splitlines()
    assert strict(line) == {"round": 1, "train": {"loss": "NaN"}}


def test_tables_without_end_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / journal.LINES).write_text('{"round": 1, "train": ' + '{"a": ' * 400 + '"NaN"' + "}" * 401 + "\n")
    assert journal.read(tmp_path)[0]["round"] == 1
    (tmp_path / journal.LINES).write_text('{"round": 1, "test": {"nll": "none"}}\n')
    with pytest.raises(InputError, match="test is"):
        journal.read(tmp_path)
