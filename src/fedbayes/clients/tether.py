"""FedProx as FedUAB's authors made it: clients pay for their distance to the broadcast, not for its square."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Learner
from fedbayes.clients.optimisers import sgd
from fedbayes.clients.point import LINEAR, PointStep, point
from fedbayes.model.model import Model
from fedbayes.noise import Tape


def tethered(model: Model, epochs: int, batch: int, strength: float = 0.01) -> Client:
    """Points trained by  mean NLL + strength * sum over tensors |w - broadcast|, a norm for each tensor.

    A pull of one length however near a client is: `strength` / 2 times the square fades with the distance.
    """
    plain = PointStep(model, sgd(), epochs, pull=(LINEAR,))

    def step(state: Learner, b: Batch, tape: Tape, info: Info) -> Learner:
        pull = {part: strength * _directions(model, part, v, info) for part, v in state.vectors.items()}
        return plain(state, b, tape, info._replace(constants={**info.constants, LINEAR: pull}))

    client = point(plain, batch)
    return client._replace(phases=(client.phases[0]._replace(step=step),))


def _directions(model: Model, part: str, vector: Tensor, info: Info) -> Tensor:
    """The slope of the distances: each tensor's way from the broadcast at length 1; where it has not moved, nothing."""
    away = model.layouts[part].split(vector - info.broadcast[part].mean)
    return torch.cat([(t / t.square().sum().clamp(min=1e-30).sqrt()).reshape(-1) for t in away.values()])
