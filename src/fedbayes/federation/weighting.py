"""Client weights: equal, by size, by distance from the broadcast, by discrepancy between clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.errors import unknown
from fedbayes.posterior.values import Gaussian, Posterior, map_tensors

# A client that has not moved has KL 0 and would outweigh all others without bound.
SMALLEST = 1e-12


class Weighting(NamedTuple):
    """`weigh(q, broadcast, n)` is computed by the client; `compare(qs)` by the server from all uploads at once."""

    about: str
    weigh: Callable[[Posterior, Posterior, Tensor], Tensor] | None = None
    compare: Callable[[list[Posterior]], Tensor] | None = None


def _distance(q: Posterior, broadcast: Posterior, n: Tensor) -> Tensor:
    """In float64: the KL of a small move is a small difference of large terms."""
    q, broadcast = (map_tensors(value, Tensor.double) for value in (q, broadcast))
    if isinstance(q, Gaussian) and isinstance(broadcast, Gaussian):
        gap = broadcast.kl(q)
    else:
        gap = (q.mean - broadcast.mean).square().sum(-1).sqrt()
    return gap.clamp(min=SMALLEST).reciprocal()


def pairwise_kl(qs: list[Posterior]) -> Tensor:
    """KL(q_k || q_j) for all pairs [K, K], by matrix products instead of a double loop; for points, L2 distance.

    Centred on the mean of means and in float64, so that the squares that cancel are small.
    """
    means = torch.stack([q.mean for q in qs]).double()
    means = means - means.mean(0)
    if not all(isinstance(q, Gaussian) for q in qs):
        return torch.cdist(means, means)
    variances = torch.stack([q.moments()[1] for q in (map_tensors(q, Tensor.double) for q in qs)])
    precisions = variances.reciprocal()
    logs = 0.5 * variances.log().sum(-1)
    quadratic = (variances + means.square()) @ precisions.T - 2 * means @ (means * precisions).T
    quadratic = quadratic + (means.square() * precisions).sum(-1)
    return 0.5 * (quadratic - means.shape[-1]) + logs - logs[:, None]


def _discrepancy(nearest: bool) -> Callable[[list[Posterior]], Tensor]:
    def compare(qs: list[Posterior]) -> Tensor:
        if len(qs) == 1:
            return torch.ones(1, dtype=torch.float64)
        gaps = pairwise_kl(qs).clamp(min=SMALLEST)
        apart = ~torch.eye(len(qs), dtype=torch.bool, device=gaps.device)
        if nearest:
            return torch.where(apart, gaps, torch.inf).amin(1).reciprocal()
        return torch.where(apart, gaps, 0).amax(1).reciprocal()

    return compare


WEIGHTINGS: dict[str, Weighting] = {
    "equal": Weighting(
        "every client counts the same", weigh=lambda q, broadcast, n: torch.ones_like(n, dtype=torch.float64)
    ),
    "size": Weighting("by number of training examples", weigh=lambda q, broadcast, n: n.double()),
    "distance": Weighting("1 / KL(broadcast || client); 1 / L2 distance for points", weigh=_distance),
    "discrepancy": Weighting("1 / KL to the nearest other client, as the formula says", compare=_discrepancy(True)),
    "discrepancy_max": Weighting("1 / KL to the farthest other client, as the name says", compare=_discrepancy(False)),
}


def weighting_named(name: str | Weighting) -> Weighting:
    """A weighting by its name in the table, or itself."""
    if isinstance(name, Weighting):
        return name
    if name not in WEIGHTINGS:
        raise unknown("weighting", name, WEIGHTINGS)
    return WEIGHTINGS[name]
