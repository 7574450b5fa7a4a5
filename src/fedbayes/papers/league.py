"""The league table: every method on every natural federation, by one protocol, between local and pooled training.

Each method has the same budget for choosing its learning rate: four multiples of its default, by NLL on a fifth of the
training rows. Then it is trained on all of them, once per seed, and judged on the federation's test rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedbayes.data import Clients, Ragged
from fedbayes.errors import NotFinite
from fedbayes.experiments.build import build, clients_of, without_federation
from fedbayes.experiments.experiment import Experiment
from fedbayes.files import write_atomically
from fedbayes.methods import METHODS
from fedbayes.model.predictive import Predictive, joined
from fedbayes.options import options_of
from fedbayes.papers.cells import Cell, Request, Table, chosen
from fedbayes.papers.layout import Layout, Row, Texts
from fedbayes.papers.ranks import Ranks, ranks_of
from fedbayes.papers.seeds import SEEDS, content_of, contents, file_name
from fedbayes.papers.seeds import train as train_seeds
from fedbayes.runs.evaluation import predictions
from fedbayes.scores import SUMS, auroc, risk_of, survival_calibration
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIVEN = "as given"  # the split that a federation came with
MULTIPLES = (0.2, 1.0, 3.0, 6.0)
FIRST = (0,)  # seeds of the runs by which a rate is chosen
WORST_NLL, SURE = 99.0, 0.9
LOCAL, POOLED = "local", "pooled"


class Federation(NamedTuple):
    """A natural federation and how long its sites train."""

    clients: int
    network: str
    network_options: Mapping[str, Any]
    rounds: int
    local: Mapping[str, Any]  # epochs and batch of a site
    data_options: Mapping[str, Any] = {}
    likelihood: str | None = None
    cohort: int | None = None
    splits: Mapping[str, Mapping[str, Any]] = {GIVEN: {}, "split 1": {"split": 1}, "split 2": {"split": 2}}
    without: tuple[str, ...] = ()  # methods that are left out


SMALL = {"hidden": [16]}
REFINED = ("fedavg_pf", "fedper_pf", "lg_fedavg_pf")  # hold a full covariance of a classifier: of 4225 weights for text
NOT_SURVIVAL = ("fedlap_cov", "laplace", *REFINED)  # need a curvature that is not known there
FEDERATIONS: dict[str, Federation] = {
    "heart-disease": Federation(4, "mlp", SMALL, 20, {"epochs": 2, "batch": 16}),
    "tcga-brca": Federation(
        *(6, "mlp", SMALL, 20, {"epochs": 2, "batch": 32}), likelihood="hazard", without=NOT_SURVIVAL
    ),
    "landmine": Federation(29, "mlp", SMALL, 20, {"epochs": 2, "batch": 32}),
    "shakespeare": Federation(
        *(14, "next_token", {"hidden": 64}, 20, {"epochs": 2, "batch": 64}),
        data_options={"length": 10, "every": 160, "speeches": 100},  # a hundredth of the text, for minutes on a CPU
        splits={GIVEN: {}},
        without=("laplace", *REFINED),
    ),
}
BY_SITES = ("fedavg_pf", "pfedbayes")  # whose models are personal, though there is a global one too
BY_SERVER = ("fedbe", "fedppd_distill")  # train on rows of the server, of which a natural federation has none


def methods_for(name: str) -> list[str]:
    """The methods that a federation allows."""
    left_out = (*BY_SERVER, *FEDERATIONS[name].without)
    return [method for method in METHODS if method not in left_out]


def experiment_of(name: str, method: str, split: str = GIVEN, lr: float | None = None) -> Experiment:
    """A method on a federation; by its default rate where none is given."""
    f = FEDERATIONS[name]
    known = options_of(METHODS[method])
    options = {key: v for key, v in {**f.local, "test_draws": 20}.items() if key in known}
    return Experiment(
        data=name,
        data_options={**f.data_options, **f.splits[split]},
        network=f.network,
        network_options=dict(f.network_options),
        likelihood=f.likelihood,
        partition="natural",
        clients=f.clients,
        cohort=f.cohort,
        method=method,
        rounds=f.rounds,
        evaluate_every=f.rounds,
        options=options | ({} if lr is None else {"lr": lr}),
    )


def judged(run: Run) -> dict[str, float]:
    """The scores of a trained run on test rows: of all, and at the site where they are worst."""
    diverged = float(bool(run.journal) and "diverged" in run.journal[-1])
    if run.task.method in BY_SITES:
        prediction = run.task.program.prediction._replace(whole=False)
        run = replace(run, task=replace(run.task, program=run.task.program._replace(prediction=prediction)))
    try:
        p, rows, homes = predictions(run)
        assert p is not None  # every federation has test rows
        owner = run.task.clients.data.test_owner
        if len(homes) == 1 and owner is not None:  # all rows in one place; they still came from somewhere
            homes = [(owner == k).nonzero().flatten() for k in owner.unique()]
        return {**scores_of(p.cpu(), run.task.clients.data.test_y[rows], homes), "diverged": diverged}
    except (NotFinite, RuntimeError):
        return {"nll": WORST_NLL, "diverged": 1.0}


def scores_of(p: Predictive, y: torch.Tensor, homes: Sequence[torch.Tensor]) -> dict[str, float]:
    """NLL, ECE, AUROC and the coverage of sets at the worst site; of survival concordance, Brier and calibration."""
    decode = SUMS[p.kind][1]
    scores = decode(p.sums(y))
    sites = [rows for rows in homes if len(rows)]
    each = [decode(p.at(rows).sums(y[rows]))["nll"] for rows in sites]
    names = [name for name in ("nll", "ece", "accuracy", "concordance", "brier") if name in scores]
    table = {name: scores[name] for name in names} | {"worst_nll": min(max(each), WORST_NLL)}
    table["nll"] = min(table["nll"], WORST_NLL)
    if p.kind == "survival":
        middle = len(p.times) // 2
        error = survival_calibration(p.survival[:, middle], y, p.times[middle], min(5, len(y))).error
        return table | {"calibration": error, "risk_spread": float(risk_of(p.survival).std())}
    covered = in_sets(p.probs, y).double()
    table["worst_coverage"] = min(float(covered[rows].mean()) for rows in sites)
    if p.probs.shape[1] == 2 and 0 < int(y.sum()) < len(y):
        table["auroc"] = auroc(p.probs[y == 0, 1], p.probs[y == 1, 1])
    return table


def in_sets(probs: torch.Tensor, y: torch.Tensor, level: float = SURE) -> torch.Tensor:
    """Whether the likeliest classes that together have at least `level` hold the true one."""
    mine = probs.gather(1, y[:, None])
    likelier = torch.where(probs > mine, probs, 0).sum(1)
    return likelier < level


def _has_rate(method: str) -> bool:
    """Whether there is a learning rate to choose; Newton steps have none."""
    return "lr" in options_of(METHODS[method])


def choice_cells() -> list[Cell[Experiment]]:
    """Every method at every rate, judged on a fifth of the training rows."""
    cells = []
    for name, f in FEDERATIONS.items():
        for method in methods_for(name):
            if not _has_rate(method):
                continue
            rate: Any = options_of(METHODS[method])["lr"].default
            for split in f.splits:
                x = experiment_of(name, method, split)
                x = replace(x, data_options={**x.data_options, "inner": 0})
                for m in MULTIPLES:
                    options = {**x.options, "lr": rate * m}
                    column = f"{split}, rate x{m:g}"
                    cells.append(Cell(method, column, replace(x, options=options), {}, judged, name))
    return cells


def choices(output: Path, scale: str) -> dict[tuple[str, str, str], float]:
    """The rate with the least NLL on inner test rows, by federation, method and split; from the kept files."""
    best: dict[tuple[str, str, str], tuple[float, float]] = {}
    for cell in choice_cells():
        files = contents(CHOICE, cell, output, scale)
        if files:
            nll = sum(content["measured"]["nll"] for content in files) / len(files)
            place = (cell.group, cell.row, cell.column.partition(", rate")[0])
            best[place] = min(best.get(place, (float("inf"), 0.0)), (nll, cell.experiment.options["lr"]))
    return {place: lr for place, (_, lr) in best.items()}


def league_cells(rates: Mapping[tuple[str, str, str], float]) -> list[Cell[Experiment]]:
    """Every method with its chosen rate, and the two bounds with FedAvg's."""
    cells = []
    for name, f in FEDERATIONS.items():
        for split in f.splits:
            for method in methods_for(name):
                x = experiment_of(name, method, split, rates.get((name, method, split)))
                cells.append(Cell(method, split, x, {}, judged, name))
            plain = experiment_of(name, "fedavg", split, rates.get((name, "fedavg", split)))
            cells.append(Cell(POOLED, split, without_federation(plain), {}, judged, name))
            cells.append(Cell(LOCAL, split, plain, {}, None, name))
    return cells


