"""The `flower` table of an experiment: who must answer, how long is waited, how numbers travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fedbayes.errors import InputError, unknown
from fedbayes.flower.wire import DTYPES, HELD, Coding


@dataclass(frozen=True)
class Settings:
    """How a federation is carried; none of it changes what is trained but `dtype` and `delta`, by their rounding."""

    min_clients: int = 1  # a round closes on what came when at least so many answered
    timeout: float = 600.0  # seconds in which the clients of a round must answer
    wait: float = 120.0  # seconds in which enough nodes must be online
    attempts: int = 3  # how often a round is asked of clients that did not answer while too few did
    quorum: float = 1.0  # the share of answers after which the others have a deadline by what they needed before
    slack: float = 3.0  # that deadline, as a multiple of the longest time measured
    dtype: str = HELD
    delta: bool = False  # an upload travels as its difference from the broadcast
    secure: bool = False  # uploads are added under masks: the server sees their sum, and no client's own
    client_scores: bool | None = None  # scores on the clients' test rows; by default where the server has none

    @property
    def coding(self) -> Coding:
        return Coding(self.dtype, self.delta)


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and v > 0


def _whole(v: Any) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and v >= 1


def _share(v: Any) -> bool:
    return _number(v) and v <= 1


def _factor(v: Any) -> bool:
    return _number(v) and 1 <= v < float("inf")


REQUIREMENTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "min_clients": ("a whole number of at least 1", _whole),
    "timeout": ("a positive number of seconds", _number),
    "wait": ("a positive number of seconds", _number),
    "attempts": ("a whole number of at least 1", _whole),
    "quorum": ("a share above 0, of 1 at most", _share),
    "slack": ("a number of at least 1", _factor),
    "dtype": (f"one of {', '.join(DTYPES)}", lambda v: v in DTYPES),
    "delta": ("true or false", lambda v: isinstance(v, bool)),
    "secure": ("true or false", lambda v: isinstance(v, bool)),
    "client_scores": ("true or false", lambda v: isinstance(v, bool)),
}


def settings_of(table: Mapping[str, Any], cohort: int) -> Settings:
    """The settings of a table, each checked by name and value."""
    for key, v in table.items():
        if key not in REQUIREMENTS:
            raise unknown("key in flower", key, [f.name for f in fields(Settings)])
        words, fine = REQUIREMENTS[key]
        if not fine(v):
            raise InputError(f"flower: {key} must be {words}, not {v!r}")
    made = Settings(**table)
    if made.min_clients > cohort:
        raise InputError(f"flower: min_clients is {made.min_clients}, but a cohort has {cohort} clients")
    if made.secure and cohort < 3:
        raise InputError(f"flower: a secure sum needs at least 3 clients a round, the cohort has {cohort}")
    return made
