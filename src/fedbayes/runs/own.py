"""Own state of clients on disk: append-only files of rows; an index says which row is whose.

The rows of the last cohort stay in memory; before a checkpoint, or when others take part, they are appended as a new
file. A file is never changed, so that the index of an earlier checkpoint stays true; one whose rows are mostly
superseded is written anew, without those, while the next round trains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from fedbayes.clients.client import Own
from fedbayes.errors import InputError
from fedbayes.runs import rows

WORN = 0.5  # a file with at most this share of live rows is written anew
MOST = 2  # rounds' rows that are moved at once, at most
HELD = 2**30  # bytes of a cohort's rows that stay in memory, at most
NONE = -1


class Index:
    """File and row of each client, eight bytes per client; and of each file how many rows it has, and how many live."""

    def __init__(self, columns: Mapping[str, Any] | None = None) -> None:
        self.file = np.full(0, NONE, np.int32)
        self.row = np.full(0, NONE, np.int32)
        self.rows: dict[int, int] = {}  # by file
        self.live: dict[int, int] = {}
        if columns is not None and len(columns["clients"]):
            if "files" not in columns:
                raise InputError("own state was written by an earlier fedbayes; start anew in another folder")
            clients, files = columns["clients"].cpu().numpy(), columns["files"].cpu().numpy()
            self._reach(int(clients[-1]))
            self.file[clients], self.row[clients] = files, columns["rows"].cpu().numpy()
            self.rows = {int(file): int(n) for file, n in columns["sizes"].tolist()}
            held, counts = np.unique(files, return_counts=True)
            self.live = dict.fromkeys(self.rows, 0) | dict(zip(held.tolist(), counts.tolist()))

    def __len__(self) -> int:
        return sum(self.live.values())

    @property
    def clients(self) -> list[int]:
        """Who has a row."""
        owners: list[int] = np.flatnonzero(self.file != NONE).tolist()
        return owners

    @property
    def files(self) -> frozenset[int]:
        """The files that are needed."""
        return frozenset(file for file, n in self.live.items() if n)

    def place(self, client: int) -> tuple[int, int] | None:
        """File and row of a client."""
        if client >= len(self.file) or self.file[client] == NONE:
            return None
        return int(self.file[client]), int(self.row[client])

    def point(self, clients: Collection[int], file: int) -> None:
        """Say that a new file holds these clients' rows, in this order."""
        self._reach(max(clients))
        self.rows[file] = self.live[file] = len(clients)
        for row, client in enumerate(clients):
            before = int(self.file[client])
            if before != NONE:
                self.live[before] -= 1
            self.file[client], self.row[client] = file, row

    def holders(self, files: Collection[int]) -> list[int]:
        """The clients whose rows lie in files, in the order of files and rows."""
        owners = np.flatnonzero(np.isin(self.file, list(files)))
        order: list[int] = owners[np.lexsort((self.row[owners], self.file[owners]))].tolist()
        return order

    def worn(self, most: int) -> list[int]:
        """Files that are mostly superseded, the emptiest first, with at most so many live rows together."""
        files = [f for f, n in self.live.items() if 0 < n <= WORN * self.rows[f]]
        total, taken = 0, []
        for file in sorted(files, key=lambda f: (self.live[f], f)):
            total += self.live[file]
            if total > most:
                break
            taken.append(file)
        return taken

    def forget(self, files: Collection[int]) -> None:
        for file in files:
            del self.rows[file], self.live[file]

    def as_tensors(self) -> dict[str, Any]:
        """The index as columns, for a checkpoint."""
        clients = np.flatnonzero(self.file != NONE)
        sizes = [[file, n] for file, n in sorted(self.rows.items()) if self.live[file]]
        return {
            "clients": torch.from_numpy(clients.astype(np.int32)),
            "files": torch.from_numpy(self.file[clients]),
            "rows": torch.from_numpy(self.row[clients]),
            "sizes": torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2),
        }

    def _reach(self, client: int) -> None:
        if client >= len(self.file):
            more = np.full(max(client + 1, 2 * len(self.file)) - len(self.file), NONE, np.int32)
            self.file, self.row = np.concatenate([self.file, more]), np.concatenate([self.row, more])


class Move:
    """Live rows of worn files on their way into new ones, one for each kind, in a thread beside a round."""

    def __init__(self, sources: Mapping[Path, list[tuple[int, int]]], targets: Iterator[tuple[int, Path]]) -> None:
        self.made: list[tuple[list[int], int]] = []  # clients, and the file that holds their rows
        self.failure: Exception | None = None
        self._sources, self._targets = sources, targets  # row and client, by file
        self._thread = Thread(target=self._run, name="fedbayes-own-state")
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            kinds: dict[Any, dict[int, rows.Row]] = {}
            for path, places in self._sources.items():
                for (_, client), row in zip(places, rows.read(path, [number for number, _ in places])):
                    kinds.setdefault(row.kind, {})[client] = row
            for moved in kinds.values():
                file, path = next(self._targets)
                rows.write(path, list(moved.values()))
                self.made.append((list(moved), file))
        except Exception as error:
            self.failure = error


