"""The stacked engine: the clients of a round, and the members of a sweep, as one tensor program by vmap.

Clients of unequal size are padded with masked batches and frozen steps; a cohort is cut into chunks of similar length
that fit in memory. Costs the steps of the longest client of each chunk, memory O(chunk * weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Batch, Info, Own, Upload
from fedbayes.engine.batches import Schedule, schedule, steps_in_epoch
from fedbayes.engine.loop import Loop, OwnState, Store
from fedbayes.engine.outcomes import Seat, merge, outcomes
from fedbayes.engine.steps import BY_HAND, CAPTURED, MODES, Clients, Steps, Table, Work
from fedbayes.engine.workers import share, side_by_side, threads
from fedbayes.federation import Order, Outcome, Program
from fedbayes.noise import Tape, address, normals, seeded

# Which fields of Info have an axis of clients: in one federation only what is the client's own, in a sweep all.
ONE_FEDERATION = Info(broadcast=None, options=None, round=None, n=0, batches=0)  # type: ignore[arg-type]
SEVERAL = Info(broadcast=0, options=0, round=0, n=0, batches=0)  # type: ignore[arg-type]


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
        self._unstackable = False
        self._alone = Loop(program, store, seed=seed)
        self.normals: dict[int, int] = {}  # that a step of each phase reads

    def train(self, order: Order, own: OwnState, after: Callable[[], None] = lambda: None) -> Outcome:
        """Let the clients of one order contribute; `after` is called once for each when its chunk is done.

        Out of memory: smaller chunks. A network that vmap can't take: the loop engine. Each says so in `notes`.
        """
        if self._unstackable:
            return self._alone.train(order, own, after)
        while True:
            try:
                return train_together([self], [order], [own], after)[0]
            except torch.OutOfMemoryError:
                if self.chunk == 1:
                    raise
                self.chunk = max(1, min(self.chunk, len(order.cohort)) // 2)
                self.notes.append(f"out of memory: {self.chunk} clients at once from now on")
            except (RuntimeError, ValueError, TypeError) as error:
                if self.chunk == 1:
                    raise
                self._unstackable = True
                first = str(error).strip().splitlines()[0]
                self.notes.append(f"engine loop instead of stacked, vmap can't take this network: {first[:160]}")
                return self._alone.train(order, own, after)

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


def train_together(
    engines: Sequence[Stacked],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    after: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """One round of several federations of one method (the members of a sweep) as one program.

    Network, client and data store are the same for all; seeds, splits, scalar options, rules and weightings may differ.
    """
    found: list[list[Outcome]] = [[] for _ in engines]
    chunks = list(_chunks(engines, orders))
    for seats, brought in zip(chunks, _run_chunks(engines, orders, owns, chunks)):
        for member, outcome in brought:
            found[member].append(outcome)
        for seat in seats:
            if not seat.ghost:
                after()
    return [merge(engine.program, brought) for engine, brought in zip(engines, found)]


def train_within_memory(engines: Sequence[Stacked], orders: Sequence[Order], owns: Sequence[OwnState]) -> list[Outcome]:
    """`train_together`, in smaller chunks from where memory ran out."""
    while True:
        try:
            return train_together(engines, orders, owns)
        except torch.OutOfMemoryError:
            if engines[0].chunk == 1:
                raise
            fewer = max(1, min(engines[0].chunk, sum(len(order.cohort) for order in orders)) // 2)
            engines[0].notes.append(f"out of memory: {fewer} clients at once from now on")
        for engine in engines:
            engine.chunk, engine._width = fewer, 0
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _run_chunks(
    engines: Sequence[Stacked], orders: Sequence[Order], owns: Sequence[OwnState], chunks: list[list[Seat]]
) -> Iterator[list[tuple[int, Outcome]]]:
    """What the members bring from each chunk, in order, the chunks one after another or side by side.

    The first chunk of a run goes ahead alone: it compiles, and counts the normals that a step reads.
    """
    lead = engines[0]

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
    lead = engines[0]
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
    lead = engines[0]
    client, store = lead.program.client, lead.store
    together = Clients(len(seats), SEVERAL if len(engines) > 1 else ONE_FEDERATION)
    info = _info(lead.program, orders, seats, several=len(engines) > 1, device=store.x.device)
    kept = [owns[seat.member](seat.client) for seat in seats]
    own = _stack([client.first(orders[s.member].broadcast) if o is None else o for s, o in zip(seats, kept)])
    # PyTorch's generator is one for all threads: with workers nothing reads it.
    with nullcontext() if lead.workers > 1 else seeded(lead.seed, orders[0].round, number, "torch"):
        state = together.over(client.start, (0, together.info))(own, info)
        for place, phase in enumerate(client.phases):
            if phase.begin is not None:
                state = together.over(phase.begin, (0, together.info))(state, info)
            table = _table(engines, orders, seats, place)
            if place not in lead.normals:
                one = tree_map(lambda t: t[0], state)
                lead.normals[place] = _count_normals(lead, place, one, table, together.first(info))
            noise = _noise(engines, orders, seats, place, lead.normals[place])
            seed = address(lead.seed, orders[0].round, number, place, "device")
            state = lead.steps.run(Work(phase, together, table, noise, info, store, seed), state)
        uploads = together.over(client.finish, (0, together.info))(state, info)
        if store.x.device.type == "cuda":
            for engine, order in zip(engines, orders):
                engine.look_ahead(order.round + 1)
        return outcomes([engine.program for engine in engines], together, seats, uploads, info)


def _stack(trees: Sequence[Own]) -> Own:
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def _info(program: Program, orders: Sequence[Order], seats: list[Seat], *, several: bool, device: torch.device) -> Info:
    """What each client of the chunk knows; in a sweep every field has the clients' axis."""
    dtype = orders[0].broadcast[program.main].mean.dtype
    sizes = torch.tensor([len(seat.rows) for seat in seats])
    batches = tuple((-(-sizes // phase.batch)).to(device) for phase in program.client.phases)
    options = {
        name: torch.tensor([order.options[name] for order in orders], dtype=dtype, device=device)
        for name in orders[0].options
    }
    number = torch.tensor([order.round for order in orders], device=device)
    broadcast = orders[0].broadcast
    if several:
        member = torch.tensor([seat.member for seat in seats], device=device)
        stacked = tree_map(lambda *leaves: torch.stack(leaves), *[order.broadcast for order in orders])
        broadcast, options, number = tree_map(lambda t: t[member], (stacked, options, number))
    else:
        options, number = tree_map(lambda t: t[0], (options, number))
    return Info(broadcast, options, number, sizes.to(device), batches)


def _table(engines: Sequence[Stacked], orders: Sequence[Order], seats: list[Seat], place: int) -> Table:
    """The schedules that the loop engine would use, padded to the steps of the longest."""
    phase = engines[0].program.client.phases[place]
    made = [engines[s.member].schedule(orders[s.member].round, s.client, place) for s in seats]
    lengths = {len(one.rows) for one in made}
    if len(lengths) == 1 and not any(seat.ghost or one.live is not None for seat, one in zip(seats, made)):
        return Table(torch.stack([one.rows for one in made], 1), None)
    rows = torch.zeros(max(lengths), len(seats), phase.batches, phase.batch, dtype=torch.int64)
    live = torch.zeros_like(rows, dtype=torch.bool)
    for c, (seat, one) in enumerate(zip(seats, made)):
        rows[: len(one.rows), c] = one.rows
        if not seat.ghost:
            live[: len(one.rows), c] = True if one.live is None else one.live
    return Table(rows, live)


def _count_normals(engine: Stacked, place: int, state: Any, table: Table, info: Info) -> int:
    """How many normals a step reads, by a dry run of one client."""
    phase, store, tape = engine.program.client.phases[place], engine.store, Tape()
    at = torch.zeros((), dtype=torch.int64, device=store.x.device)
    made = tuple(Batch(store.x[r], store.y[r], None, at) for r in table.rows[0, 0].to(store.x.device))
    with torch.random.fork_rng(devices=[]):  # a dry run must leave no trace in what follows
        phase.step(state, made[0] if phase.batches == 1 else made, tape, info)
    return tape.used


def _noise(
    engines: Sequence[Stacked], orders: Sequence[Order], seats: list[Seat], place: int, count: int
) -> Callable[[int, int], Tensor]:
    """The normals [steps, clients, count] from a step on: by address on the CPU; on a GPU equal in law only."""
    device = engines[0].store.x.device
    if device.type == "cuda":
        return lambda first, steps: torch.randn(steps, len(seats), count, device=device)
    if not count:
        return lambda first, steps: torch.zeros(steps, len(seats), 0)
    at = [(engines[s.member].seed, orders[s.member].round, s.client, place) for s in seats]

    def drawn(first: int, steps: int) -> Tensor:
        made = [normals(count, *where, s, "noise") for s in range(first, first + steps) for where in at]
        return torch.stack(made).reshape(steps, len(seats), count)

    return drawn
