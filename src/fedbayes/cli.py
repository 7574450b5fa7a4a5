"""The command line: run, resume, report, predict, and lists of what there is. Prints, never computes."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import fedbayes
from fedbayes.errors import InputError

# Modules that load torch are imported inside the commands that need it: help and errors answer at once.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Bayesian federated learning: train any PyTorch network across clients, and get a posterior back.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data sets and how they are spread.")
app.add_typer(data_app, name="data")
out = Console(highlight=False)

Folder = Annotated[Path, typer.Argument(help="A folder that `fedbayes run` wrote.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value over the experiment: rounds=50, options.fedavg.lr=0.1, or an option's name."),
]
Events = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard events; needs fedbayes[tensorboard].")
]


def main() -> None:
    """Run the command line: input errors are one line and exit code 2, Ctrl-C is 130."""
    # Waiting threads that spin collapse beside any other busy process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        app(args=arguments, prog_name="fedbayes")
    except InputError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:  # a full disk, a folder without rights
        if debug:
            traceback.print_exc()
        print(f"error: {error}; what was written before is kept, and `fedbayes resume` goes on", file=sys.stderr)
        sys.exit(1)


def _version(asked: bool) -> None:
    if asked:
        print(fedbayes.__version__)
        raise typer.Exit


@app.callback(epilog="--debug anywhere shows the traceback of an error.")
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment's name (quickstart) or a TOML file.")],
    output: Annotated[Path | None, typer.Option(help="The folder to write; runs/NAME by default.")] = None,
    settings: Settings = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, loop or stacked.")] = None,
    compile: Annotated[str | None, typer.Option(help="auto, off, on or graph (a CUDA graph).")] = None,
    tensorboard: Events = False,
) -> None:
    """Train an experiment into a folder, and write its report."""
    from fedbayes.study.experiment import with_settings
    from fedbayes.study.experiments import find

    experiment = find(name)
    given = [*(settings or [])]
    given += [
        f'{key}="{value}"' for key, value in (("device", device), ("engine", engine), ("compile", compile)) if value
    ]
    if given:
        from fedbayes.study.build import options_of_method

        experiment = with_settings(experiment, given, options_of_method)
    folder = output or Path("runs") / Path(name).stem
    from fedbayes.study.run import run as train

    _train(lambda watch: train(experiment, folder, watch), folder, tensorboard)


@app.command()
def sweep(
    name: Annotated[str, typer.Argument(help="An experiment's name or a TOML file.")],
    over: Annotated[list[str], typer.Option(help="key=first..last or key=a,b,c; give it again for more keys.")],
    output: Annotated[Path | None, typer.Option(help="The folder of the members' folders; runs/NAME-sweep.")] = None,
    settings: Settings = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
) -> None:
    """Train an experiment over lists of values, as one tensor program where only numbers differ; again: go on."""
    from fedbayes.study.build import options_of_method
    from fedbayes.study.experiment import with_settings
    from fedbayes.study.experiments import find
    from fedbayes.study.sweep import sweep as train

    given = [*(settings or []), *([f'device="{device}"'] if device else [])]
    experiment = with_settings(find(name), given, options_of_method)
    folder = output or Path("runs") / f"{Path(name).stem}-sweep"
    _train(lambda watch: train(experiment, over, folder, watch), folder)


@app.command()
def resume(folder: Folder, tensorboard: Events = False) -> None:
    """Go on after a crash, a kill or a reboot: same result as if nothing had happened."""
    from fedbayes.study.run import resume as go_on

    _train(lambda watch: go_on(folder, watch), folder, tensorboard)


def _train(work: Any, folder: Path, tensorboard: bool = False) -> None:
    from fedbayes.study.folders import arrays_in, runs_in
    from fedbayes.study.report import write
    from fedbayes.study.run import Watch
    from fedbayes.study.terminal import Bar, closing_table, samples_text

    try:
        with Bar(out) as bar:
            watch = Watch(bar.begun, bar.client, bar.round, bar.ended)
            work(_with_events(watch, folder) if tensorboard else watch)
    except KeyboardInterrupt:
        out.print(f"\nstopped; nothing is lost: `fedbayes resume {folder}` goes on from the last checkpoint")
        raise SystemExit(130) from None
    shown = arrays_in(folder / "samples.npz")
    for block in samples_text(shown) if shown else []:
        out.print(f"\n{escape(block)}")
    out.print(closing_table(runs_in(folder)))
    out.print(f"report: {write([folder], folder / 'report.html')}")


def _with_events(watch: Any, folder: Path) -> Any:
    from fedbayes.study.tensorboard import with_events

    return with_events(watch, folder)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, one or more.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; report.html in the first folder.")] = None,
    figures: Annotated[bool, typer.Option(help="Also write figures/ beside the page, as SVG and PNG.")] = True,
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained page from run folders, and its figures beside it."""
    from fedbayes.study.report import write, write_figures

    page = write(runs, output or runs[0] / "report.html")
    print(page)
    if figures:
        made = write_figures(runs, page.parent / "figures")
        print(f"{page.parent / 'figures'}: {len(made)} files")
    if open:
        typer.launch(page.resolve().as_uri())


