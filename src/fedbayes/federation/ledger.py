"""What a run releases of its sites' rows beside its rounds, such as noised histograms: each spends its own epsilon.

Epsilons of releases without a delta add, to one another and to what training has spent (basic composition). Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedbayes.errors import InputError


class Release(NamedTuple):
    """Something that was released, what it spent of every row that it is of, and after which round."""

    what: str
    epsilon: float
    round: int


Check = Callable[[Sequence[Release]], None]  # refuses what would be too much beside the releases before


class Ledger:
    """The releases of a run that lies in memory."""

    def __init__(self) -> None:
        self._releases: list[Release] = []

    def read(self) -> list[Release]:
        """All releases so far."""
        return [*self._releases]

    def add(self, release: Release, check: Check) -> None:
        """Take a release in before it is made, where the check of those before does not refuse it."""
        check(self.read())
        self._releases.append(release)

    @property
    def epsilon(self) -> float:
        """What all of them have spent together."""
        return total(self.read())


class Closed(Ledger):
    """Of a run that is still in training: what it has spent is counted by its rounds alone."""

    def add(self, release: Release, check: Check) -> None:
        raise InputError(f"epsilon: the run is still in training; a {release.what} follows when it has ended")


def total(releases: Sequence[Release]) -> float:
    """What releases have spent together."""
    return sum(release.epsilon for release in releases)
