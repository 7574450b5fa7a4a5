"""Commands for federations on other machines: an app to edit, the public port, places of clients with lost keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedbayes.cli.shared import app, out
from fedbayes.errors import InputError

flower_app = typer.Typer(no_args_is_help=True, help="Train on other machines, by Flower.")
app.add_typer(flower_app, name="flower")


@flower_app.callback()
def _flower() -> None:
    """Train on other machines, by Flower."""


@flower_app.command()
def init(folder: Annotated[Path, typer.Argument(help="A new folder; its name becomes the app's.")]) -> None:
    """Write a small Flower app to edit: network, data, experiment, scripts for keys, server and nodes."""
    from fedbayes.flower.start import init as write

    for path in write(folder):
        out.print(f"  {path}")
    out.print(f"five commands in {folder / 'README.md'} take it from this machine to others")


@flower_app.command()
def release(
    folder: Annotated[Path, typer.Argument(help="The run folder, at the server.")],
    client: Annotated[int, typer.Argument(help="The number of the client whose key is lost or replaced.")],
) -> None:
    """Free a client's place, so that the next node that speaks for it may have a new key."""
    from fedbayes.flower.places import release as free

    for path in free(folder, client):
        out.print(f"  {path}")
    out.print(f"the next node that comes as client {client} takes its place; a run that is under way need not stop")


@flower_app.command()
def gate(
    superlink: Annotated[str, typer.Option(help="Where the SuperLink listens, on this machine alone: 127.0.0.1:9444.")],
    certificate: Annotated[Path, typer.Option(help="The server's certificate, which nodes see.")],
    key: Annotated[Path, typer.Option(help="The key of that certificate.")],
    authority: Annotated[Path, typer.Option(help="The certificate of the authority that signed the SuperLink's.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The public port.")] = 9443,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "0.0.0.0",
) -> None:
    """Let nodes reach a SuperLink on a public port, and nobody its control interface."""
    try:
        from fedbayes.flower.gate import serve
    except ModuleNotFoundError as error:
        raise InputError('the gate needs Flower: pip install "fedbayes[flower]"') from error
    serve((host, port), superlink, certificate=certificate, key=key, authority=authority)
