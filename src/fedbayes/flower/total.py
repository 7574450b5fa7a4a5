"""A round's running sum at the server, over uploads that come in any order."""

from __future__ import annotations

import torch

from fedbayes.clients.client import Info, Own, Upload
from fedbayes.federation.contributions import LEFT_OUT, contribute, summed
from fedbayes.federation.influence import by_client
from fedbayes.federation.program import Contribution, Figures, Order, Outcome, Program
from fedbayes.federation.sums import Totals, added_to, apart
from fedbayes.flower.border import LARGEST, Refusal, Reply, guarded
from fedbayes.flower.wire import Coding, read, write


class Total:
    """A round's running sum. Terms are added in the order of the clients; an upload that comes early is held."""

    def __init__(self, program: Program, order: Order, coding: Coding) -> None:
        self.program, self.order = program, order
        # What the clients received, after rounding: their uploads are relative to it, whatever the wire's type.
        self.sent = read(write(order.broadcast, coding), program.initial, coding, what="broadcast")
        self.held: dict[int, Reply] = {}
        self.totals: Totals = {}
        self.buckets = dict(order.buckets)  # of the clients that are asked; who stands in for another takes its place
        self.uploads: list[Contribution] = []
        self.own: dict[int, Own] = {}
        self.left_out: dict[int, str] = {}
        self.figures: dict[str, list[float]] = {}  # by name, of those who were counted
        self.notes: list[str] = []
        self.influence: dict[int, Figures] = {}

    @property
    def counted(self) -> int:
        return len(self.own)

    def hold(self, client: int, reply: Reply) -> None:
        self.held[client] = reply

    def add(self, before: int | None) -> None:
        """Add what is held of the clients before one that may still answer; of all where none may."""
        for k in sorted(k for k in self.held if before is None or k < before):
            self._add(k, self.held.pop(k))

    def _add(self, k: int, reply: Reply) -> None:
        program = self.program
        weight = torch.ones((), dtype=torch.float64) if program.needs_uploads else None
        term = guarded(k, contribute, program, Upload(reply.parts, {}, {}), self._info(reply), weight)
        if isinstance(term, Refusal) or not bool(term.finite):
            self.left_out[k] = term.reason if isinstance(term, Refusal) else LEFT_OUT
            return
        if program.needs_uploads:
            self.uploads.append(Contribution(k, reply.parts, torch.tensor(reply.rows)))
        self.influence |= by_client([k], [term.figures.tolist()])
        if terms := summed(program, term.terms):
            added_to(self.totals, program, terms, self.buckets.get(k))
        # The state itself stays with the client; the server keeps after which round it was counted.
        self.own[k] = {"counted": torch.tensor(self.order.round)} if reply.own else {}
        self.left_out.pop(k, None)
        if reply.lost:
            self.notes.append(f"client {k} had lost its own state, and began anew")
        for name, value in reply.metrics.items():
            if not abs(value) <= LARGEST:
                self.notes.append(f"client {k}'s training figure {name} is {value:g}, and left out")
                continue
            self.figures.setdefault(name, []).append(value)

    def _info(self, reply: Reply) -> Info:
        like = self.sent[self.program.prediction.part].mean
        options = {name: torch.tensor(v, dtype=like.dtype) for name, v in self.order.options.items()}
        return Info(self.sent, options, torch.tensor(self.order.round), torch.tensor(reply.rows), ())

    def outcome(self) -> Outcome:
        # Each as if all had given it; what fewer than half name is one client's word.
        common = {name: values for name, values in self.figures.items() if 2 * len(values) >= self.counted}
        metrics = {name: sum(values) * (self.counted / len(values)) for name, values in common.items()}
        terms, buckets = apart(self.totals)
        return Outcome(
            terms,
            self.uploads,
            self.own,
            self.left_out,
            metrics,
            self.counted,
            influence=self.influence,
            buckets=buckets,
        )
