"""Sections at both ends of the page: what was run, what is missing, the closing scores, all settings."""

from __future__ import annotations

from html import escape

import numpy as np

from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.experiments.keys import TABLES
from fedbayes.report.learning import key, table
from fedbayes.report.material import Material, Section
from fedbayes.report.wording import TITLES, best_of
from fedbayes.runs.margins import Margin, margins, over_last_rounds, within
from fedbayes.runs.numbers import kind_of
from fedbayes.runs.releases import releases_in
from fedbayes.runs.seeds import over_seeds


def what_was_run(m: Material) -> str:
    """One line for each setting that runs share, with the seeds it was run under."""
    seeds: dict[str, list[int]] = {}
    for run in m.runs:
        arrays = run.files.evaluation
        line = _line(run.files.experiment, arrays.get("client_sizes"), "client_names" in arrays)
        seeds.setdefault(line, []).append(run.files.experiment.seed)
    lines = [f"{line}, {_seeds(sorted(set(held)))}" for line, held in seeds.items()]
    return "".join(f"<p class=lead>{escape(line)}</p>" for line in lines)


def _line(x: Experiment, sizes: np.ndarray | None, named: bool) -> str:
    if x.data == TABLES and sizes is not None:  # which spread themselves
        return f"tables of {len(sizes)} sites, {int(sizes.sum())} training rows, network {x.network}{_attack(x)}"
    options = ", ".join(f"{k} {v}" for k, v in x.partition_options.items())
    spread = f"{x.clients} clients ({x.partition}{', ' + options if options else ''})"
    if ":" in x.data and sizes is not None and (named or len(sizes) != x.clients):  # own code that gave clients
        spread = f"its {len(sizes)} sites"
    cohort = "all" if x.cohort is None else f"{x.cohort:.0%}" if isinstance(x.cohort, float) else str(x.cohort)
    return f"{x.data} over {spread}, {cohort} a round, network {x.network}{_attack(x)}"


def _attack(x: Experiment) -> str:
    """Who lies, and how; the journal names them."""
    if x.attack is None:
        return ""
    many = 0.2 if x.attackers is None else x.attackers
    who = f"{many:.0%}" if isinstance(many, float) else str(many if isinstance(many, int) else len(many))
    return f", under attack ({x.attack.replace('_', ' ')}) by {who} of the clients"


