"""A run's predictions of its test rows, and whose rows they are: what scores by site and reports are made from."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedbayes.errors import InputError
from fedbayes.model.predictive import Predictive, directly, joined, predictive
from fedbayes.posterior.values import Parts, Posterior
from fedbayes.scores.by_site import Rows, SiteScores, site_scores
from fedbayes.training.personal import in_units, personal_predictions
from fedbayes.training.task import Federation, Progress, Task


class Trained(Protocol):
    """What a run has that predictions are made from."""

    @property
    def task(self) -> Task: ...
    @property
    def parts(self) -> Parts: ...
    @property
    def home(self) -> Federation: ...


class Finished(Trained, Protocol):
    """What a run has besides when its model is handed on, or another begins with it."""

    @property
    def progress(self) -> Progress: ...
    @property
    def posterior(self) -> Posterior: ...
    @property
    def epsilon(self) -> float | None: ...
    def module(self, draw: int | None = None) -> nn.Module: ...


AS_RUN = "run.personal(client).as_run"


def check_whole(run: Trained, instead: str = AS_RUN) -> None:
    """Refuse a run of personal models alone where a global one is needed; `instead` says what to use."""
    if not run.task.program.prediction.whole:
        raise InputError(f"this method ({run.task.method}) has no global model, only personal ones: use {instead}")


class Tested(NamedTuple):
    """Predictions of test rows, which rows they are, and which of them are whose; None where there are none."""

    p: Predictive | None
    at: Tensor
    homes: list[Tensor]


def predictions(run: Trained, draws: int | None = None) -> Tested:
    """The whole test set; without a global model each client's own rows, as its personal model sees them."""
    clients = run.task.clients
    if run.task.program.prediction.whole:
        at = torch.arange(len(clients.data.test_x))
        p = predict_with(run.task, run.parts, clients.data.test_x, draws=draws) if len(at) else None
        return Tested(p, at, [clients.test_rows(k) for k in range(len(clients))])
    here = run.task.elsewhere is None  # else personal models stay with the clients
    by_client = {k: (rows, p) for _, k, rows, p in personal_predictions([run.home])} if here else {}
    if not by_client:
        return Tested(None, torch.zeros(0, dtype=torch.int64), [])
    starts = torch.tensor([0, *(len(rows) for rows, _ in by_client.values())]).cumsum(0).tolist()
    places = {k: torch.arange(a, b) for k, a, b in zip(by_client, starts, starts[1:])}
    empty = torch.zeros(0, dtype=torch.int64)
    return Tested(
        joined([p for _, p in by_client.values()]),
        torch.cat([rows for rows, _ in by_client.values()]),
        [places.get(k, empty) for k in range(len(clients))],
    )


def by_site(run: Trained, draws: int | None = None) -> SiteScores:
    """Scores of each client's own test rows, with errors."""
    p, at, homes = predictions(run, draws)
    clients = run.task.clients
    if p is None:
        raise InputError(f"{clients.data.name} has no test rows to score by site: give a test share with the data")
    y = in_units(run.task, clients.data.test_y[at].cpu())
    sites = [clients.name(k) for k in range(len(clients))]
    return site_scores(p.kind, rows_of(p, y), homes, sites, seed=run.task.seed)


def rows_of(p: Predictive, y: Tensor) -> Rows:
    """A prediction and its targets, as scores take them."""
    if p.kind == "survival":
        return Rows((p.mean.cpu(),), y, {"times": torch.tensor(p.times)})
    return Rows((p.mean.cpu(), p.total.cpu()) if p.kind == "real" else (p.mean.cpu(),), y)


def predict_with(
    task: Task, parts: Parts, x: Tensor, *, draws: int | None = None, which: str | None = None
) -> Predictive:
    """The parts' predictions of x. `which` is a name for an x that is predicted repeatedly: a graph pays then."""
    program = task.program
    draws = program.prediction.draws if draws is None else draws
    if draws < 1:
        raise InputError(f"draws must be at least 1, not {draws}")
    return predictive(
        program.model,
        parts,
        x.to(task.device),
        draws=draws,
        seed=task.seed,
        dropout=program.prediction.dropout,
        closed=program.prediction.closed,
        carry=directly if which is None else partial(task.carry, (id(program.model), which, draws, task.seed)),
    )
