"""Randomness with an address: every random choice is a function of (seed, round, client, purpose, step)."""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import NormalDist
from typing import SupportsIndex

import numpy as np
import torch
from torch import Tensor


def address(*parts: int | str) -> int:
    """A stable 63-bit hash of plain ints and strings: the same on every machine, process and Python version."""
    text = "\x1f".join(f"str:{p}" if isinstance(p, str) else f"int:{_whole(p)}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _whole(part: SupportsIndex) -> int:
    try:
        return operator.index(part)
    except TypeError as error:
        raise TypeError(f"an address is made of whole numbers and strings, not {part!r}") from error


class Key(str):
    """The first part of an address that nobody can guess: noise at such an address is drawn of 128 bits of it."""

    __slots__ = ()


def keyed(*parts: int | str) -> np.random.Generator:
    """A generator for an address that begins with a key; PyTorch's own takes 32 bits of a seed, which can be tried."""
    text = "\x1f".join(map(str, parts))
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator that starts at an address."""
    return torch.Generator().manual_seed(address(*parts))


def normals(count: int, *parts: int | str) -> Tensor:
    """`count` standard normals of an address, always drawn in float32 on the CPU so that no engine changes them.

    At an address that begins with a key the first of them are the same, however many there are.
    """
    if parts and isinstance(parts[0], Key):
        return torch.from_numpy(keyed(*parts).standard_normal(count, dtype=np.float32))
    return torch.randn(count, generator=generator(*parts))


@contextmanager
def seeded(*parts: int | str, device: torch.device | None = None) -> Iterator[None]:
    """PyTorch's own generators at an address, and afterwards as they were: the CPU's, and that of a CUDA `device`."""
    generators = [torch.default_generator]
    if device is not None and device.type == "cuda":
        torch.cuda.init()
        place = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[place])
    before = [one.get_state() for one in generators]
    for one in generators:
        one.manual_seed(address(*parts))
    try:
        yield
    finally:
        for one, state in zip(generators, before):
            one.set_state(state)


class Tape:
    """Standard normals read in order. Without noise it only counts, and hands out zeros."""

    def __init__(self, noise: Tensor | None = None) -> None:
        self.noise = noise
        self.used = 0

    def __call__(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """The next normals, shaped as `like` or as `shape`, with like's dtype and device."""
        shape = like.shape if shape is None else shape
        start, self.used = self.used, self.used + math.prod(shape)
        if self.noise is None:
            return like.new_zeros(shape)
        return self.noise[start : self.used].to(like.dtype).reshape(shape)

    def uniform(self, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
        """Uniforms in (0, 1) from the same normals, by their distribution function."""
        return torch.special.ndtr(self(like, shape))

    def at_least(self, p: float, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Whether uniforms from the next normals are at least p; in the precision of the tape."""
        normals = self(like if self.noise is None else self.noise, shape)
        return normals >= (NormalDist().inv_cdf(p) if 0 < p < 1 else math.copysign(math.inf, p - 0.5))
