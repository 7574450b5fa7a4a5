"""Scores of survival curves [N, T], cut at times [T], for targets [N, 2]: a time, and 1 where the event was seen.

Censoring is allowed for by weights 1 / G, where G(t) is the Kaplan-Meier estimate of not being censored until t; where
an event and a censoring share a time, the event comes first. Pairs are compared, and G is estimated, within the rows
that are given: sums of several sites decode to scores in which patients of different sites do not meet.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.scores import inputs

FLOOR = 1e-12
BLOCK = 2048  # rows that are compared with all others at once


class Steps(NamedTuple):
    """A survival curve that falls at `times` [J] to `values` [J]."""

    times: Tensor
    values: Tensor

    def at(self, t: Tensor) -> Tensor:
        """The share that is left after t."""
        place = torch.searchsorted(self.times, t.to(self.times), right=True)
        return torch.cat([self.values.new_ones(1), self.values])[place]


def kaplan_meier(target: Tensor) -> Steps:
    """The share without an event by time: prod over event times of 1 - events / at risk (Kaplan and Meier, 1958)."""
    time, event = _targets(target).unbind(1)
    times = time[event > 0].unique()
    dead = ((time[None] == times[:, None]) * event).sum(1)
    at_risk = (time[None] >= times[:, None]).double().sum(1)
    return Steps(times, (1 - dead / at_risk).cumprod(0))


def concordance(risk: Tensor, target: Tensor) -> float:
    """Harrell's C: of pairs whose order of events is known, the share in which the earlier had the higher risk.

    Equal risks count half; higher is better, .5 is chance.
    """
    right, pairs = _pairs(inputs.ranked("risk", risk), _targets(target), None)
    if not pairs > 0:
        raise ValueError("no two rows can be compared: there must be an event before another row's time")
    return float(right / pairs)


def concordance_ipcw(
    risk: Tensor, target: Tensor, horizon: float | None = None, censoring: Tensor | None = None
) -> float:
    """Uno's C: Harrell's with a weight 1 / G(t-)^2 for each event, which does not depend on who was censored when.

    Only events before `horizon` count. `censoring` are targets of which G is estimated, by default the same; events
    where it is 0 are refused. Uno et al. (2011). Higher is better.
    """
    target = _targets(target)
    time, event = target.unbind(1)
    known = target if censoring is None else _targets(censoring)
    counted = time < (torch.inf if horizon is None else horizon)
    end = _end(known)
    beyond, events = int((counted & (event > 0) & (time > end)).sum()), int(event.sum())
    if beyond:
        late = f"{beyond} of {events} events come later"
        raise ValueError(f"horizon must be at most {end:g}, the last time in censoring: {late}.")
    weight = counted * uncensored(known, time, before=True).clamp_min(FLOOR) ** -2
    right, pairs = _pairs(inputs.ranked("risk", risk), target, weight)
    if not pairs > 0:
        raise ValueError(
            "no two rows can be compared: there must be an event before another row's time and the horizon"
        )
    return float(right / pairs)


def survival_brier(survival: Tensor, target: Tensor, times: Tensor, censoring: Tensor | None = None) -> Tensor:
    """Brier score [T] at each time, weighted for censoring; lower is better (Graf et al., 1999).

    mean_i [S_i(t)^2 1(event by t) / G(t_i-) + (1 - S_i(t))^2 1(t_i > t) / G(t)]. `censoring` are targets of which G
    is estimated, by default the same; times that would divide by 0 are refused.
    """
    survival, target, times = _curves(survival, target, times)
    known = target if censoring is None else _targets(censoring)
    end = _end(known)
    late = (target[:, 0] > times[:, None]) | ((target[:, 0] > end) & (target[:, 1] > 0))
    lost = times[(times >= end) & late.any(1)]
    if len(lost):
        raise ValueError(f"times must be below {end:g}, the last time in censoring: {float(lost[0]):g} is not.")
    return _brier_terms(survival, target, times, known, torch.ones(len(known), dtype=torch.float64)).mean(0)


def integrated_brier(survival: Tensor, target: Tensor, times: Tensor, censoring: Tensor | None = None) -> float:
    """The mean of the Brier score between the first time and the last, by trapezia; lower is better."""
    by_time = survival_brier(survival, target, times, censoring)
    return float(by_time @ _trapezia(torch.as_tensor(times).double()))


class AtHorizon(NamedTuple):
    """Groups of rows by what was predicted: their number, the mean prediction, and what Kaplan-Meier found."""

    rows: Tensor
    predicted: Tensor
    observed: Tensor

    @property
    def error(self) -> float:
        """The mean distance between predicted and observed survival, by rows; lower is better."""
        return float((self.rows / self.rows.sum()) @ (self.predicted - self.observed).abs())


def survival_calibration(survival: Tensor, target: Tensor, horizon: float, groups: int = 5) -> AtHorizon:
    """Predicted survival [N] at a horizon against the Kaplan-Meier estimate, in equally large groups of rows."""
    survival, target = inputs.real("survival", survival), _targets(target)
    if survival.shape != target[:, 0].shape:
        raise ValueError(f"survival must be [{len(target)}], one chance per row, not {list(survival.shape)}.")
    if not 1 <= groups <= len(target):
        raise ValueError(f"groups must be between 1 and the {len(target)} rows, not {groups}.")
    parts = survival.argsort().tensor_split(groups)
    at = torch.tensor([float(horizon)], dtype=torch.float64)
    return AtHorizon(
        torch.tensor([len(rows) for rows in parts], dtype=torch.float64),
        torch.stack([survival[rows].mean() for rows in parts]),
        torch.cat([kaplan_meier(target[rows]).at(at) for rows in parts]),
    )


def risk_of(survival: Tensor) -> Tensor:
    """A risk [N] to rank by: minus the mean of the curve, the longer one lives the lower."""
    return -survival.double().mean(-1)


def survival_sums(
    survival: Tensor, target: Tensor, mask: Tensor | None = None, *, times: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums over live rows of curves [N, T] and targets [N, 2]; without `times` these are 1 to T.

    `nll` is that of the interval in which the event fell, or of surviving those that a censored row was seen through:
    its last one where it was seen through half of it. G of the Brier score is that of the same rows: it is 0 nowhere
    that a row is weighed, so that no value has to be looked at.
    """
    live = torch.ones(len(survival), dtype=torch.float64, device=survival.device) if mask is None else mask.double()
    cuts = torch.arange(1, survival.shape[1] + 1, device=survival.device) if times is None else times
    survival = torch.where(live[:, None] > 0, survival.double(), 0.5)
    # A row that is not live has a time below all others and no event: it is in no pair, and never at risk.
    time, event = target.double().unbind(1)
    target = torch.stack([torch.where(live > 0, time, -1.0), torch.where(live > 0, event, 0.0)], 1)
    cuts = cuts.to(survival)
    concordant, comparable = _pairs(risk_of(survival), target, None)
    brier = _brier_terms(survival, target, cuts, target, live) @ _trapezia(cuts)
    return {
        "count": live.sum(),
        "concordant": concordant,
        "comparable": comparable,
        "nll": (live * nll_terms(survival, target, cuts)).sum(),
        "brier": (live * brier).sum(),
    }


