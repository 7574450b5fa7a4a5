"""SWAG on a client: the moments of the iterates of any training, collected in the rounds that ask for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Phase, Upload
from fedbayes.noise import Tape
from fedbayes.posterior.values import Gaussian, LowRank

LEAST = 1e-12  # a scale where nothing was collected


class Collected(NamedTuple):
    """Count, mean and sum of squared deviations of the iterates so far, and the last deviations [R, P]."""

    number: Tensor
    mean: Tensor
    square: Tensor
    deviations: Tensor

    def add(self, weights: Tensor, wanted: Tensor) -> Collected:
        """With one more iterate, where it is wanted (Welford's recursion, which does not cancel)."""
        count = self.number + wanted
        away = weights - self.mean
        mean = self.mean + wanted * away / count.clamp(min=1)
        square = self.square + wanted * away * (weights - mean)
        rank = self.deviations.shape[-2]
        if not rank:
            return Collected(count, mean, square, self.deviations)
        place = torch.arange(rank, device=weights.device) == self.number % rank
        here = (place & (wanted > 0))[:, None]
        return Collected(count, mean, square, torch.where(here, weights - mean, self.deviations))

    @property
    def variance(self) -> Tensor:
        return self.square / self.number.clamp(min=1)


class State(NamedTuple):
    """The inner client's state, and what was collected."""

    inner: Any
    collected: Collected


def swag(inner: Client, *, part: str = "model", rank: int = 0) -> Client:
    """Maddox et al. (2019) around a client of one phase: N(mean, variance) of its iterates in `part`.

    Iterates count every `swag_every` steps after a share `swag_start` of the round's, in rounds with `collect` = 1;
    in others the upload is the last iterate with scales near 0. With `rank` R > 0 the covariance is
    (variance + D^T D / (R - 1)) / 2, D the last R deviations from the running mean, and the upload a LowRank.
    Scalar options: those of the inner client, `collect`, `swag_every`, `swag_start`.
    """
    (phase,) = inner.phases

    def start(own: Own, info: Info) -> State:
        begun = inner.start(own, info)
        zero = torch.zeros_like(begun.vectors[part])
        return State(begun, Collected(zero.new_zeros(()), zero, zero, zero.new_zeros(rank, *zero.shape)))

    def step(state: State, b: Any, tape: Tape, info: Info) -> State:
        after = phase.step(state.inner, b, tape, info)
        options, total = info.options, phase.epochs * info.batches[0]
        late = b.step >= (options["swag_start"] * total).floor()
        wanted = late & ((total - 1 - b.step) % options["swag_every"] == 0) & (options["collect"] > 0)
        weights = after.vectors[part]
        return State(after, state.collected.add(weights, wanted.to(weights.dtype)))

    def finish(state: State, info: Info) -> Upload:
        upload, at = inner.finish(state.inner, info), state.collected
        last = upload.parts[part]
        mean = torch.where(at.number > 0, at.mean, last.mean)
        if not rank:
            q = Gaussian(mean, at.variance.sqrt().clamp(min=LEAST), last.layout)
            return upload._replace(parts={**upload.parts, part: q})
        used = at.number.clamp(min=2, max=rank)
        factors = at.deviations * (2 * (used - 1)).rsqrt()
        low = LowRank(mean, (0.5 * at.variance).sqrt().clamp(min=LEAST), factors, last.layout)
        return upload._replace(parts={**upload.parts, part: low})

    return Client(start, (Phase(step, phase.epochs, phase.batch),), finish, inner.first)
