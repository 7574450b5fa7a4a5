"""A round as pure functions: open it, let clients contribute, add, close it. Engines only carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedbayes.federation.cohorts import cohort_of, dealt
from fedbayes.federation.contributions import received
from fedbayes.federation.kept import NOISE_PART, Kept
from fedbayes.federation.pooling import ensemble_of, pooled
from fedbayes.federation.program import (
    BY_MEMBERS,
    Context,
    FederationState,
    Order,
    Outcome,
    Program,
)
from fedbayes.federation.sums import Totals, added_to, apart
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.posterior.values import Draws, Parts, Point, Posterior, flatten_parts, scales

ROUNDING = 1e-6  # of a spread, in terms of the largest weight


def begin(program: Program) -> FederationState:
    """The state before the first round."""
    return FederationState(0, program.initial, {stage.name: stage.init(program.initial) for stage in program.stages})


def open_round(
    program: Program, state: FederationState, *, clients: int, cohort: int, seed: int, dropout: float = 0.0
) -> Order:
    """Choose the cohort of the next round by its address, drop a share of it, and fix the round's options."""
    number = state.round
    staying, gone = cohort_of(number, clients=clients, cohort=cohort, seed=seed, dropout=dropout)
    options = {**program.options(number), **told(program, state.stages)}
    buckets = dealt(staying, program.pooling.buckets, seed, number)
    return Order(number, staying, gone, state.broadcast, options, state.version, buckets=buckets)


def told(program: Program, states: Mapping[str, Any]) -> dict[str, float]:
    """What the program's stages tell clients by their states, among a round's options."""
    stages = [stage for stage in program.stages if stage.name in states]  # none of a refinement after training
    return {name: number for stage in stages for name, number in stage.told(states[stage.name]).items()}


def at_home(program: Program) -> Program:
    """The program by which clients make their personal models: nothing is pooled, every upload is kept."""
    return program._replace(client=program.tuned, pooling=program.pooling.beside(rules={}), stages=())


def gathering(program: Program) -> Program | None:
    """The program by which clients send what personal models need of one another; None: nothing.

    They send it of the broadcast, from which none is apart: weights by distance or discrepancy are by size there.
    """
    gather, weighting = program.personal.gather, program.pooling.weighting
    if gather is None:
        return None
    if weighting.compare is not None or weighting == WEIGHTINGS["distance"]:
        weighting = WEIGHTINGS["size"]
    return program._replace(
        client=gather.client,
        initial={**program.initial, **gather.initial},
        pooling=program.pooling.beside(rules=gather.rules, reference=gather.reference, weighting=weighting),
        stages=(),
        prediction=program.prediction._replace(members=False),
    )


def merged(program: Program, outcomes: Sequence[Outcome]) -> Outcome:
    """What the clients of several orders brought, as one outcome.

    They are of one version: those of an older one are brought forward before (`staleness.py`).
    """
    if len(outcomes) == 1:
        return outcomes[0]
    totals: Totals = {}
    for outcome in outcomes:
        for bucket, terms in ((None, outcome.terms), *outcome.buckets.items()):
            if terms is not None:
                added_to(totals, program, terms, bucket)
    total, buckets = apart(totals)
    names = {name for outcome in outcomes for name in outcome.metrics}
    return Outcome(
        total,
        [upload for outcome in outcomes for upload in outcome.uploads],
        {k: own for outcome in outcomes for k, own in outcome.own.items()},
        {k: why for outcome in outcomes for k, why in outcome.left_out.items()},
        {name: sum(outcome.metrics.get(name, 0.0) for outcome in outcomes) for name in sorted(names)},
        sum(outcome.counted for outcome in outcomes),
        min(outcome.version for outcome in outcomes),
        {k: figures for outcome in outcomes for k, figures in outcome.influence.items()},
        buckets,
    )


def close_round(context: Context, state: FederationState) -> tuple[FederationState, dict[str, Any]]:
    """The state after a round, and numbers to report of it. Without any contribution the posterior stays.

    The uploads are pooled, then the program's stages follow in turn.
    """
    program = context.program
    outcome = received(program, context.order, context.outcome)
    context = context._replace(outcome=outcome)
    if not outcome.counted:
        return state._replace(round=state.round + 1), {}
    parts, report = pooled(program, context.order, outcome)
    states = dict(state.stages)
    for stage in program.stages:
        parts, states[stage.name], more = stage.apply(context, states[stage.name], parts)
        report |= more
    beside = Kept()
    if program.prediction.members or program.prediction.noise in BY_MEMBERS:
        beside = Kept(ensemble_of(program, parts, outcome.uploads), tuple(u.client for u in outcome.uploads))
    return FederationState(state.round + 1, parts, states, beside, state.version + 1), report


def predicting(program: Program, state: FederationState) -> Parts:
    """The parts that predict: the kept uploads instead of the pooled posterior where the program says so."""
    parts = program.prediction.parts(dict(state.broadcast))
    if state.kept.noise is not None:
        parts[NOISE_PART] = Point(state.kept.noise)
    if program.prediction.noise == "none" and program.model.likelihood.kind == "real" and _several(program, state):
        parts[NOISE_PART] = Point(torch.tensor([0.0, 1.0]))
    return parts | state.kept.members if program.prediction.members else parts


def _several(program: Program, state: FederationState) -> bool:
    """Whether what predicts is of more than one network: the spread of one is rounding at most."""
    part = program.prediction.part
    q, members = state.broadcast[part], state.kept.members.get(part)
    if isinstance(members, Draws):
        return len(members.values) > 1
    spread = scales(q)
    return spread is None or bool(spread.max() > ROUNDING * q.mean.abs().max().clamp(min=1e-3))


def message_bytes(parts: Mapping[str, Posterior]) -> int:
    """Bytes of a broadcast, or of an upload, in the dtypes it is held in."""
    return sum(t.numel() * t.element_size() for t in flatten_parts(parts)[0].values())
