"""Shares of a private sum's noise: each client adds a part of it under its masks, so that nobody sees the bare sum.

A sum of m clients must have noise of variance V, and who will be in it is not known when clients add theirs. So a
client adds noise in pieces: by steps j_0 < j_1 < ... from the fewest clients that a sum may have (the threshold) to
those who were asked, pieces of variance V / (j_i - c) - V / (j_i+1 - c), and one of V / (j_last - c). When it is
settled who is in the sum, each client tells the seeds of the pieces up to the largest step that is not above m, and the
server takes these off again (Jiang et al., 2024). Whoever does not tell leaves more noise, never less. Up to c clients
may tell the server what they added: the noise of the others still comes to V.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedbayes.federation.randomness import normals_of
from fedbayes.flower import masks

STEPS = 16  # at most: each is a vector of normals at the client, and most are taken off again at the server
PURPOSE = "noise"


def steps(least: int, clients: int) -> list[int]:
    """Numbers of clients for which there is exactly as much noise as asked for, the fewest and the most among them."""
    if clients - least < STEPS:
        return [*range(least, max(least, clients) + 1)]
    ratio = (clients / least) ** (1 / (STEPS - 1))
    return sorted({least, clients, *(round(least * ratio**i) for i in range(STEPS))})


def deviations(places: Sequence[int], colluding: int, deviation: float) -> list[float]:
    """Of each piece that a client adds: those that may be taken off again, and the last, which never is."""
    shares = [1 / (j - colluding) for j in places]
    return [deviation * math.sqrt(a - b) for a, b in zip(shares, [*shares[1:], 0.0])]


def surplus(places: Sequence[int], alive: int) -> int:
    """How many of the first pieces are too much where so many clients are in the sum."""
    return sum(j <= alive for j in places[1:])


def piece(seed: bytes, at: Sequence[object], number: int, size: int) -> Tensor:
    """The standard normals of a piece, by whoever knows its seed."""
    run, where, attempt = at
    words = masks.mask(seed, masks.purpose(f"{PURPOSE} {number}", str(run), int(str(where)), str(attempt)), size + 1)
    return normals_of(words, size)


def share(seeds: Sequence[bytes], sizes: Sequence[float], at: Sequence[object], size: int) -> Tensor:
    """All that a client adds."""
    total = torch.zeros(size, dtype=torch.float64)
    for number, (seed, deviation) in enumerate(zip(seeds, sizes, strict=True)):
        total += deviation * piece(seed, at, number, size)
    return total


def excess(told: Mapping[int, Sequence[bytes]], sizes: Sequence[float], at: Sequence[object], size: int) -> np.ndarray:
    """What clients told is too much, over all of them: to be taken off the sum."""
    total = torch.zeros(size, dtype=torch.float64)
    for _, seeds in sorted(told.items()):
        total += share(seeds, sizes[: len(seeds)], at, size)
    return total.numpy()
