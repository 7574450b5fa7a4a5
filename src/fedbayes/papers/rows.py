"""The rows of a table from the files of its cells: ours over seeds, the published figure, and how it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedbayes.papers.cells import Cell, Content, E, Table, contents_of

LAST = 10  # evaluated rounds of which a single seed's jitter is taken


def rows_of(name: str, table: Table[E], output: Path, scale: str) -> list[dict[str, Any]]:
    """Every cell that has files as one row per metric."""
    rows = []
    for cell in table.cells():
        contents = contents_of(table, cell, output, scale)
        notes = table.source.notes(table, cell, scale, contents) if contents else {}
        for metric, path in table.metrics.items():
            having = [content for content in contents if _at(content, path) is not None]
            if having:
                rows.append(as_variant(table, {"table": name, **_row(cell, metric, path, having), **notes}))
    return rows


def _row(cell: Cell[E], metric: str, path: str, contents: Sequence[Content]) -> dict[str, Any]:
    first, values = contents[0], [_at(content, path) for content in contents]
    best = [_at(content, f"oracle_best.{path.removeprefix('test.')}") for content in contents]
    known = [b for b in best if b is not None] if path.startswith("test.") else []
    ours = sum(values) / len(values)
    spread = (sum((v - ours) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
    return {
        "group": cell.group,
        "row": cell.row,
        "column": cell.column,
        "metric": metric,
        "ours": ours,
        # A file of several folds has the error over these.
        "error": spread / len(values) ** 0.5 if len(values) > 1 else _at(first, f"error.{path}"),
        **_jitter(contents, path),
        "oracle_best": sum(known) / len(known) if known else None,
        **_at_best(contents, path),
        "published": cell.published.get(metric),
        "rounds": first["rounds"],
        "seeds": sorted(content["seed"] for content in contents),
        "test_draws": first["test_draws"],
        "seconds": sum(content["seconds"] for content in contents),
        "device": _each(contents, "device"),
        "commit": _each(contents, "commit"),
        "date": _each(contents, "date") or None,
    }


def _at_best(contents: Sequence[Content], path: str) -> dict[str, float]:
    """The score in the round of the highest accuracy on test data, averaged over seeds."""
    name = path.removeprefix("test.")
    rounds = [[r for r in content.get("curve", []) if "accuracy" in r and name in r] for content in contents]
    if path == name or not all(rounds):
        return {}
    return {"at_best": sum(max(curve, key=lambda r: r["accuracy"])[name] for curve in rounds) / len(rounds)}


def _jitter(contents: Sequence[Content], path: str) -> dict[str, float]:
    """Of a single seed: by how much a score of one round is off what others nearby are, of its last evaluated rounds.

    The root mean square of the differences from one to the next over the root of two, in which a trend hardly counts.
    """
    if len(contents) > 1 or not path.startswith("test."):
        return {}
    name = path.removeprefix("test.")
    last = [record[name] for record in contents[0].get("curve", []) if name in record][-LAST:]
    if len(last) < LAST:
        return {}
    return {"jitter": (sum((b - a) ** 2 for a, b in pairwise(last)) / (2 * (len(last) - 1))) ** 0.5}


def _each(contents: Sequence[Content], key: str) -> str:
    """What the seeds say of how they were made; several where they do not agree."""
    return ", ".join(dict.fromkeys(str(content[key]) for content in contents if content.get(key)))


def _at(content: Content, path: str) -> Any:
    value: Any = content
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def as_variant(table: Table[E], row: dict[str, Any]) -> dict[str, Any]:
    """`FedAvg` with the metric `pf nll` as `FedAvg-pf` with `nll`, where the table has such rows."""
    word, _, rest = row["metric"].partition(" ")
    if word not in table.variants:
        return row
    return {**row, "row": row["row"] + table.variants[word], "metric": rest}
