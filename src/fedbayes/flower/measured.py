"""A post with a clock: it measures how long nodes take, and gives up those that are silent when most have answered."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fedbayes.flower.node import QUERY, SECURE, TRAIN
from fedbayes.flower.places import Who
from fedbayes.flower.post import Answer, Post
from fedbayes.flower.status import Sign
from fedbayes.flower.wire import Letter

MASKED = SECURE[2]  # of a secure sum's letters the one that trains
REMEMBERED = 5  # of the last answers of a node to letters of one kind, the longest counts
MOST = 30.0  # times what the others need in the median: nobody is waited for longer, whatever it needed before


@dataclass
class Batch:
    """Letters that were sent together: when, which are still open, and how long those took that were answered."""

    kind: str
    began: float
    ends: float
    clients: dict[int, int | None]  # by node, where the letter names one
    waiting: dict[str, int]  # nodes by message
    took: dict[int, float] = field(default_factory=dict)
    seen: float = 0.0  # when it was looked at last


@dataclass(frozen=True)
class Deadline:
    """When a node that has not answered is given up: of a batch `quorum` must have answered, and at least `least`.

    It then has `slack` times the longest of what it needed before and what the others needed now, but for its own sake
    no more than `MOST` times the others' median.
    """

    quorum: float = 1.0
    slack: float = 3.0
    least: int = 1


class Measured:
    """Another post with a clock. A reply that comes after its node was given up is measured, and thrown away.

    Without that, a node slower than the others would be given up for ever: so it has its own time from then on. Each
    time that it is given up this is forgotten, until another late answer: who is silent is soon not waited for.
    """

    def __init__(self, post: Post, deadline: Deadline, clock: Callable[[], float] = time.monotonic) -> None:
        self.post, self.deadline, self.clock = post, deadline, clock
        self.pause = post.pause
        self.online = 0
        self.batches: list[Batch] = []
        self.late: dict[str, tuple[Batch, int]] = {}
        self.before: dict[tuple[int, str], deque[float]] = {}
        self.phases: dict[str, float] = {}  # seconds of waiting by kind of letter, since they were taken
        self.clients: dict[int, float] = {}  # seconds that clients needed to train, since they were taken
        self.sign: Sign | None = None

    def nodes(self) -> Mapping[int, Who]:
        nodes = self.post.nodes()
        self.online = len(nodes)
        return nodes

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        began = self.clock()
        ids = self.post.push(kind, letters, seconds)
        clients = {node: letter.head.get("client") for node, letter in letters.items()}
        for batch in [batch for batch in self.batches if batch.ends <= began]:
            for node in batch.waiting.values():  # silent for the whole time, as good as given up
                self.before.pop((node, batch.kind), None)
        self.batches = [batch for batch in self.batches if batch.waiting and batch.ends > began]
        batch = Batch(kind, began, began + seconds, clients, dict(ids), seen=began)
        self.batches.append(batch)
        self._show(batch)
        return ids

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        wanted = set(ids)
        now = self.clock()
        self.late = {key: entry for key, entry in self.late.items() if entry[0].ends > now}
        replies = []
        for key, answer in self.post.pull([*wanted, *self.late]):
            now = self.clock()
            if key in self.late:
                batch, node = self.late.pop(key)
                self._note(batch, node, answer, now - batch.began)
            else:
                self._take(key, answer, now)
                replies.append((key, answer))
        replies += self._given_up(wanted - {key for key, _ in replies})
        self._look(wanted)
        return replies

    def take_times(self) -> tuple[dict[str, float], dict[int, float]]:
        """Seconds by phase, and seconds that each client needed to train, since this was asked last."""
        taken = self.phases, self.clients
        self.phases, self.clients = {}, {}
        return taken

    def _look(self, wanted: set[str]) -> None:
        """Count the time since the batch in question was looked at, and show how it stands."""
        now = self.clock()
        batch = self.batches[-1] if self.batches else None
        if batch is not None and wanted:
            self.phases[batch.kind] = self.phases.get(batch.kind, 0.0) + now - batch.seen
            batch.seen = now
            self._show(batch)

    def _show(self, batch: Batch) -> None:
        if self.sign is not None:
            waiting = {batch.clients[node] for node in batch.waiting.values()}
            self.sign.show(batch.kind, waiting, {batch.clients[node] for node in batch.took})

    def _take(self, key: str, answer: Answer, now: float) -> None:
        for batch in self.batches:
            if key in batch.waiting:
                self._note(batch, batch.waiting.pop(key), answer, now - batch.began)

    def _note(self, batch: Batch, node: int, answer: Answer, seconds: float) -> None:
        if isinstance(answer, Letter) and "refused" not in answer.head:  # an error says nothing of how long work takes
            batch.took[node] = seconds
            client = batch.clients[node]
            if client is not None and batch.kind in (TRAIN, MASKED):
                self.clients[client] = seconds
            self.before.setdefault((node, batch.kind), deque(maxlen=REMEMBERED)).append(seconds)

    def _given_up(self, wanted: set[str]) -> list[tuple[str, Answer]]:
        """Messages whose nodes have had their time, each with the reason."""
        replies: list[tuple[str, Answer]] = []
        for batch in self.batches:
            elapsed = self.clock() - batch.began
            for key, node in [*batch.waiting.items()]:
                allowed = self._allowed(batch, node)
                if key in wanted and elapsed > allowed:
                    del batch.waiting[key]
                    self.late[key] = batch, node
                    self.before.pop((node, batch.kind), None)
                    why = f"no reply within {allowed:.3g} s, {self.deadline.slack:g} times what clients need"
                    replies.append((key, why))
        return replies

    def _allowed(self, batch: Batch, node: int) -> float:
        """The seconds that a node has to answer; endless while too few others have."""
        of = max(self.online, len(batch.clients)) if batch.kind == QUERY else len(batch.clients)
        answered = len(batch.took) if batch.kind != QUERY else of - len(batch.waiting)
        if answered < max(self.deadline.least, math.ceil(self.deadline.quorum * of)):
            return math.inf
        before = [(n, t) for (n, kind), times in self.before.items() if kind == batch.kind for t in times]
        own = [t for n, t in before if n == node]
        others = [*batch.took.values()] or [t for n, t in before if n != node]
        most = MOST * statistics.median(others or [math.inf])
        trusted = min(self.deadline.slack * max((t for t in own if t <= most), default=0.0), most)
        return max(self.deadline.slack * max(others or own, default=math.inf), trusted, 2 * self.pause)
