"""Commands that run the papers' tables and figures again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedbayes.cli.shared import app, out
from fedbayes.cli.watching import watching
from fedbayes.errors import InputError


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="Such as feduab-6 or fedag-2; without a name, a list of them.")] = "",
    every: Annotated[bool, typer.Option("--all", help="All tables, and one page of how they stand.")] = False,
    only: Annotated[str, typer.Option(help="Sets, rows and columns, by comma: mnist,FedUAB-5. All by default.")] = "",
    scale: Annotated[str, typer.Option(help="paper, or small (for a laptop).")] = "paper",
    seeds: Annotated[str, typer.Option(help="Seeds of each cell, as 0..2 or 0,3.")] = "0",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int | None, typer.Option(help="Another number of rounds than the paper's.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32, tf32 or bf16, instead of the table's own.")] = None,
    compile: Annotated[str | None, typer.Option(help="auto, off, captured, on, graph (a CUDA graph) or soon.")] = None,
    at_once: Annotated[int | None, typer.Option(help="Clients trained side by side; by default what fits.")] = None,
    train: Annotated[bool, typer.Option(help="Train what is missing; else only write the pages.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the posterior of each cell beside its file.")] = False,
    output: Annotated[Path, typer.Option(help="The folder of the pages and their cells.")] = Path("docs/results"),
) -> None:
    """Run a published table again, cell by cell, and set ours beside the published figures; again: go on."""
    from fedbayes.papers.cells import Request
    from fedbayes.papers.tables import TABLES, run_all, run_published, seeds_of

    if every and (name or only or scale != "paper"):
        raise InputError("--all: it is every table at the printed schedule; leave out the name, --only and --scale")
    if not (name or every):
        for known, published in TABLES.items():
            print(f"{known:<18} {published.title}")
        return
    words = [word.strip() for word in only.split(",") if word.strip()]
    settings = {"device": device, "rounds": rounds, "precision": precision, "compile": compile, "at_once": at_once}
    changes = {key: value for key, value in settings.items() if value is not None}
    try:
        with watching() as watch:

            def say(line: str) -> None:
                out.print(escape(line), soft_wrap=True)

            request = Request(words, scale, seeds_of(seeds), changes, keep, say, watch)
            text = run_all(output, request, train=train) if every else run_published(name, output, request, train=train)
    except KeyboardInterrupt:
        out.print("\nstopped; the same command goes on: finished cells stay, others from their last checkpoints")
        raise SystemExit(130) from None
    print(text)


@app.command()
def league(
    only: Annotated[str, typer.Option(help="Federations, methods, splits, by comma: heart-disease,pvi,as given.")] = "",
    scale: Annotated[str, typer.Option(help="paper, or small (two rounds).")] = "paper",
    seeds: Annotated[str, typer.Option(help="Seeds of each cell, as 0..4 or 0,3.")] = "0..4",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compile: Annotated[str | None, typer.Option(help="auto, off, captured, on, graph (a CUDA graph) or soon.")] = None,
    train: Annotated[bool, typer.Option(help="Train what is missing; else only write the pages.")] = True,
    output: Annotated[Path, typer.Option(help="The folder of the pages and cells.")] = Path("docs/results/league"),
) -> None:
    """Every method on every natural federation, by one protocol, between local and pooled training; again: go on."""
    from fedbayes.papers.cells import Request
    from fedbayes.papers.tables import run_league, seeds_of

    words = [word.strip() for word in only.split(",") if word.strip()]
    changes = {key: value for key, value in {"device": device, "compile": compile}.items() if value is not None}
    try:
        with watching() as watch:

            def say(line: str) -> None:
                out.print(escape(line), soft_wrap=True)

            text = run_league(output, Request(words, scale, seeds_of(seeds), changes, False, say, watch), train=train)
    except KeyboardInterrupt:
        out.print("\nstopped; the same command goes on: finished cells stay, others from their last checkpoints")
        raise SystemExit(130) from None
    print(text)


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="Such as fedppd-2 or agg-prior; without a name, a list of them.")] = "",
    scale: Annotated[str, typer.Option(help="Of the cells that are drawn: paper, short, small.")] = "paper",
    output: Annotated[Path, typer.Option(help="The folder of the cells, and to write to.")] = Path("docs/results"),
) -> None:
    """Draw a published figure again, as SVG and PNG."""
    from fedbayes.papers.figures import FIGURES, draw

    if not name:
        print(*FIGURES, sep="\n")
        return
    for path in draw(name, output, scale):
        print(path)
