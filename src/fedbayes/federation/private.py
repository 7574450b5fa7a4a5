"""Private sums: what a client adds is shortened, noise is added to the sum, and nothing else leaves a round.

A rule that is a sum of changes from the broadcast, eta = eta_0 + sum_k w_k (eta_k - eta_0) / W, has a term for each
client whose length can be bounded: all numbers of all parts together, in units of the broadcast. W is the cohort that
is expected, not that which came. Adding or removing one client then changes the sum by `clip` at most, and Gaussian
noise on it is the mechanism that `privacy.accounting` accounts for (McMahan et al., 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.partitioned import PRIVATE_CLIP
from fedbayes.errors import InputError
from fedbayes.federation.changes import ROWS, trained_parts
from fedbayes.federation.program import Mechanism, Order, Outcome, Program, Terms, Transform
from fedbayes.federation.rule import Rule, Statistics
from fedbayes.federation.rules import RULES
from fedbayes.federation.weighting import WEIGHTINGS, Weighting
from fedbayes.model.parts import is_static
from fedbayes.posterior.values import Posterior

KNOWN = ("weight", "count")  # statistics that hold no posterior: of the expected cohort, they are public
FLOOR = 0.1  # of the broadcast's precision, or variance: what noise leaves of it in a round at least
WITHIN = 1 - 1e-6  # of the clip, as options are rounded to float32
Normals = Callable[[int], Tensor]


def floored(name: str, beside: str = "") -> Callable[[Statistics], Statistics]:
    """Where noise has left too little of a positive quantity: a tenth, and the mean of the broadcast beside it."""

    def floor(total: Statistics) -> Statistics:
        least = FLOOR * total["count"]
        low = total[name] < least
        mended = {name: torch.where(low, least, total[name])}
        if beside:
            mended[beside] = torch.where(low, 0.0, total[beside])
        return {**total, **mended}

    return floor


# Rules that are sums of changes, and how what noise has made of their sum is mended: that costs no privacy.
CHANGES: dict[str, Callable[[Statistics], Statistics]] = {
    "fedavg": lambda total: total,
    "nwa": floored("variance"),
    "log_pool": floored("precision", "shift"),
    "conflation": floored("precision", "shift"),
    "dwc": lambda total: total,  # its own floor follows when it is decoded
}


def with_private_sums(program: Program, mechanism: Mechanism, rows: float | None = None) -> Program:
    """The program whose rounds release nothing but a noisy sum of shortened changes; refused where it can't be.

    `rows` is the public bound on the rows for which a client counts.
    """
    _check(program)
    own = program.options
    pooling = program.pooling
    return program._replace(
        options=lambda number: {**own(number), PRIVATE_CLIP: mechanism.clip},
        pooling=pooling._replace(
            channel=(*pooling.channel, SHORTENED),
            weighting=_weighting(program, rows),
            reference=lambda broadcast, options: broadcast,
            private=mechanism,
        ),
    )


def _check(program: Program) -> None:
    """Refuse programs whose rounds are no sum of changes, each with its reason."""
    pooling = program.pooling
    if program.needs_uploads:
        raise InputError("private: the server of this method must see every upload, there is no sum to add noise to")
    if pooling.buckets:
        raise InputError("private: buckets are sums of few clients each, every one with noise of its own; set none")
    if pooling.as_sent and not pooling.clips_itself:
        raise InputError(f"private: {pooling.as_sent}; use fedavg, feduab, fedivon, pvi or bayes_admm")
    if not program.prediction.whole:
        raise InputError("private: the models of this method are personal, and what clients make at home has no noise")
    if any(is_static(part) for part in pooling.rules):
        raise InputError("private: BatchNorm's statistics are no change with a length; use GroupNorm or LayerNorm")
    if pooling.clips_itself and len(trained_parts(program)) > 1:
        raise InputError("private: clients that keep a factor need one for every weight; set points = []")
    start = pooling.reference(program.initial, program.options(0))
    for part, rule in pooling.rules.items():
        name = name_of(rule)
        if name not in CHANGES:
            known = ", ".join(CHANGES)
            raise InputError(f"private: the rule of part {part!r} is no sum of changes with a length; use {known}")
        if type(start[part]) is not type(program.initial[part]):
            raise InputError("private: clients of this method start from points and send normals; use feduab")
        if rule.needs_reference and start[part] is not program.initial[part]:
            raise InputError(f"private: {name} divides by a fixed prior once for each client who came; use log_pool")
    if any(t.name.endswith("counted") for t in pooling.channel):
        raise InputError("private: clip_quantile counts how far clients moved; set clip_change, or leave it out")


def name_of(rule: Rule) -> str:
    """A rule's name in the table; empty for one of the user's own."""
    return next((name for name, known in RULES.items() if known == rule), "")


def _weighting(program: Program, rows: float | None) -> Weighting:
    """Weights of 1 at most: everybody's total must be known without looking."""
    weighting = program.pooling.weighting
    weighted = any(rule.weighted for rule in program.pooling.rules.values())
    if weighting == WEIGHTINGS["equal"] or not weighted:
        return WEIGHTINGS["equal"]
    if weighting != WEIGHTINGS["size"]:
        raise InputError("private: weights must have a bound; set weighting = 'equal', or 'size' with cap_rows")
    if rows is None:
        raise InputError(
            f"private: how many rows clients have is not public; set {ROWS}, for as many at most a client counts, "
            "or weighting = 'equal'"
        )
    return by_share_of(float(rows))


