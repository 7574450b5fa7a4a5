"""The stacked engine: the clients of a round, and the members of a sweep, as one tensor program by vmap.

Clients of unequal size are padded with masked batches and frozen steps; a cohort is cut into chunks of similar length
that fit in memory. Costs the steps of the longest client of each chunk, memory O(chunk * weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from fedbayes.clients.client import Own, Upload
from fedbayes.engine.batches import Schedule, schedule, steps_in_epoch
from fedbayes.engine.feed import count_normals, noise_of, table_of
from fedbayes.engine.infos import Constants, info_of, stack
from fedbayes.engine.loop import Loop, OwnState, Store
from fedbayes.engine.outcomes import Seat, Tally, outcomes
from fedbayes.engine.sharing import share_store
from fedbayes.engine.steps import BY_HAND, CAPTURED, MODES, Steps, Work
from fedbayes.engine.together import Clients, NotStackable
from fedbayes.engine.workers import share, side_by_side, threads
from fedbayes.federation.program import Order, Outcome, Program
from fedbayes.noise import address, seeded


class Stacked:
    """Runs the clients of a round at once, in chunks of at most `chunk` (default: as many as fit in memory)."""

    name = "stacked"

    def __init__(
        self,
        program: Program,
        store: Store,
        *,
        seed: int,
        chunk: int | None = None,
        steps: Steps | None = None,
        cohorts: Callable[[int], Sequence[int]] | None = None,
        workers: int = 0,
    ) -> None:
        self.program = program
        self.store = store
        self.seed = seed
        self.chunk = chunk or default_chunk(program, store)
        self.steps = steps or Steps()
        self.cohorts = cohorts  # who takes part in a round to come; lets a device work while the host prepares it
        self.workers = workers  # most chunks side by side, with one of PyTorch's threads each; 0: one, with all of them
        self.notes: list[str] = []
        self._ahead: dict[tuple[int, int, int], Schedule] = {}
        self._width = 0  # seats of a compiled program
        self.stackable = True  # until vmap is known not to take the network
        self._constants: Constants | None = None
        self._alone = Loop(program, store, seed=seed)
        self.normals: dict[int, int] = {}  # that a step of each phase reads

    def train(self, order: Order, own: OwnState, after: Callable[[], None] = lambda: None) -> Outcome:
        """Let the clients of one order contribute; `after` is called once for each when its chunk is done."""
        return train_all([self], [order], [own], after)[0]

    @property
    def widths(self) -> tuple[int, int, int]:
        """How many clients run at once, by what the memory allowed so far: at most, seats of a compiled program, and 0
        where vmap can't take the network. On a device that draws its own noise the results depend on it."""
        return self.chunk, self._width, int(self.stackable)

    @widths.setter
    def widths(self, widths: tuple[int, int, int]) -> None:
        self.chunk, self._width, self.stackable = widths[0], widths[1], bool(widths[2])

    def leads(self, engines: Sequence[Stacked]) -> bool:
        """Whether these engines, this one among them, are those of the last round."""
        return self._constants is not None and self._constants.are_of([engine.program for engine in engines])

    def constants_with(self, engines: Sequence[Stacked]) -> Constants:
        """The constants of the federations that this engine leads; compared once, and kept while they stay the same."""
        if self._constants is None or not self.leads(engines):
            self._constants = Constants.of([engine.program for engine in engines])
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

    def carry(self, key: tuple[Any, ...], f: Callable[[Any], Any], inputs: Any) -> Any:
        """f(inputs), which stays on the device and is asked for again under this key: a graph where the steps are."""
        return self.steps.carry((id(self.program.model), *key), f, inputs)

    def take_notes(self) -> list[str]:
        """Fallbacks taken since this was last asked."""
        notes, self.notes, self.steps.notes = self.notes + self.steps.notes, [], []
        return notes

    def beside(self, program: Program, seed: int, store: Store | None = None, *, often: bool = False) -> Stacked:
        """An engine for another program on this or other data, with noise of its own.

        What is compiled is shared where the steps are the same. Others are too few to be compiled, unless they are run
        as `often` as those of the clients; beside a graph they are captured as they are.
        """
        known = {id(phase.step) for phase in self.program.client.phases}
        same = all(id(phase.step) in known for phase in program.client.phases)
        few = CAPTURED if self.steps.mode == "graph" else "eager"
        mode = self.steps.mode if often and self.steps.mode in MODES else few
        steps, there = self.steps if same else Steps(mode), store or self.store
        return Stacked(program, there, seed=seed, chunk=self.chunk, steps=steps, workers=self.workers)

    def server(self, *args: Any) -> Upload:
        """The server's own training: a cohort of one."""
        return self._alone.server(*args)


