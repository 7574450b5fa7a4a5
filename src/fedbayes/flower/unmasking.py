"""The noisy sum for whose shares a server has asked last: it may have been seen, and is not made with other noise.

Shares of a majority are enough to unmask a sum, and whoever was not asked yet would take part in another. So the server
notes the round before it asks for the first share, and a round that is noted and has no sum is over.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedbayes.files import reading, settle, text_of, write_atomically

FILE = "unmasking.json"  # of a run folder
MEND = "delete it where the round that it names is closed; else put it back from a copy"


class Unmasking:
    """A round's number, in a run's folder or in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._round: int | None = None

    def begun(self, number: int) -> bool:
        """Whether shares for a sum of this round were asked for."""
        path = None if self.folder is None else self.folder / FILE
        if self._round is None and path is not None and path.exists():
            with reading(path, MEND):
                self._round = int(json.loads(text_of(path))["round"])
        return self._round == number

    def begin(self, number: int) -> None:
        """Note a round, before the first share is asked for."""
        if self.begun(number):
            return
        self._round = number
        if self.folder is not None:
            write_atomically(self.folder / FILE, json.dumps({"round": number}) + "\n")
            settle(self.folder)
