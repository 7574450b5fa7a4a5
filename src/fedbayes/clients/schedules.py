"""Learning rates within a round: what multiplies the round's own rate as its epochs go by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Learner, State
from fedbayes.noise import Tape

# The factor after `done` epochs of `epochs`, a fraction within an epoch.
WITHIN: dict[str, Callable[[Tensor, int, Info], Tensor]] = {
    "constant": lambda done, epochs, info: torch.ones_like(done),
    "falling": lambda done, epochs, info: 1 - done / epochs,
    "cosine": lambda done, epochs, info: 0.5 * (1 + (math.pi * done / epochs).cos()),
    # lr_drop^floor(done / lr_drop_every)
    "steps": lambda done, epochs, info: info.options["lr_drop"] ** (done / info.options["lr_drop_every"]).floor(),
    # Welling & Teh (2011): a (b + t)^-gamma, with b one epoch and gamma = .55.
    "polynomial": lambda done, epochs, info: (1 + done) ** -0.55,
}


class Rate(NamedTuple):
    """A learning rate within a round: option `name` times what `within` says after the steps of a learner."""

    name: str
    within: str
    epochs: int

    def __call__(self, of: Learner, info: Info) -> Tensor:
        return info.options[self.name] * WITHIN[self.within](of.steps / info.batches[0], self.epochs, info)


def scheduled(client: Client, within: str) -> Client:
    """A client of one phase whose option `lr` follows a schedule within the round."""
    (phase,) = client.phases

    def step(state: State, b: Any, tape: Tape, info: Info) -> State:
        factor = WITHIN[within](b.step / info.batches[0], phase.epochs, info)
        return phase.step(state, b, tape, info._replace(options={**info.options, "lr": factor * info.options["lr"]}))

    return client._replace(phases=(phase._replace(step=step),))
