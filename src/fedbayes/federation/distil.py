"""An ensemble around the clients' networks, for a server that distils it (FedBE: Chen & Chao, 2021)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedbayes.noise import generator
from fedbayes.posterior.values import Gaussian

Place = tuple[int | str, ...]


def gaussian_draws(mean: Tensor, members: Tensor, draws: int, spread: float, place: Place) -> Tensor:
    """Draws [M, P] of N(mean, spread^2 * mean_k (theta_k - mean)^2), one variance per weight."""
    scale = (members - mean).square().mean(0).sqrt()
    return Gaussian(mean, spread * scale).at(torch.randn(draws, len(mean), generator=generator(*place)).to(mean))


def dirichlet_draws(mean: Tensor, members: Tensor, draws: int, spread: float, place: Place) -> Tensor:
    """Draws [M, P] sum_k g_k theta_k with g from a Dirichlet of concentration 1 / spread."""
    concentration = torch.full((draws, len(members)), 1 / spread, dtype=torch.float64)
    # Gamma variates by their logarithms, as small concentrations underflow: log G(a) = log G(a + 1) + log(U) / a.
    random = generator(*place)
    uniform = torch.rand(concentration.shape, generator=random, dtype=torch.float64).clamp(min=1e-300)
    log = torch._standard_gamma(concentration + 1, generator=random).log() + uniform.log() / concentration
    return log.softmax(-1).to(mean) @ members


FITS: dict[str, Callable[[Tensor, Tensor, int, float, Place], Tensor]] = {
    "gaussian": gaussian_draws,
    "dirichlet": dirichlet_draws,
}


def ensemble(mean: Tensor, members: Tensor, *, fit: str, draws: int, spread: float, place: Place) -> Tensor:
    """Weights [M + 1 + K, P]: draws of what was fitted, the mean, and the clients' own [K, P] (FedPPD, algorithm 3)."""
    drawn = FITS[fit](mean, members, draws, spread, place)
    return torch.cat([drawn, mean[None], members])
