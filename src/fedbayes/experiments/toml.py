"""A TOML writer for what experiments hold: text, numbers, truth values, lists, tables; `tomllib` reads it back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(table: Mapping[str, Any]) -> str:
    """A nested mapping as TOML text: plain values first, then one section per table."""
    return "\n".join(_section(table, ())).strip() + "\n"


def _section(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = [f"{_key(k)} = {value(v)}" for k, v in table.items() if not isinstance(v, Mapping)]
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    lines = [f"\n[{'.'.join(map(_key, path))}]"] if path and (plain or not tables) else []
    lines += plain
    for k, v in tables.items():
        lines += _section(v, (*path, k))
    return lines


def value(v: Any) -> str:
    """One value as TOML text."""
    match v:
        case bool():
            return "true" if v else "false"
        case int() | float():
            return repr(v)
        case str():
            return json.dumps(v, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(value, v))}]"
        case Mapping():
            return "{" + ", ".join(f"{_key(k)} = {value(x)}" for k, x in v.items()) + "}"
    raise TypeError(f"TOML has no {type(v).__name__} ({v!r}); use text, numbers, truth values, lists and tables")


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else value(key)
