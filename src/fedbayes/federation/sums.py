"""Terms added up: over clients and over sums, in one total or in one for each bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedbayes.federation.program import COUNTS, Program, Terms
from fedbayes.federation.rule import Rule, added
from fedbayes.federation.rules import counted

Totals = dict[int | None, Terms]  # by bucket; without buckets there is one, under None


def rule_of(program: Program, part: str) -> Rule:
    """The rule by which the terms of a part add."""
    return counted if part == COUNTS else program.pooling.rules[part]


def add_terms(program: Program, terms: Iterable[Terms], total: Terms | None = None) -> Terms:
    """The sum over clients, or over sums, in the memory of a running total where there is one.

    Terms may come one at a time: memory O(weights). They themselves are not changed.
    """
    for more in terms:
        before = dict.fromkeys(more) if total is None else total
        total = {part: added(rule_of(program, part), before[part], t) for part, t in more.items()}
    assert total is not None
    return total


def added_to(totals: Totals, program: Program, terms: Terms, bucket: int | None) -> None:
    """Add a client's terms, or a sum, to the running total of its bucket; counts are one sum always."""
    for part, t in terms.items():
        total = totals.setdefault(None if part == COUNTS else bucket, {})
        total[part] = added(rule_of(program, part), total.get(part), t)


def by_bucket(program: Program, terms: Terms, buckets: Mapping[int, int | None]) -> Totals:
    """The sums of stacked terms [K, ...] by bucket, over the places that have one."""
    totals: Totals = {}
    for bucket in dict.fromkeys(buckets.values()):
        rows = [place for place, own in buckets.items() if own == bucket]
        together = rows[-1] - rows[0] + 1 == len(rows)
        # A list of places would be copied to the device for every tensor.
        some = slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows, device=_device(terms))
        sums = {
            part: rule_of(program, part).stacked({key: t[some] for key, t in statistics.items()})
            for part, statistics in terms.items()
        }
        if bucket is None:
            return {None: sums} if sums else {}
        added_to(totals, program, sums, bucket)
    return totals


def _device(terms: Terms) -> torch.device | None:
    return next((t.device for statistics in terms.values() for t in statistics.values()), None)


def apart(totals: Totals) -> tuple[Terms | None, dict[int, Terms]]:
    """Running totals as the one sum, and those of the buckets."""
    return totals.get(None), {bucket: totals[bucket] for bucket in sorted(b for b in totals if b is not None)}