def default_chunk(program: Program, store: Store) -> int:
    """Clients at once so that their states (about ten copies of the broadcast each) fit in memory."""
    weights = sum(t.numel() * t.element_size() for t in tree_leaves(program.initial))
    on_gpu = store.x.device.type == "cuda"
    room = torch.cuda.mem_get_info(store.x.device)[0] // 2 if on_gpu else 2 * 1024**3
    return max(1, int(room // (10 * weights + 1)))


def train_all(
    engines: Sequence[Stacked],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    after: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """One round of one federation, or of several of one method (the members of a sweep) as one program.

    Network, client and data are the same for all; seeds, splits, constants, scalar options, rules and weightings may
    differ. Federations whose broadcasts are of another kind by now (a rule made normals of points) are programs of
    their own. Out of memory: smaller chunks. What vmap can't take: the loop engine. Each says so in its notes.
    """
    groups = _alike(orders)
    if len(groups) > 1:
        found: dict[int, Outcome] = {}
        for group in groups:
            some = [engines[m] for m in group], [orders[m] for m in group], [owns[m] for m in group]
            found |= zip(group, train_all(*some, after))
        return [found[m] for m in range(len(engines))]
    lead = _lead(engines)
    if not lead.leads(engines):
        share_store(engines)
    while lead.stackable:
        try:
            return train_together(engines, orders, owns, after)
        except torch.OutOfMemoryError:
            if lead.chunk == 1:
                raise
            fewer = max(1, min(lead.chunk, sum(len(order.cohort) for order in orders)) // 2)
            lead.notes.append(f"out of memory: {fewer} clients at once from now on")
            for engine in engines:
                engine.chunk, engine._width = fewer, 0
        except NotStackable as error:
            lead.notes.append(f"engine loop instead of stacked, vmap can't take this network: {error}")
            for engine in engines:
                engine.stackable = False
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return [engine._alone.train(order, own, after) for engine, order, own in zip(engines, orders, owns)]


def train_together(
    engines: Sequence[Stacked],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    after: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """`train_all` without a way out. Memory: a chunk's clients, and one sum a federation."""
    tallies = [Tally(engine.program) for engine in engines]
    chunks = list(_chunks(engines, orders))
    for seats, brought in zip(chunks, _run_chunks(engines, orders, owns, chunks)):
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


def _lead(engines: Sequence[Stacked]) -> Stacked:
    """The engine whose client, steps and chunks are used for all: the one whose caches have room for all clients."""
    return max(engines, key=lambda engine: engine.program.personal.most)


def _run_chunks(
    engines: Sequence[Stacked], orders: Sequence[Order], owns: Sequence[OwnState], chunks: list[list[Seat]]
) -> Iterator[list[tuple[int, Outcome]]]:
    """What the members bring from each chunk, in order, the chunks one after another or side by side.

    The first chunk of a run goes ahead alone: it compiles, and counts the normals that a step reads.
    """
    lead = _lead(engines)

    def run(number: int) -> list[tuple[int, Outcome]]:
        return _run_chunk(engines, orders, owns, chunks[number], number)

    numbers = range(len(chunks))
    if lead.workers == 0:
        yield from map(run, numbers)
        return
    workers, each = share(len(chunks), lead.workers)
    with threads(each):
        if workers == 1 or not lead.normals:
            ahead = numbers if workers == 1 else numbers[:1]
            numbers = numbers[len(ahead) :]
            yield from map(run, ahead)
        yield from side_by_side(run, numbers, workers)


def _chunks(engines: Sequence[Stacked], orders: Sequence[Order]) -> Iterator[list[Seat]]:
    """Seats of similar length together: a chunk ends where a client needs under two thirds of its longest's steps."""
    phases = engines[0].program.client.phases
    seats = []
    for m, (engine, order) in enumerate(zip(engines, orders)):
        for k in order.cohort:
            rows = engine.store.rows(k)
            seats.append(Seat(m, k, rows, sum(steps_in_epoch(len(rows), p) * p.epochs for p in phases)))
    seats.sort(key=lambda seat: (-seat.length, seat.member, seat.client))
    lead = _lead(engines)
    if lead.steps.mode not in ("eager", BY_HAND):
        yield from _equal_chunks(lead, seats)
        return
    chunk: list[Seat] = []
    for seat in seats:
        short = 3 * seat.length < 2 * chunk[0].length if chunk and lead.steps.mode != BY_HAND else False
        if chunk and (len(chunk) == lead.chunk or short):
            yield chunk
            chunk = []
        chunk.append(seat)
    if chunk:
        yield chunk


def _equal_chunks(lead: Stacked, seats: list[Seat]) -> Iterator[list[Seat]]:
    """Chunks of one size, the last filled up with ghosts: a compiled program is made for one size only."""
    lead._width = min(lead.chunk, max(lead._width, len(seats)))
    for start in range(0, len(seats), lead._width):
        chunk = seats[start : start + lead._width]
        yield chunk + [chunk[0]._replace(ghost=True)] * (lead._width - len(chunk))


def _run_chunk(
    engines: Sequence[Stacked],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    seats: list[Seat],
    number: int,
) -> list[tuple[int, Outcome]]:
    lead = _lead(engines)
    client, store = lead.program.client, lead.store
    constants = lead.constants_with(engines)
    together = Clients(len(seats), constants.info_axes)
    info = info_of(constants, orders, seats, store.x.device)
    own = stack([_own(engines[s.member], orders[s.member], owns[s.member](s.client)) for s in seats])
    # PyTorch's generator is one for all threads: with workers nothing reads it.
    where = (lead.seed, orders[0].round, number, "torch")
    with nullcontext() if lead.workers > 1 else seeded(*where, device=store.x.device):
        state = together.over(client.start, (0, together.info))(own, info)
        for place, phase in enumerate(client.phases):
            if phase.begin is not None:
                state = together.over(phase.begin, (0, together.info))(state, info)
            table = table_of(engines, orders, seats, place)
            if place not in lead.normals:
                one = tree_map(lambda t: t[0], state)
                lead.normals[place] = count_normals(lead, place, one, table, together.first(info))
            noise = noise_of(engines, orders, seats, place, lead.normals[place])
            seed = address(lead.seed, orders[0].round, number, place, "device")
            state = lead.steps.run(Work(phase, together, table, noise, info, store, seed), state)
        uploads = together.over(client.finish, (0, together.info))(state, info)
        if store.x.device.type == "cuda":
            for engine, order in zip(engines, orders):
                engine.look_ahead(order.round + 1)
        return outcomes([engine.program for engine in engines], together, seats, uploads, info)


def _own(engine: Stacked, order: Order, kept: Own | None) -> Own:
    """What a client kept; of one that was never here before, the first own state by its own federation."""
    return engine.program.client.first(order.broadcast) if kept is None else kept
