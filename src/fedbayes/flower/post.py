"""Letters to nodes and their replies, over anything that can push and pull: bounded in time, never waiting for ever."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from fedbayes.flower.places import Who
from fedbayes.flower.wire import Letter, Refused

Answer = Letter | Refused | str  # a reply, why it can't be read, or why there is none


class Post(Protocol):
    """What carries letters: Flower's grid, or a stand-in."""

    pause: float  # seconds between two looks

    def nodes(self) -> Mapping[int, Who]:
        """The nodes that are online now, and by which keys and names they are known."""
        ...

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        """Send a letter to each node, valid for so long; the node by the message's id. Some may not be taken."""
        ...

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        """The replies that have come since to messages, each at most once."""
        ...


def exchange(post: Post, kind: str, letters: Mapping[int, Letter], seconds: float) -> Iterator[tuple[int, Answer]]:
    """Each node once, in the order in which replies come, with its reply or the reason why there is none."""
    end = time.monotonic() + seconds
    waiting = post.push(kind, letters, seconds)
    for node in set(letters) - set(waiting.values()):
        yield node, "its message could not be sent"
    while waiting:
        for key, answer in post.pull(list(waiting)):
            if key in waiting:
                yield waiting.pop(key), answer
        if waiting and time.monotonic() >= end:
            break
        if waiting:
            time.sleep(min(post.pause, max(0.0, end - time.monotonic())))
    for node in waiting.values():
        yield node, f"no reply within {seconds:g} s"
