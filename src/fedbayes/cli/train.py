"""Commands that train: run, sweep, resume."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedbayes.cli.shared import Events, Folder, Mlflow, Settings, Trust, Wandb, app, key_help, out
from fedbayes.cli.watching import watching
from fedbayes.engine.clock import FILES, START, Shares, share
from fedbayes.engine.clock import profile as measuring
from fedbayes.errors import InputError

Trackers = tuple[bool, str | None, str | None]  # TensorBoard, MLflow's address, the project of Weights & Biases
NO_TRACKERS: Trackers = (False, None, None)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment's name (quickstart) or a TOML file.")],
    output: Annotated[Path | None, typer.Option(help="The folder to write; runs/NAME by default.")] = None,
    settings: Settings = None,
    device: Annotated[str | None, typer.Option(help=key_help("device"))] = None,
    engine: Annotated[str | None, typer.Option(help=key_help("engine"))] = None,
    compile: Annotated[str | None, typer.Option(help=key_help("compile"))] = None,
    central: Annotated[bool, typer.Option("--central", help="Pool all rows in one client: no federation.")] = False,
    tensorboard: Events = False,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    active: Annotated[
        str | None, typer.Option(help="Active learning by entropy, mutual_information or random: labels are asked for.")
    ] = None,
    labelled: Annotated[
        int | None, typer.Option(help="Rows that a client has labels of at first, with --active; 20 by default.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Labels that a client asks for after each stage, with --active; 20 by default.")
    ] = None,
    trust: Trust = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time goes; write profile.json.")] = False,
) -> None:
    """Train an experiment into a folder, and write its report."""
    asked = {key: v for key, v in {"labelled": labelled, "budget": budget}.items() if v is not None}
    if active is None and asked:
        raise InputError(f"--{next(iter(asked))} is of active learning; give --active too, or leave it out")
    kind = f"-{active}" if active is not None else "-central" if central else ""
    folder = output or Path("runs") / f"{Path(name).stem}{kind}"
    with measuring() if profile else nullcontext() as shares:
        with share(START):
            overrides = {"device": device, "engine": engine, "compile": compile}
            experiment = _experiment(name, settings, overrides, central)
        if active is None:
            _train(lambda watch: _by_engine(experiment, folder, watch), folder, (tensorboard, mlflow, wandb))
        else:
            from fedbayes.runs.active import Active, run_active

            asking = Active(active, **asked)
            _train(lambda watch: run_active(experiment, asking, folder, watch), folder, (tensorboard, mlflow, wandb))
    if shares is not None:
        _show(shares, folder)


def _experiment(name: str, settings: list[str] | None, overrides: dict[str, str | None], central: bool) -> Any:
    from fedbayes.experiments.experiment import with_settings
    from fedbayes.experiments.included import find

    experiment = find(name)
    changes = [*(settings or []), *(f'{key}="{value}"' for key, value in overrides.items() if value)]
    if changes:
        from fedbayes.experiments.build import options_of_method

        experiment = with_settings(experiment, changes, options_of_method)
    if central:
        from fedbayes.experiments.build import without_federation

        experiment = without_federation(experiment)
    return experiment


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="An experiment's name or a TOML file.")],
    over: Annotated[list[str], typer.Option(help="key=first..last or key=a,b,c; give it again for more keys.")],
    output: Annotated[Path | None, typer.Option(help="The folder of the members' folders; runs/NAME-sweep.")] = None,
    settings: Settings = None,
    device: Annotated[str | None, typer.Option(help=key_help("device"))] = None,
    trust: Trust = None,
) -> None:
    """Train an experiment over lists of values, as one tensor program where only numbers differ; again: go on."""
    from fedbayes.experiments.build import options_of_method
    from fedbayes.experiments.experiment import with_settings
    from fedbayes.experiments.included import find
    from fedbayes.runs.sweep import sweep as train

    overrides = [*(settings or []), *([f'device="{device}"'] if device else [])]
    experiment = with_settings(find(name), overrides, options_of_method)
    folder = output or Path("runs") / f"{Path(name).stem}-sweep"
    _train(lambda watch: train(experiment, over, folder, watch), folder)


@app.command()
def resume(
    folder: Folder,
    rounds: Annotated[int | None, typer.Option(help="Train to this round, also where the run is finished.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value from here on: a number among the method's options, such as lr=0.01."),
    ] = None,
    tensorboard: Events = False,
    mlflow: Mlflow = None,
    wandb: Wandb = None,
    trust: Trust = None,
) -> None:
    """Go on after a crash, a kill or a reboot: same result as if nothing had happened."""
    if (folder / "active.toml").is_file():
        from fedbayes.runs.active import resume_active

        if rounds is not None or settings:
            raise InputError("--rounds, --set: active learning goes on as it began; begin another into a new --output")
        _train(lambda watch: resume_active(folder, watch), folder, (tensorboard, mlflow, wandb))
        return
    from fedbayes.runs.changes import change, finish
    from fedbayes.runs.home import experiment_in

    lines = finish(folder)
    if rounds is not None or settings:
        lines += change(folder, rounds=rounds, settings=settings or ())
    for line in lines:
        out.print(escape(line))
    experiment = experiment_in(folder)
    _train(lambda watch: _by_engine(experiment, folder, watch), folder, (tensorboard, mlflow, wandb))


def _by_engine(experiment: Any, folder: Path, watch: Any) -> Any:
    """Train here, or on Flower's local simulation."""
    from fedbayes.experiments.keys import FLOWER
    from fedbayes.runs.folder import run as train

    if experiment.engine != FLOWER:
        if experiment.flower:  # it is not used here, but a mistake in it is said here
            from fedbayes.flower.settings import checked

            checked(experiment.flower)
        return train(experiment, folder, watch)
    from fedbayes.flower.simulation import simulate

    return simulate(experiment, folder, watch)


