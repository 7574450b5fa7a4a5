"""The stacked engine: the clients of a round, and the members of a sweep, as one tensor program by vmap.

Clients of unequal size are padded with masked batches and frozen steps; a cohort is cut into chunks of similar length
that fit in memory. Costs the steps of the longest client of each chunk, memory O(chunk * weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Batch, Info, Own, Upload
from fedbayes.engine.batches import Schedule, schedule, steps_in_epoch
from fedbayes.engine.loop import LEFT_OUT, Loop, OwnState, Store
from fedbayes.engine.steps import Clients, Steps, Table, Work
from fedbayes.federation import Contribution, Order, Outcome, Program, Terms, add_terms, contribute
from fedbayes.noise import Tape, address, normals, seeded

# Which fields of Info have an axis of clients: in one federation only what is the client's own, in a sweep all.
ONE_FEDERATION = Info(broadcast=None, options=None, round=None, n=0, batches=0)  # type: ignore[arg-type]
SEVERAL = Info(broadcast=0, options=0, round=0, n=0, batches=0)  # type: ignore[arg-type]


class Seat(NamedTuple):
    """One client of one federation (a member of a sweep) in this round."""

    member: int
    client: int
    rows: Tensor
    length: int  # steps in all phases
    ghost: bool = False  # fills a chunk up to the size that was compiled; takes no step and is not counted


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
    ) -> None:
        self.program = program
        self.store = store
        self.seed = seed
        self.chunk = chunk or default_chunk(program, store)
        self.steps = steps or Steps()
        self.cohorts = cohorts  # who takes part in a round to come; lets a device work while the host prepares it
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

    def take_notes(self) -> list[str]:
        """Fallbacks taken since this was last asked."""
        notes, self.notes, self.steps.notes = self.notes + self.steps.notes, [], []
        return notes

    def beside(self, program: Program, seed: int) -> Stacked:
        """An engine for another program on the same data, with noise of its own.

        What is compiled is shared where the steps are the same; others run eagerly, for they are few.
        """
        known = {id(phase.step) for phase in self.program.client.phases}
        same = all(id(phase.step) in known for phase in program.client.phases)
        return Stacked(program, self.store, seed=seed, chunk=self.chunk, steps=self.steps if same else Steps())

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
    for number, seats in enumerate(_chunks(engines, orders)):
        for member, outcome in _run_chunk(engines, orders, owns, seats, number):
            found[member].append(outcome)
        for seat in seats:
            if not seat.ghost:
                after()
    return [_merge(engine.program, outcomes) for engine, outcomes in zip(engines, found)]


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
    if lead.steps.mode != "eager":
        yield from _equal_chunks(lead, seats)
        return
    chunk: list[Seat] = []
    for seat in seats:
        if chunk and (len(chunk) == lead.chunk or 3 * seat.length < 2 * chunk[0].length):
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
    with seeded(lead.seed, orders[0].round, number, "torch"):
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
        made = []
        for members in _alike([engine.program for engine in engines]):
            mine = [c for c, seat in enumerate(seats) if seat.member in members]
            if not mine:
                continue
            group = Clients(len(mine), together.info)
            made += _outcomes(
                engines[members[0]].program,
                group,
                [seats[c] for c in mine],
                *_only(mine, seats, together, uploads, info),
            )
        return made


def _alike(programs: Sequence[Program]) -> list[list[int]]:
    """Members whose server adds in the same way, so that their clients encode their terms as one."""
    groups: dict[Any, list[int]] = {}
    for member, program in enumerate(programs):
        rules = tuple((part, id(rule)) for part, rule in sorted(program.rules.items()))
        groups.setdefault((rules, id(program.weighting), program.needs_uploads), []).append(member)
    return list(groups.values())


def _only(mine: list[int], seats: list[Seat], together: Clients, uploads: Upload, info: Info) -> tuple[Upload, Info]:
    """The uploads and infos of some clients of a chunk."""
    if len(mine) == len(seats):
        return uploads, info
    taken = Info(
        *(tree_map(lambda t: t[mine], a) if axis == 0 else a for a, axis in zip(info, together.info))  # type: ignore[arg-type]
    )
    return tree_map(lambda t: t[mine], uploads), taken


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


def _outcomes(
    program: Program, together: Clients, seats: list[Seat], uploads: Upload, info: Info
) -> list[tuple[int, Outcome]]:
    """The sum of each member's finite terms, and what else its clients brought."""
    one = torch.ones((), dtype=torch.float64, device=info.n.device) if program.needs_uploads else None

    def term(upload: Upload, info: Info) -> tuple[Terms, Tensor]:
        return contribute(program, upload, info, one)

    terms, finite = together.over(term, (0, together.info))(uploads, info)
    fine = finite.tolist()  # the one wait for the device in a chunk
    metrics = {name: t.tolist() for name, t in uploads.metrics.items()}
    made = []
    for member in sorted({seat.member for seat in seats}):
        mine = [c for c, seat in enumerate(seats) if seat.member == member and not seat.ghost]
        kept = [c for c in mine if fine[c]]
        total, gathered = None, []
        if program.needs_uploads:
            rows = {c: tree_map(lambda t, c=c: t[c], uploads.parts) for c in kept}
            gathered = [Contribution(seats[c].client, rows[c], info.n[c]) for c in kept]
        elif kept:
            total = _sum(program, terms if len(kept) == len(seats) else tree_map(lambda t, kept=kept: t[kept], terms))
        made.append(
            (
                member,
                Outcome(
                    total,
                    gathered,
                    {seats[c].client: tree_map(lambda t, c=c: t[c].clone(), uploads.own) for c in kept},
                    {seats[c].client: LEFT_OUT for c in mine if not fine[c]},
                    {name: sum(values[c] for c in kept) for name, values in metrics.items()},
                    len(kept),
                ),
            )
        )
    return made


def _sum(program: Program, terms: Terms) -> Terms:
    """Add the terms of stacked clients."""
    return {
        part: {key: t.amax(0) if key in program.rules[part].maxima else t.sum(0) for key, t in statistics.items()}
        for part, statistics in terms.items()
    }


def _merge(program: Program, outcomes: list[Outcome]) -> Outcome:
    """The chunks of one member as one outcome, clients in order."""
    totals = [o.terms for o in outcomes if o.terms is not None]
    count = sum(o.counted for o in outcomes)
    names = {name for o in outcomes for name in o.metrics}
    return Outcome(
        add_terms(program, totals) if totals else None,
        sorted((u for o in outcomes for u in o.uploads), key=lambda u: u.client),
        dict(sorted((k, own) for o in outcomes for k, own in o.own.items())),
        dict(sorted((k, why) for o in outcomes for k, why in o.left_out.items())),
        {name: sum(o.metrics.get(name, 0.0) for o in outcomes) for name in sorted(names)},
        count,
    )
