"""Regression over the folds of a set: federations and central baselines, all folds of one network as one program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedbayes.data import Dataset, load
from fedbayes.data.partition import iid
from fedbayes.data.sources import UCI_FOLDS
from fedbayes.engine.sharing import share_store
from fedbayes.federation.program import FederationState
from fedbayes.federation.round import predicting
from fedbayes.methods import Method, fedag, fedavg, feduab, fedvi
from fedbayes.model.likelihood import Likelihood, mean_variance, normal
from fedbayes.model.linear import bayesian_linear
from fedbayes.model.predictive import Predictive, predictive
from fedbayes.networks.papers import network_named
from fedbayes.posterior.values import Draws, Parts
from fedbayes.scores import regression
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, with_noise
from fedbayes.training.task import Task
from fedbayes.training.tested import predict_with

Scores = dict[str, float]
CLIENTS, ROUNDS, MEMBERS = 10, 5, 5


def folds_of(name: str, folds: int | None = None) -> list[Dataset]:
    """The first folds of a UCI set, or all, each standardised by its own training rows.

    Their inputs are as the networks see them: folds that train as one program can't each have a scaling of its own.
    """
    return [load(name, fold=fold).as_seen() for fold in range(min(folds or UCI_FOLDS[name], UCI_FOLDS[name]))]


def hidden_units(name: str) -> int:
    return 100 if name in ("protein", "year", "cubic") else 50


def scores_of(data: Dataset, mean: Tensor, variance: Tensor) -> Scores:
    """All scores of normal predictions for the test part, in original units."""
    y = data.test_y if data.target_scale is None else data.target_scale.undo(data.test_y)
    mean, scale, y = mean.cpu().double(), variance.cpu().double().clamp(min=1e-12).sqrt(), y.double()
    return {
        "nll": regression.normal_nll(mean, scale, y),
        "rmse": regression.rmse(mean, scale, y),
        "sharpness": regression.sharpness(mean, scale, y),
        "crps": regression.crps(mean, scale, y),
        "coverage50": regression.coverage(mean, scale, y, 0.5),
        "coverage90": regression.coverage(mean, scale, y, 0.9),
    }


def federations(
    data: Sequence[Dataset],
    method: Method,
    *,
    hidden: int,
    rounds: int,
    clients: int = CLIENTS,
    seeds: Sequence[int] | None = None,
    likelihood: Callable[[], Likelihood] = normal,
    every: int | None = None,
    device: str = "cpu",
) -> list[Task]:
    """One federation for each fold, its network and split by the fold's number, all reading one store.

    Predictions are possible after `every` so many rounds; without, after the last.
    """
    tasks = []
    for fold, one in enumerate(data):
        seed = fold if seeds is None else seeds[fold]
        observation = likelihood()
        network = _network(one, hidden, one.classes * observation.width, seed)
        spread = one.split(iid(), clients=clients, seed=seed)
        tasks.append(
            prepare(
                network,
                spread,
                method=method,
                rounds=rounds,
                seed=seed,
                likelihood=observation,
                evaluate_every=every or rounds,
                device=device,
            )
        )
    share_store([task.engine for task in tasks], [task.program for task in tasks])
    return tasks


def _network(data: Dataset, hidden: int, outputs: int, seed: int) -> nn.Module:
    """One hidden layer, or a linear map where there are no hidden units."""
    if not hidden:
        return network_named("linear", data.shape, outputs, seed=seed)
    return network_named("mlp", data.shape, outputs, seed=seed, hidden=(hidden,))


def train(
    tasks: Sequence[Task], after: Callable[[int, list[FederationState]], None] = lambda number, states: None
) -> list[FederationState]:
    """The final state of each federation, all trained at once; `after(round, states)` sees those of every round."""
    states = [task.begin().state for task in tasks]
    steps = rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks])
    for number, entries in enumerate(steps, 1):
        states = [entry[0].state for entry in entries if entry is not None]
        after(number, states)
    return states


def predicting_by(task: Task, **changes: Any) -> Task:
    """The task with another way to predict; what trained is what it was."""
    prediction = task.program.prediction._replace(**changes)
    return replace(task, program=task.program._replace(prediction=prediction))


def predictions(tasks: Sequence[Task], states: Sequence[FederationState]) -> list[Predictive]:
    """What each federation says of its test rows."""
    return [
        predict_with(task, predicting(task.program, own), task.clients.data.test_x) for task, own in zip(tasks, states)
    ]


def _scored(tasks: Sequence[Task], states: Sequence[FederationState]) -> list[Scores]:
    return [scores_of(t.clients.data, p.mean, p.total) for t, p in zip(tasks, predictions(tasks, states))]


def fedag_network(data: Sequence[Dataset], name: str, device: str = "cpu") -> dict[str, list[Scores]]:
    """FedAG with one hidden layer, 5 rounds; and what other readings of its noise make of the same networks."""
    tasks = federations(data, fedag(), hidden=hidden_units(name), rounds=ROUNDS, device=device)
    states = train(tasks)
    scores = {"FedAG network": _scored(tasks, states)}
    for row, kind in (("FedAG no noise", "none"), ("FedAG calibrated", "calibrated")):
        others = [predicting_by(task, noise=kind) for task in tasks]
        scores[row] = _scored(others, [with_noise(t, own) for t, own in zip(others, states)])
    drawn = [predicting_by(task, members=False) for task in tasks]
    scores["FedAG Monte Carlo"] = _scored(drawn, [with_noise(t, own) for t, own in zip(drawn, states)])
    return scores


def fedag_linear(data: Sequence[Dataset], name: str, device: str = "cpu") -> dict[str, list[Scores]]:
    """FedAG with a linear model, one round: by the closed form, and by the clients' models."""
    tasks = federations(data, fedag(predict="closed", lr=0.03), hidden=0, rounds=1, device=device)
    states = train(tasks)
    members = [predicting_by(task, closed=False, members=True) for task in tasks]
    judged = [with_noise(task, own) for task, own in zip(members, states)]
    return {"FedAG linear": _scored(tasks, states), "FedAG linear bootstrap": _scored(members, judged)}


