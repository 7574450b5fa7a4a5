"""The command that accounts for privacy: what noise an epsilon asks for, what a run has spent, what more would cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.shared import app, out
from fedbayes.errors import InputError


@app.command()
def privacy(
    folder: Annotated[Path | None, typer.Argument(help="A private run: what it has spent. Without it: a plan.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The budget: which noise keeps within it?")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Chance at which epsilon may not hold, 1e-5 by default; a run has its own.")
    ] = None,
    noise: Annotated[float | None, typer.Option(help="The noise multiplier: what does it come to?")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds in all; of a run: how many more.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Chance to be in a round: cohort / clients, or batch / rows.")
    ] = None,
) -> None:
    """What noise for this epsilon, what epsilon for this noise, what a run has spent, what more rounds would cost."""
    if folder is not None:
        if any(value is not None for value in (epsilon, delta, noise, rate)):
            raise InputError(
                "privacy: a run has its own epsilon, delta, noise and rate; give --rounds alone, or no folder"
            )
        if rounds is not None and rounds < 1:
            raise InputError(f"privacy: --rounds of a run are how many more, at least 1, not {rounds}")
        out.print(_of_run(folder, rounds or 0))
        return
    if rate is None or rounds is None or (epsilon is None) == (noise is None):
        raise InputError("privacy: give --rate, --rounds, and --epsilon or --noise; or the folder of a private run")
    out.print(_plan(epsilon, 1e-5 if delta is None else delta, noise, rounds, rate))


def _plan(epsilon: float | None, delta: float, noise: float | None, rounds: int, rate: float) -> Table:
    from fedbayes.federation.accounting import Spent, epsilon_of, noise_for

    checks = {
        "rate must be in (0, 1]": 0 < rate <= 1,
        "delta must be in (0, 1)": 0 < delta < 1,
        "rounds must be positive": rounds > 0,
        "noise must be positive and finite": noise is None or 0 < noise < math.inf,
        "epsilon must be positive and finite": epsilon is None or 0 < epsilon < math.inf,
    }
    for words, holds in checks.items():
        if not holds:
            raise InputError(f"privacy: --{words}")
    if noise is None:
        assert epsilon is not None
        noise = noise_for(epsilon, delta, rate, rounds)
    account = (Spent(rate, noise, rounds),)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("noise multiplier", "rate", "rounds", "delta", "epsilon (PLD)", "epsilon (RDP)"):
        table.add_column(name, justify="right")
    spent = [f"{epsilon_of(account, delta, by):.4f}" for by in ("pld", "rdp")]
    table.add_row(f"{noise:g}", f"{rate:g}", str(rounds), f"{delta:g}", *spent)
    return table


def _of_run(folder: Path, more: int) -> Table:
    from fedbayes.runs.spending import spending

    table = Table(box=box.SIMPLE_HEAD)
    ahead = [f"after {more} more"] if more else []
    for name in ("who", "rate", "noise", "uses", "delta", "epsilon (PLD)", "epsilon (RDP)", *ahead):
        table.add_column(name, justify="left" if name == "who" else "right")
    for row in spending(folder, more):
        later = [f"{row.later:.4f}"] if more else []
        figures = ["" if v is None else f"{v:g}" for v in (row.rate, row.noise)]
        cells = (*figures, "" if row.uses is None else str(row.uses), f"{row.delta:g}")
        table.add_row(escape(row.who), *cells, f"{row.epsilon:.4f}", f"{row.by_divergences:.4f}", *later)
    return table
