"""Commands that run the papers' tables and figures again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbayes.cli.shared import app


@app.command()
def table(
    name: Annotated[str, typer.Argument(help="fedag-2 (NLL), fedag-3 (RMSE) or fedag-4 (sharpness).")],
    only: Annotated[str, typer.Option(help="Sets and columns, by comma: yacht,boston,BLR. All by default.")] = "",
    scale: Annotated[str, typer.Option(help="paper (all folds) or small (two of each set).")] = "paper",
    output: Annotated[Path, typer.Option(help="The folder of the pages and their cells.")] = Path("docs/results"),
) -> None:
    """Run a published table again, cell by cell, and set ours beside the published figures; again: go on."""
    from fedbayes.study.tables import TABLES, page, run_table

    rows = run_table(name, output, only=[o.strip() for o in only.split(",") if o.strip()], scale=scale, say=print)
    print(page(TABLES[name], rows))


@app.command()
def figure(
    name: Annotated[str, typer.Argument(help="fedag-2 (the cubic toy) or fedag-3 (scores by round).")],
    output: Annotated[Path, typer.Option(help="The folder to write to.")] = Path("docs/results"),
) -> None:
    """Draw a published figure again, as SVG and PNG."""
    from fedbayes.study.regression_figures import draw

    for path in draw(name, output):
        print(path)
