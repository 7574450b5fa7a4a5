"""What is on its way when a round is closed: who trains from which broadcast, since when, and the clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fedbayes.posterior.values import Parts


class Seat(NamedTuple):
    """A client that is on its way: the round whose broadcast it trains from, and its times in seconds."""

    client: int
    round: int
    began: float
    ends: float = 0.0  # when it answers, or is given up; 0 where nobody knows, on other machines
    lost: int = 0  # why it won't answer: an index of `REASONS`; 0: it will


REASONS = ("", "it dropped out", "it did not answer within the time-out", "its broadcast was older than max_staleness")
DROPPED, LATE, STALE = 1, 2, 3


class Sent(NamedTuple):
    """A broadcast that somebody still trains from."""

    broadcast: Parts
    options: Mapping[str, float]
    version: int


class Flight(NamedTuple):
    """Seats that are taken, the broadcasts that they hold by round, and the seconds since the first round began."""

    clock: float = 0.0
    seats: tuple[Seat, ...] = ()
    sent: Mapping[int, Sent] = {}

    def as_row(self) -> dict[str, Any]:
        """As nested plain values and tensors, for a checkpoint."""
        columns = list(zip(*self.seats)) or [()] * len(Seat._fields)
        kinds = (torch.int64, torch.int64, torch.float64, torch.float64, torch.int64)
        return {
            "clock": self.clock,
            "seats": {
                name: torch.tensor(column, dtype=kind) for name, column, kind in zip(Seat._fields, columns, kinds)
            },
            "sent": {
                str(number): {"broadcast": dict(one.broadcast), "options": dict(one.options), "version": one.version}
                for number, one in self.sent.items()
            },
        }

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Flight:
        """The inverse of `as_row`."""
        columns = [row["seats"][name].tolist() for name in Seat._fields]
        sent = {int(n): Sent(one["broadcast"], one["options"], one["version"]) for n, one in row["sent"].items()}
        return cls(row["clock"], tuple(Seat(*values) for values in zip(*columns)), sent)
