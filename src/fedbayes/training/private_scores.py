"""How a private run does on its own rows: noisy sums beside those of training, with their own share of the budget.

A client adds its mean accuracy and its mean NLL, cut at twice that of a uniform guess and in units of it: two numbers
between 0 and 1, of length sqrt(2) at most. Clients are a Poisson sample of their own, as a round's are. Where rows are
private, a row adds such a pair to the sum of its site. Noise is in terms of that length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedbayes.engine.choice import tensor_cores
from fedbayes.federation.program import FederationState
from fedbayes.federation.round import predicting
from fedbayes.scores.proper import FLOOR
from fedbayes.training.private import PrivateRun
from fedbayes.training.settings import CLIENTS
from fedbayes.training.task import Task
from fedbayes.training.tested import predict_with

LENGTH = math.sqrt(2)
TOGETHER = 10_000  # rows that are predicted at once


def noisy_scores(task: Task, privacy: PrivateRun, state: FederationState) -> dict[str, float]:
    """Accuracy and NLL on the rows that clients train on: the mean over clients, or over all rows."""
    assert privacy.scoring is not None
    random, number, clients = privacy.random, state.round, len(task.clients)
    whole = privacy.level == CLIENTS
    if whole:
        (rate,) = privacy.scoring.rates.values()
        who, expected = random.sample(clients, rate, number, "scores"), rate * clients
    else:
        who, expected = [*range(clients)], float(task.clients.sizes.sum())
    total = torch.zeros(2, dtype=torch.float64)
    for pairs in _pairs(task, state, who):
        total += pairs.mean(0) if whole else pairs.sum(0)
    shares = 1 if whole else clients  # every site adds noise of its own
    noise = random.normals(2 * shares, number, "scores").reshape(shares, 2).sum(0)
    accuracy, nll = ((total + LENGTH * privacy.scoring.noise * noise) / expected).clamp(0, 1).tolist()
    return {"accuracy": accuracy, "nll": nll * largest(task)}


def largest(task: Task) -> float:
    """Where the NLL of a row is cut."""
    return 2 * math.log(task.clients.data.classes)


def _pairs(task: Task, state: FederationState, who: Sequence[int]) -> Iterator[Tensor]:
    """Of each client the pairs [rows, 2] of its rows, each number between 0 and 1."""
    data, parts = task.clients.data, predicting(task.program, state)
    rows = [task.clients.train_rows(k) for k in who]
    flat = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    blocks = []
    for some in flat.split(TOGETHER):
        with tensor_cores("float32"):
            probs = predict_with(task, parts, data.x[some]).mean.double().cpu()
        y = data.y[some].cpu()
        nll = -probs.gather(1, y[:, None])[:, 0].clamp(min=FLOOR).log() / largest(task)
        # What is not finite counts as wrong, and as far off as can be.
        blocks.append(torch.stack([(probs.argmax(1) == y).double(), nll.nan_to_num(1.0).clamp(0, 1)], 1))
    if len(flat):
        yield from (pairs for pairs in torch.cat(blocks).split([len(own) for own in rows]) if len(pairs))
