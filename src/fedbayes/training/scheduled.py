"""From the names of a schedule and of delays to a scheduler for a program and its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedbayes.data import Clients
from fedbayes.errors import InputError
from fedbayes.federation.buffered import buffer_of, buffered, waiting_of
from fedbayes.federation.delays import Delays, Population
from fedbayes.federation.program import Program
from fedbayes.federation.schedule import Scheduler, synchronous
from fedbayes.federation.staleness import check_changes, with_debt
from fedbayes.federation.waiting import BUFFERED, BufferOptions, DelayOptions
from fedbayes.options import options_of, record_of

OF_LAW = {"spread": "lognormal", "tail": "pareto", "devices": "devices", "slowest": "labels"}


class Scheduled(NamedTuple):
    """What a user says of it."""

    cohort: int
    seed: int
    dropout: float
    schedule: str
    schedule_options: Mapping[str, Any]
    delays: str | None
    delay_options: Mapping[str, Any]


def is_stale(schedule: str, options: Mapping[str, Any], cohort: int) -> bool:
    """Whether a round may add answers to older broadcasts: it is closed while clients are still on their way."""
    return schedule == BUFFERED and buffer_of(record_of(BufferOptions, options, "schedule_options"), cohort) < cohort


def scheduled(method: str, program: Program, clients: Clients, given: Scheduled) -> tuple[Program, Scheduler]:
    """The scheduler, and the program with what the schedule needs of it."""
    options = record_of(BufferOptions, given.schedule_options, "schedule_options")
    delays = _delays(clients, given)
    seed, size, count = given.seed, given.cohort, len(clients)
    if given.schedule != BUFFERED:
        if given.schedule_options:
            raise InputError('schedule_options: they are of a schedule that does not wait; set schedule = "buffered"')
        return program, synchronous(clients=count, cohort=size, seed=seed, dropout=given.dropout, delays=delays)
    check_changes(method, program)
    waiting = waiting_of(options, program, clients=count, cohort=size, dropout=given.dropout)
    return with_debt(program), buffered(waiting, seed=seed, delays=delays)


def _delays(clients: Clients, given: Scheduled) -> Delays | None:
    table = {k: _pairs(v) if k == "devices" else v for k, v in given.delay_options.items()}
    options = record_of(DelayOptions, table, "delay_options")
    if given.delays is None:
        if given.delay_options:
            raise InputError('delay_options: there are no delays; name some, such as delays = "lognormal"')
        return None
    for name, law in OF_LAW.items():
        if name in table and given.delays != law and table[name] != options_of(DelayOptions)[name].default:
            raise InputError(f'delay_options: {name} is of delays = "{law}", not of "{given.delays}"; leave it out')
    data, held = clients.data, clients.train
    first = data.y.reshape(len(data.y), -1)[:, 0]

    def targets(k: int) -> Tensor:
        return first[clients.train_rows(k)]

    ends = (float(first.min()), float(first.max())) if len(first) else (0.0, 0.0)
    who = Population(lambda k: len(held[k]), len(held.flat) / len(held), targets, ends)
    return Delays(given.delays, options, who, given.seed)


def _pairs(v: Any) -> Any:
    """Lists of a file as the record holds them."""
    return tuple(map(_pairs, v)) if isinstance(v, list | tuple) else v
