"""Personal models: every client makes the federation's model its own, and is tested on rows of its own label mix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.stacked import run_all
from fedbayes.errors import InputError
from fedbayes.federation.kept import NOISE_PART
from fedbayes.federation.program import GATHER
from fedbayes.federation.sums import add_terms
from fedbayes.methods.refined import Refinement, refined_program
from fedbayes.model.predictive import Predictive, predictive
from fedbayes.posterior.values import Parts, Point
from fedbayes.scores import SUMS
from fedbayes.scores.additive import Sums
from fedbayes.training.private import check_gathered
from fedbayes.training.task import Federation, Task, with_program

Models = list[tuple[int, Parts]]  # pairs of client and parts


def personal_models(federations: Sequence[Federation], clients: Sequence[Sequence[int]]) -> Iterator[list[Models]]:
    """The personal models of some clients of each federation, a cohort at a time: one list for each.

    Costs a round for each cohort, memory O(cohort * weights). What clients keep is not changed.
    """
    lead = federations[0].task
    if lead.elsewhere is not None:
        raise InputError(
            "personal models stay with the clients, who are elsewhere; on Flower `personal_every` scores them"
        )
    with quick_cpu(), tensor_cores(lead.precision):
        federations = [gather(f) for f in federations]
        engines, programs = [f.task.engine for f in federations], [f.task.home for f in federations]
        for cohorts in zip_longest(*map(_cohorts, federations, clients), fillvalue=()):
            orders = [f.order(cohort) for f, cohort in zip(federations, cohorts)]
            outcomes = run_all(engines, programs, orders, [f.own for f in federations])
            noises = [noise_of_one(f) for f in federations]
            yield [[(u.client, u.parts | noise) for u in o.uploads] for o, noise in zip(outcomes, noises)]


def noise_of_one(federation: Federation) -> Parts:
    """The observation noise of a personal model: that of one network, where the federation has judged it."""
    noise = federation.state.kept.lone_noise
    return {} if noise is None else {NOISE_PART: Point(noise)}


def _cohorts(federation: Federation, clients: Sequence[int]) -> list[Sequence[int]]:
    """Clients in pieces of the size that a round has."""
    size = federation.task.cohort
    return [clients[start : start + size] for start in range(0, len(clients), size)]


def gather(federation: Federation) -> Federation:
    """With what all clients send for one another's personal models, pooled; costs a pass over all clients' rows."""
    task, program, total = federation.task, federation.task.gather, None
    if program is None or federation.gathered:
        return federation
    clients = range(len(task.clients))
    for start in range(0, len(clients), task.cohort):
        order = federation.order(clients[start : start + task.cohort], GATHER)
        terms = task.engine.run(program, order, federation.own).terms
        if terms is not None:
            total = terms if total is None else add_terms(program, [total, terms])
    if total is None:
        raise InputError("refine: no client could send a finite posterior (did training diverge? try a smaller lr)")
    order = federation.order((), GATHER)
    reference = program.pooling.reference(order.broadcast, order.options)
    pooled = {part: rule.decode(total[part], reference[part]) for part, rule in program.pooling.rules.items()}
    return federation._replace(gathered=pooled)


def personal_predictions(
    federations: Sequence[Federation], clients: Sequence[int] | None = None
) -> Iterator[tuple[int, int, Tensor, Predictive]]:
    """Federation, client, its test rows, and what its personal model says of them; for each that has such rows."""
    tested = []
    for federation in federations:
        everyone = federation.task.clients
        some = range(len(everyone)) if clients is None else clients
        tested.append([k for k in some if len(everyone.test_rows(k))])
    for cohort in personal_models(federations, tested):
        for m, models in enumerate(cohort):
            for k, parts in models:
                rows = federations[m].task.clients.test_rows(k)
                yield m, k, rows, predicted(federations[m].task, parts, rows)


def predicted(task: Task, parts: Parts, rows: Tensor) -> Predictive:
    """What a personal model says of test rows."""
    program = task.program
    return predictive(
        program.model,
        parts,
        task.clients.data.test_x[rows].to(task.device),
        draws=program.prediction.draws,
        seed=task.seed,
        dropout=program.prediction.dropout,
    )


def personal_sums(
    federations: Sequence[Federation], clients: Sequence[int] | None = None
) -> Iterator[tuple[int, int, Sums]]:
    """Federation, client, and the sums behind its personal model's scores; made where the client's own state is."""
    elsewhere = federations[0].task.elsewhere
    if elsewhere is not None:
        yield from ((0, k, sums) for k, sums in elsewhere(federations[0]))
        return
    for m, k, rows, p in personal_predictions(federations, clients):
        task = federations[m].task
        yield m, k, sums_of(task, p, task.clients.data.test_y[rows])


def sums_of(task: Task, p: Predictive, y: Tensor) -> Sums:
    """The sums behind the scores of a prediction, its targets as the data hold them."""
    return p.sums(in_units(task, y.to(task.device)))


def personal_scores(federations: Sequence[Federation]) -> list[dict[str, float]]:
    """Scores of all personal models on their clients' test rows: decoded from the sums over clients.

    `clients_NAME` is the mean over clients of their own score, for those scores that are means over rows;
    `clients` is how many were scored.
    """
    sums: list[Sums | None] = [None] * len(federations)
    each: list[list[dict[str, float]]] = [[] for _ in federations]
    for m, _, own in personal_sums(federations):
        before = sums[m]
        sums[m] = own if before is None else {name: before[name] + own[name] for name in own}
        each[m].append(SUMS[federations[m].task.program.model.likelihood.kind][1](own))
    return [_decoded(f.task, total, clients) for f, total, clients in zip(federations, sums, each)]


def _decoded(task: Task, sums: dict[str, Any] | None, each: list[dict[str, float]]) -> dict[str, float]:
    if sums is None:
        return {}
    scores = SUMS[task.program.model.likelihood.kind][1](sums)
    means = {
        f"clients_{name}": sum(c[name] for c in each) / len(each) for name in ("accuracy", "nll") if name in scores
    }
    return {**scores, **means, "clients": float(len(each))}


def in_units(task: Task, y: Tensor) -> Tensor:
    """Targets in the units in which they came."""
    units = task.program.model.units
    if units is None or not y.is_floating_point():
        return y
    return y * torch.as_tensor(units[1]).to(y) + torch.as_tensor(units[0]).to(y)


def refined_task(task: Task, **options: Any) -> Task:
    """A task whose clients refine their classifiers in another way; what has been trained is what it was."""
    refinement = Refinement(**options)
    if refinement.laplace != "end":
        raise InputError('laplace: after training, posteriors are fitted at the end; set laplace = "end"')
    data = task.clients.data
    x, y = data.x[:1].to(task.device), data.y[:1].to(task.device)
    plain = task.program.personal.plain or task.program
    program = refined_program(plain, refinement, x, y, int(task.clients.sizes.max()))
    if task.privacy is not None:
        check_gathered(program)
    return with_program(task, program)
