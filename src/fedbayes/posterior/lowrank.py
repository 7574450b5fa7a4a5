"""A normal distribution over the weights whose covariance is diagonal plus low rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbayes.posterior.layout import Layout


@dataclass(frozen=True)
class LowRank:
    """Normal with covariance diag(scale^2) + factors^T factors: mean and scale [..., P], factors [..., R, P]."""

    mean: Tensor
    scale: Tensor
    factors: Tensor
    layout: Layout | None = None

    @property
    def normals(self) -> int:
        """How many standard normals a draw reads: P + R."""
        return self.mean.shape[-1] + self.factors.shape[-2]

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Weight vectors [draws, P]; the generator is the CPU's."""
        return self.at(torch.randn(draws, self.normals, generator=generator).to(self.mean))

    def at(self, noise: Tensor) -> Tensor:
        """The weights that standard normals [..., P + R] stand for."""
        own, shared = noise.split((self.mean.shape[-1], self.factors.shape[-2]), -1)
        return self.mean + self.scale * own + shared @ self.factors

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each weight."""
        return self.mean, self.scale.square() + self.factors.square().sum(-2)

    def log_prob(self, weights: Tensor) -> Tensor:
        """log density of weights [..., P]: the Woodbury identity, O(R^2 P)."""
        away = (weights - self.mean) / self.scale
        tall = self.factors / self.scale
        small = torch.eye(len(tall), dtype=tall.dtype, device=tall.device) + tall @ tall.T
        root = torch.linalg.cholesky(small)
        shared = torch.linalg.solve_triangular(root, tall @ away[..., None], upper=False).squeeze(-1)
        distance = away.square().sum(-1) - shared.square().sum(-1)
        volume = 2 * self.scale.log().sum(-1) + 2 * root.diagonal().log().sum()
        return -0.5 * (distance + volume + self.mean.shape[-1] * torch.log(torch.tensor(2 * torch.pi)))

    def kl(self, prior: Any) -> Tensor:
        raise TypeError("a LowRank has no KL in closed form here; fit a Gaussian to its moments first")

    def naturals(self) -> tuple[Tensor, Tensor]:
        raise TypeError("a LowRank has no diagonal precision; fit a Gaussian to its moments first")

    def named(self) -> dict[str, Any]:
        raise TypeError("the weights of a LowRank depend on each other across tensors; split draws with the layout")


def mean_covariance(mean: Tensor, qs: Sequence[LowRank], weights: Tensor) -> LowRank:
    """The normal about `mean` whose covariance is the weighted mean of others': their factors side by side."""
    share = (weights / weights.sum()).to(mean)
    scale = torch.stack([w * q.scale.square() for w, q in zip(share, qs)]).sum(0).sqrt()
    factors = torch.cat([w.sqrt() * q.factors for w, q in zip(share, qs)])
    return LowRank(mean, scale, factors, qs[0].layout)
