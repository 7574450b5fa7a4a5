"""Whom a round asks and how: what rounds in the clear and rounds by secure sums have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fedbayes.federation.cohorts import drawn
from fedbayes.federation.program import Order
from fedbayes.flower.border import Refusal, guarded
from fedbayes.flower.post import Answer, exchange
from fedbayes.flower.roll import Roll
from fedbayes.flower.settings import Settings
from fedbayes.flower.total import Total
from fedbayes.flower.unmasking import Unmasking
from fedbayes.flower.wire import Head, Letter
from fedbayes.training.task import Task


class Asking:
    """The clients of a federation as the server reaches them, and what there is to say of it."""

    def __init__(self, task: Task, roll: Roll, settings: Settings, head: Head) -> None:
        self.task, self.roll, self.settings, self.head = task, roll, settings, head
        self.program = task.program
        self.bytes = {"bytes_down": 0, "bytes_up": 0}
        self.notes: list[str] = []
        self.took_part: list[int] = []  # whose uploads the last round's sum is of
        self.begun = False
        self.unmasking = Unmasking()
        self.noisy = task.program.pooling.private is not None  # what clients upload under masks has noise of its own

    def choose(self, order: Order, total: Total) -> dict[int, int]:
        """Whom to ask: the cohort, and for who is not online the next in the round's order; a node for each."""
        missing = [k for k in order.cohort if k not in total.own]
        # At first all are waited for; later only so many as a round can't do without.
        hoped = [k for k in missing if k not in self.roll.put_aside]
        online = self.roll.wait_for(self.settings.min_clients - total.counted if self.begun else len(hoped))
        self.begun = True
        nodes = {k: online[k] for k in missing if k in online}
        called = {*order.cohort, *order.dropped, *total.own}
        # Who is in a private round is the account's to say: nobody stands in for another.
        alone = self.task.hides_cohorts
        line = [] if alone else drawn(order.round, clients=len(self.task.clients), seed=self.task.seed).tolist()
        spare = iter([k for k in line if k in online and k not in called])
        for k in missing:
            if k not in online:
                other = next(spare, None)
                total.left_out[k] = self.roll.absence(k) + ("" if other is None else f"; client {other} stood in")
                nodes |= {} if other is None else {other: online[other]}
                if other is not None and k in total.buckets:
                    total.buckets[other] = total.buckets[k]
        return dict(sorted(nodes.items()))

    def exchange(self, kind: str, letters: Mapping[int, Letter]) -> Iterator[tuple[int, Answer]]:
        """Letters by node, and what each node answers, as it comes."""
        self.bytes["bytes_down"] += sum(letter.size for letter in letters.values())
        for node, answer in exchange(self.roll.post, kind, letters, self.settings.timeout):
            size = guarded(node, lambda answer: answer.size, answer)
            self.bytes["bytes_up"] += 0 if isinstance(size, Refusal) else size
            yield node, answer

    def coded(self) -> Head:
        """The head of a letter that carries arrays."""
        return {**self.head, "dtype": self.settings.dtype, "delta": self.settings.delta}

    def expected(self, client: int, number: int) -> Head:
        """What the head of a client's reply must say."""
        return {**self.head, "client": client, "round": number}
