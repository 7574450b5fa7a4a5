"""What a group of weights sees of a client's rows, kept in its state: one pass, then steps that touch no network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Info
from fedbayes.model.classifier import Group
from fedbayes.noise import Tape


class Cache(NamedTuple):
    """Features (or inputs) and targets of a client's rows in the order of one pass; rows beyond its own are zeros."""

    seen: Tensor
    y: Tensor

    @classmethod
    def empty(cls, group: Group, target: Tensor, rows: int, batch: int) -> Cache:
        """Room for `rows` rows in whole batches; `target` [1, ...] is shaped and typed as a target."""
        room = -(-rows // batch) * batch
        seen = group.blank.new_zeros(room, *group.blank.shape[1:])
        return cls(seen, target.new_zeros(room, *target.shape[1:]))

    def add(self, seen: Tensor, b: Batch) -> Cache:
        """With the rows of a batch, and what is seen of them."""
        places = b.step * len(b.x) + torch.arange(len(b.x), device=b.step.device)
        return Cache(self.seen.index_copy(0, places, seen), self.y.index_copy(0, places, b.y))

    def draw(self, count: int, tape: Tape, info: Info) -> tuple[Tensor, Tensor]:
        """Some of the client's rows at random, with replacement."""
        uniform = tape.uniform(info.n.new_zeros((), dtype=torch.float32), (count,))
        rows = torch.minimum((uniform * info.n).long(), info.n - 1)
        return self.seen.index_select(0, rows), self.y.index_select(0, rows)
