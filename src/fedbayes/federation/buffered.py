"""Rounds that do not wait: so many clients are on their way, and a round is closed on the first that answer.

Nguyen et al. (2022), "Federated learning with buffered asynchronous aggregation". A client whose answer waits in the
buffer does not begin anew before the closing: so it never trains twice from one broadcast, and what it keeps is always
that of its last answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from fedbayes.errors import InputError
from fedbayes.federation.cohorts import called
from fedbayes.federation.delays import Delays
from fedbayes.federation.flight import DROPPED, LATE, REASONS, STALE, Flight, Seat, Sent
from fedbayes.federation.program import FederationState, Order, Program
from fedbayes.federation.round import told
from fedbayes.federation.schedule import Plan, Scheduler, Waiting, by_speed
from fedbayes.federation.waiting import BUFFERED, STALENESS, BufferOptions
from fedbayes.noise import address

ASLEEP = 4096  # clients met asleep that are remembered until they wake


def buffer_of(options: BufferOptions, cohort: int) -> int:
    """The answers that a round is closed on."""
    return max(1, cohort // 10) if options.buffer is None else options.buffer


def waiting_of(options: BufferOptions, program: Program, *, clients: int, cohort: int, dropout: float = 0.0) -> Waiting:
    """The options for a program and a federation, checked."""
    buffer = buffer_of(options, cohort)
    if buffer > cohort:
        raise InputError(f"buffer: {buffer} answers can't close a round of {cohort} clients on their way; lower it")
    staleness = options.staleness or ("none" if program.pooling.as_sent else "sqrt")
    if program.pooling.as_sent and staleness != "none":
        raise InputError(f'staleness: {program.pooling.as_sent}; set "none"')
    return Waiting(
        clients, cohort, buffer, STALENESS[staleness], options.max_staleness, options.timeout, float(dropout)
    )


def buffered(waiting: Waiting, *, seed: int, delays: Delays | None = None) -> Scheduler:
    """Rounds in the time of a simulation, by addressed delays; without any, nobody takes time."""

    def plan(program: Program, state: FederationState) -> Plan:
        day = Timeline(waiting, state.flight, state.round, seed, delays)
        day.run()
        options = {**program.options(state.round), **told(program, state.stages)}
        here = Sent(state.broadcast, options, state.version)
        lost = tuple(sorted(seat.client for seat in day.lost))
        answered = [seat.client for seat in day.buffer]
        reported = {
            "clock": day.clock,
            "in_flight": len(day.seats),
            **({} if delays is None else by_speed(delays, answered, state.round, waiting.clients)),
            **({"given_up": _reasons(day.lost)} if lost else {}),
        }
        return planned(state.round, here, day.buffer, day.flight(here), state.flight, lost, reported, waiting.discount)

    return Scheduler(BUFFERED, plan, lambda number: (), waiting)


def planned(
    number: int,
    here: Sent,
    buffer: Iterable[Seat],
    flight: Flight,
    before: Flight,
    lost: tuple[int, ...],
    reported: dict[str, Any],
    discount: Callable[[int], float],
) -> Plan:
    """The plan of a closing on answers: an order for each broadcast that they are of, the oldest first."""
    sent = {**before.sent, number: here}
    groups: dict[int, list[int]] = {}
    for seat in buffer:
        groups.setdefault(seat.round, []).append(seat.client)
    orders = tuple(
        Order(r, tuple(sorted(who)), (), sent[r].broadcast, sent[r].options, sent[r].version)
        for r, who in sorted(groups.items())
    )
    everybody = tuple(sorted(k for order in orders for k in order.cohort))
    closing = Order(number, everybody, lost, here.broadcast, here.options, here.version)
    ages = [here.version - order.version for order in orders for _ in order.cohort]
    aged = {"staleness": {"mean": sum(ages) / len(ages), "most": max(ages)}} if ages else {}
    return Plan(orders, closing, flight, {**reported, **aged}, discount)


def _reasons(lost: Iterable[Seat]) -> dict[str, int]:
    reasons = [REASONS[seat.lost] for seat in lost]
    return {why: reasons.count(why) for why in sorted(set(reasons))}


class Timeline:
    """What happens from one closing to the next: clients begin where seats are free, answer, or are given up."""

    def __init__(self, waiting: Waiting, flight: Flight, number: int, seed: int, delays: Delays | None) -> None:
        self.waiting, self.number, self.seed, self.delays = waiting, number, seed, delays
        self.clock = flight.clock
        self.buffer: list[Seat] = []
        self.lost: list[Seat] = []
        self.seats: list[tuple[float, int, int, Seat]] = []  # a heap by the time at which they end
        bound = waiting.max_staleness
        for seat in flight.seats:
            if bound is not None and number - seat.round > bound:
                self.lost.append(seat._replace(lost=STALE))
            else:
                self._take(seat)
        self.before = flight
        self.busy = {seat.client for *_, seat in self.seats}
        self.line: Iterator[int] = called(number, clients=waiting.clients, seed=seed)
        self.asleep: list[int] = []

    def run(self) -> None:
        """Until the buffer is full, or nobody is left who could answer."""
        while len(self.buffer) < self.waiting.buffer:
            self._fill()
            if not self.seats and not self._wait_for_morning():
                return
            self._next()

    def flight(self, here: Sent) -> Flight:
        """Who is on the way now, and from which broadcasts."""
        seats = tuple(sorted((seat for *_, seat in self.seats), key=lambda s: (s.round, s.client)))
        sent = {**self.before.sent, self.number: here}
        return Flight(self.clock, seats, {r: sent[r] for r in sorted({seat.round for seat in seats})})

    def _next(self) -> None:
        """The next answers, all that come at one moment as long as the buffer has room."""
        first = True
        while self.seats and (first or self.seats[0][0] <= self.clock) and len(self.buffer) < self.waiting.buffer:
            ends, *_, seat = heapq.heappop(self.seats)
            self.clock, first = max(self.clock, ends), False
            (self.lost if seat.lost else self.buffer).append(seat)

    def _fill(self) -> None:
        free = self.waiting.cohort - len(self.seats)
        if free <= 0:
            return
        resting, self.asleep = self.asleep, []
        for k in chain(resting, self.line):  # no generator: leaving it would close the line
            if k in self.busy:
                continue
            if self.delays is not None and not self.delays.awake(k, self.clock):
                self.asleep.append(k)
                if len(self.asleep) > ASLEEP:
                    break
                continue
            self.busy.add(k)
            self._take(self._seat(k))
            free -= 1
            if not free:
                break
        again = {*self.asleep}
        self.asleep += [k for k in resting if k not in self.busy and k not in again]

    def _wait_for_morning(self) -> bool:
        """Wait until the first of those asleep wakes, where nobody is on the way; False: nobody will."""
        if self.delays is None or not self.asleep:
            return False
        self.clock = min(self.delays.wakes(k, self.clock) for k in self.asleep)
        self._fill()
        return bool(self.seats)

    def _seat(self, client: int) -> Seat:
        number, began, limit = self.number, self.clock, self.waiting.timeout
        ends = began if self.delays is None else self.delays.ends(client, number, began)
        if self._drops(client):
            return Seat(client, number, began, began + limit if limit is not None else ends, DROPPED)
        if limit is not None and ends > began + limit:
            return Seat(client, number, began, began + limit, LATE)
        return Seat(client, number, began, ends)

    def _drops(self, client: int) -> bool:
        chance = self.waiting.dropout
        return chance > 0 and address(self.seed, self.number, client, "dropout") < chance * 2**63

    def _take(self, seat: Seat) -> None:
        heapq.heappush(self.seats, (seat.ends, seat.round, seat.client, seat))
