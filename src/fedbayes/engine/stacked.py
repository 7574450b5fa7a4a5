"""The stacked engine: the clients of a round, and the members of a sweep, as one tensor program by vmap.

Clients of unequal size are padded with masked batches and frozen steps; a cohort is cut into chunks of similar length
that fit in memory. Costs the steps of the longest client of each chunk, memory O(chunk * weights).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_structure

from fedbayes.engine.bound import Bound, Widths
from fedbayes.engine.chunks import chunks_of, lead_of, run_chunks
from fedbayes.engine.loop import Loop
from fedbayes.engine.outcomes import Tally
from fedbayes.engine.room import Shortage
from fedbayes.engine.sharing import share_store
from fedbayes.engine.steps import CAPTURED, MODES, Steps
from fedbayes.engine.together import NotStackable
from fedbayes.errors import InputError
from fedbayes.federation.program import (
    AT_SERVER,
    PURPOSES,
    STATISTICS,
    TRAIN,
    Engine,
    Order,
    Outcome,
    OwnState,
    Program,
    Store,
    nothing,
)

# Of attention under vmap, which users can't change.
warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")

OFTEN = (TRAIN, STATISTICS, AT_SERVER)  # purposes of every round, whose steps are worth compiling


class Stacked:
    """Runs the clients of a round at once, in chunks of at most `chunk`.

    `steps` are for the program that it was chosen for. What is compiled is shared with other programs where their steps
    are the same; others are compiled if they are run in every round; beside a graph they are captured as they are.
    """

    name = "stacked"

    def __init__(
        self,
        program: Program,
        store: Store,
        *,
        seed: int | str,
        chunk: int | None = None,
        steps: Steps | None = None,
        cohorts: Callable[[int], Sequence[int]] | None = None,
        workers: int = 1,
        small: bool = False,
    ) -> None:
        self.seed = seed
        self.chunk = chunk or default_chunk(program, store)
        self.steps = steps or Steps()
        self.workers = workers
        self.small = small
        self._alone = Loop(store, seed=seed, again=self.steps.again, small=small)
        self._trained = program
        self._cohorts = cohorts  # who takes part in a round to come; lets a device work while the host prepares it
        self._bounds: dict[int, Bound] = {}  # by program, which a bound keeps alive
        self._widths: dict[str, Widths] = {}  # of a run before, by purpose

    @property
    def store(self) -> Store:
        return self._alone.store

    @store.setter
    def store(self, store: Store) -> None:
        self._alone.store = store

    def run(self, program: Program, order: Order, own: OwnState, after: Callable[[], None] = nothing) -> Outcome:
        """Let the clients of one order contribute; `after` is called once for each when its chunk is done."""
        return run_all([self], [program], [order], [own], after)[0]

    def take_notes(self) -> list[str]:
        """Fallbacks taken since this was last asked."""
        notes: list[str] = []
        sources: list[Bound | Steps] = [*self._bounds.values(), *self._all_steps()]
        for source in sources:
            notes += source.notes
            source.notes = []
        return notes

    def _all_steps(self) -> list[Steps]:
        return list({id(steps): steps for steps in (*(b.steps for b in self._bounds.values()), self.steps)}.values())

    def look(self, number: int) -> None:
        """Before the clients of a round begin: use what has been compiled beside the rounds before."""
        for steps in self._all_steps():
            steps.look(number)

    def end(self) -> None:
        """Stop compiling beside the run."""
        for steps in self._all_steps():
            steps.end()

    @property
    def widths(self) -> dict[str, Widths]:
        """How many clients run at once by now, for each purpose: a run that is resumed goes on with it."""
        default = dict.fromkeys(PURPOSES, Widths(self.chunk))
        return default | self._widths | {bound.purpose: bound.widths for bound in self._bounds.values()}

    def go_on_with(self, widths: Mapping[str, Sequence[int]]) -> None:
        """Run as many clients at once as a run before, whatever memory is free now."""
        self._widths = {purpose: Widths(*three) for purpose, three in widths.items()}
        self._bounds = {}

    def bound(self, program: Program, order: Order) -> Bound:
        """The program on this engine, made at its first order."""
        if id(program) not in self._bounds:
            widths = self._widths.get(order.purpose, Widths(self.chunk))
            steps = self._steps(program, order.purpose)
            bound = Bound(program, self._alone, order, steps=steps, widths=widths)
            bound.workers, bound.small = self.workers, self.small
            bound.cohorts = self._cohorts if order.purpose == TRAIN else None
            self._bounds[id(program)] = bound
        return self._bounds[id(program)]

    def _steps(self, program: Program, purpose: str) -> Steps:
        known = {id(phase.step) for phase in self._trained.client.phases}
        if all(id(phase.step) in known for phase in program.client.phases):
            return self.steps
        few = CAPTURED if self.steps.mode in ("graph", CAPTURED) else "eager"
        mode = self.steps.mode if purpose in OFTEN and self.steps.mode in MODES else few
        soon = self.steps.soon and mode in ("graph", "compiled")
        return Steps(mode, again=self.steps.again, soon=soon)


@contextmanager
def compiling_beside(engines: Sequence[Engine]) -> Iterator[None]:
    """While it is open, a run goes on; however it ends, so does what was compiled beside it."""
    try:
        yield
    finally:
        for engine in engines:
            if isinstance(engine, Stacked):
                engine.end()


CACHED = 2**20  # weights of all clients of a chunk on a CPU: of more, each pass over them waits for memory


def default_chunk(program: Program, store: Store) -> int:
    """Clients at once so that their states (about ten copies of the broadcast each) fit in memory, on a CPU in caches.

    Private steps have a gradient for each row beside them.
    """
    copies = 10 + 2 * max((phase.batch for phase in program.client.phases if phase.private), default=0)
    weights = sum(t.numel() * t.element_size() for t in tree_leaves(program.initial))
    on_gpu = store.x.device.type == "cuda"
    room = torch.cuda.mem_get_info(store.x.device)[0] // 2 if on_gpu else 2 * 1024**3
    fit = int(room // (copies * weights + 1))
    return max(1, fit if on_gpu else min(fit, CACHED // weights_of(program)))


def weights_of(program: Program) -> int:
    """How many weights a client trains."""
    return sum(layout.size for layout in program.model.trainable.values())


def run_all(
    engines: Sequence[Engine],
    programs: Sequence[Program],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    after: Callable[[], None] = nothing,
) -> list[Outcome]:
    """One round of one federation, or of several of one method (the members of a sweep), as one program if it can be.

    Network, client and data are the same for all; seeds, splits, constants, scalar options, rules and weightings may
    differ. Federations whose broadcasts are of another kind by now (a rule made normals of points) are programs of
    their own. Out of memory: smaller chunks. What vmap can't take: the loop engine. Each says so in its notes.
    """
    stacked = [engine for engine in engines if isinstance(engine, Stacked)]
    if len(stacked) < len(engines):
        return [e.run(program, order, own, after) for e, program, order, own in zip(engines, programs, orders, owns)]
    bounds = [engine.bound(program, order) for engine, program, order in zip(stacked, programs, orders)]
    for engine, order in zip(stacked, orders):
        if order.purpose == TRAIN:
            engine.look(order.round + 1)
    outcomes: dict[int, Outcome] = {}
    for group in _alike(orders):
        if not lead_of([bounds[m] for m in group]).leads([bounds[m] for m in group]):
            share_store([stacked[m] for m in group], [programs[m] for m in group])
        some = [bounds[m] for m in group], [orders[m] for m in group], [owns[m] for m in group]
        outcomes |= zip(group, _run_group(*some, after))
    return [outcomes[m] for m in range(len(engines))]


def _run_group(
    bounds: Sequence[Bound], orders: Sequence[Order], owns: Sequence[OwnState], after: Callable[[], None]
) -> list[Outcome]:
    """The outcomes of orders that can be stacked, by the widest chunks that fit, or by the loop."""
    lead = lead_of(bounds)
    while lead.stackable:
        try:
            return run_together(bounds, orders, owns, after)
        except torch.OutOfMemoryError as error:
            known = isinstance(error, Shortage)
            if lead.chunk == 1:
                raise (InputError(f"{error}; or lower batch or draws") if known else error) from None
            fewer = max(1, min(lead.chunk, sum(len(order.cohort) for order in orders)) // 2)
            fewer = max(1, min(fewer, error.fits)) if isinstance(error, Shortage) else fewer
            words = str(error) if known else "out of memory"
            lead.notes.append(f"{words}: {fewer} client{'s' * (fewer > 1)} at once from now on")
            for bound in bounds:
                bound.chunk, bound.seats = fewer, 0
        except NotStackable as error:
            lead.notes.append(f"engine loop instead of stacked, vmap can't take this network: {error}")
            for bound in bounds:
                bound.stackable = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return [bound.alone.run(bound.program, order, own, after) for bound, order, own in zip(bounds, orders, owns)]


def run_together(
    bounds: Sequence[Bound],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    after: Callable[[], None] = nothing,
) -> list[Outcome]:
    """The orders as one program, without a way out. Memory: a chunk's clients, and one sum for each federation."""
    tallies = [Tally(bound.program, order.version) for bound, order in zip(bounds, orders)]
    chunks = list(chunks_of(bounds, orders))
    for seats, brought in zip(chunks, run_chunks(bounds, orders, owns, chunks)):
        for member, outcome in brought:
            tallies[member].add(outcome)
        for seat in seats:
            if not seat.ghost:
                after()
    return [tally.outcome() for tally in tallies]


def _alike(orders: Sequence[Order]) -> list[list[int]]:
    """Which orders have broadcasts of the same kind and shape, and can be stacked."""
    groups: list[tuple[Any, list[int]]] = []
    for m, order in enumerate(orders):
        kind = tree_structure(order.broadcast)
        members = next((members for other, members in groups if other == kind), None)
        if members is None:
            groups.append((kind, [m]))
        else:
            members.append(m)
    return [members for _, members in groups]