def train(table: Table[Experiment], output: Path, request: Request) -> None:
    """Choose rates, then train what is missing: methods and the pooled bound as cells, local training site by site."""
    chosen(table.cells(), request.only)  # a word that names nothing is refused before anything is trained
    words = {word.casefold() for word in request.only}
    rows = {cell.row for cell in table.cells()} | set(FEDERATIONS)
    splits = [split for split in dict.fromkeys(c.column for c in table.cells()) if split.casefold() in words]
    columns = [f"{split}, rate x{m:g}" for split in splits for m in MULTIPLES]
    methods = [word for word in request.only if word in rows and word not in (LOCAL, POOLED)]
    asked = [*(word for word in methods if word in FEDERATIONS or _has_rate(word)), *columns]
    bounds_alone = words & {LOCAL, POOLED} and not any(word in METHODS for word in methods)
    if bounds_alone:
        asked.append("fedavg")  # by whose rate they train
    if all(word in FEDERATIONS for word in methods) or any(word in METHODS for word in asked):
        train_seeds(CHOICE, output, request._replace(only=asked, seeds=FIRST))
    table = league(choices(output, request.scale))
    cells = chosen(table.cells(), request.only)
    train_seeds(table._replace(cells=lambda: [c for c in cells if c.row != LOCAL]), output, request._replace(only=()))
    for cell in cells:
        if cell.row == LOCAL:
            _train_local(table, cell, output, request)


