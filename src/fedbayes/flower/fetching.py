"""Replies on their way to the server: bounded before their pieces are joined, and none holds up another.

A node announces a reply by the names of its objects and sends these later, or never. Flower waits for them, for hours,
and joins them as often as the reply says.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from fedbayes.files import size_text
from fedbayes.flower.library import (
    Array,
    Grid,
    ObjectPullError,
    ObjectUnavailableError,
    object_parts,
    pull_by,
    pull_objects,
)

Answers = TypeVar("Answers")
SLACK = 16 << 20  # bytes of a reply beside its numbers: a head, keys and shares, sums of scores
HISTOGRAM = 128 << 20  # the same where a client is asked for a histogram: it has up to 2^24 counts
WORDS = 16  # bytes of a reply for each number that was sent: two words, for a secure sum may need more than one
PIECE = 8 << 10  # bytes of an object, at least, so that there are not too many
SOON, SELDOM = 0.05, 5.0  # seconds between two looks for an object that is missing, at first and later


class Bound(NamedTuple):
    """How many bytes a reply may have, and until when it may come."""

    size: int = SLACK
    until: float = float("inf")


class Fetch(Generic[Answers]):
    """The reply to one message: `begun` once it is announced or known not to be there."""

    def __init__(self, key: str, bound: Bound) -> None:
        self.key, self.bound = key, bound
        self.begun = threading.Event()
        self.answers: Future[Answers] = Future()


class Fetching(Generic[Answers]):
    """Fetches replies one after another; one that takes longer than `patience` seconds goes on beside the others.

    Its threads keep no process from ending.
    """

    def __init__(self, pull: Callable[[str], Answers], patience: float) -> None:
        self.pull, self.patience = pull, patience
        self.bounds: dict[str, Bound] = {}
        self.unfinished: dict[str, Fetch[Answers]] = {}

    def expect(self, keys: Iterable[str], numbers: int, until: float, beside: int | None = None) -> None:
        """Bound the replies to messages that sent so many numbers; `beside` these, they may have so many bytes."""
        now = time.monotonic()
        self.bounds = {key: bound for key, bound in self.bounds.items() if bound.until > now}
        self.unfinished = {key: fetch for key, fetch in self.unfinished.items() if fetch.bound.until > now}
        self.bounds |= dict.fromkeys(keys, Bound((SLACK if beside is None else beside) + WORDS * numbers, until))

    def come(self, keys: Iterable[str]) -> list[tuple[str, Answers]]:
        """What the pull of each message has brought, but for those that go on."""
        come, queue = [], None
        try:
            for key in keys:
                fetch = self.unfinished.pop(key, None)
                if fetch is None:
                    fetch = Fetch(key, self.bounds.get(key, Bound()))
                    queue = self._thread() if queue is None else queue
                    queue.put(fetch)
                    fetch.begun.wait()
                    if wait([fetch.answers], self.patience).not_done:
                        queue.put(None)  # that thread has this one to do, and then no other
                        queue = None
                if fetch.answers.done():
                    come.append((key, fetch.answers.result()))
                else:
                    self.unfinished[key] = fetch
        finally:
            if queue is not None:
                queue.put(None)
        return come

    def _thread(self) -> SimpleQueue[Fetch[Answers] | None]:
        queue: SimpleQueue[Fetch[Answers] | None] = SimpleQueue()
        threading.Thread(target=self._work, args=(queue,), name="fedbayes-fetch", daemon=True).start()
        return queue

    def _work(self, queue: SimpleQueue[Fetch[Answers] | None]) -> None:
        while (fetch := queue.get()) is not None:
            HERE.fetch = fetch
            try:
                fetch.answers.set_result(self.pull(fetch.key))
            except BaseException as error:  # whoever asks for the reply meets it
                fetch.answers.set_exception(error)
            fetch.begun.set()


HERE = threading.local()  # the fetch of this thread


def bounded(grid: Grid) -> None:
    """Let a grid that pulls replies in pieces pull them within the bounds of their fetches."""
    pull_by(grid, objects)


class Missing(Exception):
    """An object was announced and is not there yet."""


def objects(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
    """The objects of a message by name, in place of Flower's own pull: none twice, not too many, not for ever."""
    fetch: Fetch[Any] | None = getattr(HERE, "fetch", None)
    if fetch is None:
        return pull_objects(object_ids, pull_object_fn, **options)
    fetch.begun.set()
    wanted, most = dict.fromkeys(object_ids), fetch.bound.size
    if len(wanted) > most // PIECE:
        raise ValueError(f"it is of {len(wanted)} pieces, at most {most // PIECE} are expected")
    got, size, lock = dict[str, bytes](), 0, threading.Lock()

    def one(key: str) -> bytes:
        nonlocal size
        try:
            content = pull_object_fn(key)
        except ObjectUnavailableError as error:
            raise Missing(key) from error
        with lock:
            size += 0 if key in got else len(content)
            got[key] = content
        _check(size, most)
        return content

    delay = SOON
    while missing := [key for key in wanted if key not in got]:
        try:
            pull_objects(missing, one)
        except Missing as error:
            if time.monotonic() + delay > fetch.bound.until:
                raise ObjectPullError(str(error), "it was announced and has not come in time") from error
            time.sleep(delay)
            delay = min(2 * delay, SELDOM)
    _check(joined(got), most)
    return got


def joined(contents: dict[str, bytes]) -> int:
    """Bytes of all arrays once their pieces are joined, each as often as it is named."""
    total = 0
    for content in contents.values():
        kind, children, body = object_parts(content)
        if kind == Array.__qualname__:
            total += sum(len(contents[children[i]]) for i in json.loads(body)["arraychunk_ids"])
    return total


def _check(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"it has {size_text(size)}, at most {size_text(most)} are expected")
