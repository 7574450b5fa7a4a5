"""Own state of clients on disk: a round appends its cohort's rows as a new file, an index says which file is whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedbayes.clients.client import Own
from fedbayes.errors import InputError
from fedbayes.study import sealed


class OwnFiles:
    """Rows in `own/round-000012.safetensors`; memory O(clients) for the index and O(cohort) for the rows.

    A file is never changed, so the index of an earlier checkpoint stays true until `sweep` drops what it needs.
    """

    def __init__(self, folder: Path, device: torch.device, index: Mapping[int, int] | None = None) -> None:
        self.folder = folder
        self.device = device
        self.index: dict[int, int] = dict(index or {})  # client -> the round whose file holds its row

    def path(self, number: int) -> Path:
        return self.folder / f"round-{number:06d}.safetensors"

    def get(self, client: int) -> Own | None:
        number = self.index.get(client)
        if number is None:
            return None
        path = self.path(number)
        try:
            own: Own = sealed.read(path, str(client), self.device)
        except (ValueError, OSError) as error:
            raise InputError(
                f"own state of client {client} can't be read from {path}: {error}; put the file back from a copy, "
                "or start anew in another folder"
            ) from error
        return own

    def put(self, number: int, rows: Mapping[int, Own]) -> None:
        kept = {client: own for client, own in rows.items() if own}
        if kept:
            # Rounds count from 1 in file names, as in the journal.
            sealed.write(self.path(number + 1), {str(client): own for client, own in kept.items()})
            self.index.update(dict.fromkeys(kept, number + 1))

    def as_tensors(self) -> dict[str, Any]:
        """The index as two columns, for a checkpoint."""
        clients = sorted(self.index)
        return {"clients": torch.tensor(clients), "rounds": torch.tensor([self.index[k] for k in clients])}

    def sweep(self, indices: Iterable[Mapping[int, int]]) -> None:
        """Delete the files that none of the indices needs."""
        needed = {self.path(number) for index in indices for number in index.values()}
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path not in needed:
                    path.unlink(missing_ok=True)


def index_of(columns: Mapping[str, Any]) -> dict[int, int]:
    """The inverse of `OwnFiles.as_tensors`."""
    return dict(zip(columns["clients"].tolist(), columns["rounds"].tolist()))