def _seeds(seeds: list[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


def missing(m: Material) -> str:
    """What the folders lack, as a list that says how to get it."""
    if not m.missing:
        return ""
    items = "".join(f"<li>{code(note)}</li>" for note in dict.fromkeys(m.missing))
    many = len(dict.fromkeys(m.missing))
    opened = " open" if many <= 6 else ""
    return f'<details class="note"{opened}><summary>What is missing ({many})</summary><ul>{items}</ul></details>'


def code(text: str) -> str:
    """Escaped text with `...` as code."""
    pieces = escape(text, quote=False).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def closing(m: Material) -> Section:
    """The closing table and the means over the last rounds: the best, and what is within noise of it, are marked."""
    noise = [margins(run.files, run.errors) for run in m.runs]
    lasting = [over_last_rounds(run.files, n) for run, n in zip(m.runs, noise)]
    body = [_scores(m, [{name: (v, n[name]) for name, v in run.files.scores.items()} for run, n in zip(m.runs, noise)])]
    if any(lasting):
        body.append("<h3>Mean over the last quarter of the evaluated rounds</h3>" + _scores(m, lasting))
    lead = "An arrow says which way is better."
    if len(m.runs) > 1:
        lead += (
            " Bold are the best of a column and all that are within noise of it: no further from it than two standard "
            "errors of the difference."
        )
    if any(margin.error for margins_of in noise for margin in margins_of.values()):
        lead += (
            " After ± stands one standard error: over resamples of the test rows (and draws of the weights, where "
            "`fedbayes evaluate` has measured them) together with how much the score moves between the last rounds."
        )
    if any(run.predictions and kind_of(run.predictions) == "real" for run in m.runs):
        lead += " Columns without an arrow have a target: the share of targets inside an interval should be its level."
    if len({run.files.evaluation["labels"].tobytes() for run in m.runs if "labels" in run.files.evaluation}) > 1:
        lead += (
            " Not all runs were tested on the same rows: personal models, for one, are tested each on its own client's."
        )
    return Section("scores", "Scores on the test set", lead, [_seeds_together(m), *body, _privacy(m), _scales(m)])


def _seeds_together(m: Material) -> str:
    """Where seeds were swept, a row for each setting: means over seeds."""
    settings = over_seeds([(run.name, run.files) for run in m.runs])
    if not settings:
        return ""
    names = [name for name in TITLES if any(name in own.figures for own in settings)]
    columns = [_column([own.figures.get(name) for own in settings], name) for name in names]
    head = "".join(f"<th scope=col>{escape(title)}</th>" for title in (*(TITLES[name] for name in names), "seeds"))
    rows = []
    for at, own in enumerate(settings):
        cells = "".join(column[at] for column in columns) + f"<td>{own.seeds}</td>"
        rows.append(f"<tr><th scope=row>{escape(own.name)}</th>{cells}</tr>")
    lead = "After ± stands one standard error over seeds; settings are compared in pairs of seeds that both have."
    return f"<h3>Means over seeds</h3><p class=lead>{lead}</p>{table(head, rows, 'setting')}<h3>Each run</h3>"


def _scores(m: Material, scores: list[dict[str, tuple[float, Margin]]]) -> str:
    """A row for each run, a column for each score."""
    names = [name for name in TITLES if any(name in own for own in scores)]
    columns = [_column([own.get(name) for own in scores], name) for name in names]
    head = "".join(f"<th scope=col>{escape(TITLES[name])}</th>" for name in names) + "<th scope=col>rounds</th>"
    rows = []
    for at, run in enumerate(m.runs):
        cells = "".join(column[at] for column in columns) + f"<td>{len(run.files.records)}</td>"
        rows.append(f'<tr class="r{run.number}"><th scope=row>{key(run)}</th>{cells}</tr>')
    return table(head, rows)


def _column(figures: list[tuple[float, Margin] | None], name: str) -> list[str]:
    """The cells of a score, one for each run."""
    near = within(figures, best_of(name, [figure[0] for figure in figures if figure]))
    errors = [figure[1].error if figure else 0.0 for figure in figures]
    cells = []
    for figure, error, winner in zip(figures, errors, near):
        mark = ' class="best"' if winner and len(figures) > 1 else ""
        sure = f" <small>± {error:.4f}</small>" if error else ""
        if not error and any(errors):
            sure = " <small class=gap>± 0.0000</small>"  # unseen: decimal points stay in line
        cells.append(f"<td{mark}>{f'{figure[0]:.4f}{sure}' if figure else ''}</td>")
    return cells


def _privacy(m: Material) -> str:
    """What private runs have spent, one sentence each."""
    lines = []
    for run in m.runs:
        x = run.files.experiment
        last = next((r for r in reversed(run.files.records) if "epsilon" in r), None)
        if x.private is None or last is None:
            continue
        spent = f"epsilon {last['epsilon']:.4g} at delta {last.get('delta', 0.0):.3g} after {last['round']} rounds"
        beside = [release.epsilon for release in releases_in(run.files.folder)]
        if beside:
            times = "a calibration" if len(beside) == 1 else f"{len(beside)} calibrations"
            spent += f", {sum(beside):.4g} in {times}: {last['epsilon'] + sum(beside):.4g} in all"
        budget = "" if x.epsilon is None else f", of a budget of {x.epsilon:g}"
        seeded = " NOT PRIVATE: its noise comes from a seed." if x.private_seed is not None else ""
        lines.append(f"<p class=lead>{key(run)}: {escape(x.private)} are private, {spent}{budget}.{seeded}</p>")
    return "".join(lines)


def _scales(m: Material) -> str:
    """How far posteriors' scales have moved, one sentence for each run that has some."""
    lines = []
    for run in m.runs:
        last = next((r["scales"] for r in reversed(run.files.records) if r.get("scales")), None)
        if last is not None:
            moved, moving = (f"{last.get(name, 0.0):.1%}" for name in ("moved", "moving"))
            words = f"median scale of the weights {last.get('median', 0.0):.3g}, moved by {moved} since the first round"
            lines.append(f"<p class=lead>{key(run)}: {words}, by {moving} in the last.</p>")
    return "".join(lines)


def settings(m: Material) -> Section:
    """Every run's experiment in full."""
    blocks = [
        f"<details><summary>{key(run)}</summary><pre tabindex=0>{escape(to_toml(run.files.experiment))}</pre></details>"
        for run in m.runs
    ]
    return Section("settings", "Settings in full", "Each is a TOML file that `fedbayes run` takes.", blocks)
