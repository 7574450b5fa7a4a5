"""Row numbers of unequal lists, held as one flat vector and its cuts."""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MANY = 1 << 20  # a table of at least this many entries lies in a file


def _held(entries: np.ndarray) -> Tensor:
    """Entries as a tensor; many entries lie in a mapped file, of which only what clients have read is in memory."""
    if len(entries) < MANY:
        return torch.from_numpy(entries)
    with tempfile.NamedTemporaryFile() as file:  # its name goes here, its content with the tensor
        entries.tofile(file)
        file.flush()
        return torch.from_file(file.name, size=len(entries), dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """List k is `flat[offsets[k] : offsets[k + 1]]`; both int64."""

    flat: Tensor
    offsets: Tensor

    @classmethod
    def of_sizes(cls, flat: np.ndarray, sizes: np.ndarray) -> "Ragged":
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(_held(np.ascontiguousarray(flat, np.int64)), _held(offsets))

    @classmethod
    def of_lists(cls, lists: Sequence[Sequence[int] | np.ndarray | Tensor]) -> "Ragged":
        arrays = [np.asarray(rows, np.int64).reshape(-1) for rows in lists]
        flat = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        return cls.of_sizes(flat, np.array([len(rows) for rows in arrays], np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: int) -> Tensor:
        if not -len(self) <= k < len(self):
            raise IndexError(f"client {k} of {len(self)}")
        k %= len(self)
        return self.flat[self.offsets[k] : self.offsets[k + 1]]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.sizes.tolist())) if len(self) else iter(())

    @property
    def sizes(self) -> Tensor:
        return self.offsets.diff()

    @property
    def digest(self) -> str:
        """A checksum of who has which entries; of a table in a file only of its size, which costs no reading."""
        table = hashlib.blake2b(f"{len(self)} {len(self.flat)}".encode(), digest_size=8)
        if len(self.flat) < MANY:
            for t in (self.offsets, self.flat):
                table.update(t.numpy().tobytes())
        return table.hexdigest()

    def owners(self) -> Tensor:
        """The list that each entry of `flat` belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.sizes)
