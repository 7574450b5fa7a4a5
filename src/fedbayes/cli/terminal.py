"""What a run looks like in a terminal, and in a file that its output is piped to: progress, tables, pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedbayes.engine.clock import MEANING
from fedbayes.report.wording import TITLES, best_of, beyond
from fedbayes.runs.margins import Margin, margins, within
from fedbayes.runs.numbers import by_site
from fedbayes.runs.records import Arrays, RunFiles
from fedbayes.runs.seeds import over_seeds
from fedbayes.training import influence

LIVE = ("accuracy", "concordance", "rmse", "nll", "ece")
SHOWN = 3  # clients that a line names
SITES = 20  # of a table
WIDE = ("brier", "mce")  # scores that 80 columns do not hold beside AUROC or long names; the report has them
LONG = 10  # of a run's name, as members of a sweep have them, beside which fewer scores find room
STARTED = 0.5  # seconds of start-up that are told
SHADES = " .:-=+*#%@"


class Bar:
    """A bar for each method with the scores of the last evaluated round; without a terminal, a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.fields[method]:<10}"),
            BarColumn(bar_width=14),
            TextColumn("{task.fields[round]}/{task.fields[rounds]}"),
            TextColumn("{task.fields[live]}", style="cyan"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task: TaskID | None = None
        self.method, self.rounds, self.cohort = "", 0, 1
        self.owned = False  # whether it was said that one client has most of the precision

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begun(self, method: str, task: Any, records: list[dict[str, Any]]) -> None:
        self.method, self.rounds, self.cohort, self.owned = method, task.rounds, task.cohort, False
        done = len(records)
        if done < task.rounds:
            self.console.print(f"{method}: {escape(task.choice)}", style="dim")
            if task.privacy is not None:
                self.console.print(f"{method}: {escape(task.privacy.words)}")
        if 0 < done < task.rounds:
            self.console.print(f"{method}: going on from round {done}")
        self.task = self.progress.add_task(
            method,
            total=task.rounds * task.cohort,
            completed=done * task.cohort,
            method=method,
            round=done,
            rounds=task.rounds,
            live=live(records[-1].get("test", {}), records[-1].get("epsilon")) if records else "",
        )

    def client(self) -> None:
        assert self.task is not None
        self.progress.advance(self.task)

    def round(self, record: dict[str, Any]) -> None:
        assert self.task is not None
        number = record["round"]
        scores = live(record.get("test", {}), record.get("epsilon"))
        fields = {"round": number, **({"live": scores} if scores else {})}
        self.progress.update(self.task, completed=number * self.cohort, **fields)
        reasons: dict[str, list[str]] = {}
        for client, why in record.get("left_out", {}).items():
            reasons.setdefault(why, []).append(client)
        for why, clients in reasons.items():
            more = f" and {len(clients) - SHOWN} more" if len(clients) > SHOWN else ""
            who = f"client{'s' if clients[1:] else ''} {', '.join(clients[:SHOWN])}{more}"
            self.console.print(f"[yellow]warning[/]: round {number}: {escape(who)} left out: {escape(why)}")
        owner = influence.owner(record)
        if owner is not None and not self.owned:
            self.owned = True
            self.console.print(f"[yellow]warning[/]: round {number}: {escape(influence.warning(*owner))}")
        if not self.console.is_terminal and (number % max(1, self.rounds // 5) == 0 or number == self.rounds):
            self.console.print(f"{self.method:<10} round {number}/{self.rounds}  {scores}")
        for note in record.get("notes", ()):
            self.console.print(f"{self.method}: {escape(note)}", style="dim")
        if "stopped" in record:
            self.console.print(f"{self.method} stopped early at round {number}: {escape(record['stopped'])}")

    def ended(self, method: str, was_finished: bool) -> None:
        if was_finished:
            self.console.print(f"{method}: finished earlier, nothing to do; delete its folder to train anew")


def live(scores: Mapping[str, float], epsilon: float | None = None) -> str:
    """The few scores that fit beside a progress bar, and what a private run has spent."""
    shown = [f"{TITLES[name].split()[0]} {scores[name]:.3f}" for name in LIVE if name in scores]
    shown += [] if epsilon is None else [f"epsilon {epsilon:.3f}"]
    return "  ".join(shown)


def closing_table(runs: Iterable[RunFiles], width: int = 80) -> Table:
    """One row per run with all its scores; bold are the best of each column and what is within noise of it."""
    runs = list(runs)
    names = [name for name in TITLES if any(name in run.scores for run in runs)]
    longest = max(len(run.name) for run in runs)
    if "auroc" in names or longest > LONG or width < 80:
        names = [name for name in names if name not in WIDE]
    table = Table(box=box.SIMPLE_HEAD)
    # Where a terminal is narrow, long names are folded and numbers stay whole.
    table.add_column("method", overflow="fold", min_width=min(8, longest))
    for name in names:
        table.add_column(TITLES[name], justify="right", min_width=max(6, *map(len, TITLES[name].split())))
    for word in ("rounds", "seconds"):
        table.add_column(word, justify="right", min_width=len(word))
    noise = [margins(run) for run in runs]
    columns = [_column(runs, noise, name) for name in names]
    for at, run in enumerate(runs):
        cells = [column[at] for column in columns]
        taken = f"{run.seconds - run.start:.1f}" if run.seconds else "-"  # a private journal does not tell them
        table.add_row(escape(run.name), *cells, str(len(run.records)), taken)
    started = [f"{run.name} {run.start:.1f}" for run in runs if run.start >= STARTED]
    if started:
        said = f"start-up is not in the seconds: {', '.join(started[:SHOWN])}"
        table.caption, table.caption_justify = escape(said), "left"
    return table


def seeds_table(runs: Iterable[RunFiles]) -> Table | None:
    """Where seeds were swept, one row per setting: means over seeds with their errors; bold as in the closing table."""
    settings = over_seeds([(run.name, run) for run in runs])
    if not settings:
        return None
    names = [name for name in TITLES if name not in WIDE and any(name in own.figures for own in settings)]
    table = Table(title="means over seeds, ± one standard error", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("setting", overflow="fold")
    for title in (*(TITLES[name] for name in names), "seeds"):
        table.add_column(title, justify="right")
    columns = []
    for name in names:
        figures = [own.figures.get(name) for own in settings]
        near = within(figures, best_of(name, [figure[0] for figure in figures if figure]))
        cells = [_figure(figure[0], figure[1].error or np.nan) if figure else "" for figure in figures]
        columns.append(_bold(cells, near))
    for at, own in enumerate(settings):
        table.add_row(escape(own.name), *(column[at] for column in columns), str(own.seeds))
    return table


def site_table(run: RunFiles) -> Table | None:
    """One line per named site, each score with its error, the worst red; then all rows together, and the spread."""
    found = by_site(run.evaluation)
    if found is None or len(found.sites) > SITES:
        return None
    shown = [(j, name) for j, name in enumerate(found.names) if name in TITLES and name not in WIDE]
    title, longest = escape(f"{run.name}, by site"), max(map(len, found.sites))
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("site", overflow="fold", min_width=min(12, longest))
    table.add_column("rows", justify="right")
    for _, name in shown:
        table.add_column(TITLES[name], justify="right")
    worst = {j: found.worst(j, TITLES[name][-1]) for j, name in shown}
    rows = found.names.index("count")
    for k, site in enumerate(found.sites):
        cells = [_figure(found.values[k, j], found.errors[k, j], worst[j] == k) for j, _ in shown]
        table.add_row(escape(site), f"{np.nan_to_num(found.values[k, rows]):.0f}", *cells)
    table.add_section()
    table.add_row("all", f"{found.all[rows]:.0f}", *(_figure(found.all[j], found.all_errors[j]) for j, _ in shown))
    table.add_row("spread", "", *(_figure(found.spread(j)) for j, _ in shown))
    return table


def _figure(value: float, error: float = np.nan, worst: bool = False) -> str:
    if not np.isfinite(value):
        return "-"
    text = f"{value:.3f}" + (f" ±{error:.3f}".replace("±0.", "±.", 1) if np.isfinite(error) else "")
    return f"[red]{text}[/]" if worst else text


def shares_table(seconds: Mapping[str, float]) -> Table:
    """Where a run's time went; the shares add up to all of it."""
    table, total = Table(box=box.SIMPLE_HEAD, show_footer=True), sum(seconds.values())
    table.add_column("share of the time", "in all")
    table.add_column("seconds", f"{total:.2f}", justify="right")
    table.add_column("%", "100.0", justify="right")
    table.add_column("what", style="dim")
    for name, value in seconds.items():
        if value:
            table.add_row(name, f"{value:.2f}", f"{100 * value / total:.1f}", MEANING[name])
    return table


def _column(runs: list[RunFiles], noise: list[dict[str, Margin]], name: str) -> list[str]:
    """The cells of a score, one for each run."""
    figures = [(run.scores[name], own[name]) if name in run.scores else None for run, own in zip(runs, noise)]
    near = within(figures, best_of(name, [figure[0] for figure in figures if figure]))
    cells = [f"{figure[0]:.4f}" if figure else "" for figure in figures]
    return _bold(cells, near)


def _bold(cells: list[str], near: list[bool]) -> list[str]:
    return [f"[bold green]{cell}[/]" if winner and len(cells) > 1 else cell for cell, winner in zip(cells, near)]


def samples_text(arrays: Arrays) -> list[str]:
    """Each sample as a picture of characters beside its three likeliest classes and the parts of its uncertainty."""
    blocks = []
    classes, methods = arrays["class_names"].tolist(), arrays["methods"].tolist()
    for i, name in enumerate(arrays["names"].tolist()):
        label = int(arrays["labels"][i])
        truth = f"a {classes[label]}" if label >= 0 else "stripes, which no client ever saw"
        beside = []
        for method in methods:
            beside += _bars(method, arrays, i, classes)
        picture = _picture(arrays["images"][i])
        width = len(picture[0])
        rows = max(len(picture), len(beside))
        picture += [" " * width] * (rows - len(picture))
        beside += [""] * (rows - len(beside))
        lines = [f"  {a}   {b}".rstrip() for a, b in zip(picture, beside)]
        blocks.append("\n".join([f"{name}: {truth}", *lines]))
    return blocks


def _bars(method: str, arrays: Arrays, i: int, classes: list[str]) -> list[str]:
    probs = arrays[f"{method}/probs"][i]
    top = [int(c) for c in np.argsort(-probs)[:3]]
    parts = {part: float(arrays[f"{method}/{part}"][i].sum()) for part in ("aleatoric", "epistemic")}
    likeliest = "   ".join(f"{classes[c]} {probs[c]:6.1%}" for c in top)
    shown = [f"{method:<9} {likeliest}"]
    shown += [f"{'':<9} {part} {_bar(value)} {value:.3f}" for part, value in parts.items()]
    if parts["epistemic"]:
        shown.append(f"{'':<9} {'':<9} {beyond(float(arrays[f'{method}/rank'][i]))}")
    return shown


def _bar(value: float, width: int = 20) -> str:
    """A bar of a variance in [0, 1]."""
    filled = min(width, max(0, round(value * width)))
    return "█" * filled + "·" * (width - filled)


def _picture(image: np.ndarray, largest: int = 16) -> list[str]:
    """A grey image as lines of characters, two per pixel so that pixels look square."""
    grey = image.astype(float)
    grey = grey.mean(-1) if grey.ndim == 3 else grey
    step = -(-max(grey.shape) // largest)
    grey = grey[::step, ::step]
    return ["".join(SHADES[int(v / 256 * len(SHADES))] * 2 for v in row) for row in grey]
