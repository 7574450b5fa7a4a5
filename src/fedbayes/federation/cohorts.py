"""Who takes part in a round: drawn by its address, dropped out, dealt to buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from numbers import Real

import torch
from torch import Tensor

from fedbayes.errors import InputError
from fedbayes.noise import generator

MANY = 100_000  # clients of whom a round shuffles the whole list
DRAWN = 1024  # clients that are drawn at once


@lru_cache(maxsize=2)  # the next round's is asked for when own state is read ahead, and when it begins
def cohort_of(
    number: int, *, clients: int, cohort: int, seed: int, dropout: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Who takes part in a round, and who was asked but dropped out; known before the round is reached."""
    chosen = torch.tensor([*islice(called(number, clients=clients, seed=seed), cohort)], dtype=torch.int64)
    gone = torch.rand(cohort, generator=generator(seed, number, "dropout")) < dropout
    return tuple(sorted(chosen[~gone].tolist())), tuple(sorted(chosen[gone].tolist()))


def dealt(cohort: Sequence[int], buckets: int, seed: int, number: int) -> dict[int, int]:
    """The bucket of each client of a round, at random, of sizes that differ by one at most; empty without buckets."""
    if not buckets:
        return {}
    line = torch.randperm(len(cohort), generator=generator(seed, number, "buckets")).tolist()
    return {cohort[k]: place % buckets for place, k in enumerate(line)}


def drawn(number: int, *, clients: int, seed: int) -> Tensor:
    """All clients in the order in which a round calls them."""
    return torch.randperm(clients, generator=generator(seed, number, "cohort"))


def called(number: int, *, clients: int, seed: int) -> Iterator[int]:
    """The same one after another; of very many clients only as many are drawn as are asked for."""
    if clients <= MANY:
        line = drawn(number, clients=clients, seed=seed)
        for start in range(0, clients, DRAWN):
            yield from line[start : start + DRAWN].tolist()
        return
    random, seen = generator(seed, number, "cohort"), set[int]()
    while len(seen) < clients:
        for k in torch.randint(clients, (DRAWN,), generator=random).tolist():
            if k not in seen:
                seen.add(k)
                yield k


def cohort_size(cohort: int | float | None, clients: int) -> int:
    """A cohort given as a number (int), a fraction (float in (0, 1]) or everybody (None)."""
    if cohort is None:
        return clients
    number = isinstance(cohort, Real) and not isinstance(cohort, bool)
    if not number or not math.isfinite(cohort) or cohort <= 0:
        raise InputError(f"cohort must be a positive number of clients or a fraction of them, not {cohort!r}")
    if isinstance(cohort, float):
        if cohort > 1:
            raise InputError(f"cohort: a fraction lies in (0, 1], not {cohort}; give a whole number for a count")
        return max(1, round(cohort * clients))
    if cohort > clients:
        raise InputError(f"cohort: {cohort} clients per round were asked for, but there are only {clients}")
    return cohort