def _train_local(table: Table[Experiment], cell: Cell[Experiment], output: Path, request: Request) -> None:
    """Each site alone, all sites and seeds as one program; one file per seed."""
    base = replace(table.scales[request.scale](cell.experiment), **request.changes)
    members = {}
    for seed in request.seeds:
        x = replace(base, seed=seed)
        path = output / "cells" / request.scale / file_name(table.family, cell, x)
        if not path.is_file():
            members[path] = x
    if not members:
        return
    sites = clients_of(next(iter(members.values())))
    alone = _alone(sites)
    tasks = [build(x, clients=one) for x in members.values() for one in alone]
    request.say(f"{cell.title}: {len(tasks)} runs of {tasks[0].rounds} rounds")
    progress, own = [task.begin() for task in tasks], [Memory() for _ in tasks]
    records: list[list[dict[str, Any]]] = [[] for _ in tasks]
    for entries in rounds_together(tasks, list(progress), own):
        for m, entry in enumerate(entries):
            if entry is not None:
                progress[m] = entry[0]
                records[m].append(entry[1])
    runs = [Run(task, at, journal, memory) for task, at, journal, memory in zip(tasks, progress, records, own)]
    for i, (path, x) in enumerate(members.items()):
        each = runs[i * len(sites) : (i + 1) * len(sites)]
        content = content_of(cell, x, each[0]) | {"test": {}, "oracle_best": {}, "curve": [], "bytes_up": 0}
        spent = sum(record["seconds"] for run in each for record in run.journal)
        content |= {"measured": _of_sites(each, sites), "seconds": round(spent, 1)}
        write_atomically(path, (json.dumps(content) + "\n").encode())


def _alone(sites: Clients) -> list[Clients]:
    """Every site as a federation of its own, of the same data; tested nowhere while it trains."""
    data = sites.data
    data = replace(data, test_x=data.test_x[:0], test_y=data.test_y[:0], test_owner=None)
    nothing = Ragged.of_lists([data.y.new_zeros(0, dtype=torch.int64)])
    return [replace(sites, data=data, train=Ragged.of_lists([own]), test=nothing, names=()) for own in sites.train]


def _of_sites(runs: Sequence[Run], sites: Clients) -> dict[str, float]:
    """Scores of local models, each on the test rows of its own site."""
    tested = [k for k in range(len(sites)) if len(sites.test[k])]
    try:
        pieces = [runs[k].predict(sites.data.test_x[sites.test[k]]).cpu() for k in tested]
        rows = torch.cat([sites.test[k] for k in tested])
        starts = torch.tensor([0, *(len(sites.test[k]) for k in tested)]).cumsum(0).tolist()
        homes = [torch.arange(a, b) for a, b in pairwise(starts)]
        return {**scores_of(joined(pieces), sites.data.test_y[rows], homes), "diverged": 0.0}
    except (NotFinite, RuntimeError):
        return {"nll": WORST_NLL, "diverged": 1.0}


METRICS = {
    **{name: f"measured.{name}" for name in ("nll", "ece", "auroc", "concordance", "brier", "calibration", "accuracy")},
    **{"worst_nll": "measured.worst_nll", "worst_coverage": "measured.worst_coverage"},
    **{"seconds": "seconds", "bytes_up": "bytes_up"},
}
TITLES = {
    "nll": "NLL ↓",
    "ece": "ECE ↓",
    "auroc": "AUROC ↑",
    "concordance": "concordance ↑",
    "brier": "Brier ↓",
    "calibration": "calibration error ↓",
    "accuracy": "accuracy ↑",
    "worst_nll": "NLL, worst site ↓",
    "worst_coverage": "90 % sets, worst site",
    "seconds": "seconds",
    "bytes_up": "bytes a round",
}
RANKED = {"nll": False, "worst_nll": False}


