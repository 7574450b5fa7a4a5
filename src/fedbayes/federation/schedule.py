"""When orders open and what a round closes on. Rounds are closings: each consumes one order, or several."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedbayes.federation.program import FederationState, Order, Program
from fedbayes.federation.round import cohort_of, open_round

SYNCHRONOUS = "synchronous"


class Scheduler(NamedTuple):
    """Decides which orders are run before the next closing.

    The orders of one closing may be of several versions; their sums are added (`round.merged`), and the last order is
    the one that the round is closed by.
    """

    name: str
    orders: Callable[[Program, FederationState], tuple[Order, ...]]
    cohort: Callable[[int], tuple[int, ...]]  # who will take part in a round, known before it is reached


def synchronous(*, clients: int, cohort: int, seed: int, dropout: float = 0.0) -> Scheduler:
    """One order per round, of the newest version, to a cohort that is waited for."""

    def orders(program: Program, state: FederationState) -> tuple[Order, ...]:
        return (open_round(program, state, clients=clients, cohort=cohort, seed=seed, dropout=dropout),)

    def members(number: int) -> tuple[int, ...]:
        return cohort_of(number, clients=clients, cohort=cohort, seed=seed, dropout=dropout)[0]

    return Scheduler(SYNCHRONOUS, orders, members)
