"""Histograms that tell no row from another: every site adds noise to its counts before they leave it.

Two-sided geometric noise on whole counts, P(n) proportional to exp(-e |n|) (Ghosh et al., 2012). One row in place of
another changes two bins and two totals of classes by one each; half of epsilon is for the bins, half for the totals.
So what a site sends is epsilon-private for each of its rows, whoever reads it, in one calibration.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from fedbayes.errors import InputError

COARSE = 64  # edges that become one: noise adds up over bins
CALIBRATION = "calibration"  # what it is called in a run's account
SURE = 1.645  # deviations of noise that are allowed for: 95 % of its draws
ABLE = ("label_shift", "by_class", "pooled")  # ways whose thresholds follow from what is noised


def check_noised(way: str, score: str, epsilon: float) -> None:
    """Refuse what can't be private, by name."""
    if not 0 < epsilon < float("inf"):
        raise InputError(f"epsilon must be a positive number, not {epsilon}")
    if way not in ABLE:
        raise InputError(f"epsilon: way {way!r} shows what is not noised; take {', '.join(ABLE)}")
    if score == "weighted":
        raise InputError("epsilon: weighted survival scores are no whole counts; take score = 'observed'")


def coarse(edges: Tensor) -> Tensor:
    """Fewer edges, the last among them. Scores are rounded up to them: promises stay, sets grow a little."""
    return torch.cat([edges[:-1:COARSE], edges[-1:]])


def source_of(seed: int | None = None) -> np.random.Generator:
    """Where noise comes from: the system; or a seed, which is NOT PRIVATE, for tests."""
    return np.random.default_rng(int.from_bytes(os.urandom(32), "little") if seed is None else seed)


def geometric(shape: tuple[int, ...], epsilon: float, random: np.random.Generator) -> Tensor:
    """Two-sided geometric noise: the difference of two geometric numbers."""
    chance = -np.expm1(-epsilon)
    return torch.tensor(random.geometric(chance, shape) - random.geometric(chance, shape), dtype=torch.float64)


def variance(epsilon: float) -> float:
    """Of two-sided geometric noise."""
    return float(2 * np.exp(-epsilon) / np.expm1(-epsilon) ** 2)


def noised(counts: Tensor, epsilon: float, random: np.random.Generator) -> Tensor:
    """What a site sends of its counts [C, B + 1]: the bins and the total of each class, with noise: [C, B + 2]."""
    sent = torch.cat([counts, counts.sum(1, keepdim=True)], 1)
    return sent + geometric(tuple(sent.shape), epsilon / 4, random)


def cautious(sums: Tensor, sites: int, epsilon: float) -> Tensor:
    """Counts [C, B + 1] from the sum [C, B + 2] of what so many sites sent: as many high scores as noise may hide.

    Rows at or above a bin are taken for as many as they are with 95 % confidence, rows of a class for as few; so that
    thresholds are larger than without noise, and promises stay. A class whose rows may all be noise has none.
    """
    each = sites * variance(epsilon / 4)
    bins, totals = sums[:, :-1], sums[:, -1:] - SURE * each**0.5
    width = torch.arange(bins.shape[1], 0, -1, dtype=torch.float64)
    above = bins.flip(1).cumsum(1).flip(1) + SURE * (each * width).sqrt()
    above = above.flip(1).cummax(1).values.flip(1).clamp_min(0)
    above = torch.minimum(torch.cat([totals, above[:, 1:]], 1), totals).clamp_min(0)
    rows = sums[:, -1].sum() - SURE * (each * len(sums)) ** 0.5  # one class of many is above its noise by chance
    if not (rows > 0 and above.sum() > 0):
        raise InputError(f"epsilon: all rows of all sites may be noise at {epsilon:g}; raise it, or have more rows")
    return above - torch.cat([above[:, 1:], torch.zeros_like(totals)], 1)


def noised_hits(hits: int, rows: int, epsilon: float, random: np.random.Generator) -> int:
    """How many of a known number of rows are held, with noise: another row changes it by one."""
    return int((hits + geometric((), epsilon, random)).clamp(0, rows))