def _train(work: Any, folder: Path, trackers: Trackers = NO_TRACKERS) -> None:
    with share(START):
        from fedbayes.cli.terminal import closing_table, samples_text, seeds_table, site_table
        from fedbayes.report import write
        from fedbayes.runs.folder import Watch  # noqa: F401  (loads torch)
        from fedbayes.runs.records import arrays_in, runs_in

    try:
        with watching() as watch:
            work(_tracked(watch, folder, trackers))
    except KeyboardInterrupt:
        out.print(f"\n{escape(_after_a_stop(folder))}")
        raise SystemExit(130) from None
    shown = arrays_in(folder / "samples.npz")
    for block in samples_text(shown) if shown else []:
        out.print(f"\n{escape(block)}")
    runs = runs_in(folder)
    for table in (seeds_table(runs), closing_table(runs, out.width), *map(site_table, runs)):
        if table is not None:
            out.print(table)
    with share(FILES):
        page = write([folder], folder / "report.html")
    out.print(f"report: {escape(str(page))}")


def _after_a_stop(folder: Path) -> str:
    """How to go on after Ctrl-C, by what the folder holds."""
    if (folder / "sweep.toml").is_file():
        return "stopped; nothing is lost: the same command again goes on from the last checkpoints"
    if (folder / "config.toml").is_file() or (folder / "active.toml").is_file():
        return f"stopped; nothing is lost: `fedbayes resume {folder}` goes on from the last checkpoint"
    return "stopped before the first round; nothing was written"


def _show(shares: Shares, folder: Path) -> None:
    """A table of where the time went, and the same seconds as a file."""
    from fedbayes.cli.terminal import shares_table
    from fedbayes.files import write_atomically

    out.print(shares_table(shares.seconds))
    write_atomically(folder / "profile.json", json.dumps({"total": shares.total, **shares.seconds}, indent=1) + "\n")


def _tracked(watch: Any, folder: Path, trackers: Trackers) -> Any:
    """The watch with the trackers that were asked for."""
    if trackers == NO_TRACKERS:
        return watch
    from fedbayes.runs.trackers import with_events, with_mlflow, with_wandb

    events, mlflow, wandb = trackers
    watch = with_events(watch, folder) if events else watch
    watch = watch if mlflow is None else with_mlflow(watch, folder, mlflow)
    return watch if wandb is None else with_wandb(watch, folder, wandb)