@lru_cache
def by_share_of(rows: float) -> Weighting:
    """Weights by size, 1 for whoever has so many rows."""
    return Weighting(f"share of {rows:g} rows", weigh=lambda q, broadcast, n: (n.double() / rows).clamp(max=1))


def _shortened(terms: Terms, still: Terms, options: Mapping[str, Any]) -> Terms:
    """The change that a client adds, of length `clip` at most over all parts; its weight is left out."""
    changes = {
        part: {key: t - still[part][key] for key, t in statistics.items() if key not in KNOWN}
        for part, statistics in terms.items()
    }
    squares = [t.square().sum() for statistics in changes.values() for t in statistics.values()]
    length = torch.stack(squares).sum().sqrt()
    most = options[PRIVATE_CLIP]
    most = WITHIN * (most.double() if isinstance(most, Tensor) else most)
    factor = torch.where(length > most, most / length, 1.0)
    return {part: {key: factor * t for key, t in statistics.items()} for part, statistics in changes.items()}


SHORTENED = Transform("clip of what is added", terms=_shortened)


def released(program: Program, order: Order, outcome: Outcome, normals: Normals) -> tuple[Order, Outcome]:
    """What leaves a private round: the noisy sum, as if the expected cohort had sent it; not who came, nor how it went.

    A sum to which clients have added their shares of the noise has it already; where nobody sent anything it is added.
    The noisy sum is rounded to float32, so that the last digits of a float64 tell nothing of what was added.
    """
    mechanism = program.pooling.private
    assert mechanism is not None
    reference = program.pooling.reference(order.broadcast, order.options)
    still = {part: one_of(rule, reference[part]) for part, rule in program.pooling.rules.items()}
    numbers = [t for statistics in still.values() for key, t in statistics.items() if key not in KNOWN]
    sizes = [t.numel() for t in numbers]
    strength = 0.0 if outcome.noisy else mechanism.clip * mechanism.noise
    noise = iter((strength * normals(sum(sizes))).split(sizes))
    terms: Terms = {}
    for part, statistics in still.items():
        total = {} if outcome.terms is None else outcome.terms[part]
        terms[part] = {key: mechanism.cohort * t for key, t in statistics.items()}
        for key, t in statistics.items():
            if key not in KNOWN:
                added = total.get(key, torch.zeros_like(t)) + next(noise).to(t).reshape(t.shape)
                terms[part][key] = terms[part][key] + added.float().double()
        terms[part] = CHANGES[name_of(program.pooling.rules[part])](terms[part])
    closed = order._replace(cohort=(), dropped=())
    return closed, Outcome(terms, [], outcome.own, {}, {}, mechanism.cohort, outcome.version)


def one_of(rule: Rule, reference: Posterior) -> Statistics:
    """What one client adds that has not moved."""
    one = torch.ones((), dtype=torch.float64, device=reference.mean.device)
    return rule.encode(reference, one, reference)
