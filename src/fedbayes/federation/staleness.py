"""Answers from older broadcasts: brought forward as changes to the newest, and which programs allow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedbayes.errors import InputError
from fedbayes.federation.changes import started
from fedbayes.federation.encodings import DWC_FLOOR
from fedbayes.federation.moves import Move, floored, moved_mean, moved_moments, moved_naturals
from fedbayes.federation.program import (
    COUNTS,
    STATISTICS,
    Context,
    Order,
    Outcome,
    Program,
    Stage,
    Terms,
)
from fedbayes.federation.round import merged
from fedbayes.federation.sites import SITES, Naturals, changes, gaussian, naturals
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import Gaussian, Parts

OWED = "owed"


def closed_on(
    program: Program,
    orders: Sequence[Order],
    outcomes: Sequence[Outcome],
    closing: Order,
    discount: Callable[[int], float] = lambda age: 1.0,
) -> Outcome:
    """What the clients of all orders brought, as one outcome in units of the newest broadcast."""
    if not orders:
        return Outcome(None, [], {}, {}, {}, 0, closing.version)
    stale = any(order.version != closing.version and o.counted for order, o in zip(orders, outcomes))
    outcome = merged(program, [_forward(program, *pair, closing, discount) for pair in zip(orders, outcomes)])
    if not stale or outcome.terms is None:
        return outcome
    return outcome._replace(terms={part: _settled(program, part, t) for part, t in outcome.terms.items()})


def _forward(
    program: Program, order: Order, outcome: Outcome, closing: Order, discount: Callable[[int], float]
) -> Outcome:
    """An order's outcome as changes to the broadcast of the closing."""
    if order.version == closing.version or outcome.terms is None:
        return outcome._replace(version=closing.version)
    pooling, share = program.pooling, discount(closing.version - order.version)
    old, now = (started(program, o.broadcast, o.options) for o in (order, closing))
    before, reference = (pooling.reference(o.broadcast, o.options) for o in (order, closing))
    terms: Terms = {}
    for part, t in outcome.terms.items():
        change = None if part == COUNTS else pooling.rules[part].change
        if change is not None:
            t = change(t, Move(old[part], before[part], now[part], reference[part], share))
        elif part != COUNTS and not is_static(part):
            raise InputError(f"uploads of two versions can't be added: the rule of part {part!r} adds no changes")
        terms[part] = t
    return outcome._replace(terms=terms, version=closing.version)


def _settled(program: Program, part: str, t: Any) -> Any:
    """A sum of changes of several versions, from which a posterior can be decoded."""
    rule = None if part == COUNTS else program.pooling.rules[part]
    if rule is None or rule.needs_reference or rule.change is None:
        return t
    if rule.change is moved_naturals:
        return floored(t, "precision")
    return floored(t, "variance") if rule.change is moved_moments else t


def check_changes(method: str, program: Program) -> None:
    """Refuse a program whose answers from several broadcasts can't be added, by name and with the reason."""
    pooling = program.pooling
    reasons = {
        "a rule compares all posteriors": any(rule.combine for rule in pooling.rules.values()) or bool(pooling.over),
        "its weights compare the clients of one round": pooling.weighting.compare is not None,
        "the networks of one round are kept to predict": program.prediction.members,
        'the noise is judged by the networks of one round; set noise = "likelihood"': _judged(program),
        "a stage looks at every upload of a round": any(stage.uploads for stage in program.stages),
        "a stage asks the cohort a second time; set norm_passes = 0": any(s.name == STATISTICS for s in program.stages),
        "buckets are dealt within one round; leave them out": pooling.buckets > 0,
        "attacks are on the clients of one round; leave attack out": pooling.attacked is not None
        and pooling.attacked.tell is not None,
    }
    for why, holds in reasons.items():
        if holds:
            raise InputError(f'schedule: {method} can\'t be "buffered": {why}')
    start = started(program, program.initial, program.options(0))
    reference = pooling.reference(program.initial, program.options(0))
    for part, rule in pooling.rules.items():
        if is_static(part):
            continue
        if rule.change is None:
            why = f"the rule of part {part!r} ({rule.about}) is no sum of changes from what clients started from"
            raise InputError(f'schedule: {method} can\'t be "buffered": {why}; use log_pool, nwa, dwc or fedavg')
        if rule.change is not moved_mean and not isinstance(start[part], Gaussian):
            why = f"clients start from a point and send normals, so that the spread of part {part!r} is no change"
            raise InputError(f'schedule: {method} can\'t be "buffered": {why}')
        if rule.needs_reference and reference[part] is not program.initial[part]:
            why = "the product is over a fixed prior, not over what clients started from"
            raise InputError(f'schedule: {method} can\'t be "buffered": {why}; set prior = "broadcast"')


def _judged(program: Program) -> bool:
    return program.needs_uploads and program.prediction.noise not in ("likelihood", "none")


def with_debt(program: Program) -> Program:
    """A program of sites, whose posterior is the prior times all of them even where a precision had to be floored.

    Synchronous clients share what may be taken off a round's precision; those of an older broadcast may take more than
    is left. What a floor holds back is owed, and given when there is precision again.
    """
    part = program.prediction.part
    rule = program.pooling.rules.get(part)
    if not (program.pooling.as_sent and rule is not None and rule.needs_reference):
        return program
    if any(stage.name == SITES for stage in program.stages):  # it has the sum of all sites itself
        return program
    return program._replace(stages=(owed(part), *program.stages))


def owed(part: str) -> Stage:
    """What the sum of changes has beyond the posterior, in natural parameters; nothing is changed while that is 0."""

    def init(parts: Parts) -> Naturals:
        zero = torch.zeros_like(parts[part].mean, dtype=torch.float64)
        return {"precision": zero, "shift": zero.clone()}

    def apply(context: Context, state: Naturals, parts: Parts) -> tuple[Parts, Naturals, dict[str, float]]:
        q, terms = context.order.broadcast[part], context.outcome.terms
        assert isinstance(q, Gaussian)
        assert terms is not None
        t = terms[part]
        low = t["precision"] - (t["count"] - 1) < DWC_FLOOR
        if not bool(low.any()) and not bool(state["precision"].any()):
            return parts, state, {}
        old, change = naturals(q), changes(context, part)
        whole = {name: old[name] + change[name] + state[name] for name in old}
        moved, floored = gaussian(whole, q)
        after = naturals(moved)
        behind = whole["precision"] < DWC_FLOOR * old["precision"]
        debt = {name: torch.where(behind, whole[name] - after[name], 0.0) for name in whole}
        return {**parts, part: moved}, debt, {"floored": floored}

    return Stage(OWED, init, apply)
