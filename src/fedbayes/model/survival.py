"""Survival as tensor functions: what a row was seen through, Cox's partial likelihood, a baseline in intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.errors import InputError

LEAST, MOST = 1e-4, 0.5  # of the chances of an event in an interval to begin with
EXPECTED = 2.0  # events of one row in one interval, above which its likelihood is bent
log_expected = math.log(EXPECTED)


class Cuts(NamedTuple):
    """Intervals [J] on a device; made once, as a captured graph can't copy from the host."""

    starts: Tensor
    ends: Tensor
    widths: Tensor
    after: Tensor  # an interval's times are later than this: its start, and for the first any

    @classmethod
    def of(cls, times: Sequence[float], device: torch.device | None = None) -> Cuts:
        starts, ends = (torch.tensor(t, device=device) for t in ([0.0, *times[:-1]], list(times)))
        after = torch.tensor([-torch.inf, *times[:-1]], device=device)
        return cls(starts, ends, ends - starts, after)


def spans(time: Tensor, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """For each time [B] and interval (a, b]: whether it lies inside, and the share that has passed by then, [B, J].

    Time 0 lies in the first.
    """
    t = time[..., None]
    inside = (t <= cuts.ends) & (t > cuts.after)
    return inside, ((t - cuts.starts) / cuts.widths).clamp(0, 1)


def seen(target: Tensor, cuts: Cuts) -> tuple[Tensor, Tensor]:
    """The interval of the event, and those that were survived, as 0 and 1 [B, J]."""
    time, event = target.unbind(-1)
    inside, passed = spans(time, cuts)
    dead = event[..., None] > 0
    survived = torch.where(dead, (passed >= 1) & ~inside, passed >= 0.5)
    return (dead & inside).to(target.dtype), survived.to(target.dtype)


def partial_log_likelihood(risk: Tensor, target: Tensor) -> Tensor:
    """For each row [B] with an event: its log-risk less the log of the sum of risks of all who were still there."""
    time, event = target.unbind(-1)
    there = time[..., None, :] >= time[..., :, None]
    at_risk = torch.where(there, risk[..., None, :], -torch.inf).logsumexp(-1)
    return event * (risk - at_risk)


def exponential_log_likelihood(risk: Tensor, log_masses: Tensor, target: Tensor, cuts: Cuts) -> Tensor:
    """Log-likelihood [B] of a hazard that is constant in each interval, up to a constant.

    sum_j event_ij (log m_j + f_i) - share_ij m_j exp f_i, with m_j the hazard of a whole interval. Where a row would
    have more than `EXPECTED` events in an interval, its term goes on with the logarithm's slope: draws of a wide
    posterior have such rows, and a single one would outweigh all others.
    """
    time, event = target.unbind(-1)
    inside, passed = spans(time, cuts)
    log = log_masses + risk[..., None]
    beyond = (log - log_expected).clamp(min=0)
    return (event[..., None] * inside * log - passed * (log - beyond).exp() * (1 + beyond)).sum(-1)


def chances_in(y: Tensor, cuts: Sequence[float]) -> tuple[float, ...]:
    """The chance of an event in each interval among rows [n, 2], without looking at their inputs."""
    inside, passed = spans(y[:, 0].double(), Cuts.of(cuts))
    dead = (inside * y[:, 1:].double()).sum(0)
    rate = (dead + 0.5) / (passed.sum(0) + 1)
    return tuple((1 - (-rate).exp()).clamp(LEAST, MOST).tolist())


def first_chances(chances: Sequence[float] | None, intervals: int) -> Tensor:
    """Chances to begin with, one for each interval; a tenth where none are given."""
    if chances is None:
        return torch.full((intervals,), 0.1)
    first = torch.tensor(list(chances), dtype=torch.float32)
    if first.shape != (intervals,) or not bool(((first > 0) & (first < 1)).all()):
        raise InputError(f"chances: give one in (0, 1) for each of the {intervals} intervals, not {list(chances)[:4]}")
    return first
