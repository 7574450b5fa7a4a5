"""What the commands share: the application, the console, arguments that several take."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from fedbayes.experiments.keys import Keys
from fedbayes.options import options_of


def key_help(name: str) -> str:
    """What `--help` says of a key of an experiment."""
    f = options_of(Keys)[name]
    choices = f.metadata["check"].choices
    return f"{f.metadata['about']}{'' if choices is None else ': ' + ', '.join(choices)}."


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Bayesian federated learning: train any PyTorch network across clients, and get a posterior back.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data sets and how they are spread.")
app.add_typer(data_app, name="data")
out = Console(highlight=False)
NARROWEST = 20  # characters of a text beside a name


def print_text(text: str, first: str = "", others: str = "", file: TextIO | None = None) -> None:
    """Print text in the width of the terminal, or of COLUMNS; a pipe without a width gets it in one line."""
    width = shutil.get_terminal_size((0, 0)).columns or len(first + text)
    width = max(width, len(others) + NARROWEST)
    wrapper = textwrap.TextWrapper(width, first, others, break_on_hyphens=False, break_long_words=False)
    for line in wrapper.wrap(text):  # a path that is torn apart can't be copied
        print(line, file=file)


def say_whose(folder: Path) -> None:
    """Of a comparison, say whose run a command takes."""
    from fedbayes.experiments.experiment import folder_name
    from fedbayes.runs.home import experiment_in

    experiment = experiment_in(folder)
    if experiment.methods:
        others = ", ".join(f"{folder}/{folder_name(m)}" for m in experiment.methods if m != experiment.method)
        print_text(f"{folder} is a comparison: what follows is of {experiment.method}; for others give {others}")


Folder = Annotated[Path, typer.Argument(help="A folder that `fedbayes run` wrote.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value over the experiment: rounds=50, options.fedavg.lr=0.1, or an option's name."),
]
Events = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard events; needs fedbayes\\[tensorboard].")
]
Mlflow = Annotated[
    str | None,
    typer.Option("--mlflow", metavar="URI", help="Also track on MLflow, such as http://localhost:5000; \\[mlflow]."),
]
Wandb = Annotated[
    str | None, typer.Option("--wandb", metavar="PROJECT", help="Also track on Weights & Biases; \\[wandb].")
]


def _trust(packages: list[str] | None) -> list[str] | None:
    from fedbayes.experiments.trust import trust

    trust(*(packages or ()))
    return packages


Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="PACKAGE",
        callback=_trust,
        help="An installed package whose code the experiment may run; again for more.",
    ),
]
