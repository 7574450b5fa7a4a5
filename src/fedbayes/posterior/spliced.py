"""A posterior over some of a network's weights, set into one over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbayes.posterior.layout import Layout


@dataclass(frozen=True)
class Grafted:
    """A value over all weights in which those at the positions `places` [p] are drawn from another value, the graft.

    The classifier's own posterior on a network whose other weights are a point, or have one of their own.
    """

    stock: Any
    graft: Any
    places: Tensor
    layout: Layout | None = None

    @property
    def mean(self) -> Tensor:
        return self._insert(self.stock.mean, self.graft.mean)

    @property
    def normals(self) -> int:
        """How many standard normals stand for one draw: on a stock that is a point, only the graft's."""
        return len(self.places) if self.still else self.stock.mean.shape[-1]

    @property
    def still(self) -> bool:
        """Whether only the graft is drawn."""
        return not hasattr(self.stock, "scale")

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Weight vectors [draws, P]."""
        noise = torch.randn(draws, self.normals, generator=generator, dtype=self.stock.mean.dtype)
        return self.at(noise.to(self.stock.mean.device))

    def at(self, noise: Tensor) -> Tensor:
        """The weights that standard normals [..., normals] stand for; the graft reads those of its own places."""
        if self.still:
            whole = self.stock.mean.expand(*noise.shape[:-1], -1)
            return self._insert(whole, self.graft.at(noise))
        return self._insert(self.stock.at(noise), self.graft.at(noise.index_select(-1, self.places)))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance, where both values have them."""
        (mean, variance), (other, spread) = self.stock.moments(), self.graft.moments()
        return self._insert(mean, other), self._insert(variance, spread)

    def log_prob(self, weights: Tensor) -> Tensor:
        raise TypeError("ask the graft and the stock for their own densities")

    def kl(self, prior: Any) -> Tensor:
        raise TypeError("ask the graft and the stock for their own divergences")

    def naturals(self) -> tuple[Tensor, Tensor]:
        raise TypeError("ask the graft and the stock for their own natural parameters")

    def named(self) -> dict[str, Any]:
        raise TypeError("the graft is a value over several tensors at once; split draws with the layout")

    def _insert(self, whole: Tensor, piece: Tensor) -> Tensor:
        return whole.index_copy(-1, self.places, piece)
