"""Terms of an older broadcast as changes to a newer one: what a client learned from where it started is added to now.

A client started from q_o, by now the broadcast is q_n. Under a rule that averages, the pooled value is

    value(q_n) + sum_k s_k w_k (value(q_k) - value(q_o of k)) / sum_k w_k,   value: mean, variance, natural parameters,

with s the discount of a client's staleness; under one that multiplies, the same without the division.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.posterior.full import FullGaussian
from fedbayes.posterior.values import Gaussian, Posterior

Statistics = dict[str, Tensor]
FLOOR = 0.01  # of the newer precision, or variance: what is left of it at least where changes of several versions add


class Move(NamedTuple):
    """From an older broadcast to a newer one, of one part: what clients start from, and in whose units terms are."""

    old: Posterior
    old_reference: Posterior
    now: Posterior
    reference: Posterior
    discount: float = 1.0  # on the change


def unit_scale(reference: Posterior) -> Tensor:
    if isinstance(reference, Gaussian):
        return reference.scale.double()
    if isinstance(reference, FullGaussian):
        return reference.moments()[1].double().sqrt()
    return torch.ones_like(reference.mean, dtype=torch.float64)


def moved_mean(t: Statistics, move: Move) -> Statistics:
    """Weighted means about the reference: those of changes of the mean."""
    unit, old_unit = unit_scale(move.reference), unit_scale(move.old_reference)
    change = old_unit * t["mean"] + t["weight"] * (move.old_reference.mean.double() - move.old.mean.double())
    base = t["weight"] * (move.now.mean.double() - move.reference.mean.double())
    return {**t, "mean": (base + move.discount * change) / unit}


def moved_moments(t: Statistics, move: Move) -> Statistics:
    """The same of mean and variance."""
    unit, old_unit = unit_scale(move.reference), unit_scale(move.old_reference)
    old, now = (unit_scale(q).square() for q in (move.old, move.now))
    change = old_unit.square() * t["variance"] - t["weight"] * old
    return {**moved_mean(t, move), "variance": (t["weight"] * now + move.discount * change) / unit.square()}


def moved_naturals(t: Statistics, move: Move) -> Statistics:
    """The same of natural parameters, centred on the newer reference."""
    unit, old_unit = unit_scale(move.reference), unit_scale(move.old_reference)
    centre = move.reference.mean.double()
    # Of all clients together: sum of w / s^2, and of w (m - centre) / s^2.
    precision = t["precision"] / old_unit.square()
    shift = t["shift"] / old_unit + precision * (move.old_reference.mean.double() - centre)
    old, now = (_about(q, centre) for q in (move.old, move.now))
    precision = t["weight"] * now[0] + move.discount * (precision - t["weight"] * old[0])
    shift = t["weight"] * now[1] + move.discount * (shift - t["weight"] * old[1])
    return {**t, "precision": precision * unit.square(), "shift": shift * unit}


def _about(q: Posterior, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Precision, and precision times the mean's distance from a centre."""
    precision = unit_scale(q).square().reciprocal()
    return precision, precision * (q.mean.double() - centre)


def floored(t: Statistics, key: str) -> Statistics:
    """A sum of changes whose precision or variance is at least a share of the newer one's.

    Where the precision is floored the mean stays: its shift is the sum of changes of something that is not there.
    """
    low = t[key] < FLOOR * t["weight"]
    raised = {**t, key: torch.where(low, FLOOR * t["weight"], t[key])}
    if "shift" in t:
        raised["shift"] = torch.where(low, 0.0, t["shift"])
    return raised
