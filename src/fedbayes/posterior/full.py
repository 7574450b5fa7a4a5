"""The normal with a full covariance, over one part of a network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedbayes.posterior.layout import Layout

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class FullGaussian:
    """A normal with covariance tril tril^T: mean [..., P] and a lower triangle with positive diagonal [..., P, P]."""

    mean: Tensor
    tril: Tensor
    layout: Layout | None = None

    @classmethod
    def from_covariance(cls, mean: Tensor, covariance: Tensor, layout: Layout | None = None) -> FullGaussian:
        return cls(mean, torch.linalg.cholesky(covariance), layout)

    @property
    def covariance(self) -> Tensor:
        return self.tril @ self.tril.mT

    def sample(self, draws: int, generator: torch.Generator | None = None) -> Tensor:
        """Weight vectors [draws, ..., P]."""
        shape = (draws, *self.mean.shape)
        return self.at(torch.randn(shape, generator=generator, dtype=self.mean.dtype, device=self.mean.device))

    def at(self, noise: Tensor) -> Tensor:
        """The weights that standard normals [..., P] stand for: mean + tril noise."""
        if self.tril.dim() == 2:  # one product for all draws
            return self.mean + noise @ self.tril.mT
        return self.mean + (self.tril @ noise[..., None])[..., 0]

    def log_prob(self, weights: Tensor) -> Tensor:
        """log density of weights [..., P]."""
        away = (weights - self.mean)[..., None]
        z = torch.linalg.solve_triangular(self.tril, away, upper=False)[..., 0]
        return -(0.5 * z.square() + 0.5 * LOG_2PI).sum(-1) - self._log_det()

    def kl(self, prior: Any) -> Tensor:
        """KL(self || prior) in nats, for a prior with full or diagonal covariance."""
        if isinstance(prior, FullGaussian):
            ratio = torch.linalg.solve_triangular(prior.tril, self.tril, upper=False)
            away = (self.mean - prior.mean)[..., None]
            shift = torch.linalg.solve_triangular(prior.tril, away, upper=False)[..., 0]
            log_det = prior._log_det()
        else:
            ratio, shift = self.tril / prior.scale[..., None], (self.mean - prior.mean) / prior.scale
            log_det = prior.scale.log().sum(-1)
        squares = ratio.square().sum((-2, -1)) + shift.square().sum(-1)
        return 0.5 * (squares - self.mean.shape[-1]) + log_det - self._log_det()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and marginal variances."""
        return self.mean, self.tril.square().sum(-1)

    def naturals(self) -> tuple[Tensor, Tensor]:
        """precision mean [..., P], and the precision matrix [..., P, P]."""
        precision = torch.cholesky_inverse(self.tril)
        return (precision @ self.mean[..., None])[..., 0], precision

    def named(self) -> dict[str, Any]:
        raise TypeError("weights of a full covariance have no posterior each of their own; split its moments by layout")

    def _log_det(self) -> Tensor:
        """Half the logarithm of the covariance's determinant."""
        return torch.diagonal(self.tril, dim1=-2, dim2=-1).log().sum(-1)


def triangle(within: Tensor, between: Tensor) -> Tensor:
    """The Cholesky factor of within + between [P, P]: one positive definite, one positive but for rounding.

    Where rounding makes the sum indefinite, negative eigenvalues of `between` are dropped first; where `within` itself
    is singular to working precision, its diagonal is then raised by parts of 1e-14, 1e-13, ... until it is not.
    """
    tril, failed = torch.linalg.cholesky_ex(within + between)
    if not failed:
        return tril
    values, vectors = torch.linalg.eigh(0.5 * (between + between.mT))
    clean = within + (vectors * values.clamp(min=0)) @ vectors.mT
    for power in range(-14, -3):
        tril, failed = torch.linalg.cholesky_ex(clean + 10.0**power * clean.diagonal().diag())
        if not failed:
            return tril
    raise ValueError("covariance: this matrix is not positive definite, and not by rounding alone")


def from_precision(precision: Tensor) -> Tensor:
    """The Cholesky factor of the inverse of matrices [..., P, P], without inverting them twice.

    With the matrix in reverse order = K K^T, it is U U^T for the upper triangle U, K reversed; so U^-T is the factor.
    Not a number where a matrix is not positive definite.
    """
    lower, failed = torch.linalg.cholesky_ex(precision.flip((-2, -1)))
    upper = torch.where((failed == 0)[..., None, None], lower, torch.nan).flip((-2, -1))
    one = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    return torch.linalg.solve_triangular(upper, one, upper=True).mT