@app.command()
def predict(
    folder: Folder,
    input: Annotated[Path, typer.Option(help="Inputs [N, ...] as .npy or .npz, or one a line as .csv, in own units.")],
    output: Annotated[Path | None, typer.Option(help="Write all as .npz or .csv.")] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of the weights; the method's own number by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    ood: Annotated[
        bool, typer.Option("--ood", help="Flag rows beyond a threshold that keeps 95 % of test data.")
    ] = False,
    by: Annotated[str, typer.Option(help="What --ood goes by: entropy or epistemic.")] = "entropy",
) -> None:
    """Probabilities with their aleatoric and epistemic parts for new data."""
    from fedbayes.study.predict import predict_file, prediction_table

    arrays, flags = predict_file(folder, input, output, draws=draws, device=device, ood=by if ood else None)
    out.print(prediction_table(arrays))
    if flags:
        print(
            f"never seen: {flags.outside.sum()} of {len(flags.outside)} rows, {flags.measure} > {flags.threshold:.6g}"
        )
    if output:
        print(output)


@app.command()
def export(
    folder: Folder,
    output: Annotated[Path, typer.Option(help="The folder to write.")],
    what: Annotated[str, typer.Option(help="mean (one network), or ensemble (draws of the weights).")] = "ensemble",
    draws: Annotated[
        int | None, typer.Option(help="Members of the ensemble; the method's own number by default.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also as ONNX; needs fedbayes[onnx].")] = False,
) -> None:
    """The trained network as files that need no fedbayes: a torch.export program, safetensors and a PyTorch file."""
    from fedbayes.study.export import export as write
    from fedbayes.study.run import load

    for path in write(load(folder, device="cpu"), output, what, draws=draws, onnx=onnx):
        print(path)


@app.command()
def evaluate(
    folder: Folder,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Sets to tell from the test set: kmnist,uniform-noise, or train@2000 (inputs x 2000)."),
    ] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of the weights; the method's own number by default.")] = None,
    repeats: Annotated[int, typer.Option(help="Predictions with draws of their own, for the Monte Carlo error.")] = 5,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
) -> None:
    """All scores of a run (of each method in a comparison) with their Monte Carlo error, and OOD detection."""
    from fedbayes.study.score_tables import ood_table, score_table
    from fedbayes.study.scoring import evaluate as score

    names = [name for given in ood or () for name in given.split(",") if name]
    runs = score(folder, ood=names, draws=draws, repeats=repeats, device=device)
    out.print(score_table(runs))
    for name in names:
        out.print(ood_table(runs, name))
    for method, scores in runs.items():
        for note in (scores["ood"] or {}).get("notes", ()):
            out.print(f"{method}: {escape(note)}", style="dim")
        print(folder / method / "scores.json" if len(runs) > 1 else folder / "scores.json")


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


def _list(rows: Iterable[tuple[str, str]]) -> None:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    for name, about in rows:
        print(f"{name:<{width}}  {about}")


def _docs(table: Mapping[str, Any]) -> None:
    _list((name, (made.__doc__ or "").strip().splitlines()[0]) for name, made in table.items())


@app.command()
def experiments() -> None:
    """Experiments that come with the library."""
    from fedbayes.study.experiments import EXPERIMENTS

    _list((name, f"{x.data}, {x.clients} clients, {' and '.join(x.all_methods)}") for name, x in EXPERIMENTS.items())


@app.command()
def methods() -> None:
    """Methods, by their papers' names."""
    from fedbayes.methods import METHODS

    _docs(METHODS)


@app.command()
def rules() -> None:
    """Aggregation rules."""
    from fedbayes.server.rules import RULES

    _list((name, rule.about) for name, rule in RULES.items())


@app.command()
def weightings() -> None:
    """Ways to weigh clients."""
    from fedbayes.server.weighting import WEIGHTINGS

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
    """Data sets, what they hold, and where each would come from."""
    from fedbayes.data.catalogue import listing

    _list((row.name, f"{row.about}; {row.train} + {row.test} rows; {row.source}") for row in listing())


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="A data set's name, or package.module:object.")],
    partition: Annotated[str, typer.Option(help="How it is spread.")] = "iid",
    clients: Annotated[int, typer.Option(help="Over how many clients.")] = 20,
    seed: Annotated[int, typer.Option(help="The split's seed.")] = 0,
    settings: Settings = None,
    figure: Annotated[Path | None, typer.Option(help="Write a picture of who holds what (.svg, .png).")] = None,
) -> None:
    """A data set and its spread over clients: rows and labels of each."""
    from fedbayes.data.show import label_figure, label_table
    from fedbayes.study.build import clients_of
    from fedbayes.study.experiment import Experiment, with_settings

    experiment = Experiment(data=name, partition=partition, clients=clients, seed=seed)
    spread = clients_of(with_settings(experiment, settings or [], lambda method: ()))
    out.print(repr(spread.data), soft_wrap=True)
    if spread.data.kind == "real":
        out.print(repr(spread))
    else:
        table = label_table(spread)
        table.box, table.padding = None, (0, 1)  # ten classes fit into 80 columns
        out.print(table)
    if figure:
        label_figure(spread, path=figure)
        print(figure)
