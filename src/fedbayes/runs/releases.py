"""The releases of a run beside its rounds as a file of its folder, written before they are made. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from fedbayes.federation.ledger import Check, Ledger, Release
from fedbayes.files import reading, settle, text_of, write_atomically

FILE = "releases.json"
MEND = "put it back from a copy: without it nobody knows what was spent"


class Releases(Ledger):
    """The releases of a run folder; `alone` keeps others out of it while one is added."""

    def __init__(self, folder: Path, alone: Callable[[], AbstractContextManager[None]]) -> None:
        self.folder, self.alone = folder, alone

    def read(self) -> list[Release]:
        return releases_in(self.folder)

    def add(self, release: Release, check: Check) -> None:
        with self.alone():
            before = self.read()
            check(before)
            rows = [each._asdict() for each in (*before, release)]
            write_atomically(self.folder / FILE, json.dumps(rows, indent=1) + "\n")
            settle(self.folder)


def releases_in(folder: str | Path) -> list[Release]:
    """The releases of a run folder; none where nothing was released."""
    path = Path(folder) / FILE
    if not path.exists():
        return []
    with reading(path, MEND):
        rows = json.loads(text_of(path))
        releases = [Release(str(row["what"]), float(row["epsilon"]), int(row["round"])) for row in rows]
        if not all(0 < release.epsilon < math.inf for release in releases):
            raise ValueError("it holds an epsilon that is no positive number")
        return releases
