"""Twins, uploads whose means are alike, count once: a robust rule sees one posterior for each group of them.

Honest clients train on rows of their own and never upload the same thing; attackers who send one lie many times do, and
where it lies in the middle they are everybody's neighbours. FoolsGold (Fung et al., 2020) weighs clients down whose
directions are alike over rounds; this is simpler, needs one round, and is exact for copies.

Alike is what is near, not what has the same direction: clients with the same kind of rows take the same direction
honestly. Scales are not looked at, for whoever copies a mean can make up any. K^2 distances of K clients over P weights
take O(K^2 P) operations and K^2 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedbayes.federation.robust import Combine, count_of, distances, mixtures
from fedbayes.federation.rule import Groups, Together
from fedbayes.posterior.values import Point, Posterior


def once(rule_for: Callable[[float], Combine], outliers: float, share: float) -> Together:
    """A rule, made for a share of clients that may lie, over groups of twins.

    No two honest clients are twins, so that a group of m has at least m - 1 who lie. Where f of K do, f - (K - G) of
    the G groups are lies alone, and the others as near to an honest client as twins are. Groups of several may be lies.
    """

    def together(posteriors: Sequence[Posterior], reference: Posterior) -> tuple[Posterior, Groups]:
        seen, groups = folded(posteriors, share)
        gone = len(posteriors) - len(seen)
        lying = max(count_of(outliers, len(posteriors)) - gone, len(groups))
        return rule_for(lying / len(seen))(seen, torch.ones(len(seen)), reference), groups

    return together


def folded(posteriors: Sequence[Posterior], share: float) -> tuple[Sequence[Posterior], Groups]:
    """Each group of twins as the mean of their (mean, scale), all others as they are; and who has twins, by group.

    Whole numbers have none.
    """
    if not posteriors[0].mean.is_floating_point():
        return posteriors, ()
    groups = groups_of(distances([Point(q.mean, q.layout) for q in posteriors]), share)
    several = [group for group in groups if len(group) > 1]
    if not several:
        return posteriors, ()
    shares = torch.zeros(len(several), len(posteriors), dtype=torch.float64)
    for row, group in zip(shares, several):
        row[group] = 1 / len(group)
    means = iter(mixtures(shares, posteriors))
    return [posteriors[group[0]] if len(group) == 1 else next(means) for group in groups], several


def groups_of(gaps: Tensor, share: float) -> list[list[int]]:
    """The places of those whose gaps [K, K] are all at most a share of the usual one, in the order of their first.

    The usual gap is the median over clients of their median gap to others: a minority can't make it larger than the
    largest between honest clients. Groups grow nearest first (complete linkage): nobody can be a bridge between two.

    >>> at = torch.tensor([0.0, 9.0, 0.1, 20.0, 0.45, -7.0, 30.0])
    >>> groups_of((at - at[:, None]).abs(), 0.05)
    [[0, 2], [1], [3], [4], [5], [6]]
    """
    groups = [[place] for place in range(len(gaps))]
    if len(gaps) == 1:
        return groups
    most = share * float(gaps.sort(1).values[:, 1:].median(1).values.median())
    apart = gaps.clone().fill_diagonal_(torch.inf)  # the largest gap between two groups, at the place of their first
    while float(apart.min()) <= most:
        one, other = sorted(divmod(int(apart.argmin()), len(gaps)))
        groups[one] += groups[other]
        groups[other] = []
        apart[one] = apart[:, one] = torch.maximum(apart[one], apart[other])
        apart[other] = apart[:, other] = torch.inf
    return [sorted(group) for group in groups if group]
