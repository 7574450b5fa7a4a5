"""Commands that keep a federation on other machines going: flower watch, flower train, flower status."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedbayes.cli.federate import flower_app
from fedbayes.cli.shared import Folder, Settings, out
from fedbayes.errors import InputError


@flower_app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def watch(
    command: Annotated[
        list[str], typer.Argument(help="The program and its arguments: flower-supernode --superlink ...")
    ],
    health: Annotated[
        str | None, typer.Option(help="host:port at which it answers /health; deaf, it is ended.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(help="host:port of the SuperLink, whose clock must be this one.")
    ] = None,
    authority: Annotated[Path | None, typer.Option(help="The certificate by which both are known.")] = None,
    log: Annotated[Path | None, typer.Option(help="A file for its output: 10 MiB, and five older ones.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds of failures in a row after which this ends too.")] = 3600.0,
) -> None:
    """Keep one of Flower's programs running: what ends, hangs or goes deaf is started again.

    Exit status: 0 told to stop, 69 the SuperLink does not answer, 70 it failed again and again, 77 the SuperLink turned
    it away, 78 this machine's clock is wrong, 2 its arguments are wrong.
    """
    from fedbayes.flower.watchdog import Server, Watch, watched

    if authority is None and (health or superlink):
        raise InputError("--health and --superlink need --authority, the certificate by which they are known")

    def server(address: str | None) -> Server | None:
        if address and not address.rpartition(":")[2].isdigit():
            raise InputError(f"{address!r} is no address: give host:port")
        return Server(address, authority) if address and authority else None

    raise typer.Exit(watched(command, Watch(server(health), server(superlink), patience=patience, log=log)))


@flower_app.command()
def train(
    app: Annotated[Path, typer.Argument(help="The folder of the app, as of `fedbayes flower init`.")] = Path("."),
    superlink: Annotated[str | None, typer.Option(help="The SuperLink by its name; the app's by default.")] = None,
    output: Annotated[
        str | None, typer.Option(help="The run folder, from the SuperLink's; runs/NAME by default.")
    ] = None,
    settings: Settings = None,
    patience: Annotated[float, typer.Option(help="Seconds in which the SuperLink must answer.")] = 900.0,
) -> None:
    """Train on a SuperLink until the run is complete; where Flower fails it, go on from the last round that was closed.

    Exit status: 0 complete, 69 the SuperLink does not answer, 70 it failed again and again, 75 stopped by an operator.
    """
    import os
    import shlex

    from fedbayes.flower.driver import Driver, Plan

    name = app.resolve().name
    if not (app / "pyproject.toml").is_file():
        raise InputError(
            f"{app} is no app: it has no pyproject.toml; give the folder that `fedbayes flower init` wrote"
        )
    if (app / ".flwr").is_dir():  # where secure.sh wrote how the SuperLink is reached
        os.environ.setdefault("FLWR_HOME", str(app.resolve() / ".flwr"))
    place = output or f"runs/{name}"
    plan = Plan(app, superlink or name, place, shlex.join(settings or []), app / place, patience=patience)
    raise typer.Exit(Driver(plan, lambda text: out.print(escape(text), soft_wrap=True)).drive())


@flower_app.command()
def status(folder: Folder) -> None:
    """Where a federation stands: rounds, who took part, who is waited for.

    Exit status: 0 where it is finished or in progress, 1 where it is not finished and nobody works on it.
    """
    from fedbayes.flower.status import lines, standings

    runs = standings(folder)
    for run in runs:
        for line in lines(run):
            out.print(escape(line), soft_wrap=True)
    raise typer.Exit(0 if all(run.finished for run in runs) or any(run.alive for run in runs) else 1)
