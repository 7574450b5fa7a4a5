"""Who moved the model: each round's record of its clients, and all of them as a table. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LISTED = 100  # clients of a round that are listed: all, or of a larger cohort those who moved or count most
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
OWNS, AMONG = 0.5, 5  # a client with more than this share of the precision, among so many, is warned of
HIDDEN = "uploads were added under masks: who moved the sum can't be known"
COLUMNS = ("change", "share", "capped", "clipped")
PRECISION, WEIGHT = "precision", "weight"  # what a share is of

Row = tuple[float, ...]  # in the order of COLUMNS


def record_of(rows: Mapping[str, Row], share_of: str, twins: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """The influence of a round's clients for its journal, of at most `LISTED` clients; of more their quantiles too.

    Half of those listed moved most, the others have the largest shares: O(cohort) numbers a round, never above 400.
    `twins` are those who counted as one; of them at most `LISTED` too.
    """
    listed, more = rows, _named(twins)
    if len(rows) > LISTED:
        by = [sorted(rows, key=lambda name, at=at: -_order(rows[name][at])) for at in (0, 1)]  # type: ignore[misc]
        few = dict.fromkeys([*by[0][: LISTED // 2], *by[1][: LISTED // 2]])
        listed = {name: row for name, row in rows.items() if name in few}
        more |= {
            "cohort": len(rows),
            "change": _quantiles([row[0] for row in rows.values()]),
            "share": _quantiles([row[1] for row in rows.values()]),
            "capped": sum(row[2] > 0 for row in rows.values()),
            "clipped": sum(row[3] > 0 for row in rows.values()),
        }
    return {"share_of": share_of, "clients": {name: [_short(v) for v in row] for name, row in listed.items()}, **more}


def _named(twins: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Groups of those who counted as one, the largest first, until `LISTED` are named."""
    groups, room = [], LISTED
    for group in sorted(twins, key=len, reverse=True):
        groups += [list(group[:room])] if room > 1 else []
        room -= min(room, len(group))
    return {"twins": groups} if groups else {}


def _order(v: float) -> float:
    return math.inf if math.isnan(v) else v


def _short(v: float) -> float:
    return float(f"{v:.6g}")


def _quantiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values, key=_order)
    return [_short(ordered[round(q * (len(ordered) - 1))]) for q in QUANTILES]


def table_of(journal: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per client and round: its change, its share, whether it was capped, clipped, or refused and why, and how
    many others it counted as one with.

    A round by a secure sum, or of a journal that an earlier version wrote, has rows of who was refused alone.
    """
    table = []
    for record in journal:
        number, refused = record["round"], dict(record.get("left_out", {}))
        others = {name: len(group) - 1 for group in record.get("influence", {}).get("twins", ()) for name in group}
        for name, row in record.get("influence", {}).get("clients", {}).items():
            if name not in refused:
                change, share, capped, clipped = row
                held = {"capped": capped, "clipped": bool(clipped), "twins": others.get(name, 0), "refused": ""}
                table.append({"round": number, "client": name, "change": change, "share": share, **held})
        for name, why in refused.items():
            nothing = {"change": math.nan, "share": 0.0, "capped": 0.0, "clipped": False, "twins": 0}
            table.append({"round": number, "client": name, **nothing, "refused": why})
    return table


def owner(record: Mapping[str, Any]) -> tuple[str, float] | None:
    """The client that has most of a round's precision to itself, and its share; None where nobody has."""
    influence = record.get("influence", {})
    clients = influence.get("clients", {})
    if influence.get("share_of") != PRECISION or len(clients) < AMONG:
        return None
    name = max(clients, key=lambda name: clients[name][1])
    return (name, clients[name][1]) if clients[name][1] > OWNS else None


def warning(name: str, share: float) -> str:
    """What is said of a client that has most of the precision to itself."""
    return (
        f"client {name} has {share:.0%} of the pooled precision to itself, by its rows or by how sure it claims to be; "
        "cap_rows bounds the one, cap_precision = 10 the other"
    )


def fault(v: Any) -> bool:
    """Whether this is no influence of a round, as a journal holds it."""
    if not isinstance(v, dict) or not {*v} <= {"share_of", "clients", "cohort", "twins", *COLUMNS, "hidden"}:
        return True
    clients = v.get("clients", {})
    rows = clients.values() if isinstance(clients, dict) else None
    if rows is None or len(clients) > LISTED or not all(_numbers(row, len(COLUMNS)) for row in rows):
        return True
    lists = [v[name] for name in ("change", "share") if name in v]
    counts = [v[name] for name in ("cohort", "capped", "clipped") if name in v]
    fine = all(_numbers(numbers, len(QUANTILES)) for numbers in lists) and all(type(count) is int for count in counts)
    fine &= _names(v.get("twins", []))
    words = v.get("share_of", WEIGHT) in (PRECISION, WEIGHT) and isinstance(v.get("hidden", ""), str)
    return not (fine and words)


def _names(groups: Any) -> bool:
    """Whether this is a list of groups of names, not too many."""
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        return False
    names = [name for group in groups for name in group]
    return len(groups) <= len(names) <= LISTED and all(isinstance(name, str) for name in names)


def _numbers(v: Any, count: int) -> bool:
    plain = isinstance(v, list) and len(v) == count
    return plain and all(isinstance(one, int | float) and not isinstance(one, bool) for one in v)
