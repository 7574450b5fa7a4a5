"""Which rows each step of a client reads: a function of (seed, round, client, phase), the same in every engine."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedbayes.clients.client import Phase
from fedbayes.noise import generator, keyed


class Schedule(NamedTuple):
    """Row numbers [steps, batches, B] of one phase, and which of them are live; None: all are."""

    rows: Tensor
    live: Tensor | None


def taken(data: Tensor, rows: Tensor) -> Tensor:
    """data[rows], whose general index costs ten times as much for a batch of bytes on a CPU."""
    if rows.dim() == 1:
        return data.index_select(0, rows)
    return data.index_select(0, rows.flatten()).unflatten(0, rows.shape)


def steps_in_epoch(n: int, phase: Phase) -> int:
    return math.ceil(n / phase.batch)


def schedule(rows: Tensor, phase: Phase, *address: int | str) -> Schedule:
    """Shuffle a client's rows anew for each epoch and cut them into batches of full shape, the last one padded."""
    if phase.private:
        return _sampled(rows, phase, *address)
    n, steps = len(rows), steps_in_epoch(len(rows), phase)
    random = generator(*address, "batches")
    orders = [torch.randperm(n, generator=random) for _ in range(phase.batches * phase.epochs)]
    padding = steps * phase.batch - n
    table = F.pad(rows[torch.stack(orders)], (0, padding), value=int(rows[0]))

    def shape(t: Tensor) -> Tensor:
        return t.reshape(phase.batches, phase.epochs * steps, phase.batch).movedim(0, 1)

    return Schedule(shape(table), shape((torch.arange(n + padding) < n).expand_as(table)) if padding else None)


def widest(n: int, phase: Phase) -> int:
    """Places that nearly every sample of a private step fits into, and that which is nobody's: 6 deviations more than
    the rows expected."""
    spread = math.sqrt(phase.batch * max(0.0, 1 - phase.batch / n))
    return min(n, math.ceil(phase.batch + 6 * spread + 6)) + 1


def _sampled(rows: Tensor, phase: Phase, *address: int | str) -> Schedule:
    """A Poisson sample of a client's rows for each step: each with probability batch / rows, whichever others are in.

    Samples are padded to the largest of them and one place more, which is nobody's and always live: a step whose sample
    is empty is taken all the same, as its noise must be.
    """
    n, steps = len(rows), phase.epochs * steps_in_epoch(len(rows), phase)
    inside = torch.from_numpy(keyed(*address, "batches").random((steps, n)) < phase.batch / n)
    width = int(inside.sum(1).max())
    first = inside.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    live = F.pad(inside.gather(1, first), (0, 1), value=True)
    table = F.pad(rows[first], (0, 1), value=int(rows[0]))
    return Schedule(table[:, None], live[:, None])