def texts(row: Row) -> Texts:
    """Seconds and bytes as whole numbers, scores with three digits."""
    value, error = row["ours"], row["error"]
    if row["column"] in (TITLES["seconds"], TITLES["bytes_up"]):
        return Texts(f"{value:,.0f}" if value >= 10 else f"{value:.1f}", "", "", "")
    return Texts(f"{value:.3f}", "" if error is None else f"{error:.3f}", "", "")


def by_metric(rows: Sequence[Row]) -> list[Row]:
    """Rows with metrics as columns, one block per federation and split, the best NLL first."""
    blocks: dict[str, list[Row]] = {}
    for row in rows:
        block = row["group"] if row["column"] == GIVEN else f"{row['group']}, {row['column']}"
        blocks.setdefault(block, []).append({**row, "group": block, "column": TITLES[row["metric"]]})
    shown: list[Row] = []
    for block in blocks.values():
        order = {row["row"]: row["ours"] for row in block if row["metric"] == "nll"}
        metrics = list(METRICS)
        block.sort(key=lambda row: (order.get(row["row"], WORST_NLL), metrics.index(row["metric"])))
        # What a cell was made with otherwise is said once, and not at each of its scores.
        shown += [
            {**row, "metric": "by NLL", "otherwise": row.get("otherwise", "") if row["metric"] == "nll" else ""}
            for row in block
        ]
    return shown


def ranks(rows: Sequence[Row], metric: str) -> Ranks | None:
    """Ranks of the methods that are in all federations and splits; None where there are not two."""
    blocks: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["metric"] == metric and row["row"] not in (LOCAL, POOLED):
            blocks.setdefault((row["group"], row["column"]), {})[row["row"]] = row["ours"]
    if not blocks or len(set.intersection(*map(set, blocks.values()))) < 2:
        return None
    return ranks_of(list(blocks.values()), higher=RANKED[metric])


def findings(rows: Sequence[Row]) -> list[str]:
    """Mean ranks over all federations and splits, and the difference that is needed to tell two methods apart."""
    lines = []
    for metric in RANKED:
        found = ranks(rows, metric)
        if found is None:
            continue
        places = ", ".join(f"{name} {rank:.1f}" for name, rank in found.mean.items())
        over = "one federation" if found.blocks == 1 else f"{found.blocks} federations and splits"
        test = "" if isnan(found.p_value) else f"; Friedman's p = {found.p_value:.2g}"
        lines.append(
            f"Mean rank by {TITLES[metric].rstrip(' ↓↑')} over {over}: {places}. "
            f"Ranks that differ by less than {found.critical:.1f} can't be told apart (Nemenyi, 5 %){test}."
        )
    return lines


def picture(rows: Sequence[Row]) -> Figure | None:
    """Mean ranks by NLL, the best on top; methods whose bars overlap with the first one's can't be told from it."""
    from matplotlib.figure import Figure

    found = ranks(rows, "nll")
    if found is None:
        return None
    figure = Figure(figsize=(6.4, 1 + 0.24 * len(found.mean)), layout="constrained")
    axes = figure.subplots()
    places, half = range(len(found.mean)), found.critical / 2
    axes.errorbar(list(found.mean.values()), places, xerr=half, fmt="o", ms=4, lw=1.2, color="#1b6ca8")
    best = next(iter(found.mean.values()))
    axes.axvspan(best - half, best + half, color="#1b6ca8", alpha=0.08, lw=0)
    axes.set(yticks=places, xlabel="mean rank by NLL; bars: half the critical difference to either side")
    axes.set_yticklabels(list(found.mean))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


LEGEND = (
    "Means over seeds ± standard errors. Every method has four tries for its learning rate, on a fifth of the training "
    "rows, and equally many passes over the rows. Local: each site alone, judged on its own test rows; pooled: all "
    "rows in one place. Methods with personal models are judged by these, each on its site's test rows. Seconds are "
    "those of training, of all seeds together; bytes are one round's uploads."
)


def small(x: Experiment) -> Experiment:
    """Two rounds: for trying the command."""
    return replace(x, rounds=2, evaluate_every=2)


SCALES: Mapping[str, Callable[[Experiment], Experiment]] = {"paper": lambda x: x, "small": small}
CHOICE: Table[Experiment] = Table(
    "Learning rates of the league", choice_cells, {"nll": "measured.nll"}, SCALES, "league-choice", SEEDS
)


def league(rates: Mapping[tuple[str, str, str], float] | None = None) -> Table[Experiment]:
    """The table with these learning rates; with the methods' own where none were chosen."""
    return Table(
        "League of natural federations",
        lambda: league_cells(rates or {}),
        METRICS,
        SCALES,
        "league",
        SEEDS._replace(train=train),
        layout=Layout(legend=LEGEND, corner="method", texts=texts, headed=True),
    )
