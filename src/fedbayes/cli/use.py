"""Commands on what was trained: report, predict, export, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedbayes.cli.shared import Folder, Trust, app, out, say_whose
from fedbayes.cli.sites import show_by_site
from fedbayes.errors import InputError


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, one or more.")],
    output: Annotated[Path | None, typer.Option(help="The page to write; report.html in the first folder.")] = None,
    figures: Annotated[bool, typer.Option(help="Also write figures/ beside the page, as SVG and PNG.")] = True,
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one self-contained page from run folders, and its figures beside it."""
    from fedbayes.report import write, write_figures

    page = write(runs, output or runs[0] / "report.html")
    print(page)
    if figures:
        paths = write_figures(runs, page.parent / "figures")
        print(f"{page.parent / 'figures'}: {len(paths)} files")
    if open:
        typer.launch(page.resolve().as_uri())


@app.command()
def predict(
    folder: Folder,
    input: Annotated[
        Path, typer.Option(help="Inputs [N, ...] as .npy or .npz, or one per line as .csv, in own units.")
    ],
    output: Annotated[Path | None, typer.Option(help="Write all as .npz or .csv.")] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of the weights; the method's own number by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    ood: Annotated[
        bool, typer.Option("--ood", help="Flag rows unlike all that was seen; 5 % of familiar rows are flagged too.")
    ] = False,
    by: Annotated[
        str | None,
        typer.Option(help="What --ood goes by: usual (distance and doubt, the default), distance, entropy, epistemic."),
    ] = None,
    sets: Annotated[
        bool, typer.Option("--sets", help="What `fedbayes calibrate` promises: sets, intervals or lower bounds.")
    ] = False,
    site: Annotated[str | None, typer.Option(help="The site whose promise it is; of all rows by default.")] = None,
    trust: Trust = None,
) -> None:
    """Probabilities with their aleatoric and epistemic parts for new data."""
    from fedbayes.export.predictions import predict_file, prediction_table

    if by is not None and not ood:
        raise InputError("--by says what --ood goes by; give --ood too, or leave --by out")
    say_whose(folder)
    options = {"draws": draws, "device": device, "ood": (by or "usual") if ood else None}
    arrays, flags = predict_file(folder, input, output, sets=sets or site is not None, site=site, **options)  # type: ignore[arg-type]
    out.print(prediction_table(arrays))
    if flags:
        print(flags)
    if output:
        print(output)


@app.command()
def export(
    folder: Folder,
    output: Annotated[Path, typer.Option(help="The folder to write.")],
    what: Annotated[
        str,
        typer.Option(help="mean (one network), ensemble (draws of the weights), or peft (adapters, in PEFT's format)."),
    ] = "ensemble",
    draws: Annotated[
        int | None, typer.Option(help="Members of the ensemble; the method's own number by default.")
    ] = None,
    client: Annotated[
        str | None, typer.Option(help="A client, by number or name, whose personal model is meant.")
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also as ONNX; needs fedbayes\\[onnx].")] = False,
    trust: Trust = None,
) -> None:
    """The trained network as files that need no fedbayes: a torch.export program, safetensors and a PyTorch file."""
    from fedbayes.export.program import PEFT, export_adapters
    from fedbayes.export.program import export as write
    from fedbayes.export.sets import promises_in, told_by, write_sets
    from fedbayes.runs.calibrated import FILE
    from fedbayes.runs.folder import load
    from fedbayes.runs.home import home_of

    if what != "ensemble" and draws is not None:
        raise InputError(f"--draws are the members of an ensemble; leave it out with --what {what}")
    if what == PEFT and onnx:
        raise InputError("--onnx is of a whole network; leave it out with --what peft")
    say_whose(folder)
    run = load(folder, device="cpu")
    home = home_of(folder)
    promises = promises_in(home, run) if client is None else None
    if client is not None and (home / FILE).is_file():
        out.print("the run's promises are of its global model, and are left out", style="dim")
    if promises is not None and not told_by(run, what, draws):
        promises = None
        out.print("the run's promises are of all its draws together, and are left out", style="dim")
    if client is not None:
        run = run.personal(int(client) if client.isdecimal() else client).as_run
    for path in export_adapters(run, output) if what == PEFT else write(run, output, what, draws=draws, onnx=onnx):
        print(path)
    for path in write_sets(promises, output) if promises is not None else []:
        print(path)


@app.command()
def evaluate(
    folder: Folder,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="Sets to tell from the test set: kmnist,uniform-noise, or train@2000 (inputs x 2000)."),
    ] = None,
    draws: Annotated[int | None, typer.Option(help="Draws of the weights; the method's own number by default.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Predictions with draws of their own, for the Monte Carlo error; 5 by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    by: Annotated[
        str | None, typer.Option(help="site: scores of each site's own rows, and how often promises hold there.")
    ] = None,
    trust: Trust = None,
) -> None:
    """All scores of a run (of each method in a comparison) with their errors, and OOD detection."""
    if by is not None and (ood or repeats is not None):
        raise InputError("--ood and --repeats are of the whole test set; leave them out with --by, or --by with them")
    from fedbayes.cli.score_tables import ood_table, score_table
    from fedbayes.evaluate.repeated import REPEATS
    from fedbayes.evaluate.scoring import evaluate as score

    if by is not None:
        return show_by_site(folder, by, draws, device)
    names = [name for argument in ood or () for name in argument.split(",") if name]
    runs = score(folder, ood=names, draws=draws, repeats=REPEATS if repeats is None else repeats, device=device)
    out.print(score_table(runs))
    for name in names:
        out.print(ood_table(runs, name))
    for method, scores in runs.items():
        for note in (scores["ood"] or {}).get("notes", ()):
            out.print(f"{method}: {escape(note)}", style="dim")
        print(folder / method / "scores.json" if len(runs) > 1 else folder / "scores.json")
