"""Who begins, answers and is given up between two closings, and how long clients take."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedbayes.federation.buffered import Timeline
from fedbayes.federation.cohorts import MANY, called, cohort_of, drawn
from fedbayes.federation.delays import Delays, Population, shares
from fedbayes.federation.flight import DROPPED, LATE, STALE, Flight, Seat, Sent
from fedbayes.federation.schedule import Waiting
from fedbayes.federation.waiting import DELAYS, STALENESS, DelayOptions
from fedbayes.posterior.values import Point

LABELS = torch.tensor([0, 0, 9, 9])


def delays(law: str = "constant", **options: Any) -> Delays:
    who = Population(lambda k: 10 + k, 20.0, lambda k: LABELS[:2] if k % 2 == 0 else LABELS[2:], (0.0, 9.0))
    return Delays(law, DelayOptions(**{"jitter": 0.0, **options}), who, seed=1)


def waiting(**options: Any) -> Waiting:
    return Waiting(**{"clients": 50, "cohort": 10, "buffer": 4, "discount": STALENESS["sqrt"], **options})


def closings(count: int, w: Waiting, law: Delays | None) -> list[Timeline]:
    """Timelines of closings one after another."""
    flight, here, days = Flight(), Sent({}, {}, 0), []
    for number in range(count):
        day = Timeline(w, flight, number, 7, law)
        day.run()
        flight = day.flight(here)
        days.append(day)
    return days


@pytest.mark.parametrize("law", DELAYS)
@pytest.mark.parametrize("awake", [1.0, 0.3])
def test_seats_are_filled_and_nobody_is_twice_on_the_way(law: str, awake: float) -> None:
    w = waiting()
    clock = 0.0
    for number, day in enumerate(closings(30, w, delays(law, jitter=0.3, awake=awake, period=60.0))):
        on_the_way = [seat.client for *_, seat in day.seats]
        answered = [seat.client for seat in day.buffer]
        assert len(answered) == w.buffer
        assert len({*on_the_way, *answered}) == len(on_the_way) + len(answered)
        assert len(on_the_way) <= w.cohort
        assert awake < 1 or len(on_the_way) == w.cohort - 1  # the last to answer has not been followed yet
        assert all(seat.round <= number and seat.began <= seat.ends <= day.clock for seat in day.buffer)
        assert day.clock >= clock
        clock = day.clock


def test_without_delays_the_cohort_is_that_of_a_round() -> None:
    for number, day in enumerate(closings(4, waiting(buffer=10), None)):
        assert sorted(seat.client for seat in day.buffer) == list(
            cohort_of(number, clients=50, cohort=10, seed=7, dropout=0.0)[0]
        )
        assert not day.seats
        assert day.clock == 0


def test_who_is_late_drops_out_or_is_too_old_is_given_up() -> None:
    slow = delays("devices", devices=((0.8, 1.0), (0.2, 100.0)))
    late = closings(20, waiting(timeout=50.0), slow)
    assert {seat.lost for day in late for seat in day.lost} == {LATE}
    assert all(seat.ends - seat.began == pytest.approx(50.0) for day in late for seat in day.lost)
    old = closings(20, waiting(max_staleness=3), slow)
    assert {seat.lost for day in old for seat in day.lost} == {STALE}
    assert all(day.number - seat.round <= 3 for day in old for seat in day.buffer)
    gone = closings(60, waiting(dropout=0.25), delays(jitter=0.5))
    assert {seat.lost for day in gone for seat in day.lost} == {DROPPED}
    lost, answered = (sum(len(getattr(day, name)) for day in gone) for name in ("lost", "buffer"))
    assert lost / (lost + answered) == pytest.approx(0.25, abs=0.08)


def test_a_round_is_closed_on_what_came_where_nobody_else_can() -> None:
    (day,) = closings(1, waiting(clients=5, cohort=5, buffer=5, dropout=0.5), delays())
    assert 0 < len(day.buffer) < 5
    assert not day.seats


def test_fast_clients_answer_more_often_by_their_speed() -> None:
    law = delays("devices", devices=((0.5, 1.0), (0.5, 4.0)))
    days = closings(300, waiting(clients=12, cohort=12, buffer=1), law)
    counts = Counter(seat.client for day in days for seat in day.buffer)
    fast = [counts[k] for k in range(12) if law.factor(k) == 1]
    slow = [counts[k] for k in range(12) if law.factor(k) == 4]
    assert sum(fast) / len(fast) == pytest.approx(4 * sum(slow) / len(slow), rel=0.1)


FACTORS: dict[str, Callable[[list[float]], bool]] = {
    "constant": lambda f: set(f) == {1.0},
    "lognormal": lambda f: abs(sum(map(math.log, f)) / len(f)) < 0.05,
    "pareto": lambda f: set(f) == {1.0},
    "devices": lambda f: set(f) == {1.0, 50.0} and 0.005 < f.count(50.0) / len(f) < 0.015,
    "labels": lambda f: set(f) == {1.0, 20.0},
}


@pytest.mark.parametrize("law", DELAYS)
def test_laws_have_the_distribution_they_say(law: str) -> None:
    made = delays(law)
    assert FACTORS[law]([made.factor(k) for k in range(5000)])
    assert sum(shares(made, 5000).values()) == pytest.approx(1)
    if law == "pareto":
        times = sorted(made.seconds(0, number) / 11 for number in range(5000))
        assert times[0] >= 1
        assert times[2500] == pytest.approx(2 ** (1 / 1.5), rel=0.05)
        assert times[4950] == pytest.approx(100 ** (1 / 1.5), rel=0.3)


def test_rows_and_sleep_take_time() -> None:
    assert delays(by_rows=True).seconds(30, 0) == pytest.approx(10 * 40 / 20 + 1)
    law = delays(awake=0.25, period=40.0)  # ten seconds of each forty
    wakes = law.wakes(3, 100.0)
    assert law.awake(3, wakes)
    began = wakes + 40.0  # a moment after it woke
    assert law.ends(3, 0, began) == pytest.approx(began + 11 + 30, abs=0.01)  # eleven seconds need two days
    assert not law.awake(3, began + 10.5)


def test_of_very_many_clients_few_are_drawn() -> None:
    line = called(3, clients=MANY + 1, seed=0)
    some = [next(line) for _ in range(5000)]
    assert len({*some}) == 5000
    assert max(some) <= MANY
    assert [*called(3, clients=2000, seed=0)] == drawn(3, clients=2000, seed=0).tolist()


def test_a_flight_is_the_same_after_a_checkpoint() -> None:
    sent = {3: Sent({"model": Point(torch.ones(2))}, {"lr": 0.1}, 2)}
    flight = Flight(1.5, (Seat(4, 3, 0.1, 0.7), Seat(5, 3, 0.2, math.inf, LATE)), sent)
    again = Flight.of_row(flight.as_row())
    assert again._replace(sent={}) == flight._replace(sent={})
    assert again.sent[3].options == {"lr": 0.1}
    assert Flight.of_row(Flight().as_row()) == Flight()
