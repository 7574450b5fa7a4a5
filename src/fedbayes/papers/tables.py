"""Every published table by name, trained where it is missing and written as JSON, Markdown and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, unknown
from fedbayes.files import write_atomically
from fedbayes.papers import admm, aggregation, attacks, fedag, fedppd, feduab, league, league_page, pfedpf
from fedbayes.papers.cells import Request, Table
from fedbayes.papers.drawing import save, svg_of
from fedbayes.papers.index import below_head, counted, index, standings, worse
from fedbayes.papers.page import markdown, page
from fedbayes.papers.rows import rows_of
from fedbayes.runs.sweep import values_of

TABLES: dict[str, Table[Any]] = {
    **fedag.TABLES,
    **feduab.TABLES,
    **aggregation.TABLES,
    **fedppd.TABLES,
    **pfedpf.TABLES,
    **attacks.TABLES,
    **admm.TABLES,
}


def run_published(name: str, output: Path, request: Request, *, train: bool = True) -> str:
    """Train the cells that are missing, write NAME.json, NAME.md and NAME.html, and give the Markdown."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    table, scale = TABLES[name], request.scale
    if scale not in table.scales:
        raise unknown("scale", scale, table.scales)
    if train:
        table.source.train(table, output, request)
    rows = rows_of(name, table, output, scale)
    if not rows:
        others = [other for other in table.scales if rows_of(name, table, output, other)]
        mend = f"there are some of --scale {', '.join(others)}" if others else f"run fedbayes table {name}"
        raise InputError(f"no cell of {name} has been run at scale {scale}: {mend}")
    stem = name if scale == "paper" else f"{name}-{scale}"
    # How far a single seed may stray is judged by all tables.
    printed = scale == "paper" and any(row["published"] is not None for row in rows)
    found = standings(TABLES, output) if printed else []
    text = markdown(table, rows, worse(name, table, found, output))
    records = [{key: row[key] for key in table.layout.keys or row} for row in rows]
    write_atomically(output / f"{stem}.json", (json.dumps(records, indent=1) + "\n").encode())
    write_atomically(output / f"{stem}.md", text.encode())
    write_atomically(output / f"{stem}.html", page(table, rows, output, scale).encode())
    return text


def run_all(output: Path, request: Request, *, train: bool = True) -> str:
    """Train what is missing of every table where asked, write index.md and index.json, and give the Markdown."""
    if train:
        for name in TABLES:
            request.say(name)
            run_published(name, output, request)
    found = standings(TABLES, output)
    text = index(TABLES, found, output)
    counts = {name: counted([one for one in found if one.table == name]) for name in TABLES}
    records = {
        "all": counted(found),
        "tables": {name: numbers for name, numbers in counts.items() if numbers["printed"]},
    }
    write_atomically(output / "index.json", (json.dumps(records, indent=1) + "\n").encode())
    page = output / "index.md"
    head = page.read_text(encoding="utf-8") if page.is_file() else ""
    write_atomically(page, below_head(head, text).encode())
    return text


def run_league(output: Path, request: Request, *, train: bool = True) -> str:
    """Train what is missing of the league, write league.json, league.md and league.html, and give the Markdown."""
    scale = request.scale
    if scale not in league.SCALES:
        raise unknown("scale", scale, league.SCALES)
    if train:
        league.train(league.league(), output, request)
    table = league.league(league.choices(output, scale))
    rows = rows_of("league", table, output, scale)
    if not rows:
        raise InputError(f"no cell of the league has been run at scale {scale}: run fedbayes league")
    shown = league_page.by_metric(rows)
    stem, drawn = "league" if scale == "paper" else f"league-{scale}", league_page.picture(rows)
    layout = table.layout._replace(
        findings=lambda _: league_page.findings(rows), drawing=lambda _: "" if drawn is None else svg_of(drawn)
    )
    table = table._replace(layout=layout)
    if drawn is not None:
        save(drawn, output / f"{stem}-ranks")
    text = markdown(table, shown)
    write_atomically(output / f"{stem}.json", (json.dumps(rows, indent=1) + "\n").encode())
    write_atomically(output / f"{stem}.md", text.encode())
    write_atomically(output / f"{stem}.html", page(table, shown, output, scale).encode())
    return text


def seeds_of(text: str) -> list[int]:
    """Seeds from text: `0..2` or `0,3`."""
    words = values_of(f"seed={text}")[1] if text.strip() else []
    if not words or not all(word.isdecimal() for word in words):
        raise InputError(f"seeds: {text!r} is no list of seeds; write 0..2 or 0,3")
    return [int(word) for word in words]
