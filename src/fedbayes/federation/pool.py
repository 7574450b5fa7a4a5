"""Posteriors pooled by hand, outside of any federation, with every argument checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedbayes.errors import shown
from fedbayes.federation.robust import MINORITY, OUTLIERS
from fedbayes.federation.rule import Rule, Statistics, added
from fedbayes.federation.rules import rule_named
from fedbayes.options import is_number
from fedbayes.posterior.values import Draws, Gaussian, Point, Posterior, check

# Why a rule takes no weights.
ONCE_ROBUST = "a robust rule counts every posterior once, for who lies may claim any weight; leave weights out"
ONCE_PRODUCT = (
    "this rule is a product of densities, in which every posterior counts once; leave weights out, "
    "or take wc (weighted conflation) or log_pool"
)


def pool(
    rule: str | Rule,
    posteriors: Iterable[Posterior],
    weights: Sequence[float] | Tensor | None = None,
    reference: Posterior | None = None,
    *,
    outliers: float = OUTLIERS,
    mixing: bool = False,
    twins: float = 0.0,
) -> Posterior:
    """Aggregate posteriors with a rule; their statistics are added one at a time.

    `weights` are relative, equal by default; a product of densities (`conflation`, `dwc`) and robust rules take none.
    `reference` is what the clients started from; only `dwc` depends on it. `outliers` is the share of posteriors that
    may be false, for `trimmed_mean` and `multi_krum`; `mixing` takes means of neighbours before a robust rule, and
    before that those nearer than a share `twins` of the usual distance count as one.

    >>> q = pool("ws", [Gaussian(torch.zeros(1), torch.ones(1))] * 3, weights=[0.5, 0.3, 0.2])
    >>> round(float(q.scale**2), 4)
    0.38
    """
    if not is_number(outliers) or not 0 <= outliers < 0.5:
        raise ValueError(f"outliers must be {MINORITY}, not {shown(outliers)}")
    if not is_number(twins) or not 0 <= twins < 1:
        raise ValueError(f"twins must be a share in [0, 1), not {shown(twins)}")
    rule = rule_named(rule, outliers, mixing, twins)
    posteriors = list(posteriors)
    _check_pool(rule, posteriors, reference)
    if weights is None:
        weights = [1.0] * len(posteriors)
    w = torch.as_tensor(weights, dtype=torch.float64)
    if w.shape != (len(posteriors),):
        raise ValueError(f"weights: {len(posteriors)} are needed, one for each posterior, not shape {tuple(w.shape)}")
    if not (torch.isfinite(w).all() and (w >= 0).all() and w.sum() > 0):
        raise ValueError(f"weights must be finite, not negative, and not all zero: {w.tolist()[:8]}")
    if not rule.weighted and not torch.equal(w, w[:1].expand_as(w)):
        raise ValueError(f"weights: {ONCE_ROBUST if rule.robust else ONCE_PRODUCT}")
    if reference is None:
        reference = _middle(posteriors)
    if rule.combine is not None:
        return rule.combined(posteriors, w, reference)[0]
    total: Statistics | None = None
    for q, wk in zip(posteriors, w):
        total = added(rule, total, rule.encode(q, wk, reference))
    assert total is not None
    return rule.decode(total, reference)


def _check_pool(rule: Rule, posteriors: list[Posterior], reference: Posterior | None) -> None:
    if not posteriors:
        raise ValueError("posteriors: there are none to pool")
    if rule.needs_reference and reference is None:
        raise ValueError("reference: this rule divides by what the clients started from; pass reference=q_0")
    for k, q in enumerate(posteriors):
        if not isinstance(q, rule.takes):
            names = " or ".join(t.__name__ for t in rule.takes)
            raise ValueError(f"posterior {k} is a {type(q).__name__}; this rule takes {names}")
        check(q, f"posterior {k}")
        if q.mean.shape != posteriors[0].mean.shape:
            raise ValueError(
                f"posterior {k} has shape {tuple(q.mean.shape)}, the first {tuple(posteriors[0].mean.shape)}"
            )
        if q.layout != posteriors[0].layout:
            raise ValueError(f"posterior {k} speaks of another network than the first (their layouts differ)")
    if reference is not None:
        check(reference, "reference")
        if reference.mean.shape != posteriors[0].mean.shape:
            shapes = tuple(reference.mean.shape), tuple(posteriors[0].mean.shape)
            raise ValueError(f"reference has shape {shapes[0]}, the posteriors {shapes[1]}")
        if rule.needs_reference and not isinstance(reference, (Gaussian, *rule.takes)):
            raise ValueError(f"reference is a {type(reference).__name__}; this rule divides by a Gaussian")


def _middle(posteriors: list[Posterior]) -> Posterior:
    """A reference amid the posteriors, for good rounding: mean of means, geometric mean of scales."""
    first = posteriors[0]
    mean = sum(q.mean.double() for q in posteriors) / len(posteriors)
    assert isinstance(mean, Tensor)
    assert not isinstance(first, Draws)
    if not isinstance(first, Gaussian):
        return Point(mean.to(first.mean.dtype), first.layout)
    logs = sum(q.scale.double().log() for q in posteriors if isinstance(q, Gaussian))
    scale = torch.as_tensor(logs / len(posteriors)).exp()
    return Gaussian(mean.to(first.mean.dtype), scale.to(first.mean.dtype), first.layout)
