"""The loop engine: one client after another, one step after another. The specification, and the debugger."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.clients.client import Batch, Client, Info, Own, Phase, Upload
from fedbayes.engine.batches import schedule, steps_in_epoch
from fedbayes.federation.program import SERVER, Contribution, FederationState, Order, Outcome, Program, Terms
from fedbayes.federation.round import add_terms, contribute
from fedbayes.noise import Tape, normals, seeded
from fedbayes.posterior.values import Parts


class Store(NamedTuple):
    """The data on the device, held once, and the rows of each client."""

    x: Tensor
    y: Tensor
    rows: Callable[[int], Tensor]
    server: Tensor | None = None  # the server's own rows


LEFT_OUT = "its upload was not finite (did it diverge? try a smaller lr)"
OwnState = Callable[[int], Own | None]  # what a client kept; None: it was never here before


class Loop:
    """Runs the clients of a round one by one. Costs K * steps gradient steps, memory O(weights)."""

    name = "loop"

    def __init__(self, program: Program, store: Store, *, seed: int) -> None:
        self.program = program
        self.store = store
        self.seed = seed
        self._normals: dict[tuple[int, int], int] = {}

    def train(self, order: Order, own: OwnState, after: Callable[[], None] = lambda: None) -> Outcome:
        """Let each client of the order contribute; `after` is called when a client is done."""
        total: Terms | None = None
        uploads, kept, left_out = [], {}, {}
        metrics: dict[str, float] = {}
        for k in order.cohort:
            upload, info = self.client(order, k, own(k))
            terms, finite = self._terms(upload, info)
            after()
            if not bool(finite):
                left_out[k] = LEFT_OUT
                continue
            if self.program.needs_uploads:
                uploads.append(Contribution(k, upload.parts, info.n))
            else:
                total = add_terms(self.program, [terms], total)
            kept[k] = upload.own
            for name, value in upload.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        return Outcome(total, uploads, kept, left_out, metrics, len(kept))

    def beside(self, program: Program, seed: int, store: Store | None = None, *, often: bool = False) -> Loop:
        """An engine for another program on this or other data, with noise of its own."""
        return Loop(program, store or self.store, seed=seed)

    def _terms(self, upload: Upload, info: Info) -> tuple[Terms, Tensor]:
        if self.program.needs_uploads:  # the weight is not known yet: one stands in, only finiteness is asked
            return contribute(self.program, upload, info, torch.ones((), dtype=torch.float64))
        return contribute(self.program, upload, info)

    def carry(self, key: tuple[Any, ...], f: Callable[[Any], Any], inputs: Any) -> Any:
        """f(inputs), which stays on the device and is asked for again under this key: here each time anew."""
        return f(inputs)

    def take_notes(self) -> list[str]:
        """What an engine has to say since it was last asked; the loop has nothing."""
        return []

    def client(self, order: Order, k: int, own: Own | None) -> tuple[Upload, Info]:
        """One client's round."""
        return self.run(self.program.client, order.broadcast, order.options, order.round, k, own)

    def server(self, client: Client, state: FederationState, options: Mapping[str, float]) -> Upload:
        """The server's own training on its data: a cohort of one."""
        return self.run(client, state.broadcast, options, state.round, SERVER, None)[0]

    def run(
        self,
        client: Client,
        broadcast: Parts,
        options: Mapping[str, float],
        number: int,
        k: int,
        own: Own | None,
    ) -> tuple[Upload, Info]:
        """start, the steps of each phase, finish; all randomness by address (seed, round, client, phase, step)."""
        rows = self.store.rows(k) if k != SERVER else self.store.server
        assert rows is not None
        info = self._info(client, broadcast, options, number, rows)
        # For what can't be taken over, such as dropout inside attention: reproducible here, in law elsewhere.
        with seeded(self.seed, number, k, "torch", device=self.store.x.device):
            state = client.start(client.first(broadcast) if own is None else own, info)
            for place, phase in enumerate(client.phases):
                if phase.begin is not None:
                    state = phase.begin(state, info)
                plan = schedule(rows, phase, self.seed, number, k, place)
                for step in range(len(plan.rows)):
                    live = None if plan.live is None else plan.live[step]
                    batch = self._batch(phase, plan.rows[step], live, step)
                    noise = self._noise(client, place, state, batch, info, (number, k, place, step))
                    state = phase.step(state, batch, Tape(noise), info)
            return client.finish(state, info), info

    def _info(self, client: Client, broadcast: Parts, options: Mapping[str, float], number: int, rows: Tensor) -> Info:
        device = self.store.x.device
        dtype = broadcast[self.program.prediction.part].mean.dtype

        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        batches = tuple(torch.tensor(steps_in_epoch(len(rows), phase), device=device) for phase in client.phases)
        return Info(
            broadcast,
            {name: scalar(value) for name, value in options.items()},
            torch.tensor(number, device=device),
            torch.tensor(len(rows), device=device),
            batches,
            self.program.known,
        )

    def _batch(self, phase: Phase, rows: Tensor, live: Tensor | None, step: int) -> Batch | tuple[Batch, ...]:
        x, y = self.store.x, self.store.y
        at = torch.tensor(step, device=x.device)
        rows = rows.to(x.device)
        masks = [None] * len(rows) if live is None else list(live.to(x.device))
        made = tuple(Batch(x[r], y[r], mask, at) for r, mask in zip(rows, masks))
        return made[0] if phase.batches == 1 else made

    def _noise(
        self, client: Client, place: int, state: Any, batch: Any, info: Info, at: tuple[int, ...]
    ) -> Tensor | None:
        """The step's normals; how many it needs is counted once, by a dry run."""
        key = (id(client), place)
        if key not in self._normals:
            tape = Tape()
            with torch.random.fork_rng(devices=[]):  # or the first client would meet other dropout in attention
                client.phases[place].step(state, batch, tape, info)
            self._normals[key] = tape.used
        count = self._normals[key]
        return normals(count, self.seed, *at, "noise").to(self.store.x.device) if count else None