def nll_terms(survival: Tensor, target: Tensor, times: Tensor) -> Tensor:
    """Negative log-likelihood [N] of the interval of each row's event, or of surviving until it was censored."""
    time, event = target.unbind(1)
    place, share = place_of(time, times)
    padded = torch.cat([torch.ones_like(survival[:, :1]), survival], 1)
    passed = place + ((share >= 0.5) & (place < len(times))).long()
    dies = (event > 0) & (place < len(times))
    here = place.clamp(max=len(times) - 1)[:, None]
    death = padded.gather(1, here) - padded.gather(1, here + 1)
    alive = padded.gather(1, passed.clamp(max=len(times))[:, None])
    return -torch.where(dies, death[:, 0], alive[:, 0]).clamp_min(FLOOR).log()


def place_of(time: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
    """The interval (a, b] of each time, T beyond the last, and the share of it that has passed."""
    place = (time[:, None] > times).sum(1)
    ends = torch.cat([times.new_zeros(1), times])
    here = place.clamp(max=len(times) - 1)
    start, end = ends[here], ends[here + 1]
    return place, ((time - start) / (end - start)).clamp(0, 1)


def survival_scores(sums: dict[str, Tensor], count: float) -> dict[str, float]:
    """Concordance, where any pair could be compared, NLL and integrated Brier score."""
    pairs = float(sums["comparable"])
    return {
        "count": count,
        **({"concordance": float(sums["concordant"]) / pairs} if pairs > 0 else {}),
        "nll": float(sums["nll"]) / count,
        "brier": float(sums["brier"]) / count,
    }


def _pairs(risk: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The weight of pairs in the right order, and of all that can be compared."""
    time, event = target.unbind(1)
    weight = event if weight is None else event * weight
    right, all_pairs = torch.zeros_like(weight).sum(), torch.zeros_like(weight).sum()
    for start in range(0, len(risk), BLOCK):
        rows = slice(start, start + BLOCK)
        mine, when = risk[rows, None], time[rows, None]
        later = ((when < time) | ((when == time) & (event == 0))).double() * weight[rows, None]
        all_pairs = all_pairs + later.sum()
        right = right + (later * ((mine > risk).double() + 0.5 * (mine == risk).double())).sum()
    return right, all_pairs


def uncensored(target: Tensor, at: Tensor, *, before: bool, live: Tensor | None = None) -> Tensor:
    """G: the Kaplan-Meier chance of not being censored until each time of `at`, or just before it."""
    time, event = target.unbind(1)
    live = torch.ones_like(time) if live is None else live
    censored = (1 - event) * live
    beside = _blocks(time, lambda t: ((t == time) * censored).sum(1))  # censored at the same time
    at_risk = _blocks(time, lambda t: ((t < time) * live).sum(1)) + beside
    drop = torch.log1p(-beside / at_risk.clamp_min(1)) / beside.clamp_min(1)
    drop = torch.where(censored > 0, drop, 0.0)
    return _blocks(at, lambda t: torch.where(time < t if before else time <= t, drop, 0.0).sum(1)).exp()


def _end(known: Tensor) -> float:
    """The time from which on G is 0: the last of all, where a row was censored at it."""
    time, event = known.unbind(1)
    last = time.max()
    return float(last) if bool(((time == last) & (event == 0)).any()) else torch.inf


def _blocks(values: Tensor, count: Callable[[Tensor], Tensor]) -> Tensor:
    """What `count` finds for each value, some values [n, 1] at a time: all pairs would not fit into memory."""
    return torch.cat([count(values[start : start + BLOCK, None]) for start in range(0, len(values), BLOCK)])


def _brier_terms(survival: Tensor, target: Tensor, times: Tensor, known: Tensor, live: Tensor) -> Tensor:
    """The terms [N, T] of the Brier score; G is that of the `known` targets."""
    time, event = target.unbind(1)
    own = uncensored(known, time, before=True, live=live)
    there = uncensored(known, times, before=False, live=live)
    dead = ((time[:, None] <= times) * event[:, None]) / own.clamp_min(FLOOR)[:, None]
    alive = (time[:, None] > times).double() / there.clamp_min(FLOOR)
    return survival.square() * dead + (1 - survival).square() * alive


def _trapezia(times: Tensor) -> Tensor:
    """Weights [T] by which a function's values at the times make its mean between them."""
    if len(times) == 1:
        return torch.ones_like(times)
    widths = times.diff()
    ends = torch.cat([widths.new_zeros(1), widths, widths.new_zeros(1)])
    return (ends[1:] + ends[:-1]) / 2 / (times[-1] - times[0])


def _targets(target: Tensor) -> Tensor:
    target = inputs.real("target", target)
    if target.ndim != 2 or target.shape[1] != 2:
        raise ValueError(f"target must be [N, 2], a time and an event, not {list(target.shape)}.")
    if ((target[:, 1] != 0) & (target[:, 1] != 1)).any():
        raise ValueError("events must be 0 or 1. Are time and event swapped?")
    return target


def _curves(survival: Tensor, target: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    survival, target, times = inputs.real("survival", survival), _targets(target), inputs.real("times", times)
    if survival.shape != (len(target), len(times)):
        raise ValueError(f"survival must be [{len(target)}, {len(times)}], rows by times, not {list(survival.shape)}.")
    if (times.diff() <= 0).any():
        raise ValueError("times must rise.")
    return survival, target, times
