"""Which rows each step of a client reads: a function of (seed, round, client, phase), the same in every engine."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Phase
from fedbayes.noise import generator


class Schedule(NamedTuple):
    """Row numbers [steps, batches, B] of one phase, and which of them are live; padding repeats row 0."""

    rows: Tensor
    live: Tensor

    @property
    def full(self) -> bool:
        """Whether no row is padding."""
        return bool(self.live.all())


def steps_in_epoch(n: int, phase: Phase) -> int:
    return math.ceil(n / phase.batch)


def schedule(rows: Tensor, phase: Phase, *address: int | str) -> Schedule:
    """Shuffle a client's rows anew for each epoch and cut them into batches of full shape, the last one padded."""
    n, size = len(rows), phase.batch
    steps = steps_in_epoch(n, phase)
    random = generator(*address, "batches")
    table = torch.zeros(phase.batches, phase.epochs, steps * size, dtype=torch.int64)
    for stream in range(phase.batches):
        for epoch in range(phase.epochs):
            table[stream, epoch, :n] = rows[torch.randperm(n, generator=random)]
            table[stream, epoch, n:] = rows[0]
    live = (torch.arange(steps * size) < n).expand_as(table)

    def shape(t: Tensor) -> Tensor:
        return t.reshape(phase.batches, phase.epochs * steps, size).movedim(0, 1).contiguous()

    return Schedule(shape(table), shape(live))
