"""Observation noise of a regression: what a target's variance holds beyond the disagreement of the networks."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 1e-8  # a variance in standardised units; a target without any variance is predicted with this much
VARIANCES = torch.logspace(-4, 0.5, 136, dtype=torch.float64)  # tried, in units of the mean squared residual
FACTORS = {"calibrated": torch.logspace(-1, 1, 21, dtype=torch.float64)}

# What the residuals are that the noise is fitted to.
NOISE = {
    "likelihood": "the likelihood's own",
    "none": "no noise: the networks' disagreement is all the variance there is",
    "own": "each network on its own client's rows",
    "train": "all networks together on all rows that trained them",
    "heldout": "each client's rows judged by the networks of the other clients",
    "calibrated": "as heldout, and a factor on the networks' disagreement beside the noise",
}


def observation_noise(kind: str, outputs: Tensor, owner: Tensor, y: Tensor) -> Tensor:
    """Noise variance and factor on the disagreement, [2, D], from K networks' outputs [K, n, D] for targets [n, D].

    `owner` [n] says which network was trained on a row. The variance v minimises the NLL of the rows under
    N(mean, factor * disagreement + v): a sum over rows for each v tried, so that clients send one number for each.
    Where there is one network only, it is judged on its own rows.
    """
    outputs, y = outputs.double(), y.double()
    members = len(outputs)
    mine = outputs[owner, torch.arange(len(y), device=y.device)]
    mean, square = outputs.mean(0), outputs.square().mean(0)
    if kind == "own" or members == 1:
        mean, square = mine, mine.square()
    elif kind != "train":
        mean, square = ((members * t - own) / (members - 1) for t, own in ((mean, mine), (square, mine.square())))
    spread = (square - mean.square()).clamp(min=0)
    factors = FACTORS.get(kind, torch.ones(1, dtype=torch.float64)).to(y.device)
    columns = [_fit((y - mean).square()[:, d], spread[:, d], factors) for d in range(y.shape[1])]
    return torch.stack(columns, 1)


def _fit(squares: Tensor, spread: Tensor, factors: Tensor) -> Tensor:
    """The variance and factor with the least sum over rows of [r^2 / t + log t] / 2, t = factor * spread + variance."""
    variances = (VARIANCES.to(squares.device) * squares.mean()).clamp(min=SMALLEST)
    sums = torch.stack([nll_sums(squares, factor * spread, variances) for factor in factors])
    best = int(sums.argmin())
    return torch.stack([variances[best % len(variances)], factors[best // len(variances)]])


def nll_sums(squares: Tensor, spread: Tensor, variances: Tensor) -> Tensor:
    """Sum over rows of the NLL (without its constant) under each variance: what a client sends."""
    total = spread[:, None] + variances
    return 0.5 * (squares[:, None] / total + total.log()).sum(0)
