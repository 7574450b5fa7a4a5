"""Letters as Flower's records, and its grid as a post."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import numpy as np

from fedbayes.errors import one_line, shown
from fedbayes.files import array_of
from fedbayes.flower.border import clean
from fedbayes.flower.fetching import HISTOGRAM, Fetching, bounded
from fedbayes.flower.library import Array, ArrayRecord, ConfigRecord, Grid, Message, RecordDict
from fedbayes.flower.node import CALIBRATE
from fedbayes.flower.places import Who
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter, Refused

HEAD, ARRAYS = "fedbayes.head", "fedbayes.arrays"
NUMPY = "numpy.ndarray"  # how an array is written into a record: numpy's own format, without pickle
GRACE = 30.0  # seconds that a message outlives its round, so that a reply just in time is not lost on its way


class GridPost:
    """Flower's grid: nodes that are online, messages out, replies in.

    `keys`: whether nodes have keys that outlive them; those of a simulation do not.
    """

    def __init__(self, grid: Grid, pause: float = 0.5, keys: bool = True) -> None:
        self.grid, self.pause, self.keys = grid, pause, keys
        self.fetching: Fetching[list[Answer]] = Fetching(self._pull, patience=pause)
        bounded(grid)

    def nodes(self) -> dict[int, Who]:
        return {info.node_id: self._who(info) for info in self.grid.get_nodes()}

    def _who(self, info: Any) -> Who:
        return Who(hashlib.sha256(info.public_key).hexdigest()[:32], info.name) if self.keys else Who()

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        ids: dict[str, int] = {}
        records: dict[int, ArrayRecord] = {}  # one broadcast is one record, whoever receives it
        for node, letter in letters.items():
            record = records.setdefault(id(letter.arrays), array_record(letter))
            content = RecordDict({HEAD: ConfigRecord(dict(letter.head)), ARRAYS: record})
            message = Message(content, node, kind, ttl=seconds + GRACE, group_id=str(letter.head.get("round", "")))
            # One at a time: a message that is not taken must not shift the others' ids.
            taken = [str(key) for key in self.grid.push_messages([message]) if key]
            numbers = sum(a.size for a in letter.arrays.values())
            beside = HISTOGRAM if kind == CALIBRATE else None
            self.fetching.expect(taken, numbers, time.monotonic() + seconds + GRACE, beside)
            ids |= dict.fromkeys(taken, node)
        return ids

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        return [(key, answer) for key, answers in self.fetching.come(ids) for answer in answers]

    def _pull(self, key: str) -> list[Answer]:
        """The reply to one message. It is known by what was asked for: what a message says of itself is its sender's.

        One at a time, for Flower takes messages apart as it pulls: one that can't be would take others with it.
        """
        try:
            return [answer_of(message) for message in self.grid.pull_messages([key])][:1]
        except (httpx.HTTPError, ConnectionError):
            raise  # the SuperLink's, and nobody's reply
        except Exception as error:
            return [Refused(f"its reply can't be read ({one_line(error)})")]


def answer_of(message: Message) -> Answer:
    """A reply as a letter, the reason of its error, or why it can't be read."""
    try:
        if message.has_error():
            return clean(f"error {message.error.code}: {message.error.reason or 'no reason given'}")
        return letter_of(message.content)
    except Exception as error:
        return Refused(f"its reply can't be read ({one_line(error)})")


def array_record(letter: Letter) -> ArrayRecord:
    """A letter's arrays as a record."""
    return ArrayRecord({name: Array(np.asarray(a, order="C")) for name, a in letter.arrays.items()})


def content_of(letter: Letter) -> RecordDict:
    """A letter as the content of a message."""
    return RecordDict({HEAD: ConfigRecord(dict(letter.head)), ARRAYS: array_record(letter)})


def letter_of(content: RecordDict) -> Letter:
    """The content of a message as a letter; only numpy's own format is read, and never a pickle."""
    head: dict[str, Any] = dict(content.config_records[HEAD])
    arrays = content.array_records[ARRAYS]
    for name, array in arrays.items():
        if array.stype != NUMPY:
            raise ValueError(f"array {shown(name)} is written as {shown(array.stype)}, not as {NUMPY}")
    return Letter(head, {name: array_of(array.data) for name, array in arrays.items()})