class OwnFiles:
    """Own state in `own/rows-000012.safetensors`: eight bytes per client in memory, and the rows of one cohort."""

    def __init__(self, folder: Path, device: torch.device, index: Index | None = None) -> None:
        self.folder, self.device = folder, device
        self.index = Index() if index is None else index
        self._next = max([*self.index.rows, *self._on_disk()], default=0) + 1
        self._move: Move | None = None
        self._most = 0  # rows that the largest round so far has put
        self._held: dict[int, Own] = {}  # of the last cohort
        self._unwritten: set[int] = set()  # of these

    def path(self, file: int) -> Path:
        return self.folder / f"rows-{file:06d}.safetensors"

    def get(self, client: int) -> Own | None:
        if client in self._held:
            return self._held[client]
        place = self.index.place(client)
        if place is None:
            return None
        try:
            own: Own = rows.value(rows.read(self.path(place[0]), [place[1]])[0], self.device)
        except (ValueError, OSError) as error:
            raise InputError(
                f"own state of client {client} can't be read from {self.path(place[0])}: {error}; put the file back "
                "from a copy, or start anew in another folder"
            ) from error
        return own

    def expect(self, clients: Iterable[int]) -> None:
        """Start to load the rows of clients that the next round needs."""
        files: dict[int, list[int]] = {}
        for file, row in filter(None, (self.index.place(c) for c in clients if c not in self._held)):
            files.setdefault(file, []).append(row)
        for file, numbers in files.items():
            rows.expect(self.path(file), numbers)

    def put(self, number: int, rows_of: Mapping[int, Own]) -> None:
        """Take the rows of a round: in place of those of the round before, which are written unless they are here."""
        new = {client: own for client, own in rows_of.items() if own}
        self._write(sorted(self._unwritten - new.keys()))
        self._held, self._unwritten = new, set(new)
        if sum(t.nbytes for t in tree_leaves(new) if isinstance(t, torch.Tensor)) > HELD:
            self.write()
            self._held = {}

    def write(self) -> None:
        """Write what is in memory only: an index that is kept after this has all rows."""
        self._write(sorted(self._unwritten))

    def _write(self, clients: Sequence[int]) -> None:
        """Append the rows of clients, those of one kind to one file."""
        self.settle()
        kinds: dict[Any, dict[int, rows.Row]] = {}
        for client in clients:
            row = rows.Row.of(self._held[client])
            kinds.setdefault(row.kind, {})[client] = row
        self._most = max(self._most, len(clients))
        for kind_rows, (file, path) in zip(kinds.values(), self._targets()):
            rows.write(path, list(kind_rows.values()))
            self.index.point(kind_rows, file)
        self._unwritten.difference_update(clients)

    def compact(self) -> None:
        """Begin to write the live rows of worn files anew, beside what follows; at most two rounds' rows at a time.

        A file is taken when half of its rows are superseded, so that a row is moved at most once for each that was
        superseded, and the store is at most twice as large as what is live.
        """
        files = self.index.worn(MOST * self._most)
        if self._move is None and files:
            self._move = Move(self._places(files), self._targets())

    def settle(self) -> None:
        """Wait for what is being written anew, and use it."""
        if self._move is None:
            return
        move, self._move = self._move, None
        move.join()
        if move.failure is not None:
            raise InputError(f"own state in {self.folder} can't be compacted: {move.failure}") from move.failure
        for clients, file in move.made:
            self.index.point(clients, file)

    def sweep(self, needed: Collection[frozenset[int]]) -> None:
        """Delete the files that neither the index nor one of the given sets needs."""
        keep = self.index.files.union(*needed)
        gone = [file for file in self.index.rows if file not in keep]
        for file in gone:
            self.path(file).unlink(missing_ok=True)
        self.index.forget(gone)

    def sweep_strays(self, needed: Collection[frozenset[int]]) -> None:
        """Delete all that no index needs, what a killed process left included."""
        keep = {self.path(file): file for file in self.index.files.union(*needed)}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path not in keep and not path.is_dir():
                    path.unlink(missing_ok=True)
        for file in keep.values():  # of the checkpoint before, for a later sweep
            self.index.rows.setdefault(file, 0)
            self.index.live.setdefault(file, 0)

    def _targets(self) -> Iterator[tuple[int, Path]]:
        while True:
            self._next += 1
            yield self._next - 1, self.path(self._next - 1)

    def _places(self, files: Collection[int]) -> dict[Path, list[tuple[int, int]]]:
        """Row and client of the live rows of files."""
        places: dict[Path, list[tuple[int, int]]] = {}
        for client in self.index.holders(files):
            file, row = int(self.index.file[client]), int(self.index.row[client])
            places.setdefault(self.path(file), []).append((row, client))
        return places

    def _on_disk(self) -> list[int]:
        return [int(path.stem.removeprefix("rows-")) for path in self.folder.glob("rows-*.safetensors")]


def rows_on_disk(cohorts: Iterable[Sequence[int]]) -> Iterator[int]:
    """How many rows the store will hold after each round, from who will take part: a checkpoint after every round.

    Cohorts are known before a run (`federation.cohort_of`); times the size of a row this is its use of the disk.
    """
    index, needed, most, file = Index(), [frozenset[int]()], 0, 0
    for cohort in cohorts:
        most = max(most, len(cohort))
        moved = index.holders(index.worn(MOST * most)) if file else []
        for clients in (moved, list(cohort)):
            if len(clients):
                file += 1
                index.point(clients, file)
        needed = [needed[-1], index.files]
        index.forget([f for f in index.rows if f not in needed[0] | needed[1]])
        yield sum(index.rows.values())
