"""A program on the stacked engine: what is known of it from round to round, and the schedules of its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedbayes.engine.batches import Schedule, schedule
from fedbayes.engine.infos import Constants
from fedbayes.engine.loop import Loop
from fedbayes.engine.steps import Steps
from fedbayes.federation.program import Order, Program, Store


class Widths(NamedTuple):
    """How many clients run at once, by what the memory allowed so far.

    On a device that draws its own noise the results depend on it, so that checkpoints keep it.
    """

    chunk: int  # at most
    seats: int = 0  # of a compiled program
    stackable: int = 1  # 0 where vmap can't take the network


class Bound:
    """A program on the stacked engine: its steps, how many of its clients run at once, and what it made before.

    Each has one purpose, and the noise of it.
    """

    def __init__(self, program: Program, alone: Loop, order: Order, *, steps: Steps, widths: Widths) -> None:
        self.program = program
        self.alone = alone  # runs it where vmap can't; its data are the engine's
        self.purpose = order.purpose
        self.at_server = alone.store.of(order) is not alone.store
        self.seed = order.seed(alone.seed)
        self.steps = steps
        self.chunk, self.seats, self.stackable = widths.chunk, widths.seats, bool(widths.stackable)
        self.workers = 1  # most chunks side by side, which share PyTorch's threads
        self.small = False  # whether each has one thread, however many there are
        self.cohorts: Callable[[int], Sequence[int]] | None = None  # who takes part in a round to come
        self.notes: list[str] = []  # fallbacks that were taken
        self.normals: dict[tuple[int, int], int] = {}  # that a step of each phase reads, by the rows of its batches
        self._constants: Constants | None = None
        self._ahead: dict[tuple[int, int, int], Schedule] = {}

    @property
    def store(self) -> Store:
        """The data that its clients train on."""
        store = self.alone.store
        if not self.at_server:
            return store
        assert store.server is not None
        return store.server

    @property
    def widths(self) -> Widths:
        return Widths(self.chunk, self.seats, int(self.stackable))

    def leads(self, bounds: Sequence[Bound]) -> bool:
        """Whether these, this one among them, are those of the last round."""
        return self._constants is not None and self._constants.are_of([bound.program for bound in bounds])

    def constants_with(self, bounds: Sequence[Bound]) -> Constants:
        """The constants of the federations that this one leads; compared once, and kept while they stay the same."""
        if self._constants is None or not self.leads(bounds):
            self._constants = Constants.of([bound.program for bound in bounds])
        return self._constants

    def schedule(self, number: int, client: int, place: int) -> Schedule:
        """The batches of a client's phase in a round, made now or while the device was busy with an earlier one."""
        ready = self._ahead.pop((number, client, place), None)
        if ready is not None:
            return ready
        phase = self.program.client.phases[place]
        return schedule(self.store.rows(client), phase, self.seed, number, client, place)

    def look_ahead(self, number: int) -> None:
        """Make the schedules of a round to come."""
        places = range(len(self.program.client.phases))
        cohort = self.cohorts(number) if self.cohorts else ()
        self._ahead = {(number, k, place): self.schedule(number, k, place) for k in cohort for place in places}
