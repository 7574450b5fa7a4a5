"""Rounds at the server that do not wait: each client has its own order, and a round is closed on the first answers.

What is on its way is in the state that checkpoints keep. A server that was killed sends those orders again: a node that
has trained the same order before gives the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.engine.clock import STEPS, share
from fedbayes.errors import InputError
from fedbayes.federation.buffered import planned
from fedbayes.federation.cohorts import called
from fedbayes.federation.flight import REASONS, STALE, Flight, Seat, Sent
from fedbayes.federation.program import FederationState, Order
from fedbayes.federation.round import told
from fedbayes.federation.schedule import Plan
from fedbayes.federation.staleness import closed_on
from fedbayes.flower.border import Form, Refusal, Reply, guarded, opened, reply_of
from fedbayes.flower.node import QUERY, TRAIN, told_by
from fedbayes.flower.post import Answer
from fedbayes.flower.remote import Remote, counted
from fedbayes.flower.total import Total
from fedbayes.flower.wire import Letter, write
from fedbayes.runs.folder import Step
from fedbayes.training.rounds import close, judged
from fedbayes.training.run import OwnStore
from fedbayes.training.task import Progress, Task

NODES = 1.0  # seconds between two looks at who is online


class Open(NamedTuple):
    """A letter without an answer: to which node, since when, whose order it is (None: it asks who is there), and of
    how many rows: a card may be gone when the answer comes."""

    node: int
    began: float
    seat: Seat | None
    rows: int = 0


class Aloft:
    """The letters that are on their way, from one closing to the next."""

    def __init__(self, task: Task, engine: Remote, progress: Progress, clock: Callable[[], float]) -> None:
        assert task.scheduler.waiting is not None
        self.task, self.engine, self.waiting, self.clock = task, engine, task.scheduler.waiting, clock
        self.roll, self.settings, self.post = engine.roll, engine.settings, engine.roll.post
        flight = progress.state.flight
        self.origin = clock() - flight.clock  # the clock of the run goes on where it was
        self.seats = {seat.client: seat for seat in flight.seats}
        self.sent = dict(flight.sent)
        self.open: dict[str, Open] = {}
        self.took: dict[int, float] = {}  # seconds that each client needed for its last order
        self.nodes = self.post.nodes()
        self.looked = float("-inf")

    def closing(self, state: FederationState, own: OwnStore, after: Callable[[], None]) -> tuple[Plan, Any]:
        """Keep seats filled until enough have answered; what the round is closed on."""
        number, program = state.round, self.task.program
        options = {**program.options(number), **told(program, state.stages)}
        self.sent[number] = Sent(state.broadcast, options, state.version)
        buffer: dict[int, tuple[Seat, Reply]] = {}
        self.left_out: dict[int, str] = {}
        self._give_up_stale(number)
        idle = self.clock()
        while len(buffer) < self.waiting.buffer:
            self._meet()
            self._fill(number, own, buffer)
            for key, answer in self.post.pull(list(self.open)):
                if key in self.open:
                    self._take(self.open.pop(key), answer, buffer)
                    after()
            self._give_up_late()
            now = self.clock()
            if any(letter.seat for letter in self.open.values()):
                idle = now
            if buffer and self._nobody_soon(now):
                break
            if not buffer and now - idle > self.settings.wait:
                reasons = "; ".join(f"client {k}: {why}" for k, why in self.left_out.items()) or "no node was online"
                raise InputError(
                    f"round {number + 1}: nobody answered ({reasons}). The rounds before it are kept: start the run "
                    "again into the same folder when the nodes are back"
                )
            if len(buffer) < self.waiting.buffer:
                time.sleep(self.post.pause)
        return self._closed(number, buffer)

    def _closed(self, number: int, buffer: dict[int, tuple[Seat, Reply]]) -> tuple[Plan, Any]:
        seats = [seat for seat, _ in buffer.values()]
        now = self.clock() - self.origin
        held = {seat.round for seat in self.seats.values()}
        flight = Flight(now, tuple(sorted(self.seats.values())), {r: self.sent[r] for r in sorted(held)})
        before, here = Flight(now, (), dict(self.sent)), self.sent[number]
        reported = {"clock": now, "in_flight": len(self.seats)}
        plan = planned(number, here, seats, flight, before, (), reported, self.waiting.discount)
        outcomes = []
        for order in plan.orders:
            total = Total(self.task.program, order, self.settings.coding)
            for k in order.cohort:
                total.hold(k, buffer[k][1])
            total.add(before=None)
            self.engine.asking.notes += total.notes
            outcomes.append(total.outcome()._replace(version=order.version))
        outcome = closed_on(self.task.program, plan.orders, outcomes, plan.closing, plan.discount)
        self.engine.asking.took_part = sorted(outcome.own)
        self.sent = {r: one for r, one in self.sent.items() if r in held}
        return plan, outcome._replace(left_out={**self.left_out, **outcome.left_out})

    def _meet(self) -> None:
        """Ask nodes that are new who they are, without waiting for them."""
        now = self.clock()
        if 0 <= now - self.looked < NODES and self.roll.cards:
            return
        self.looked = now
        self.nodes, new = self.roll.met()
        asked = {letter.node for letter in self.open.values()}
        letters = {node: letter for node, letter in new.items() if node not in asked}
        for key, node in self.post.push(QUERY, letters, self.settings.wait).items() if letters else ():
            self.open[key] = Open(node, now, None)

    def _fill(self, number: int, own: OwnStore, buffer: dict[int, tuple[Seat, Reply]]) -> None:
        """Send the orders of seats that have none on the way, and fill those that are free from the round's line."""
        online, now = self.roll.seated(), self.clock()
        under_way = {letter.seat.client for letter in self.open.values() if letter.seat is not None}
        for k, seat in self.seats.items():
            if k not in under_way and k in online:
                self._send(seat, online[k], own)
        free = self.waiting.cohort - len(self.seats)
        busy = {*self.seats, *buffer, *self.left_out}
        if free <= 0 or not set(online) - busy:
            return
        for k in called(number, clients=len(self.task.clients), seed=self.task.seed):
            if free and k in online and k not in busy:
                self.seats[k] = Seat(k, number, now - self.origin)
                self._send(self.seats[k], online[k], own)
                free -= 1

    def _send(self, seat: Seat, node: int, own: OwnStore) -> None:
        one, asking = self.sent[seat.round], self.engine.asking
        order = Order(seat.round, (seat.client,), (), one.broadcast, one.options, one.version)
        head = {**asking.coded(), "round": seat.round, **told_by(self.task.program, order), "client": seat.client}
        letter = Letter({**head, "counted": counted(own.get(seat.client))}, write(one.broadcast, self.settings.coding))
        asking.bytes["bytes_down"] += letter.size
        for key in self.post.push(TRAIN, {node: letter}, self.settings.timeout):
            self.open[key] = Open(node, self.clock(), seat, self.roll.cards[node].rows)

    def _take(self, letter: Open, answer: Answer, buffer: dict[int, tuple[Seat, Reply]]) -> None:
        if letter.seat is None:
            if letter.node in self.nodes:
                self.roll.enter(letter.node, answer, self.nodes)
            return
        seat, asking = letter.seat, self.engine.asking
        k = seat.client
        if self.seats.get(k) != seat:
            return  # it was given up
        del self.seats[k]
        size = guarded(k, lambda answer: answer.size, answer)
        asking.bytes["bytes_up"] += 0 if isinstance(size, Refusal) else size
        reply = guarded(k, self._read, seat, letter.rows, answer)
        if isinstance(reply, Refusal):
            self.left_out[k] = reply.reason
            self.roll.count(reply)
            if isinstance(answer, str):
                self.roll.forget(k)
                self.looked = float("-inf")  # it is asked again who it is
            return
        self.took[k] = self.clock() - letter.began
        buffer[k] = seat, reply

    def _read(self, seat: Seat, rows: int, answer: Answer) -> Reply:
        expected = self.engine.asking.expected(seat.client, seat.round)
        opened(answer, expected)
        one, program = self.sent[seat.round], self.task.program
        order = Order(seat.round, (seat.client,), (), one.broadcast, one.options, one.version)
        total = Total(program, order, self.settings.coding)
        like = program.pooling.uploaded({part: total.sent[part] for part in program.pooling.rules})
        form = Form(like, self.settings.coding, total.sent, rows)
        return reply_of(answer, expected, form)

    def _give_up_late(self) -> None:
        now = self.clock()
        for key, letter in [*self.open.items()]:
            limit = self.settings.wait if letter.seat is None else self.settings.timeout
            if now - letter.began > limit:
                del self.open[key]
                self._take(letter, f"no reply within {limit:g} s", {})

    def _give_up_stale(self, number: int) -> None:
        bound = self.waiting.max_staleness
        for k, seat in [*self.seats.items()]:
            if bound is not None and number - seat.round > bound:
                del self.seats[k]
                self.left_out[k] = REASONS[STALE]

    def _nobody_soon(self, now: float) -> bool:
        """Whether all who are on their way have had several times what others needed, and nobody else can begin."""
        longest = self.settings.slack * max(self.took.values(), default=float("inf"))
        return all(now - letter.began > max(longest, 2 * self.post.pause) for letter in self.open.values())


def rounds_aloft(
    task: Task,
    progress: Progress,
    own: OwnStore,
    after: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Step]:
    """Rounds as `training.rounds` yields them, closed on the first answers."""
    engine = task.engine
    assert isinstance(engine, Remote)
    aloft = Aloft(task, engine, progress, clock)
    while not task.done(progress):
        started = time.perf_counter()
        with quick_cpu(), tensor_cores(task.precision):
            with share(STEPS):
                plan, outcome = aloft.closing(progress.state, own, after)
            progress, record = close(task, progress, own, plan, outcome)
            progress = judged(task, progress, own, record)
        record["seconds"] = time.perf_counter() - started
        yield progress, record
