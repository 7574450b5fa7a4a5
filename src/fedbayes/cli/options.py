"""The command that lists options: keys of an experiment, of Flower, and of methods, all read from their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from fedbayes.cli.shared import app, print_text
from fedbayes.errors import unknown
from fedbayes.experiments.keys import FLOWER, GROUPS, RECORDS, Keys
from fedbayes.options import Row, described

EXPERIMENT = "experiment"


@app.command()
def options(
    name: Annotated[str, typer.Argument(help="experiment, one of its tables, or a method's name.")] = EXPERIMENT,
    markdown: Annotated[bool, typer.Option("--markdown", help="All of them, as the page of the docs.")] = False,
) -> None:
    """Options and keys: what each means, what it must be, and its default."""
    if markdown:
        print(page(), end="")
        return
    for row in described(record_named(name)):
        print(f"{row.name} = {row.default or '(to be given)'}")
        print_text(f"{row.about}; {row.words}" if row.words else row.about, "    ", "    ")


def record_named(name: str) -> Any:
    """The record of an experiment's keys, of one of its tables, or of a method's options."""
    if name == EXPERIMENT or name in RECORDS:
        return Keys if name == EXPERIMENT else RECORDS[name]
    from fedbayes.flower.settings import Settings
    from fedbayes.methods import METHODS

    if name != FLOWER and name not in METHODS:
        raise unknown("options of", name, [EXPERIMENT, *RECORDS, FLOWER, *METHODS])
    return Settings if name == FLOWER else METHODS[name]


def page() -> str:
    """All options, as a page of the docs."""
    from fedbayes.flower.settings import Settings
    from fedbayes.methods import METHODS

    keys = {row.name: row for row in described(Keys)}
    blocks = [
        "# Options\n\nWritten by `fedbayes options --markdown` from the records that check them. *own*: your own code "
        "can be named, as `package.module:name`.\n",
        "## Keys of an experiment\n",
    ]
    for group in GROUPS:
        blocks += [f"### {_about(group)}\n", _table(keys[row.name] for row in described(group))]
    for name, record in RECORDS.items():
        blocks += [f"## Table `{name}`\n\n{_about(record)}.\n", _table(described(record))]
    blocks += [f"## Table `flower`\n\n{_about(Settings)}.\n", _table(described(Settings))]
    blocks += ["## Options of methods\n", _methods_table({name: described(METHODS[name]) for name in METHODS})]
    return "\n".join(blocks)


def _about(record: Any) -> str:
    return str(record.__doc__).strip().splitlines()[0].rstrip(".")


def _table(rows: Iterable[Row]) -> str:
    return _lines(("key", "default", "must be", "meaning"), ((f"`{r.name}`", *_cells(r)) for r in rows))


def _methods_table(by_method: Mapping[str, list[Row]]) -> str:
    """Each option once, with the methods that have it; again where a method has another default or meaning."""
    takers: dict[Row, list[str]] = {}
    for method, rows in by_method.items():
        for row in rows:
            takers.setdefault(row, []).append(method)
    order = sorted(takers, key=lambda row: row.name)
    head = ("option", "default", "must be", "meaning", "methods")
    return _lines(head, ((f"`{row.name}`", *_cells(row), _list(takers[row], by_method)) for row in order))


def _list(methods: list[str], all_methods: Iterable[str]) -> str:
    others = [method for method in all_methods if method not in methods]
    if len(others) < len(methods):
        return f"all but {', '.join(others)}" if others else "all"
    return ", ".join(methods)


def _cells(row: Row) -> tuple[str, str, str]:
    return f"`{row.default}`" if row.default else "to be given", row.words, row.about


def _lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
