"""What an aggregation rule is: a sum of what clients encode, decoded once; or a function of all posteriors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.federation.moves import Move
from fedbayes.posterior.values import Gaussian, Posterior

Statistics = dict[str, Tensor]
Groups = Sequence[Sequence[int]]  # of posteriors, by place
Together = Callable[[Sequence[Posterior], Posterior], tuple[Posterior, Groups]]
Encode = Callable[[Posterior, Tensor, Posterior], Statistics]
Decode = Callable[[Statistics, Posterior], Posterior]


class Rule(NamedTuple):
    """`encode(q, weight, reference)`, then a sum over clients (a max for the keys in `maxima`), then `decode`.

    A rule that combines in another way overrides `add`, which must not depend on the order.
    """

    encode: Encode
    decode: Decode
    about: str
    takes: tuple[type, ...] = (Gaussian,)
    maxima: tuple[str, ...] = ()
    needs_reference: bool = False  # whether the answer depends on the reference, not only its rounding
    # How terms of an older broadcast become changes to a newer one, so that those of several versions add; None: they
    # don't (`moves.py`).
    change: Callable[[Statistics, Move], Statistics] | None = None
    narrows: bool = False  # whether several copies of one posterior pool to a narrower one
    weighted: bool = True  # whether the answer depends on the clients' weights
    robust: bool = False  # whether a minority of clients can't move the answer at will
    weighs_precision: bool = False  # whether a client counts by the precision that it claims
    report: Callable[[Statistics, Posterior], dict[str, float]] = lambda total, reference: {}
    # Or no sum at all: from all posteriors, their weights [K] and the reference (a median, say). Costs memory
    # O(clients * weights); `encode` and `decode` are not used then.
    combine: Callable[[Sequence[Posterior], Tensor, Posterior], Posterior] | None = None
    together: Together | None = None  # the same where some count as one (`twins.py`)

    def combined(
        self, posteriors: Sequence[Posterior], weights: Tensor, reference: Posterior
    ) -> tuple[Posterior, Groups]:
        """What all posteriors come to where the rule is no sum, and who of them counted as one."""
        if self.together is not None:
            return self.together(posteriors, reference)
        assert self.combine is not None
        return self.combine(posteriors, weights, reference), ()

    def add(self, a: Statistics, b: Statistics) -> Statistics:
        """The statistics of two groups of clients as those of their union."""
        return {key: torch.maximum(a[key], b[key]) if key in self.maxima else a[key] + b[key] for key in a}

    @property
    def adds(self) -> bool:
        """Whether statistics are summed, or combined in a way of the rule's own."""
        return type(self).add is Rule.add

    def stacked(self, rows: Statistics) -> Statistics:
        """The statistics of clients [K, ...] as those of their union."""
        if self.adds:
            return {key: t.amax(0) if key in self.maxima else t.sum(0) for key, t in rows.items()}
        count = len(next(iter(rows.values())))
        return reduce(self.add, ({key: t[k] for key, t in rows.items()} for k in range(count)))

    def add_into(self, total: Statistics, more: Statistics) -> None:
        """The same in the memory of `total`, at the speed at which memory is read and written."""
        for key, t in more.items():
            if key in self.maxima:
                torch.maximum(total[key], t, out=total[key])
            else:
                total[key].add_(t)


def combining(
    combine: Callable[[Sequence[Posterior], Tensor, Posterior], Posterior],
    about: str,
    takes: tuple[type, ...] = (Gaussian,),
    *,
    robust: bool = False,
) -> Rule:
    """A rule that is no sum: `combine(posteriors, weights [K], reference)` sees every upload, as a median does.

    `robust`: a minority of clients can't move it at will, and every client counts once.
    """

    def decode(total: Statistics, reference: Posterior) -> Posterior:
        raise TypeError("this rule combines all posteriors; there is no sum to decode")

    return Rule(
        lambda q, weight, reference: {}, decode, about, takes, weighted=not robust, robust=robust, combine=combine
    )


def added(rule: Rule, total: Statistics | None, more: Statistics) -> Statistics:
    """A running sum with one more term, or sum, in its own memory; the first is copied, for it may be a client's."""
    if total is None:
        return {key: t.clone() for key, t in more.items()}
    if not rule.adds:
        return rule.add(total, more)
    rule.add_into(total, more)
    return total
