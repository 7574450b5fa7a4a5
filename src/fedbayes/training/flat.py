"""A round's record as one flat row. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """One round as a flat row: nested numbers get dotted names, lists and reasons become counts."""
    row: dict[str, Any] = {}
    for key, value in record.items():
        if key == "influence":
            row |= _largest(value.get("clients", {}))
        elif key in ("left_out", "client_seconds") or isinstance(value, list):
            row[key] = len(value)
        elif isinstance(value, Mapping):
            row |= {f"{key}.{name}": number for name, number in value.items()}
        else:
            row[key] = value
    return row


def _largest(clients: Mapping[str, Any]) -> dict[str, Any]:
    """What the clients of a round did to it, in three numbers."""
    if not clients:
        return {}
    changes, shares, _, clipped = zip(*clients.values())
    return {"largest_change": max(changes), "largest_share": max(shares), "clipped": sum(map(bool, clipped))}
