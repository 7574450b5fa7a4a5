"""The loop engine: one client after another, one step after another. The specification, and the debugger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.engine.batches import Schedule, schedule, steps_in_epoch, taken
from fedbayes.engine.clock import SUM, share
from fedbayes.engine.compiled import Compiled
from fedbayes.engine.room import Shortage, shortage
from fedbayes.engine.workers import threads
from fedbayes.errors import InputError
from fedbayes.federation.contributions import LEFT_OUT, Term, contribute, summed
from fedbayes.federation.influence import by_client
from fedbayes.federation.program import Contribution, Figures, Order, Outcome, OwnState, Program, Store, nothing
from fedbayes.federation.sums import Totals, added_to, apart
from fedbayes.model.gradient import still
from fedbayes.noise import Tape, normals, seeded


class Loop:
    """Runs the clients of a round one by one. Costs K * steps gradient steps, memory O(weights)."""

    name = "loop"

    def __init__(self, store: Store, *, seed: int | str, again: bool = False, small: bool = False) -> None:
        self.store = store
        self.seed = seed
        self.again = again  # whether activations are computed again: steps are then traced
        self.small = small  # whether one of PyTorch's threads does products as fast as several
        self._traced: dict[int, tuple[Phase, Compiled]] = {}
        # By client, phase and rows of a batch, and what they are of.
        self._normals: dict[tuple[int, int, int], tuple[Client, int]] = {}

    def run(self, program: Program, order: Order, own: OwnState, after: Callable[[], None] = nothing) -> Outcome:
        """Let each client of the order contribute; `after` is called when a client is done."""
        totals: Totals = {}
        uploads, owns, left_out = [], {}, {}
        metrics: dict[str, float] = {}
        influence: dict[int, Figures] = {}
        for k in order.cohort:
            upload, info = self.client(program, order, k, own(k))
            with share(SUM):
                terms, finite, figures = _term(program, upload, info)
            after()
            if not bool(finite):
                left_out[k] = LEFT_OUT
                continue
            influence |= by_client([k], [figures.tolist()])
            if program.needs_uploads:
                uploads.append(Contribution(k, upload.parts, info.n, order.version))
            if terms := summed(program, terms):
                with share(SUM):
                    added_to(totals, program, terms, order.buckets.get(k))
            owns[k] = upload.own
            for name, value in upload.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        total, buckets = apart(totals)
        return Outcome(total, uploads, owns, left_out, metrics, len(owns), order.version, influence, buckets)

    def take_notes(self) -> list[str]:
        """The loop takes no fallback."""
        return []

    def client(self, program: Program, order: Order, k: int, own: Own | None) -> tuple[Upload, Info]:
        """One client's round: start, the steps of each phase, finish.

        All randomness has an address: seed, round, client, phase, step.
        """
        client, store, number, seed = program.client, self.store.of(order), order.round, order.seed(self.seed)
        rows = store.rows(k)
        info = _info(program, order, rows, store.x.device)
        # For what can't be taken over, such as dropout inside attention: reproducible here, elsewhere the same
        # distribution with other draws.
        own_thread = threads(1) if self.small else nullcontext()
        with own_thread, seeded(seed, number, k, "torch", device=store.x.device):
            state = client.start(client.first(order.broadcast) if own is None else own, info)
            for place, phase in enumerate(client.phases):
                if phase.begin is not None:
                    state = phase.begin(state, info)
                plan = schedule(rows, phase, seed, number, k, place)
                for step, batch in enumerate(_batches(store, phase, plan)):
                    count = self._count(client, place, state, batch, info)
                    noise = normals(count, seed, number, k, place, step, "noise").to(store.x.device) if count else None
                    one = self._step(phase)
                    try:
                        state = one(state, batch, noise, info)
                    except torch.OutOfMemoryError as error:
                        raise _too_large(one, (state, batch, noise, info), self.again, error) from None
            return client.finish(state, info), info

    def _step(self, phase: Phase) -> Callable[..., Any]:
        def step(state: Any, batch: Any, noise: Tensor | None, info: Info) -> Any:
            return phase.step(state, batch, Tape(noise), info)

        if not self.again:
            return step
        if id(phase) not in self._traced:
            self._traced[id(phase)] = phase, Compiled(step, kernels=False, again=True)
        return self._traced[id(phase)][1]

    def _count(self, client: Client, place: int, state: Any, batch: Any, info: Info) -> int:
        """How many normals a step needs, counted once by a dry run."""
        key = (id(client), place, len(batch.y) if client.phases[place].private else 0)
        if key not in self._normals:
            tape = Tape()
            with torch.random.fork_rng(devices=[]):  # or the first client would meet other dropout in attention
                still(client.phases[place].step)(state, batch, tape, info)
            self._normals[key] = client, tape.used
        return self._normals[key][1]


def _too_large(
    step: Callable[..., Any], arguments: tuple[Any, ...], again: bool, error: torch.OutOfMemoryError
) -> Exception:
    found = shortage(step.step if isinstance(step, Compiled) else step, arguments, 1, again, error)
    return InputError(f"{found}; or lower batch or draws") if isinstance(found, Shortage) else found


def _term(program: Program, upload: Upload, info: Info) -> Term:
    if program.needs_uploads:  # the weight is not known yet: one stands in, only finiteness is asked
        return contribute(program, upload, info, torch.ones((), dtype=torch.float64))
    return contribute(program, upload, info)


def _info(program: Program, order: Order, rows: Tensor, device: torch.device) -> Info:
    dtype = order.broadcast[program.prediction.part].mean.dtype

    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    batches = tuple(torch.tensor(steps_in_epoch(len(rows), phase), device=device) for phase in program.client.phases)
    return Info(
        order.broadcast,
        {name: scalar(value) for name, value in order.options.items()},
        torch.tensor(order.round, device=device),
        torch.tensor(len(rows), device=device),
        batches,
        program.known,
    )


def _batches(store: Store, phase: Phase, plan: Schedule) -> Iterator[Any]:
    """The batch of each step, or a tuple of them where the phase reads several."""
    x, y, count = store.x, store.y, phase.batches
    rows = plan.rows.to(x.device).flatten(0, 1).unbind(0)
    masks = [None] * len(rows) if plan.live is None else plan.live.to(x.device).flatten(0, 1).unbind(0)
    for step, at in enumerate(torch.arange(len(plan.rows), device=x.device).unbind(0)):
        own = slice(step * count, (step + 1) * count)
        batches = [Batch(taken(x, r), taken(y, r), mask, at) for r, mask in zip(rows[own], masks[own])]
        yield batches[0] if count == 1 else tuple(batches)
