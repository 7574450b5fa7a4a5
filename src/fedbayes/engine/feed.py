"""What the steps of a chunk's clients read: their rows, and their noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Info
from fedbayes.engine.batches import widest
from fedbayes.engine.bound import Bound
from fedbayes.engine.outcomes import Seat
from fedbayes.engine.work import Table
from fedbayes.federation.program import Order
from fedbayes.model.gradient import still
from fedbayes.noise import Tape, normals


def table_of(bounds: Sequence[Bound], orders: Sequence[Order], seats: list[Seat], place: int) -> Table:
    """The schedules that the loop engine would use, padded to the steps of the longest."""
    phase = bounds[0].program.client.phases[place]
    schedules = [bounds[s.member].schedule(orders[s.member].round, s.client, place) for s in seats]
    lengths, width = {len(one.rows) for one in schedules}, max(one.rows.shape[-1] for one in schedules)
    if phase.private and bounds[0].steps.mode == "graph":  # which is of one shape
        width = max(width, *(widest(len(s.rows), phase) for s in seats))
    if len(lengths) == 1 and not any(seat.ghost or one.live is not None for seat, one in zip(seats, schedules)):
        return Table(torch.stack([one.rows for one in schedules], 1), None)
    rows = torch.zeros(max(lengths), len(seats), phase.batches, width, dtype=torch.int64)
    live = torch.zeros_like(rows, dtype=torch.bool)
    for c, (seat, one) in enumerate(zip(seats, schedules)):
        steps, places = len(one.rows), one.rows.shape[-1]
        rows[:steps, c, :, :places] = one.rows
        if seat.ghost:
            continue
        live[:steps, c, :, :places] = True if one.live is None else one.live
        if phase.private:  # the last place says that a step is taken, wherever it was in a narrower table
            live[:steps, c, :, places - 1] = False
            live[:steps, c, :, -1] = True
    return Table(rows, live)


def count_normals(bound: Bound, place: int, state: Any, table: Table, info: Info) -> int:
    """How many normals a step reads, by a dry run of one client."""
    phase, store, tape = bound.program.client.phases[place], bound.store, Tape()
    at = torch.zeros((), dtype=torch.int64, device=store.x.device)
    batches = tuple(Batch(store.x[r], store.y[r], None, at) for r in table.rows[0, 0].to(store.x.device))
    with torch.random.fork_rng(devices=[]):  # a dry run must leave no trace in what follows
        still(phase.step)(state, batches[0] if phase.batches == 1 else batches, tape, info)
    return tape.used


def noise_of(
    bounds: Sequence[Bound], orders: Sequence[Order], seats: list[Seat], place: int, count: int
) -> Callable[[int, int], Tensor]:
    """Normals [steps, clients, count] from a step on: by address on a CPU; on a GPU same distribution, other draws."""
    device = bounds[0].store.x.device
    if device.type == "cuda":
        return lambda first, steps: torch.randn(steps, len(seats), count, device=device)
    if not count:
        return lambda first, steps: torch.zeros(steps, len(seats), 0)
    at = [(bounds[s.member].seed, orders[s.member].round, s.client, place) for s in seats]

    def drawn(first: int, steps: int) -> Tensor:
        noise = [normals(count, *where, s, "noise") for s in range(first, first + steps) for where in at]
        return torch.stack(noise).reshape(steps, len(seats), count)

    return drawn
