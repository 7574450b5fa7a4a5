"""Letters as Flower's records, and its grid as a post."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter

HEAD, ARRAYS = "fedbayes.head", "fedbayes.arrays"
NUMPY = "numpy.ndarray"  # how an array is written into a record: numpy's own format, without pickle
AT_ONCE = 16  # replies that are pulled together: so many uploads are in memory beside the sum
GRACE = 30.0  # seconds that a message outlives its round, so that a reply just in time is not lost on its way


class GridPost:
    """Flower's grid: nodes that are online, messages out, replies in."""

    def __init__(self, grid: Grid, pause: float = 0.5) -> None:
        self.grid = grid
        self.pause = pause

    def nodes(self) -> list[int]:
        return list(self.grid.get_node_ids())

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        ids: dict[str, int] = {}
        records: dict[int, ArrayRecord] = {}  # one broadcast is one record, whoever receives it
        for node, letter in letters.items():
            record = records.setdefault(id(letter.arrays), array_record(letter))
            content = RecordDict({HEAD: ConfigRecord(dict(letter.head)), ARRAYS: record})
            message = Message(content, node, kind, ttl=seconds + GRACE, group_id=str(letter.head.get("round", "")))
            # One at a time: a message that is not taken must not shift the others' ids.
            ids |= {str(key): node for key in self.grid.push_messages([message]) if key}
        return ids

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        waiting = list(ids)
        replies: list[tuple[str, Answer]] = []
        for start in range(0, len(waiting), AT_ONCE):
            for message in self.grid.pull_messages(waiting[start : start + AT_ONCE]):
                replies.append((message.metadata.reply_to_message_id, answer_of(message)))
        return replies


def answer_of(message: Message) -> Answer:
    """A reply as a letter, or the reason of its error."""
    if message.has_error():
        return f"error {message.error.code}: {' '.join(str(message.error.reason).split()) or 'no reason given'}"
    try:
        return letter_of(message.content)
    except (KeyError, ValueError, TypeError) as error:
        return f"its reply can't be read ({type(error).__name__}: {error})"


def array_record(letter: Letter) -> ArrayRecord:
    """A letter's arrays as a record."""
    return ArrayRecord({name: Array(np.ascontiguousarray(a)) for name, a in letter.arrays.items()})


def content_of(letter: Letter) -> RecordDict:
    """A letter as the content of a message."""
    return RecordDict({HEAD: ConfigRecord(dict(letter.head)), ARRAYS: array_record(letter)})


def letter_of(content: RecordDict) -> Letter:
    """The content of a message as a letter; only numpy's own format is read, and never a pickle."""
    head: dict[str, Any] = dict(content.config_records[HEAD])
    arrays = content.array_records[ARRAYS]
    for name, array in arrays.items():
        if array.stype != NUMPY:
            raise ValueError(f"array {name!r} is written as {array.stype!r}, not as {NUMPY}")
    return Letter(head, {name: array.numpy() for name, array in arrays.items()})
