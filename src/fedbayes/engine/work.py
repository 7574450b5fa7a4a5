"""What steps are made of: rows, noise, and what their clients know."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Info, Phase
from fedbayes.engine.together import Clients
from fedbayes.federation.program import Store


class Table(NamedTuple):
    """Row numbers and live flags of a phase, [steps, clients, batches, B]; without flags nothing is padding."""

    rows: Tensor
    live: Tensor | None


class Work(NamedTuple):
    """The steps of one phase for the clients of a chunk. `noise(first, steps)` gives [steps, clients, normals]."""

    phase: Phase
    together: Clients
    table: Table
    noise: Callable[[int, int], Tensor]
    info: Info
    store: Store
    seed: int  # of the device's own generator, where the noise is drawn there

    def silence(self, first: int, steps: int) -> Tensor:
        """In place of the noise, where none is to be drawn."""
        return torch.empty(steps, self.together.size, 0, device=self.store.x.device)
