"""When orders open and what a round closes on. Rounds are closings: each consumes one order, or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedbayes.federation.cohorts import cohort_of
from fedbayes.federation.delays import SPEEDS, Delays, shares
from fedbayes.federation.flight import Flight
from fedbayes.federation.program import FederationState, Order, Program
from fedbayes.federation.randomness import Randomness
from fedbayes.federation.round import open_round, told
from fedbayes.federation.waiting import SYNCHRONOUS

POISSON = "poisson"


class Plan(NamedTuple):
    """What is done before the next closing, and what is on its way after it."""

    orders: tuple[Order, ...]  # of one version, or of several: the oldest first
    closing: Order  # of the newest version, to all who answered: the order that the round is closed by
    flight: Flight = Flight()
    told: Mapping[str, Any] = {}  # for the journal
    discount: Callable[[int], float] = lambda age: 1.0  # on changes from a broadcast that is older by so many versions


class Waiting(NamedTuple):
    """Where rounds do not wait: how many are on their way, how many answers close a round, who is given up when."""

    clients: int
    cohort: int
    buffer: int
    discount: Callable[[int], float]
    max_staleness: int | None = None
    timeout: float | None = None
    dropout: float = 0.0


class Scheduler(NamedTuple):
    """Decides which orders are run before the next closing."""

    name: str
    plan: Callable[[Program, FederationState], Plan]
    cohort: Callable[[int], tuple[int, ...]]  # who will take part in a round, where that is known before
    waiting: Waiting | None = None  # where rounds do not wait


def synchronous(
    *, clients: int, cohort: int, seed: int, dropout: float = 0.0, delays: Delays | None = None
) -> Scheduler:
    """One order per round, of the newest version, to a cohort that is waited for."""

    def plan(program: Program, state: FederationState) -> Plan:
        order = open_round(program, state, clients=clients, cohort=cohort, seed=seed, dropout=dropout)
        if delays is None:
            return Plan((order,), order)
        began = state.flight.clock
        clock = max([began, *(delays.ends(k, order.round, began) for k in order.cohort)])
        seen = by_speed(delays, order.cohort, order.round, clients)
        return Plan((order,), order, Flight(clock), {"clock": clock, **seen})

    def members(number: int) -> tuple[int, ...]:
        return cohort_of(number, clients=clients, cohort=cohort, seed=seed, dropout=dropout)[0]

    return Scheduler(SYNCHRONOUS, plan, members)


def by_speed(delays: Delays, who: Sequence[int], number: int, clients: int) -> dict[str, Any]:
    """For the journal: how many of these are in each class of speed; beside the first round the shares of all."""
    classes = [delays.speed(k) for k in who]
    counts = {"speeds": {name: classes.count(name) for name in SPEEDS if name in classes}}
    return counts | ({} if number else {"registered": shares(delays, clients)})


def poisson(*, clients: int, rate: float, random: Randomness, dropout: float = 0.0) -> Scheduler:
    """One order per round, to a cohort in which each client is with probability `rate`, whoever else is there.

    Nobody knows a cohort before its round is opened, and opening it again draws another.
    """

    def plan(program: Program, state: FederationState) -> Plan:
        number = state.round
        chosen = random.sample(clients, rate, number)
        gone = {chosen[k] for k in random.sample(len(chosen), dropout, number, "dropout")} if dropout else set()
        options = {**program.options(number), **told(program, state.stages)}
        staying = tuple(k for k in chosen if k not in gone)
        order = Order(number, staying, tuple(sorted(gone)), state.broadcast, options, state.version)
        return Plan((order,) if staying else (), order)

    return Scheduler(POISSON, plan, lambda number: ())
