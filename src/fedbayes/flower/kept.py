"""What a node keeps of its client between rounds: own state that the server has counted, and the one not yet known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from fedbayes.clients.client import Own
from fedbayes.files import write_atomically
from fedbayes.flower.shown import Shown
from fedbayes.runs import sealed
from fedbayes.runs.locks import lock


class Lost(LookupError):
    """The own state that the server counted last is not here."""


class Slot(NamedTuple):
    """A place for one block of bytes."""

    fetch: Callable[[], bytes | None]
    store: Callable[[bytes], None]


def in_memory() -> Slot:
    """A place that ends with the process."""
    block: list[bytes] = []
    return Slot(lambda: block[0] if block else None, lambda new: block.__setitem__(slice(None), [new]))


class Kept:
    """Own state by round, in one block of bytes that something else stores: a file, or Flower's context.

    A client can't know whether its last upload was counted: it may have come late, or the server may have died before
    its checkpoint. So the state after the round counted last stays until the server names a later one.
    """

    def __init__(
        self,
        fetch: Callable[[], bytes | None],
        store: Callable[[bytes], None],
        secret: Slot | None = None,
        shown: Shown | None = None,
        totals: Slot | None = None,
    ) -> None:
        self.fetch = fetch
        self.store = store
        self.secret = in_memory() if secret is None else secret  # of a secure sum, from one letter to the next
        self.shown = Shown(*in_memory()) if shown is None else shown  # secure sums that it helped to show
        self.totals = in_memory() if totals is None else totals  # noised totals of classes that a calibration sent

    def after(self, number: int, device: torch.device) -> Own | None:
        """Own state after a round; None before the first (-1). Lost where there is none of that round."""
        if number < 0:
            return None
        block = self.fetch()
        if block is None:
            raise Lost
        try:
            own: Own = sealed.unpack(block, str(number), device)
        except (KeyError, ValueError) as error:
            raise Lost from error
        return own

    def put(self, number: int, own: Own, counted: int, before: Own | None) -> None:
        """Keep the state after a round beside the one, `before`, after the round that was counted last."""
        rows = {str(number): own}
        if counted >= 0 and before is not None:
            rows[str(counted)] = before
        if own:
            self.store(sealed.pack(rows))


def file_slot(path: Path) -> Slot:
    """A file, written whole or not at all."""
    return Slot(lambda: path.read_bytes() if path.is_file() else None, lambda block: write_atomically(path, block))


def in_file(path: Path, secret: Slot | None = None, shown: Shown | None = None, totals: Slot | None = None) -> Kept:
    """Own state in a file, which outlives the node and the run; secrets of a round are never in a file."""
    return Kept(*file_slot(path), secret, shown, totals)


def shown_in_file(path: Path) -> Shown:
    """Which sums were shown, in a file of all runs: a run that is begun again must not show the difference."""

    @contextmanager
    def alone() -> Iterator[None]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.with_suffix(".lock"), wait=True):
            yield

    return Shown(*file_slot(path), alone)
