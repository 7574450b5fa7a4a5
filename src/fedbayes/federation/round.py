"""A round as pure functions: open it, let clients contribute, add, close it. Engines only carry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Info, Upload
from fedbayes.errors import InputError
from fedbayes.federation.changes import started
from fedbayes.federation.influence import by_client, figures_of, shares
from fedbayes.federation.kept import NOISE_PART, Kept
from fedbayes.federation.program import (
    BY_MEMBERS,
    COUNTS,
    Context,
    Contribution,
    FederationState,
    Order,
    Outcome,
    Passed,
    Program,
    Terms,
)
from fedbayes.federation.rules import RULES, Rule, largest
from fedbayes.federation.sums import Totals, add_terms, added_to, apart, by_bucket
from fedbayes.model.model import Model, is_static
from fedbayes.noise import generator
from fedbayes.posterior.lowrank import mean_covariance
from fedbayes.posterior.values import Draws, LowRank, Parts, Point, Posterior, flatten_parts, scales

MANY = 100_000  # clients of whom a round shuffles the whole list
DRAWN = 1024  # clients that are drawn at once
LEFT_OUT = "its upload was not finite (did it diverge? try a smaller lr)"


def static_rules(model: Model, rule: Rule = RULES["fedavg"]) -> dict[str, Rule]:
    """Rules of the parts that are not trained, beside the rule of those that are.

    Float buffers are averaged by size, counters take the largest; beside a robust rule both take the median, for a
    client that lies about its rows would own them.
    """
    table = {"buffers": RULES["fedavg"], "counters": largest}
    if rule.robust:
        table = dict.fromkeys(table, RULES["median"])
    return {part: table[part.rpartition(".")[2]] for part in model.static}


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
    """What the program's stages tell the clients of the next round, among its options."""
    return {name: number for stage in program.stages for name, number in stage.told(states[stage.name]).items()}


