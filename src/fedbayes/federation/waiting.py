"""How a server waits for clients, and how long they take in simulation, as options. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fedbayes.options import (
    Check,
    at_least_one,
    check_values,
    flag,
    name_in,
    not_negative,
    number,
    option,
    positive,
    record,
    up_to_one,
    whole,
)

SYNCHRONOUS, BUFFERED = "synchronous", "buffered"
SCHEDULES = {
    SYNCHRONOUS: "a round waits for its cohort",
    BUFFERED: "a cohort is always on its way, a round is closed on the first that answer",
}
STALENESS: dict[str, Callable[[int], float]] = {  # by how many closings a client's broadcast is older
    "sqrt": lambda age: 1 / math.sqrt(1 + age),  # Nguyen et al. (2022)
    "inverse": lambda age: 1 / (1 + age),
    "none": lambda age: 1.0,
}
DELAYS = {
    "constant": "all clients take the same time",
    "lognormal": "a client's own speed is lognormal (`spread`)",
    "pareto": "each round of a client has a heavy tail (`tail`)",
    "devices": "classes of devices (`devices`)",
    "labels": "who has the last classes, or large targets, is slow (`slowest`)",
}


def _names_devices(v: Any) -> bool:
    def pair(one: Any) -> bool:
        return isinstance(one, list | tuple) and len(one) == 2 and all(map(positive.holds, one))

    return isinstance(v, list | tuple) and bool(v) and all(map(pair, v))


seconds = positive._replace(words="a positive number of seconds")


@record
class BufferOptions:
    """What a round is closed on where nobody is waited for."""

    buffer: int | None = option(
        "answers that a round is closed on; by default a tenth of the cohort", at_least_one, default=None
    )
    staleness: str | None = option(
        "what a change counts whose broadcast is older: 1 / sqrt(1 + age), 1 / (1 + age), or all of it; by default "
        "sqrt, and none where clients keep what they sent",
        name_in(STALENESS),
        default=None,
    )
    max_staleness: int | None = option(
        "closings after which a client is given up; by default never", whole(0), default=None
    )
    timeout: float | None = option(
        "seconds after which a client is given up, in simulation; by default never", seconds, default=None
    )

    def __post_init__(self) -> None:
        check_values(self)


@record
class DelayOptions:
    """How long clients take, in simulation."""

    compute: float = option("seconds that a client's training takes, times its factor", not_negative, default=10.0)
    network: float = option("seconds that its messages take, times its factor", not_negative, default=1.0)
    by_rows: bool = option("`compute` is of a client of mean size, and grows with rows", flag, default=False)
    jitter: float = option("standard deviation of the log of a client's times", not_negative, default=0.2)
    spread: float = option("standard deviation of the log of clients' factors (lognormal)", not_negative, default=1.0)
    tail: float = option("exponent of the tail of times (pareto)", positive, default=1.5)
    devices: tuple[tuple[float, float], ...] = option(
        "share and factor of each class of devices (devices)",
        Check("a list of [share, factor], both positive", _names_devices),
        default=((0.99, 1.0), (0.01, 50.0)),
    )
    slowest: float = option(
        "factor of a client that has the last class, or the largest target, alone (labels)",
        number("a number of at least 1", lambda v: v >= 1),
        default=20.0,
    )
    awake: float = option("share of the day in which a client is awake, at hours of its own", up_to_one, default=1.0)
    period: float = option("seconds of a day", seconds, default=86400.0)

    def __post_init__(self) -> None:
        check_values(self)
