"""The league table: every method on every natural federation, by one protocol, between local and pooled training.

Each method has the same budget for choosing its learning rate: four multiples of its default, by NLL on a fifth of the
training rows. Then it is trained on all of them, once per seed, and judged on the federation's test rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedbayes.data import Clients, Ragged
from fedbayes.errors import NotFinite
from fedbayes.experiments.build import build, clients_of, without_federation
from fedbayes.experiments.experiment import Experiment
from fedbayes.files import write_atomically
from fedbayes.methods import METHODS
from fedbayes.model.predictive import joined
from fedbayes.options import options_of
from fedbayes.papers.cells import Cell, Request, Table, chosen
from fedbayes.papers.layout import Layout
from fedbayes.papers.league_page import GIVEN, LEGEND, LOCAL, METRICS, POOLED, texts
from fedbayes.papers.league_scores import WORST_NLL, judged, scores_of
from fedbayes.papers.seeds import SEEDS, content_of, contents, file_name
from fedbayes.papers.seeds import train as train_seeds
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, Run

MULTIPLES = (0.2, 1.0, 3.0, 6.0)
FIRST = (0,)  # seeds of the runs by which a rate is chosen


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


def _has_rate(method: str) -> bool:
    """Whether there is a learning rate to choose; Newton steps have none."""
    return "lr" in options_of(METHODS[method])


@cache
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
