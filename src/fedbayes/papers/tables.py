"""Every published table by name, trained where it is missing and written as JSON, Markdown and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, unknown
from fedbayes.files import write_atomically
from fedbayes.papers import (
    agg as printed_agg,
)
from fedbayes.papers import (
    fedppd as printed_fedppd,
)
from fedbayes.papers import (
    feduab as printed_feduab,
)
from fedbayes.papers import (
    page as cells_page,
)
from fedbayes.papers import (
    pfedpf as printed_pfedpf,
)
from fedbayes.papers import (
    regression_tables as tables,
)
from fedbayes.papers.cells import Printed, Say, rows_of, run_cells
from fedbayes.runs.folder import Watch
from fedbayes.runs.sweep import values_of

PRINTED: dict[str, Callable[[], Printed]] = {
    **printed_feduab.tables(),
    **printed_agg.tables(),
    **printed_fedppd.tables(),
    **printed_pfedpf.tables(),
}
TABLES: dict[str, str] = {
    **{name: table.title for name, table in tables.TABLES.items()},
    **{name: make().title for name, make in PRINTED.items()},
}


def run_published(
    name: str,
    output: Path,
    *,
    only: Sequence[str] = (),
    scale: str = "paper",
    seeds: str = "0",
    changes: Mapping[str, Any] | None = None,
    train: bool = True,
    keep: bool = False,
    say: Say = lambda line: None,
    watch: Watch | None = None,
) -> str:
    """Train the cells that are not there yet, write NAME.json, NAME.md and NAME.html, and give the Markdown."""
    if name not in TABLES:
        raise unknown("table", name, TABLES)
    if name in tables.TABLES:
        asked = {**dict(changes or {}), **({} if seeds == "0" else {"seeds": seeds})}
        device = asked.pop("device", "cpu")
        if asked:
            raise InputError(f"{next(iter(asked))}: {name} is of all folds of its sets in one setting; leave it out")
        made = tables.run_table(name, output, only=only, scale=scale, device=device, say=say)
        return tables.page(tables.TABLES[name], made)
    printed = PRINTED[name]()
    if train:
        numbers = [int(v) for v in values_of(f"seed={seeds}")[1] if v.isdigit()]
        if not numbers:
            raise InputError(f"seeds: {seeds!r} names no seed; write 0..2 or 0,3")
        asked = {"only": only, "scale": scale, "seeds": numbers, "changes": changes, "keep": keep}
        run_cells(printed, output, **asked, say=say, watch=watch)
    rows = rows_of(name, printed, output, scale)
    if not rows:
        others = [other for other in printed.scales if rows_of(name, printed, output, other)]
        mend = f"there are some of --scale {', '.join(others)}" if others else f"run fedbayes table {name}"
        raise InputError(f"no cell of {name} has been run at scale {scale}: {mend}")
    stem = name if scale == "paper" else f"{name}-{scale}"
    text = cells_page.markdown(printed, rows)
    write_atomically(output / f"{stem}.json", (json.dumps(rows, indent=1) + "\n").encode())
    write_atomically(output / f"{stem}.md", text.encode())
    write_atomically(output / f"{stem}.html", cells_page.page(printed, rows, output, scale).encode())
    return text
