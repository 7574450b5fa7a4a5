"""The `flower` table of an experiment: who must answer, how long is waited, how numbers travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbayes.errors import InputError
from fedbayes.flower.places import RULES as PLACES
from fedbayes.flower.wire import DTYPES, HELD, Coding
from fedbayes.options import (
    at_least_one,
    check_values,
    flag,
    name_in,
    number,
    option,
    positive,
    record,
    record_of,
    up_to_one,
    whole,
)

seconds = positive._replace(words="a positive number of seconds")


@record
class Settings:
    """How a federation is carried; none of it changes what is trained but `dtype` and `delta`, by their rounding."""

    min_clients: int = option("a round closes on what came when at least so many answered", at_least_one, default=1)
    timeout: float = option("seconds in which the clients of a round must answer", seconds, default=600.0)
    wait: float = option("seconds in which enough nodes must be online", seconds, default=120.0)
    attempts: int = option(
        "how often a round is asked of clients that did not answer while too few did", at_least_one, default=3
    )
    quorum: float = option(
        "share of answers after which the others have a deadline by what they needed before",
        up_to_one._replace(words="a share above 0, of 1 at most"),
        default=1.0,
    )
    slack: float = option(
        "that deadline, as a multiple of the longest time measured",
        number("a number of at least 1", lambda v: v >= 1),
        default=3.0,
    )
    dtype: str = option("how numbers travel", name_in(DTYPES), default=HELD)
    delta: bool = option("an upload travels as its difference from the broadcast", flag, default=False)
    secure: bool = option(
        "uploads are added under masks: the server sees their sum, and no client's own", flag, default=False
    )
    colluding: int = option(
        "clients of a secure sum that may tell the server their shares of a private run's noise: the others' suffice",
        whole(0),
        default=0,
    )
    client_scores: bool | None = option(
        "scores on the clients' test rows; by default where the server has none", flag, default=None
    )
    places: str = option(
        "who may speak for a client: the owner of its key, or of its name", name_in(PLACES), default="keys"
    )
    max_rows: int = option(
        "rows that a client may say it has, to train and to test, where the server does not know them",
        at_least_one,
        default=10**9,
    )
    max_offences: int = option(
        "replies that can't be used, after which a client is put aside; 0: never", whole(0), default=3
    )

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def coding(self) -> Coding:
        return Coding(self.dtype, self.delta)


def checked(table: Mapping[str, Any]) -> Settings:
    """The settings of a table, each checked by itself."""
    return record_of(Settings, table, "flower")


def settings_of(table: Mapping[str, Any], cohort: int) -> Settings:
    """The settings of a table, each checked by name and value."""
    made = checked(table)
    if made.min_clients > cohort:
        raise InputError(f"flower: min_clients is {made.min_clients}, but a cohort has {cohort} clients")
    if made.secure and cohort < 3:
        raise InputError(f"flower: a secure sum needs at least 3 clients a round, the cohort has {cohort}")
    return made