def cohort_of(
    number: int, *, clients: int, cohort: int, seed: int, dropout: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who takes part in a round, and who was asked but dropped out; known before the round is reached."""
    chosen = torch.tensor([*islice(called(number, clients=clients, seed=seed), cohort)], dtype=torch.int64)
    gone = torch.rand(cohort, generator=generator(seed, number, "dropout")) < dropout
    return tuple(sorted(chosen[~gone].tolist())), tuple(sorted(chosen[gone].tolist()))


def dealt(cohort: Sequence[int], buckets: int, seed: int, number: int) -> dict[int, int]:
    """The bucket of each client of a round, at random, of sizes that differ by one at most; empty without buckets."""
    if not buckets:
        return {}
    line = torch.randperm(len(cohort), generator=generator(seed, number, "buckets")).tolist()
    return {cohort[k]: place % buckets for place, k in enumerate(line)}


def drawn(number: int, *, clients: int, seed: int) -> Tensor:
    """All clients in the order in which a round calls them."""
    return torch.randperm(clients, generator=generator(seed, number, "cohort"))


def called(number: int, *, clients: int, seed: int) -> Iterator[int]:
    """The same one after another; of very many clients only as many are drawn as are asked for."""
    if clients <= MANY:
        line = drawn(number, clients=clients, seed=seed)
        for start in range(0, clients, DRAWN):
            yield from line[start : start + DRAWN].tolist()
        return
    random, seen = generator(seed, number, "cohort"), set[int]()
    while len(seen) < clients:
        for k in torch.randint(clients, (DRAWN,), generator=random).tolist():
            if k not in seen:
                seen.add(k)
                yield k


class Term(NamedTuple):
    """What a client adds to a round."""

    terms: Terms  # of the sum, for each shared part
    finite: Tensor  # whether all of it is
    figures: Tensor  # what it does to the round (`Figures`), none where nothing is pooled


def contribute(
    program: Program, upload: Upload, info: Info, weight: Tensor | None = None, unit: float | None = None
) -> Term:
    """A client's term of the sum; `weight` stands in for its own, which may be in units of a typical one."""
    rules, part = program.pooling.rules, program.prediction.part
    reference = program.pooling.reference(info.broadcast, info.options)  # type: ignore[arg-type]
    start = started(program, info.broadcast, info.options)
    passed = through_channel(program, upload.parts, start, info.options)
    sent = passed.parts
    size = rows_counted(program, info.n, info.options)
    if weight is None:
        assert program.pooling.weighting.weigh is not None
        weight = program.pooling.weighting.weigh(sent[part], info.broadcast[part], size)
        weight = weight if unit is None else weight / unit
    size = size.double()
    terms: Terms = {
        part: rule.encode(sent[part], size if is_static(part) else weight, reference[part])
        for part, rule in rules.items()
        if rule.combine is None
    }
    for transform in program.pooling.channel:
        if transform.terms is not None:
            terms = transform.terms(terms, _still(program, reference, weight, size), info.options)
    if passed.counts:
        terms[COUNTS] = passed.counts
    checked = [terms[part][key] for part in terms for key in terms[part]]
    for part in rules or upload.parts:  # personal models are not pooled: all of them is looked at
        q = upload.parts[part]
        checked += tree_leaves(q)
        scale = scales(q)
        if scale is not None:
            checked.append(torch.where(scale > 0, scale, torch.nan))
    finite = torch.stack([torch.isfinite(t).all() for t in checked if t.is_floating_point()]).all()
    return Term(terms, finite, figures_of(program, passed, start, terms))


def _still(program: Program, reference: Parts, weight: Tensor, size: Tensor) -> Terms:
    """What a client of some weight adds that has not moved from the reference."""
    return {
        part: rule.encode(reference[part], size if is_static(part) else weight, reference[part])
        for part, rule in program.pooling.rules.items()
        if rule.combine is None
    }


def through_channel(program: Program, parts: Parts, start: Parts, options: Mapping[str, Any]) -> Passed:
    """An upload as it leaves its client: what each transform of the channel makes of it in turn, and has seen."""
    passed = Passed(parts)
    for transform in program.pooling.channel:
        step = transform.upload(passed.parts, start, options)
        passed = Passed(step.parts, *({**before, **more} for before, more in zip(passed[1:], step[1:])))
    return passed


def rows_counted(program: Program, n: Tensor, options: Mapping[str, Any]) -> Tensor:
    """The rows for which a client counts, of those that it has."""
    for transform in program.pooling.channel:
        n = transform.rows(n, options)
    return n


def received(program: Program, order: Order, outcome: Outcome) -> Outcome:
    """The outcome with the uploads that are held as they came out of the channel."""
    if not program.pooling.channel:
        return outcome

    start = started(program, order.broadcast, order.options)

    def sent(u: Contribution) -> Contribution:
        passed = through_channel(program, u.parts, start, order.options)
        return u._replace(parts=passed.parts, n=rows_counted(program, u.n, order.options))

    return outcome._replace(uploads=[sent(u) for u in outcome.uploads])


def summed(program: Program, terms: Terms) -> Terms:
    """What engines add of a client's terms: all of them, or where uploads are held only what the channel counts."""
    return {part: t for part, t in terms.items() if part == COUNTS} if program.needs_uploads else terms


def at_home(program: Program) -> Program:
    """The program by which clients make their personal models: nothing is pooled, every upload is kept."""
    return program._replace(client=program.tuned, pooling=program.pooling.beside(rules={}), stages=())


def gathering(program: Program) -> Program | None:
    """The program by which clients send what personal models need of one another; None: nothing."""
    gather = program.personal.gather
    if gather is None:
        return None
    return program._replace(
        client=gather.client,
        initial={**program.initial, **gather.initial},
        pooling=program.pooling.beside(rules=gather.rules, reference=gather.reference),
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


def as_told(program: Program, order: Order, outcome: Outcome) -> Outcome:
    """What reaches the server where clients lie, in simulation: uploads changed, and their sum made anew."""
    attacked = program.pooling.attacked
    if attacked is None or attacked.tell is None or not outcome.uploads:
        return outcome
    told = attacked.tell(order, outcome.uploads)
    one = torch.ones((), dtype=torch.float64, device=told[0].n.device)
    adds = not program._replace(pooling=program.pooling._replace(attacked=None)).needs_uploads

    def term(parts: Parts, n: Tensor) -> Term:
        info = Info(order.broadcast, order.options, torch.tensor(order.round), n, ())  # type: ignore[arg-type]
        return contribute(program, Upload(parts, {}, {}), info, None if adds else one)

    rows = tree_map(lambda *leaves: torch.stack(leaves), *[(u.parts, u.n) for u in told])
    terms, finite, figures = torch.vmap(term)(*rows)
    fine = [k for k, is_fine in enumerate(finite.tolist()) if is_fine]
    rows_of = {k: order.buckets.get(told[k].client) for k in fine}
    total, buckets = apart(by_bucket(program, terms if adds else summed(program, terms), rows_of))
    left_out = {u.client: LEFT_OUT for k, u in enumerate(told) if k not in set(fine)}
    return outcome._replace(
        terms=total,
        buckets=buckets,
        uploads=[] if adds else [told[k] for k in fine],
        left_out=dict(sorted((outcome.left_out | left_out).items())),
        counted=len(fine),
        influence=by_client([told[k].client for k in fine], figures[fine].tolist()),
    )


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
    if outcome.influence:
        counts = weights and program.pooling.rules[program.prediction.part].weighted
        given = torch.stack(weights).tolist() if counts else ()
        report["influence"] = shares(outcome.influence, {u.client: w for u, w in zip(outcome.uploads, given)})
    for part, rule in program.pooling.rules.items():
        if rule.combine is not None:
            sent = [u.parts[part] for u in outcome.uploads]
            parts[part] = rule.combine(sent, torch.stack(weights), reference[part])
            continue
        assert terms is not None
        parts[part] = rule.decode(terms[part], reference[part])
        report |= rule.report(terms[part], reference[part])
    return parts, report


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
            combine = over[part].combine
            assert combine is not None
            parts[part] = combine([q[part] for q in posteriors], torch.ones(len(posteriors)), reference[part])
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


def predicting(program: Program, state: FederationState) -> Parts:
    """The parts that predict: the kept uploads instead of the pooled posterior where the program says so."""
    parts = program.prediction.parts(dict(state.broadcast))
    if state.kept.noise is not None:
        parts[NOISE_PART] = Point(state.kept.noise)
    if program.prediction.noise == "none" and program.model.likelihood.kind == "real":
        parts[NOISE_PART] = Point(torch.tensor([0.0, 1.0]))
    return parts | state.kept.members if program.prediction.members else parts


def message_bytes(parts: Mapping[str, Posterior]) -> int:
    """Bytes of a broadcast, or of an upload, in the dtypes it is held in."""
    return sum(t.numel() * t.element_size() for t in flatten_parts(parts)[0].values())


def cohort_size(cohort: int | float | None, clients: int) -> int:
    """A cohort given as a number (int), a fraction (float in (0, 1]) or everybody (None)."""
    if cohort is None:
        return clients
    number = isinstance(cohort, Real) and not isinstance(cohort, bool)
    if not number or not math.isfinite(cohort) or cohort <= 0:
        raise InputError(f"cohort must be a positive number of clients or a fraction of them, not {cohort!r}")
    if isinstance(cohort, float):
        if cohort > 1:
            raise InputError(f"cohort: a fraction lies in (0, 1], not {cohort}; give a whole number for a count")
        return max(1, round(cohort * clients))
    if cohort > clients:
        raise InputError(f"cohort: {cohort} clients per round were asked for, but there are only {clients}")
    return cohort


def check_rules(program: Program) -> None:
    """Refuse rules that can't take what the clients upload, before any training."""
    for part, rule in program.pooling.rules.items():
        q = program.initial[part]
        if not is_static(part) and not isinstance(q, rule.takes):
            fitting = [name for name, r in RULES.items() if isinstance(q, r.takes)]
            raise InputError(f"this rule can't pool a {type(q).__name__}: use one of {', '.join(fitting)}")
