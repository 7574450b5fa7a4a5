"""The page: a list of sections, each made from the files of the runs, or left out where they have nothing for it."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import NamedTuple

import fedbayes
from fedbayes.study.experiment import to_toml
from fedbayes.study.folders import Arrays, RunFiles, arrays_in, runs_in
from fedbayes.study.report.charts import Curve, heat_map, line_chart
from fedbayes.study.report.pictures import data_address
from fedbayes.study.wording import TITLES, best_of, beyond

COLOURS = 6
CURVES = {"accuracy": "Accuracy", "rmse": "RMSE", "nll": "NLL", "ece": "ECE", "crps": "CRPS"}
WIDEST = 400  # clients in a heat map


class Shown(NamedTuple):
    """A run on the page: its name there, its colour, its files."""

    name: str
    colour: int
    files: RunFiles


class Material(NamedTuple):
    """All that the sections are made from."""

    runs: list[Shown]
    samples: list[tuple[str, Arrays]]  # folder's name and its samples.npz


def page(folders: list[Path]) -> str:
    """The report of run folders as one HTML text."""
    material = gather(folders)
    body = "\n".join(section for make in SECTIONS if (section := make(material)))
    title = ", ".join(dict.fromkeys(folder.resolve().name for folder in folders))
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} · fedbayes</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</main>\n"
        f"<footer>fedbayes {escape(fedbayes.__version__)}</footer>\n</body>\n</html>\n"
    )


def gather(folders: list[Path]) -> Material:
    """Read the folders; names carry the folder where there are several."""
    runs: list[Shown] = []
    samples = []
    for folder in folders:
        name = folder.resolve().name
        for files in runs_in(folder):
            shown = files.name if len(folders) == 1 else f"{name}/{files.name}" if files.folder != folder else name
            runs.append(Shown(shown, len(runs) % COLOURS, files))
        arrays = arrays_in(folder / "samples.npz")
        if arrays:
            samples.append((name, arrays))
    return Material(runs, samples)


def summary(m: Material) -> str:
    """What was run, in one line each for what all runs share."""
    lines = []
    for x in {run.files.folder: run.files.experiment for run in m.runs}.values():
        spread = ", ".join(f"{k}={v}" for k, v in x.partition_options.items())
        cohort = "all" if x.cohort is None else f"{x.cohort:.0%}" if isinstance(x.cohort, float) else str(x.cohort)
        lines.append(
            f"{x.data} over {x.clients} clients ({x.partition}{' ' + spread if spread else ''}), "
            f"{cohort} a round, network {x.network}, seed {x.seed}"
        )
    return "".join(f"<p class=lead>{escape(line)}</p>" for line in dict.fromkeys(lines)) + _unfinished(m)


def _unfinished(m: Material) -> str:
    notes = [
        f"<p class=note>{escape(run.name)} is not finished: round {len(run.files.records)} of "
        f"{run.files.experiment.rounds}.</p>"
        for run in m.runs
        if not run.files.evaluation
    ]
    return "".join(notes)


def closing(m: Material) -> str:
    """The closing table: one row a run, the best of each column marked."""
    names = [name for name in TITLES if any(name in run.files.scores for run in m.runs)]
    best = {n: best_of(n, [run.files.scores[n] for run in m.runs if n in run.files.scores]) for n in names}
    head = "".join(f"<th scope=col>{escape(TITLES[name])}</th>" for name in names)
    rows = []
    for run in m.runs:
        cells = []
        for name in names:
            value = run.files.scores.get(name)
            mark = ' class="best"' if len(m.runs) > 1 and value is not None and value == best[name] else ""
            cells.append(f"<td{mark}>{'' if value is None else f'{value:.4f}'}</td>")
        sent = sum(r.get("bytes_up", 0) + r.get("bytes_down", 0) for r in run.files.records) / 1e6
        more = f"<td>{len(run.files.records)}</td><td>{run.files.seconds:.1f}</td><td>{sent:.1f}</td>"
        rows.append(f"<tr><th scope=row>{_key(run)}</th>{''.join(cells)}{more}</tr>")
    head += "<th scope=col>rounds</th><th scope=col>seconds</th><th scope=col>MB sent</th>"
    table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return _section("Scores on the test set", f'<div class="wide" tabindex="0">{table}</div>')


def _key(run: Shown) -> str:
    return f'<span class="key back{run.colour}"></span>{escape(run.name)}'


def curves(m: Material) -> str:
    """Learning curves of all runs, one chart a score."""
    charts = []
    for score, title in CURVES.items():
        lines = [Curve(run.name, run.colour, *run.files.curve(score)) for run in m.runs]
        chart = line_chart(title, [line for line in lines if line.y])
        if chart:
            charts.append(f"<figure><figcaption>{escape(TITLES[score])}</figcaption>{chart}</figure>")
    legend = '<p class="legend">' + " ".join(f"<span>{_key(run)}</span>" for run in m.runs) + "</p>"
    return _section("Learning curves", legend + f'<div class="charts">{"".join(charts)}</div>') if charts else ""


def predictions(m: Material) -> str:
    """Three inputs as every method sees them: its likeliest classes and the parts of its uncertainty."""
    blocks = []
    for name, arrays in m.samples:
        if len(m.samples) > 1:
            blocks.append(f"<h3>{escape(name)}</h3>")
        cards = "".join(_card(arrays, i) for i in range(len(arrays["names"])))
        blocks.append(f'<div class="cards">{cards}</div>')
    text = (
        "<p>Aleatoric is the variance that stays when the weights are known, epistemic the variance between draws of "
        "the weights. A point estimate has no epistemic part: it can't say that it has never seen such a thing.</p>"
    )
    return _section("Three predictions", text + "".join(blocks)) if blocks else ""


def _card(arrays: Arrays, i: int) -> str:
    classes = arrays["class_names"].tolist()
    label = int(arrays["labels"][i])
    truth = f"a {classes[label]}" if label >= 0 else "stripes, of no class"
    head = f"<h3>{escape(str(arrays['names'][i]))}: {escape(truth)}</h3>"
    picture = f'<img src="{data_address(arrays["images"][i])}" alt="{escape(truth)}" width="96" height="96">'
    said = []
    for method in arrays["methods"].tolist():
        probs = arrays[f"{method}/probs"][i]
        bars = [_bar(classes[c], float(probs[c]), "prob") for c in (-probs).argsort()[:3].tolist()]
        bars += [_bar(p, float(arrays[f"{method}/{p}"][i].sum()), p) for p in ("aleatoric", "epistemic")]
        if arrays[f"{method}/epistemic"][i].any():
            bars.append(f"<small>epistemic {beyond(float(arrays[f'{method}/rank'][i]))}</small>")
        said.append(f"<div><h4>{escape(method)}</h4>{''.join(bars)}</div>")
    return f'<article>{head}<div class="sample">{picture}<div class="said">{"".join(said)}</div></div></article>'


def _bar(name: str, value: float, kind: str) -> str:
    width = max(0.0, min(1.0, value)) * 100
    return (
        f'<div class="bar"><span>{escape(name)}</span>'
        f'<i class="{kind}" style="--w:{width:.1f}%"></i><b>{value:.2f}</b></div>'
    )


def clients(m: Material) -> str:
    """How many training rows of each label every client holds."""
    blocks, seen = [], set()
    for run in m.runs:
        counts = run.files.evaluation.get("label_counts")
        if counts is None or counts.tobytes() in seen:
            continue
        seen.add(counts.tobytes())
        shown = counts[:WIDEST].T
        names = run.files.evaluation["class_names"].tolist() or [str(c) for c in range(len(shown))]
        title = f"training rows of each label at {shown.shape[1]} clients"
        chart = heat_map(title, shown, names, "client", "rows of")
        more = f"<p>The first {WIDEST} of {len(counts)} clients.</p>" if len(counts) > WIDEST else ""
        blocks.append(f'<figure class="wide" tabindex="0">{chart}</figure>{more}')
    return _section("Labels of the clients", "".join(blocks)) if blocks else ""


def settings(m: Material) -> str:
    """Every run's experiment in full."""
    made = [
        f"<details><summary>{escape(run.name)}</summary><pre tabindex=0>{escape(to_toml(run.files.experiment))}</pre>"
        "</details>"
        for run in m.runs
    ]
    return _section("What was run", "".join(made))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


SECTIONS: tuple[Callable[[Material], str], ...] = (summary, closing, curves, predictions, clients, settings)
