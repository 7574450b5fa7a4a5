"""Commands that list what there is, and show how data are spread."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedbayes.cli.shared import Settings, app, data_app, key_help, out, print_text
from fedbayes.errors import InputError

if TYPE_CHECKING:
    from fedbayes.data.catalogue import Row


def _list(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, about in rows:
        print_text(about, f"{name:<{width}}  ", " " * (width + 2))


def _docs(table: Mapping[str, Any]) -> None:
    _list((name, (entry.__doc__ or "").strip().splitlines()[0]) for name, entry in table.items())


@app.command()
def experiments() -> None:
    """Experiments that come with the library."""
    from fedbayes.experiments.included import EXPERIMENTS

    _list((name, f"{x.data}, {x.clients} clients, {' and '.join(x.all_methods)}") for name, x in EXPERIMENTS.items())


@app.command()
def methods() -> None:
    """Methods, by their papers' names."""
    from fedbayes.methods import METHODS

    _docs(METHODS)
    print_text("`fedbayes options NAME` lists what can be set of one of them, with defaults.", file=sys.stderr)


@app.command()
def rules() -> None:
    """Aggregation rules."""
    from fedbayes.federation.rules import RULES

    _list((name, rule.about) for name, rule in RULES.items())


@app.command()
def weightings() -> None:
    """Ways to weigh clients."""
    from fedbayes.federation.weighting import WEIGHTINGS

    _list((name, weighting.about) for name, weighting in WEIGHTINGS.items())


@app.command()
def networks() -> None:
    """Networks, by name."""
    from fedbayes.networks.papers import NETWORKS

    _docs(NETWORKS)


@app.command()
def partitions() -> None:
    """Ways to spread data over clients."""
    from fedbayes.data.partition import PARTITIONS

    _docs(PARTITIONS)


@app.command()
def datasets() -> None:
    """Data sets, what they hold, where each would come from, and whether it is here."""
    from fedbayes.data.catalogue import listing

    _list((row.name, f"{row.about}; {_extent(row)}; {'here, ' * row.present}{row.source}") for row in listing())


def _extent(row: Row) -> str:
    """Rows and targets of a data set in words."""
    train, test = (f"{n:,}".replace(",", "\N{NO-BREAK SPACE}") for n in (row.train, row.test))
    words = [f"{train} rows"] * (row.train > 0) + [f"{test} test rows"] * (row.test > 0)
    if row.kind in ("real", "survival"):
        words.append(f"{row.kind} targets")
    elif row.classes > 1:
        words.append(f"{row.classes} classes")
    return ", ".join(words)


@data_app.command("show")
def data_show(
    name: Annotated[
        str, typer.Argument(help="A data set's name, package.module:object, or own tables: a folder, file or pattern.")
    ],
    partition: Annotated[str, typer.Option(help=key_help("partition"))] = "iid",
    clients: Annotated[int, typer.Option(help="Over how many clients.")] = 20,
    seed: Annotated[int, typer.Option(help="The split's seed.")] = 0,
    settings: Settings = None,
    target: Annotated[str | None, typer.Option(help="Of own tables: the column to predict.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Write a picture of who holds what (.svg, .png).")] = None,
) -> None:
    """A data set and its spread over clients: rows and labels of each; of own tables, what each site holds."""
    if figure is not None:
        _check_figure(figure)
    if _is_path(name):
        _show_tables(name, target, settings or [], figure)
        return
    from fedbayes.data.show import label_figure, label_table
    from fedbayes.experiments.build import clients_of
    from fedbayes.experiments.experiment import Experiment, with_settings

    experiment = Experiment(data=name, partition=partition, clients=clients, seed=seed)
    spread = clients_of(with_settings(experiment, settings or [], lambda method: ()))
    if figure and spread.data.kind in ("real", "survival"):
        raise InputError(f"--figure draws who holds which labels; {name} has {spread.data.kind} targets: leave it out")
    out.print(escape(repr(spread.data)), soft_wrap=True)
    if spread.data.kind in ("real", "survival"):
        out.print(escape(repr(spread)))
    else:
        table = label_table(spread)
        table.box, table.padding = None, (0, 1)  # ten classes fit into 80 columns
        out.print(table)
    if figure:
        label_figure(spread, path=figure)
        print(figure)


def _check_figure(path: Path) -> None:
    """Refuse a name whose ending says no format of pictures."""
    from matplotlib.backend_bases import FigureCanvasBase

    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in endings:
        raise InputError(f"--figure {path}: no picture's name ends so; give .svg, .png or .pdf")


def _is_path(name: str) -> bool:
    """Whether a name is that of own tables: a folder, a file, or a pattern; a data set's own name goes first."""
    from fedbayes.data.catalogue import CATALOGUE

    named = any(sign in name for sign in "/*?.") or (name not in CATALOGUE and Path(name).is_dir())
    return named and ":" not in name


def _show_tables(name: str, target: str | None, settings: list[str], figure: Path | None) -> None:
    from fedbayes.data import holdings as show
    from fedbayes.experiments.tables import look

    held = look(name, target, settings)
    out.print(show.site_table(held))
    out.print(show.column_table(held))
    if figure:
        show.figure(held, figure)
        print(figure)
