"""What a round's contributions come to: the shared parts, pooled from a sum, from all uploads, or over buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedbayes.clients.client import Info, Upload
from fedbayes.errors import InputError
from fedbayes.federation.contributions import contribute
from fedbayes.federation.influence import shares
from fedbayes.federation.program import (
    COUNTS,
    Contribution,
    Order,
    Outcome,
    Program,
    Terms,
)
from fedbayes.federation.rule import Groups, Rule
from fedbayes.federation.rules import RULES, largest
from fedbayes.federation.sums import add_terms
from fedbayes.model.model import Model
from fedbayes.model.parts import is_static
from fedbayes.posterior.lowrank import mean_covariance
from fedbayes.posterior.values import Draws, LowRank, Parts


def static_rules(model: Model, rule: Rule = RULES["fedavg"]) -> dict[str, Rule]:
    """Rules of the parts that are not trained, beside the rule of those that are.

    Float buffers are averaged by size, counters take the largest; beside a robust rule both take the median, for a
    client that lies about its rows would own them.
    """
    table = {"buffers": RULES["fedavg"], "counters": largest}
    if rule.robust:
        table = dict.fromkeys(table, RULES["median"])
    return {part: table[part.rpartition(".")[2]] for part in model.static}


def check_rules(program: Program) -> None:
    """Refuse rules that can't take what the clients upload, before any training."""
    for part, rule in program.pooling.rules.items():
        q = program.initial[part]
        if not is_static(part) and not isinstance(q, rule.takes):
            fitting = [name for name, r in RULES.items() if isinstance(q, r.takes)]
            raise InputError(f"this rule can't pool a {type(q).__name__}: use one of {', '.join(fitting)}")


def pooled(program: Program, order: Order, outcome: Outcome) -> tuple[Parts, dict[str, Any]]:
    """The broadcast with the shared parts pooled, and numbers to report of them; uploads are as `received`."""
    if outcome.buckets:
        return _over_buckets(program, order, outcome)
    reference = program.pooling.reference(order.broadcast, order.options)
    terms, weights = outcome.terms, []
    if program.needs_uploads and not {*(terms or ())} - {COUNTS}:
        weights = _weights(program, order, outcome.uploads)
        terms = _terms_of(program, order, outcome.uploads, weights)
    for transform in program.pooling.channel:
        terms = None if terms is None else transform.total(terms)
    parts: Parts = dict(order.broadcast)
    report: dict[str, Any] = {}
    main = program.prediction.part
    if outcome.influence:
        counts = weights and program.pooling.rules[main].weighted
        given = torch.stack(weights).tolist() if counts else ()
        report["influence"] = shares(outcome.influence, {u.client: w for u, w in zip(outcome.uploads, given)})
    for part, rule in program.pooling.rules.items():
        if rule.combine is not None:
            sent = [u.parts[part] for u in outcome.uploads]
            parts[part], groups = rule.combined(sent, torch.stack(weights), reference[part])
            if groups and part == main:
                report |= _alike(outcome, groups)
            continue
        assert terms is not None
        parts[part] = rule.decode(terms[part], reference[part])
        report |= rule.report(terms[part], reference[part])
    return parts, report


def _alike(outcome: Outcome, groups: Groups) -> dict[str, Any]:
    """Who counted as one, and the shares of clients then: twins have that of one client together."""
    clients = [[outcome.uploads[place].client for place in group] for group in groups]
    weights = {k: 1 / len(group) for group in clients for k in group}
    seen = {"influence": shares(outcome.influence, weights)} if outcome.influence else {}
    return {"twins": clients, **seen}


def _over_buckets(program: Program, order: Order, outcome: Outcome) -> tuple[Parts, dict[str, Any]]:
    """The posterior of each bucket, and of those the robust rules'; parts without such a rule are one sum.

    A bucket whose posterior is not finite is left out.
    """
    rules, over = program.pooling.rules, program.pooling.over
    reference = program.pooling.reference(order.broadcast, order.options)
    sums = [outcome._replace(terms=terms, buckets={}) for terms in outcome.buckets.values()]
    posteriors = [parts for parts in (pooled(program, order, one)[0] for one in sums) if _finite(parts)]
    parts: Parts = dict(order.broadcast)
    for part in rules if posteriors else ():
        if part in over:
            sent = [q[part] for q in posteriors]
            parts[part], _ = over[part].combined(sent, torch.ones(len(sent)), reference[part])
        else:
            total = add_terms(program, ({part: terms[part]} for terms in outcome.buckets.values()))
            parts[part] = rules[part].decode(total[part], reference[part])
    seen = {"influence": shares(outcome.influence, {})} if outcome.influence else {}
    return parts, {"buckets": float(len(posteriors)), **seen}


def _finite(parts: Parts) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tree_leaves(parts) if t.is_floating_point())


def _weights(program: Program, order: Order, uploads: Sequence[Contribution]) -> list[Tensor]:
    """The weight of each upload, where the server sees them."""
    weighting, part = program.pooling.weighting, program.prediction.part
    if weighting.compare is not None:
        return list(weighting.compare([u.parts[part] for u in uploads])) if uploads else []
    assert weighting.weigh is not None
    return [weighting.weigh(u.parts[part], order.broadcast[part], u.n) for u in uploads]


def _terms_of(
    program: Program, order: Order, uploads: Sequence[Contribution], weights: Sequence[Tensor]
) -> Terms | None:
    """The sum of the uploads' terms, of those parts that are sums."""
    if all(rule.combine is not None for rule in program.pooling.rules.values()):
        return None
    program = program._replace(pooling=program.pooling._replace(channel=()))  # they have passed it

    def term(u: Contribution, weight: Tensor) -> Terms:
        info = Info(order.broadcast, order.options, torch.tensor(order.round), u.n, ())  # type: ignore[arg-type]
        return contribute(program, Upload(u.parts, {}, {}), info, weight).terms

    return add_terms(program, map(term, uploads, weights)) if uploads else None


def ensemble_of(program: Program, parts: Parts, uploads: Sequence[Contribution]) -> Parts:
    """The cohort's uploads as one ensemble for each part.

    Normals with a covariance become one, about the pooled mean, with the mean of their covariances by size.
    """
    part = program.prediction.part
    if isinstance(uploads[0].parts[part], LowRank):
        sizes = torch.stack([u.n for u in uploads]).double()
        low = [q for u in uploads if isinstance(q := u.parts[part], LowRank)]
        return {part: mean_covariance(parts[part].mean, low, sizes)}
    return {
        part: Draws(torch.stack([u.parts[part].mean for u in uploads]), program.initial[part].layout)
        for part in program.pooling.rules
        if program.initial[part].mean.is_floating_point()  # counters are no one's own
    }
