"""The command line: it prints, and never computes.

Modules that load torch are imported inside the commands that need it: help and errors answer at once.
"""

from __future__ import annotations  # noqa: I001  (commands stand in --help in the order of their import)

import os
import sys
import traceback
import warnings
from typing import Annotated

import typer

from fedbayes.cli import train, use, sites, private, published, lists, options, federate, operate
from fedbayes.cli.plain import make_safe
from fedbayes.cli.shared import app
from fedbayes.errors import InputError, disk_advice, printable
from fedbayes.version import __version__

__all__ = ["app", "federate", "lists", "main", "operate", "options", "private", "published", "sites", "train", "use"]


def main() -> None:
    """Run the command line: input errors are one line and exit code 2, Ctrl-C is 130."""
    make_safe(sys.stdout, sys.stderr)
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(args=arguments, prog_name="fedbayes")
    except InputError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder without rights
        if debug:
            traceback.print_exc()
        print(f"error: {disk_advice(error)}", file=sys.stderr)
        sys.exit(1)


def _version(shown: bool) -> None:
    if shown:
        print(__version__)
        raise typer.Exit


@app.callback(epilog="--debug anywhere shows the traceback of an error.")
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
