"""Targets of survival: a time and whether the event was seen at it; times at which a curve is cut."""

from collections.abc import Sequence

import torch
from torch import Tensor

INTERVALS = 10


def cut_times(y: Tensor, intervals: int = INTERVALS) -> tuple[float, ...]:
    """Ends of intervals that hold equally many of the events of y [n, 2] = (time, event); the last is the last event.

    Fewer than asked for where there are fewer events. Without any event the longest time is the only one.
    """
    if intervals < 1:
        raise ValueError(f"intervals must be at least 1, not {intervals}")
    events = y[y[:, 1] > 0, 0].double().sort().values
    if not len(events):
        return (max(float(y[:, 0].max()), 1.0),)
    places = (torch.arange(1, intervals + 1) * len(events) / intervals).ceil().long() - 1
    cuts = events[places.clamp(min=0)].unique()
    return tuple(cuts[cuts > 0].tolist()) or (max(float(y[:, 0].max()), 1.0),)


def check_times(times: Sequence[float]) -> tuple[float, ...]:
    """Times that rise from above zero."""
    cuts = tuple(float(t) for t in times)
    if not cuts or cuts[0] <= 0 or any(not a < b for a, b in zip(cuts, (*cuts[1:], float("inf")))):
        raise ValueError(f"times must rise from above 0, not {list(cuts)[:6]}: give the ends of intervals, in order")
    return cuts


def check_targets(y: Tensor, where: str) -> None:
    """Refuse targets that are not pairs of a time from 0 on and an event, 0 or 1."""
    if y.ndim != 2 or y.shape[1] != 2:
        raise ValueError(f"{where}: y has shape {list(y.shape)}, expected [n, 2]: a time and an event (1 seen, 0 not)")
    if bool((y[:, 0] < 0).any()):
        row = int((y[:, 0] < 0).nonzero()[0])
        raise ValueError(f"{where}: time {float(y[row, 0]):g} at row {row} is below 0: drop that row, or shift times")
    if bool(((y[:, 1] != 0) & (y[:, 1] != 1)).any()):
        row = int(((y[:, 1] != 0) & (y[:, 1] != 1)).nonzero()[0])
        raise ValueError(
            f"{where}: event {float(y[row, 1]):g} at row {row} is neither 0 nor 1: are time and event swapped?"
        )
