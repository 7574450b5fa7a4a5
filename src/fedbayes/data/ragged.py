"""Row numbers of unequal lists, held as one flat vector and its cuts."""

import hashlib
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

MANY = 1 << 19  # a table of at least this many entries lies in a file
READS = 16  # lists of a table in a file that are read before its pages are let go


class Pages:
    """The mapped files of a table: of very many clients only what was read last is in memory."""

    def __init__(self) -> None:
        self.files: list[mmap.mmap] = []
        self.reads = 0

    def __reduce__(self) -> tuple[type["Pages"], tuple[()]]:
        return Pages, ()  # a copy of the table has its entries in memory

    def tensor(self, entries: np.ndarray) -> Tensor:
        """Entries as a tensor, in a file where there are many."""
        if len(entries) < MANY:
            return torch.from_numpy(entries)
        with tempfile.TemporaryFile() as file:  # without a name; it goes with the tensor
            entries.tofile(file)
            file.flush()
            self.files.append(mmap.mmap(file.fileno(), 0))
        return torch.frombuffer(self.files[-1], dtype=torch.int64)

    def read(self) -> None:
        """Count a list that is read."""
        self.reads += 1
        if self.reads % READS == 0:
            self.let_go()

    def let_go(self) -> None:
        """Take the pages out of this process's memory; what is read again is in the system's cache."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            for file in self.files:
                file.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, eq=False)
class Ragged:
    """List k is `flat[offsets[k] : offsets[k + 1]]`; both int64."""

    flat: Tensor
    offsets: Tensor
    pages: Pages = field(default_factory=Pages, repr=False)

    @classmethod
    def of_sizes(cls, flat: np.ndarray, sizes: np.ndarray) -> "Ragged":
        offsets, pages = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), Pages()
        return cls(pages.tensor(np.ascontiguousarray(flat, np.int64)), pages.tensor(offsets), pages)

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
        self.pages.read()
        start, end = self.offsets[k : k + 2].tolist()
        return self.flat[start:end]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.flat.split(self.sizes.tolist())) if len(self) else iter(())

    @property
    def sizes(self) -> Tensor:
        sizes = self.offsets.diff()
        self.pages.let_go()
        return sizes

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
