"""The journal of a run: one JSON line a round, and the same numbers as a flat CSV table. Needs no torch."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError
from fedbayes.files import write_atomically

Record = dict[str, Any]
LINES, TABLE = "rounds.jsonl", "metrics.csv"


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a round."""
    with (folder / LINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def sync(folder: Path) -> None:
    """Wait until the journal is on disk: no checkpoint may ever be ahead of it."""
    with (folder / LINES).open("a", encoding="utf-8") as file:
        os.fsync(file.fileno())


def read(folder: Path) -> list[Record]:
    """The rounds written so far; a last line that was cut short by a crash is left out."""
    path = folder / LINES
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise InputError(f"{path}, line {number} is not JSON; put the file back from a copy") from error
    return records


def cut(folder: Path, rounds: int) -> list[Record]:
    """Drop the rounds after a checkpoint's, and give those that stay."""
    records = read(folder)
    if len(records) < rounds:
        raise InputError(
            f"{folder / LINES} ends at round {len(records)}, the checkpoint is of round {rounds}; "
            "put the journal back from a copy, or start anew in another folder"
        )
    kept = records[:rounds]
    lines = "".join(json.dumps(record) + "\n" for record in kept)
    path = folder / LINES
    if not path.is_file() or path.read_bytes() != lines.encode():
        write_atomically(path, lines)
    return kept


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """One round as a flat row: nested numbers get dotted names, lists and reasons become counts."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        if key == "left_out" or isinstance(value, list):
            row[key] = len(value)
        elif isinstance(value, Mapping):
            row |= {f"{key}.{name}": number for name, number in value.items()}
        else:
            row[key] = value
    return row


def write_table(folder: Path, records: list[Record]) -> None:
    """Write the journal as CSV; a number that a round lacks is left empty."""
    rows = [flat(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    table = csv.DictWriter(text, names, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_atomically(folder / TABLE, text.getvalue())
