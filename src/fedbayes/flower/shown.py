"""Sums that were shown, and whom one more would show: what a node remembers, so that no difference tells on a few.

Two sums of one round over sets of clients that differ in one client give that client's upload to the last digit, for a
client that trains again from the same broadcast uploads the same. So what counts is not a sum but all that follows from
it and from those before: every combination of them that is not nothing must be over at least `LEAST` clients.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import combinations
from typing import NamedTuple

import numpy as np

from fedbayes.flower.wire import Refused
from fedbayes.posterior.values import Parts, flatten_parts

LEAST = 3  # clients below which a sum, or a difference of sums, says too much of one
OFTEN = 8  # different sums of one round, at most
ONCE = "it gave its shares of a private sum of this round already, and nobody gets one sum under two noises"
REMEMBERED = 4096  # sums that a node remembers, of all its runs; the oldest go first

Clients = frozenset[int]


def few(sums: Iterable[Clients]) -> Clients:
    """Clients, fewer than `LEAST`, whom a combination of sums shows apart from all others; none where it is empty.

    A combination is over the clients whose rows of the table (client x sum) it does not take to 0. One over a few
    clients alone exists where the rows of the others have a smaller rank than all.
    """
    table = [*dict.fromkeys(sums)]
    alike: dict[tuple[bool, ...], list[int]] = {}
    for k in sorted(frozenset[int]().union(*table)):
        alike.setdefault(tuple(k in clients for clients in table), []).append(k)
    small = [row for row, clients in alike.items() if len(clients) < LEAST]
    whole = _rank([*alike])
    for number in range(1, LEAST):
        for rows in combinations(small, number):
            clients = frozenset(k for row in rows for k in alike[row])
            if len(clients) < LEAST and _rank([row for row in alike if row not in rows]) < whole:
                return clients
    return frozenset()


def _rank(rows: Sequence[tuple[bool, ...]]) -> int:
    return int(np.linalg.matrix_rank(np.array(rows, dtype=float))) if rows else 0


def names(clients: Iterable[int]) -> str:
    """Clients in words."""
    numbers = sorted(clients)
    return f"client{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def digest(method: str, broadcast: Parts) -> str:
    """A hash of what a client trains from: with the same, it uploads the same."""
    made = hashlib.sha256(method.encode())
    for name, t in sorted(flatten_parts(broadcast)[0].items()):
        a = t.detach().cpu().contiguous().numpy()
        made.update(f"\0{name} {a.dtype} {a.shape}\0".encode())
        made.update(a.tobytes())
    return made.hexdigest()


class Sum(NamedTuple):
    """A sum that a node helped to show: of which round of which run, from which broadcast, over whom."""

    round: str
    broadcast: str
    clients: Clients


class Shown:
    """The sums that a node helped to show, in one block of bytes that something else stores."""

    def __init__(
        self,
        fetch: Callable[[], bytes | None],
        store: Callable[[bytes], None],
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.fetch, self.store, self.alone = fetch, store, alone

    def sums(self) -> list[Sum]:
        block = self.fetch()
        try:
            rows = json.loads(block) if block else []
            return [Sum(at, broadcast, _clients(int(mask, 16))) for at, broadcast, mask in rows]
        except (ValueError, TypeError) as error:
            raise Refused("what it remembers of sums can't be read: see sums-*.json in its state folder") from error

    def has(self, key: str) -> bool:
        """Whether a sum of this round was shown, over whomever."""
        return any(s.round == key for s in self.sums())

    def admit(self, new: Sum, *, once: bool = False) -> None:
        """Remember a sum before anything of it is shown; Refused where it must not be.

        `once`: it is under noise of its own, so that the same sum again is news.
        """
        with self.alone():  # a node may answer two runs at once
            if once and self.has(new.round):
                raise Refused(ONCE)
            before = self.sums()
            near = [s.clients for s in before if s.round == new.round or s.broadcast == new.broadcast]
            if new.clients in near:
                near.remove(new.clients)  # the same sum again says nothing new
            if clients := few([*near, new.clients]):
                raise Refused(
                    f"a sum over {names(new.clients)} beside those of this round that were shown before would show "
                    f"{names(clients)} alone: wait for the clients of the first sum, or begin from another seed"
                )
            if len({*near, new.clients}) > OFTEN:
                raise Refused(f"{OFTEN} sums of this round were shown already")
            self._keep([*before, new])

    def strike(self, key: str, clients: Clients, client: int) -> None:
        """Take a client out of a sum of a round: what would be shown of it is no secret to keep."""
        with self.alone():
            self._keep(
                s._replace(clients=clients - {client}) if (s.round, s.clients) == (key, clients) else s
                for s in self.sums()
            )

    def _keep(self, sums: Iterable[Sum]) -> None:
        rows = [(s.round, s.broadcast, f"{_mask(s.clients):x}") for s in dict.fromkeys(sums)]
        self.store(json.dumps(rows[-REMEMBERED:]).encode())


def _mask(clients: Clients) -> int:
    return sum(1 << k for k in clients)


def _clients(mask: int) -> Clients:
    return frozenset(k for k in range(mask.bit_length()) if mask >> k & 1)
