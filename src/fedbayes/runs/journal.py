"""The journal of a run: one JSON line per round, and the same numbers as a flat CSV table. Needs no torch."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, shown
from fedbayes.files import reading, size_of, write_atomically
from fedbayes.training.flat import flat
from fedbayes.training.influence import fault

Record = dict[str, Any]
LINES, TABLE = "rounds.jsonl", "metrics.csv"
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as JSON writers agree on
DEPTH = 4  # of tables within a record: no round has more, whatever a file from elsewhere holds
WORDS = {
    "left_out",
    "notes",
    "dropped",
    "took_part",
    "stopped",
    "diverged",
    "attack",
    "attackers",
    "release",
}  # keys whose values hold no numbers


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a round."""
    try:
        with (folder / LINES).open("a", encoding="utf-8") as file:
            file.write(line_of(record))
    except OSError as error:  # a full disk does not say where; the line that it cut is left out when a run goes on
        error.filename = error.filename or str(folder / LINES)
        raise


def complete(folder: Path, line: str, number: int) -> None:
    """Add the line of a round that was committed, where the process was killed before it wrote it."""
    lines = [line_of(record) for record in read(folder)]
    if len(lines) == number - 1:
        write_atomically(folder / LINES, "".join([*lines, line]))


def line_of(record: Mapping[str, Any]) -> str:
    """A round as a line of JSON, which cannot hold numbers that are not finite: they are written as text."""
    return json.dumps({key: v if key in WORDS else _words_of(v) for key, v in record.items()}, allow_nan=False) + "\n"


def _words_of(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _words_of(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_words_of(v) for v in value]
    return NOT_FINITE[repr(value)] if isinstance(value, float) and not isfinite(value) else value


def _numbers(record: Any) -> Any:
    """The inverse of `line_of`; text stays as it is."""
    if not isinstance(record, dict):
        return record
    return {key: v if key in WORDS else _numbers_of(v, DEPTH) for key, v in record.items()}


def _numbers_of(value: Any, depth: int) -> Any:
    if isinstance(value, dict) and depth:
        return {key: _numbers_of(v, depth - 1) for key, v in value.items()}
    if isinstance(value, list) and depth:
        return [_numbers_of(v, depth - 1) for v in value]
    return float(value) if isinstance(value, str) and value in NOT_FINITE.values() else value


def sync(folder: Path) -> None:
    """Wait until the journal is on disk: no checkpoint may ever be ahead of it."""
    with (folder / LINES).open("a", encoding="utf-8") as file:
        os.fsync(file.fileno())


def read(folder: Path) -> list[Record]:
    """The rounds written so far; a last line that was cut short by a crash is left out."""
    path = folder / LINES
    if not path.is_file():
        return []
    with reading(path, "put the file back from a copy"):
        size_of(path)
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    whole = lines[:-1]  # what follows the last line's end is nothing, or was cut short
    if lines[-1] and _is_json(lines[-1]):
        whole = lines
    records: list[Record] = []
    for number, line in enumerate(whole, 1):
        if not _is_json(line):
            raise InputError(f"{path}, line {number} is not JSON; put the file back from a copy")
        record = _numbers(json.loads(line))
        if fault := _fault(record, number):
            raise InputError(
                f"{path}, line {number} is not the record of round {number} ({fault}); put the file back from a copy"
            )
        records.append(record)
    return records


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _fault(record: Any, number: int) -> str:
    """What is wrong with the kinds of values in a round's record; empty where it is fine."""
    if not isinstance(record, dict):
        return "it is no table"
    if record.get("round") != number:
        return f"it is of round {shown(record.get('round'))}"
    wrong = [key for key, fine in FIELDS.items() if key in record and not fine(record[key])]
    return f"{wrong[0]} is {shown(record[wrong[0]])}" if wrong else ""


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool)


def _scores(v: Any) -> bool:
    return isinstance(v, dict) and all(_number(score) for score in v.values())


def _words(v: Any) -> bool:
    return isinstance(v, list) and all(isinstance(word, str) for word in v)


def _reasons(v: Any) -> bool:
    return isinstance(v, dict) and all(isinstance(why, str) for why in v.values())


FIELDS: dict[str, Callable[[Any], bool]] = {
    "cohort": _number,
    "bytes_down": _number,
    "bytes_up": _number,
    "train": lambda v: isinstance(v, dict),
    "stopped": lambda v: isinstance(v, str),
    "seconds": _number,
    "test": _scores,
    "validation": _scores,
    "personal": _scores,
    "notes": _words,
    "left_out": _reasons,
    "phases": _scores,
    "client_seconds": _scores,
    "took_part": lambda v: isinstance(v, list) and all(isinstance(who, str | int) for who in v),
    "scales": _scores,
    "clock": _number,
    "in_flight": _number,
    "staleness": _scores,
    "speeds": _scores,
    "registered": _scores,
    "given_up": _scores,
    "influence": lambda v: not fault(v),
    "epsilon": _number,
    "delta": _number,
    "release": lambda v: isinstance(v, str),
    "attack": lambda v: isinstance(v, str),
    "attackers": lambda v: isinstance(v, list) and all(isinstance(who, str | int) for who in v),
}


def upto(folder: Path, rounds: int) -> list[Record]:
    """The rounds up to a checkpoint's, which must all be there."""
    records = read(folder)
    if len(records) < rounds:
        raise InputError(
            f"{folder / LINES} ends at round {len(records)}, the checkpoint is of round {rounds}; "
            "put the journal back from a copy, or start anew in another folder"
        )
    return records[:rounds]


def cut(folder: Path, rounds: int) -> list[Record]:
    """Drop the rounds after a checkpoint's, and give those that stay."""
    records = upto(folder, rounds)
    lines = "".join(map(line_of, records))
    path = folder / LINES
    if not path.is_file() or path.read_bytes() != lines.encode():
        write_atomically(path, lines)
    return records


def write_table(folder: Path, records: list[Record]) -> None:
    """Write the journal as CSV; a number that a round lacks is left empty."""
    rows = [flat(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomically(folder / TABLE, text.getvalue())
