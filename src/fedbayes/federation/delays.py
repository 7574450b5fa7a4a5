"""How long clients take, in simulation: seconds by address, so that a run that goes on meets the same ones.

A client's round takes  factor * (compute * rows + network) * exp(jitter * noise)  seconds of those in which it is
awake, where `factor` is its own: what a law gives to its number, its device, its luck or its labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from fedbayes.federation.waiting import DelayOptions
from fedbayes.noise import address

SPEEDS = ("fast", "usual", "slow", "very slow")  # below half of the usual time, up to twice, up to ten times, beyond
BOUNDS = (0.5, 2.0, 10.0)
MOMENT = 1e-3  # seconds after which one who wakes is awake, whatever rounding says


def uniform(*where: int | str) -> float:
    """A number in (0, 1) of an address."""
    return (address(*where) + 0.5) / 2**63


def normal(*where: int | str) -> float:
    """A standard normal of an address, by Box and Muller."""
    radius = math.sqrt(-2 * math.log(uniform(*where, "radius")))
    return radius * math.cos(2 * math.pi * uniform(*where, "angle"))


class Population(NamedTuple):
    """What delays may depend on: how many rows a client has, their mean over clients, and the targets of its rows."""

    rows: Callable[[int], int]
    mean_rows: float
    targets: Callable[[int], Tensor]
    ends: tuple[float, float]  # the least and the largest target: the first class and the last


Law = Callable[[int, DelayOptions, int, Population], float]  # the factor of a client, by seed, options and number


def _constant(seed: int, o: DelayOptions, k: int, who: Population) -> float:
    return 1.0


def _lognormal(seed: int, o: DelayOptions, k: int, who: Population) -> float:
    return math.exp(o.spread * normal(seed, k, "speed"))


def _devices(seed: int, o: DelayOptions, k: int, who: Population) -> float:
    place = uniform(seed, k, "speed") * sum(share for share, _ in o.devices)
    for share, factor in o.devices:
        place -= share
        if place < 0:
            return float(factor)
    return float(o.devices[-1][1])


def _labels(seed: int, o: DelayOptions, k: int, who: Population) -> float:
    """From 1 for a client that has the first class alone to `slowest` for one that has the last."""
    rows, (low, high) = who.targets(k), who.ends
    mix = (float(rows.double().mean()) - low) / (high - low) if len(rows) and high > low else 0.0
    return float(o.slowest**mix)


LAWS: dict[str, Law] = {
    "constant": _constant,
    "lognormal": _lognormal,
    "pareto": _constant,  # its luck changes from round to round
    "devices": _devices,
    "labels": _labels,
}


class Delays:
    """The times of all clients: how long a round takes one, and when it is awake."""

    def __init__(self, law: str, options: DelayOptions, who: Population, seed: int) -> None:
        self.law, self.options, self.who, self.seed = law, options, who, seed
        self.factor = lru_cache(maxsize=2**16)(self._factor)

    def _factor(self, client: int) -> float:
        return LAWS[self.law](self.seed, self.options, client, self.who)

    def speed(self, client: int) -> str:
        """The class of a client's own factor."""
        return SPEEDS[sum(self.factor(client) >= bound for bound in BOUNDS)]

    def seconds(self, client: int, number: int) -> float:
        """How long a client takes for a round, while it is awake."""
        o, where = self.options, (self.seed, number, client)
        rows = self.who.rows(client) / self.who.mean_rows if o.by_rows else 1.0
        luck = math.exp(o.jitter * normal(*where, "jitter")) if o.jitter else 1.0
        if self.law == "pareto":
            luck *= uniform(*where, "luck") ** (-1 / o.tail)
        return self.factor(client) * (o.compute * rows + o.network) * luck

    def awake(self, client: int, at: float) -> bool:
        """Whether a client can begin now."""
        return self.options.awake >= 1 or self._hour(client, at) < self.options.awake * self.options.period

    def wakes(self, client: int, at: float) -> float:
        """When a client is awake next; now where it is."""
        return at if self.awake(client, at) else at + self.options.period - self._hour(client, at) + MOMENT

    def ends(self, client: int, number: int, began: float) -> float:
        """When a client that begins now, or as soon as it wakes, is done; it rests while it is asleep."""
        left, at = self.seconds(client, number), self.wakes(client, began)
        if self.options.awake >= 1:
            return at + left
        day = self.options.awake * self.options.period
        first = day - self._hour(client, at)
        if left <= first:
            return at + left
        nights = math.ceil((left - first) / day)
        return at + left + nights * (self.options.period - day)

    def _hour(self, client: int, at: float) -> float:
        """Seconds since a client last woke; its time of day is its own."""
        period = self.options.period
        return (at + uniform(self.seed, client, "time of day") * period) % period


def shares(delays: Delays, clients: int, most: int = 10_000) -> dict[str, float]:
    """The share of clients in each class of speed; of very many, among the first so many."""
    some = min(clients, most)
    classes = [delays.speed(k) for k in range(some)]
    return {name: classes.count(name) / some for name in SPEEDS if name in classes}
