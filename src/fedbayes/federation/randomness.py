"""Where private noise and private samples come from: the operating system; or a seed, which is not private.

PyTorch's generator on a CPU takes 32 bits of a seed, which can all be tried in an hour. So noise that protects somebody
is made of the system's own bytes, and long streams of it of a key of 256 bits.
"""

from __future__ import annotations

import os
import secrets
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.noise import Key, address

NOT_PRIVATE = "NOT PRIVATE: noise and cohorts come from a seed, so that whoever knows it can take the noise off"


def system_normals(count: int) -> Tensor:
    """Standard normals in float64 of the system's bytes, by Box and Muller: 8 bytes each, to 8.5 deviations."""
    return normals_of(np.frombuffer(os.urandom(16 * -(-count // 2)), np.uint64), count)


def normals_of(words: np.ndarray, count: int) -> Tensor:
    """Standard normals in float64 of so many random words of 64 bits, by Box and Muller; an even number of words."""
    pairs = -(-count // 2)
    bits = words[: 2 * pairs].reshape(2, pairs) >> np.uint64(11)
    radius, angle = (bits + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(radius)), 2 * np.pi * angle
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])


def system_sample(count: int, rate: float) -> list[int]:
    """Each of `count` with probability `rate`, on its own, by the system's bytes."""
    bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)
    return np.flatnonzero((bits + 0.5) * 2.0**-53 < rate).tolist()


def fresh_key() -> Key:
    """A secret of 256 bits: the first part of the address of noise that nobody can draw again."""
    return Key(secrets.token_hex(32))


class Randomness(NamedTuple):
    """Noise and samples of a round: of the system, or of a seed, for tests."""

    seed: int | None = None  # None: the system's

    @property
    def is_private(self) -> bool:
        return self.seed is None

    @property
    def key(self) -> Key:
        """The first part of the addresses of all noise of a run whose rows are private; another in each process."""
        return fresh_key() if self.seed is None else Key(f"seed {self.seed}")

    def normals(self, count: int, number: int, purpose: str = "noise") -> Tensor:
        """Standard normals [count] for a round."""
        if self.seed is None:
            return system_normals(count)
        return torch.from_numpy(_seeded(self.seed, number, purpose).standard_normal(count))

    def sample(self, count: int, rate: float, number: int, purpose: str = "cohort") -> list[int]:
        """Each of `count` with probability `rate`, for a round."""
        if self.seed is None:
            return system_sample(count, rate)
        return np.flatnonzero(_seeded(self.seed, number, purpose).random(count) < rate).tolist()


def _seeded(seed: int, number: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng(address(seed, number, "private", purpose))