def blr(data: Sequence[Dataset], name: str, device: str = "cpu") -> dict[str, list[Scores]]:
    """Bayesian linear regression under a unit prior, its noise the residual variance; and by the evidence."""
    scores: dict[str, list[Scores]] = {}
    for row, evidence in (("BLR", False), ("BLR by evidence", True)):
        scores[row] = []
        for one in data:
            mean, variance = bayesian_linear(one.x, one.y, evidence=evidence).predict(one.test_x)
            assert one.target_scale is not None
            mean = one.target_scale.undo(mean[:, None])
            scores[row].append(scores_of(one, mean, variance[:, None] * one.target_scale.std.square()))
    return scores


def batch_of(data: Sequence[Dataset]) -> int:
    """Rows of a central method's batch: a fiftieth of the training rows, from 8 to 128."""
    return max(8, min(128, len(data[0].x) // 50))


def vi(data: Sequence[Dataset], name: str, device: str = "cpu") -> dict[str, list[Scores]]:
    """Mean-field VI on all rows: a cohort of one, prior N(0, 1), the noise learned."""
    method = fedvi(
        prior="fixed", prior_scale=1.0, kl="1/n", kl_weight=1.0, initial=0.05, optimiser="adam", lr=0.01,
        lr_within="falling", epochs=100, batch=batch_of(data), train_draws=1, test_draws=100, rule="lp",
    )  # fmt: skip
    tasks = federations(
        data,
        method,
        hidden=hidden_units(name),
        rounds=1,
        clients=1,
        likelihood=lambda: normal(0.5, learn=True),
        device=device,
    )
    return {"VI": _scored(tasks, train(tasks))}


def feduab_network(data: Sequence[Dataset], name: str, device: str = "cpu") -> dict[str, list[Scores]]:
    """FedUAB with a regression likelihood whose noise is learned: Gaussian clients under the logarithmic pool."""
    method = feduab(
        kl_weight=1e-4, initial=0.05, optimiser="adam", lr=0.01, lr_within="falling", epochs=40,
        batch=max(4, batch_of(data) // CLIENTS), test_draws=100,
    )  # fmt: skip
    tasks = federations(
        data,
        method,
        hidden=hidden_units(name),
        rounds=ROUNDS,
        likelihood=lambda: normal(0.5, learn=True),
        device=device,
    )
    return {"FedUAB": _scored(tasks, train(tasks))}


def deep_ensemble(
    data: Sequence[Dataset], name: str, device: str = "cpu", *, adversarial: float = 0.0
) -> dict[str, list[Scores]]:
    """Deep ensembles of 5 networks with mean and variance outputs (Lakshminarayanan et al., 2017)."""
    method = fedavg(optimiser="adam", lr=0.01, lr_within="falling", epochs=40, batch=batch_of(data), clip=10.0,
                    adversarial=adversarial)  # fmt: skip
    members = [(fold, member) for fold in range(len(data)) for member in range(MEMBERS)]
    tasks = federations(
        [data[fold] for fold, _ in members],
        method,
        hidden=hidden_units(name),
        rounds=1,
        clients=1,
        seeds=[fold * MEMBERS + member for fold, member in members],
        likelihood=mean_variance,
        device=device,
    )
    states, scores = train(tasks), []
    for fold, one in enumerate(data):
        mine = [own.broadcast["model"].mean for (f, _), own in zip(members, states) if f == fold]
        program = tasks[fold * MEMBERS].program
        ensemble: Parts = {"model": Draws(torch.stack(mine), program.initial["model"].layout)}
        p = predictive(program.model, ensemble, one.test_x.to(device))
        scores.append(scores_of(one, p.mean, p.total))
    return {"DE": scores}


# What trains the rows of the tables; the rows that each gives.
CELLS: Mapping[str, tuple[Callable[..., dict[str, list[Scores]]], tuple[str, ...]]] = {
    "blr": (blr, ("BLR", "BLR by evidence")),
    "vi": (vi, ("VI",)),
    "fedag_linear": (fedag_linear, ("FedAG linear", "FedAG linear bootstrap")),
    "fedag_network": (
        fedag_network,
        ("FedAG network", "FedAG no noise", "FedAG calibrated", "FedAG Monte Carlo"),
    ),
    "deep_ensemble": (deep_ensemble, ("DE",)),
    "feduab": (feduab_network, ("FedUAB",)),
}


def cell(kind: str, name: str, folds: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """The scores of every fold, by row, of one method on one set."""
    return CELLS[kind][0](folds_of(name, folds), name, device)
