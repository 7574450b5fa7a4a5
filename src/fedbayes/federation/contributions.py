"""What clients bring to a round: an upload through the channel, its terms of the sum, and what it does to the round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Info, Upload
from fedbayes.errors import InputError
from fedbayes.federation.changes import started
from fedbayes.federation.influence import by_client, figures_of
from fedbayes.federation.program import (
    COUNTS,
    Contribution,
    Order,
    Outcome,
    Passed,
    Program,
    Terms,
)
from fedbayes.federation.sums import apart, by_bucket
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import Parts, scales

LEFT_OUT = "its upload was not finite (did it diverge? try a smaller lr)"


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
    if lacking := [name for name in rules if name not in sent]:
        raise InputError(f"a client's upload has no part {lacking[0]!r}, which the method pools; upload it too")
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
    signs = []
    for part in rules or upload.parts:  # personal models are not pooled: all of them is looked at
        q = upload.parts[part]
        checked += tree_leaves(q)
        scale = scales(q)
        if scale is not None and scale.numel():
            signs.append(scale.amin() > 0)
    finite = torch.stack([*(_is_finite(t) for t in checked if t.is_floating_point()), *signs]).all()
    return Term(terms, finite, figures_of(program, passed, start, terms))


def _is_finite(t: Tensor) -> Tensor:
    """Whether all numbers are finite: the largest is, which is nan where one is. A fifth of the time of asking each."""
    return torch.isfinite(t.abs().amax() if t.numel() else t.sum())


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
