"""Commands that look at sites: calibrate, so that promises hold at each; watch, so that changes at one are seen."""

from __future__ import annotations

from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedbayes.cli.shared import Folder, Trust, app, out, say_whose
from fedbayes.errors import InputError

if TYPE_CHECKING:
    from fedbayes.training.run import Run

MOST = 40  # sites in a table
CHANGED = 3  # the exit status of a watch that has alarmed


@app.command()
def calibrate(
    folder: Folder,
    coverage: Annotated[float, typer.Option(help="How often the truth must be held, at every site.")] = 0.9,
    way: Annotated[
        str | None,
        typer.Option(help="label_shift, unlabelled, by_class, blended, own, quantiles or pooled."),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="least_ambiguous, adaptive or regularised; normalised or quantile for reals; observed or weighted for "
            "survival."
        ),
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Keep the coverage with this confidence, not only on average.")
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Also compare maps of probabilities, pooled and by site.")
    ] = False,
    epsilon: Annotated[float | None, typer.Option(help="Privacy of each row: sites noise their histograms.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    trust: Trust = None,
) -> None:
    """Sets, intervals or lower bounds that hold at every site: writes calibration.npz, which predict and export use."""
    from fedbayes.evaluate import conformal
    from fedbayes.evaluate.calibration import held_out
    from fedbayes.evaluate.recalibrated import compared
    from fedbayes.runs.calibrated import write
    from fedbayes.runs.folder import load
    from fedbayes.runs.home import home_of
    from fedbayes.runs.scored import scored_clients

    if recalibrate and epsilon is not None:
        raise InputError("--recalibrate compares maps by sums without noise; leave it out with --epsilon")
    say_whose(folder)
    run = load(folder, device=device, clients=scored_clients(folder))
    held = held_out(run)
    maps = compared(run, held) if recalibrate else None
    made = conformal.fit(run, coverage, way=way, score=score, confidence=confidence, held=held, epsilon=epsilon)
    out.print(coverage_table(made))
    if maps is not None:
        out.print(map_table(maps))
    print(write(home_of(folder), made))


def coverage_table(made: object) -> Table:
    """Coverage and size by site, with the exact interval of each; sites whose share chance does not explain are red."""
    from fedbayes.evaluate.conformal import by_site
    from fedbayes.runs.calibrated import Calibrated

    assert isinstance(made, Calibrated)
    rows = sorted(by_site(made), key=lambda row: row.coverage)
    sizes = {"classes": "classes in a set", "real": "width", "survival": "lower bound"}
    title = f"{made.coverage:.0%} by {made.way}, {made.score}: {made.rows} rows calibrate ({made.source})"
    table = Table(box=box.SIMPLE_HEAD, title=escape(title), title_justify="left", pad_edge=False)
    table.add_column("site", overflow="fold")
    told = not any(isnan(row.size) for row in rows)  # under epsilon sizes stay at the sites
    for name in ("rows", "coverage", "95 % interval", *[sizes[made.kind]] * told):
        table.add_column(name, justify="right")
    for row in rows[:MOST]:
        shown = f"{row.coverage:.3f}"
        cells = [shown if row.inside else f"[red]{shown}[/]", f"{row.low:.3f} to {row.high:.3f}"]
        table.add_row(escape(row.site), str(row.rows), *cells, *[f"{row.size:.4g}"] * told)
    if len(rows) > MOST:
        table.add_row(f"and {len(rows) - MOST} more")
    total = sum(row.rows for row in rows)
    table.add_section()
    whole = sum(row.coverage * row.rows for row in rows) / max(total, 1)
    inside = sum(row.inside for row in rows)
    size = sum(row.size * row.rows for row in rows) / max(total, 1)
    promised = f"{inside} of {len(rows)} sites as promised"
    table.add_row("all", str(total), f"{whole:.3f}", promised, *[f"{size:.4g}"] * told)
    return table


def show_by_site(folder: Path, by: str, draws: int | None, device: str | None) -> None:
    """Scores of each site's own test rows, and coverage there: as calibrated before, or as `calibrate` would.

    Of a comparison those of each method.
    """
    from fedbayes.runs import calibrated
    from fedbayes.runs.folder import load
    from fedbayes.runs.records import runs_in
    from fedbayes.runs.scored import scored_clients

    clients, runs = scored_clients(folder), runs_in(folder)
    for files in runs:
        run = load(files.folder, device=device, clients=clients)
        if len(runs) > 1:
            print(f"{files.name}:")
        privacy, kept = run.task.privacy, files.folder / calibrated.FILE
        if privacy is None or privacy.public_test or not kept.is_file():  # else promises alone, which are noised
            out.print(run.scores(draws=draws, by=by).table(out.width))
        _show_coverage(run, files.folder)


def _show_coverage(run: Run, home: Path) -> None:
    """How often a run's promises hold at its sites, where it makes such."""
    from fedbayes.evaluate import conformal
    from fedbayes.evaluate.calibration import held_out
    from fedbayes.runs import calibrated

    if run.task.program.prediction.whole and run.task.clients.data.kind != "labels":
        privacy = run.task.privacy
        if (home / calibrated.FILE).is_file():
            out.print(coverage_table(calibrated.read(home, run)))
        elif privacy is None or privacy.public_test:
            held = held_out(run)
            if held.suffices:
                out.print(coverage_table(conformal.fit(run, held=held)))
            else:
                out.print("whether promises hold can't be told: no test row is left to calibrate by", style="dim")


def map_table(rows: dict[str, dict[str, float]]) -> Table:
    """NLL and ECE of judging rows, by map."""
    table = Table("map", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("NLL ↓", "ECE ↓", "mean ECE of sites ↓"):
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[key]:.4f}" for key in ("nll", "ece", "site_ece")))
    return table


@app.command()
def watch(
    folder: Folder,
    input: Annotated[
        Path | None,
        typer.Option(
            help="The stream, as for predict: rows in the order in which they came; without one only the page."
        ),
    ] = None,
    site: Annotated[str | None, typer.Option(help="Whose stream it is, by name or number.")] = None,
    label: Annotated[
        str | None, typer.Option(help="The column of labels, empty where not known yet; only of a .csv with names.")
    ] = None,
    time: Annotated[str | None, typer.Option(help="The column that says when a row came.")] = None,
    scores: Annotated[str | None, typer.Option(help="epistemic,energy,entropy,mahalanobis,...")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="The chance of a false alarm, over all time; 0.05 by default.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Compare with own held-out rows, as by default, federation, or none.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
    trust: Trust = None,
) -> None:
    """Watch a site's stream for changes; goes on where it stopped. Exit status: 0 quiet, 3 after an alarm."""
    from fedbayes.evaluate.stream import read_stream
    from fedbayes.evaluate.watch import watch as watch_of
    from fedbayes.report.watch import write_page
    from fedbayes.runs.folder import load
    from fedbayes.runs.home import home_of

    if input is None:
        print(write_page(home_of(folder)))
        return
    if site is None:
        raise InputError("--input is of one site: give its name or number with --site")
    say_whose(folder)
    run = load(folder, device=device)
    home = home_of(folder)
    options: dict[str, Any] = {"alpha": alpha, "reference": reference, "labels": label is not None}
    chosen = scores.split(",") if scores else None
    watcher = watch_of(run, site, scores=chosen, folder=home, **options)
    stream = read_stream(input, run, label=label, time=time, site=watcher.state.site)
    before = watcher.state.rows
    if before > len(stream.x):
        raise InputError(f"{input} has {len(stream.x)} rows, the watch on {site} has seen {before}: append to the file")
    watcher.update(stream.x[before:], None if stream.y is None else stream.y[before:], times=stream.times[before:])
    path = watcher.save()
    state = watcher.state
    out.print(f"site {escape(state.site)}: {state.rows - before} new rows, {state.rows} in all", soft_wrap=True)
    for name, log in state.logs.items():
        out.print(f"  {name:<20} 10^{(log - state.limit) / 2.302585093:+.1f} of its limit")
    print(path)
    print(write_page(home))
    if state.alarm:
        out.print(f"[red]alarm[/] {escape(str(state.alarm))}", soft_wrap=True)
        raise typer.Exit(CHANGED)
