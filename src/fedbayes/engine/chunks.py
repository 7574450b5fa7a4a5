"""The clients of a round in chunks: of similar length, that fit in memory, one after another or side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils._pytree import tree_map

from fedbayes.clients.client import Own
from fedbayes.engine.batches import steps_in_epoch
from fedbayes.engine.bound import Bound
from fedbayes.engine.feed import count_normals, noise_of, table_of
from fedbayes.engine.infos import info_of, stack
from fedbayes.engine.outcomes import Seat, outcomes
from fedbayes.engine.steps import BY_HAND
from fedbayes.engine.together import Clients
from fedbayes.engine.work import Work
from fedbayes.engine.workers import share, side_by_side, threads
from fedbayes.federation.program import Order, Outcome, OwnState
from fedbayes.noise import address, seeded


def lead_of(bounds: Sequence[Bound]) -> Bound:
    """The one whose client, steps and chunks are used for all: that whose caches have room for all clients."""
    return max(bounds, key=lambda bound: bound.program.personal.most)


def run_chunks(
    bounds: Sequence[Bound], orders: Sequence[Order], owns: Sequence[OwnState], chunks: list[list[Seat]]
) -> Iterator[list[tuple[int, Outcome]]]:
    """What the members bring from each chunk, in order, the chunks one after another or side by side.

    The first chunk of a run goes ahead alone: it compiles, counts the normals that a step reads, and shows whether
    PyTorch's own generator is read too.
    """
    lead = lead_of(bounds)

    def run(number: int) -> list[tuple[int, Outcome]]:
        return _run_chunk(bounds, orders, owns, chunks[number], number)

    def run_seeded(number: int) -> list[tuple[int, Outcome]]:
        with seeded(lead.seed, orders[0].round, number, "torch", device=lead.store.x.device):
            before = torch.get_rng_state()
            brought = run(number)
            if not torch.equal(before, torch.get_rng_state()):
                lead.workers = 1  # PyTorch's generator is one for all threads: where it is read, they would share it
            return brought

    numbers = range(len(chunks))
    workers, each = share(len(chunks), lead.workers, small=lead.small)
    with threads(each):
        if workers > 1 and not lead.normals:
            yield run_seeded(0)
            numbers = numbers[1:]
        if workers == 1 or lead.workers == 1:
            yield from map(run_seeded, numbers)
        else:
            yield from side_by_side(run, numbers, workers)


def chunks_of(bounds: Sequence[Bound], orders: Sequence[Order]) -> Iterator[list[Seat]]:
    """Seats of similar length together: a chunk ends where a client needs under two thirds of its longest's steps."""
    phases = bounds[0].program.client.phases
    seats = []
    for m, (bound, order) in enumerate(zip(bounds, orders)):
        for k in order.cohort:
            rows = bound.store.rows(k)
            length = sum(steps_in_epoch(len(rows), p) * p.epochs for p in phases)
            seats.append(Seat(m, k, rows, length, order.buckets.get(k)))
    seats.sort(key=lambda seat: (-seat.length, seat.member, seat.client))
    lead = lead_of(bounds)
    if lead.steps.mode not in ("eager", BY_HAND):
        yield from _equal_chunks(lead, seats)
        return
    chunk: list[Seat] = []
    most = -(-len(seats) // max(1, -(-len(seats) // lead.chunk)))  # as many chunks as it takes, of about one size
    for seat in seats:
        short = 3 * seat.length < 2 * chunk[0].length if chunk and lead.steps.mode != BY_HAND else False
        if chunk and (len(chunk) == most or short):
            yield chunk
            chunk = []
        chunk.append(seat)
    if chunk:
        yield chunk


def _equal_chunks(lead: Bound, seats: list[Seat]) -> Iterator[list[Seat]]:
    """Chunks of one size, the last filled up with ghosts: a compiled program is made for one size only."""
    if not seats:  # of a private round, whose cohort may be empty
        return
    if lead.store.x.device.type == "cpu":
        lead.seats = width([seat.length for seat in seats], lead.chunk, lead.seats)
    else:  # where a step of many takes hardly longer than one of few
        lead.seats = min(lead.chunk, max(lead.seats, len(seats)))
    for start in range(0, len(seats), lead.seats):
        chunk = seats[start : start + lead.seats]
        yield chunk + [chunk[0]._replace(ghost=True)] * (lead.seats - len(chunk))


def width(lengths: Sequence[int], most: int, before: int) -> int:
    """Clients at once for which a CPU takes least time, given their steps, the longest first.

    A step costs as one client more than run, and a chunk has the steps of its longest. Another width is another
    program: it stays as `before`, or grows where that saves a fifth.
    """

    def cost(width: int) -> int:
        return (width + 1) * sum(lengths[::width])

    best, before = min(range(min(most, len(lengths)), 0, -1), key=cost), min(before, most)
    return best if best > before and (not before or cost(best) < 0.8 * cost(before)) else before


def _run_chunk(
    bounds: Sequence[Bound],
    orders: Sequence[Order],
    owns: Sequence[OwnState],
    seats: list[Seat],
    number: int,
) -> list[tuple[int, Outcome]]:
    lead = lead_of(bounds)
    client, store = lead.program.client, lead.store
    constants = lead.constants_with(bounds)
    together = Clients(len(seats), constants.info_axes)
    info = info_of(constants, orders, seats, store.x.device)
    own = stack([_own(bounds[s.member], orders[s.member], owns[s.member](s.client)) for s in seats])
    state = lead.steps.around(client.start, together, own, info)
    for place, phase in enumerate(client.phases):
        if phase.begin is not None:
            state = lead.steps.around(phase.begin, together, state, info)
        table = table_of(bounds, orders, seats, place)
        at = (place, table.rows.shape[-1])
        if at not in lead.normals:
            one = tree_map(lambda t: t[0], state)
            lead.normals[at] = count_normals(lead, place, one, table, together.first(info))
        noise = noise_of(bounds, orders, seats, place, lead.normals[at])
        seed = address(lead.seed, orders[0].round, number, place, "device")
        state = lead.steps.run(Work(phase, together, table, noise, info, store, seed), state)
    uploads = lead.steps.around(client.finish, together, state, info)
    if store.x.device.type == "cuda":
        for bound, order in zip(bounds, orders):
            bound.look_ahead(order.round + 1)
    return outcomes([bound.program for bound in bounds], lead.steps, together, seats, uploads, info)


def _own(bound: Bound, order: Order, own: Own | None) -> Own:
    """What a client kept; of one that was never here before, the first own state by its own federation."""
    return bound.program.client.first(order.broadcast) if own is None else own
