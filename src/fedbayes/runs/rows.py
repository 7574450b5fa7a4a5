"""Files of rows that have one structure: each tensor stacked over the rows, and a checksum for each row.

They are safetensors files; reading a row costs its own bytes, whatever the file holds beside it. The checksum is of the
row and its place, the file's name and the row's number: a row that was put in the place of another is noticed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedbayes.errors import InputError, one_line
from fedbayes.files import size_of, write_atomically
from fedbayes.runs.sealed import BROKEN, checksum, structure, value_of

VERSION = 2  # 1 had checksums of rows without their places
SUMS, FIELD = "checksums", "row/"
# What safetensors calls them.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
KINDS = {name: dtype for dtype, name in DTYPES.items()}


class Row(NamedTuple):
    """A value as its structure in JSON and its tensors, with their checksum."""

    shape: str
    tensors: Mapping[str, Tensor]
    sum: str

    @classmethod
    def of(cls, value: Any) -> Row:
        tensors: dict[str, Tensor] = {}
        shape = json.dumps(structure(value, "", tensors))
        return cls(shape, tensors, checksum(shape, tensors))

    @property
    def kind(self) -> tuple[Any, ...]:
        """What rows must have in common to lie in one file."""
        return self.shape, *((name, t.dtype, tuple(t.shape)) for name, t in sorted(self.tensors.items()))

    @property
    def size(self) -> int:
        """Bytes that it takes in a file."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values()) + len(self.sum) // 2


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows of one kind, as one file or none; no more than the rows themselves is held in memory."""
    seals = [_seal(path, number, row.sum) for number, row in enumerate(rows)]
    sums = [torch.tensor(list(seal), dtype=torch.uint8) for seal in seals]
    columns = {FIELD + name: [row.tensors[name] for row in rows] for name in rows[0].tensors} | {SUMS: sums}
    about = json.dumps({"version": VERSION, "structure": rows[0].shape})
    header: dict[str, Any] = {"__metadata__": {"fedbayes.rows": about}}
    at = 0
    for name, column in columns.items():
        end = at + sum(t.numel() * t.element_size() for t in column)
        shape = [len(rows), *column[0].shape]
        header[name] = {"dtype": DTYPES[column[0].dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pieces = (t.contiguous().reshape(-1).view(torch.uint8).numpy().data for column in columns.values() for t in column)
    write_atomically(path, chain([len(text).to_bytes(8, "little"), text], pieces))


def _seal(path: Path, number: int, sum: str) -> bytes:
    """The checksum of a row in its place."""
    return hashlib.blake2b(f"{path.name} {number} {sum}".encode(), digest_size=16).digest()


class Column(NamedTuple):
    """Where a file has the tensors of one name, row after row."""

    start: int
    size: int  # bytes of a row
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row


def read(path: Path, numbers: Sequence[int]) -> list[Row]:
    """Some rows of a file, each compared with its checksum; ValueError where it is not what was written."""
    try:
        size_of(path)
        with path.open("rb", buffering=0) as file:
            structure, columns = _header(file)
            return [_row(path, file, columns, number, structure) for number in numbers]
    except InputError:
        raise
    except BROKEN as error:
        raise ValueError(f"it is cut short or not a file of rows ({one_line(error)})") from error


def expect(path: Path, numbers: Sequence[int]) -> None:
    """Advise the system to load some rows of a file, which will be read soon; it may not."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(*BROKEN):
        size_of(path)
        with path.open("rb", buffering=0) as file:
            for column in _header(file)[1].values():
                for number in numbers:
                    at = column.start + number * column.size
                    os.posix_fadvise(file.fileno(), at, column.size, os.POSIX_FADV_WILLNEED)


def _header(file: FileIO) -> tuple[str, dict[str, Column]]:
    """The structure of the rows, and the columns."""
    length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
    most = os.fstat(file.fileno()).st_size - 8 - length
    if length <= 0 or most < 0:
        raise ValueError("no header")
    header = json.loads(os.pread(file.fileno(), length, 8))
    about = json.loads(header.pop("__metadata__")["fedbayes.rows"])
    if about["version"] > VERSION:
        raise InputError(f"{file.name} was written by a newer fedbayes (format {about['version']}); update fedbayes")
    if about["version"] < VERSION:
        raise InputError(f"{file.name} was written by an earlier fedbayes; start anew in another folder")
    columns = {}
    for name, entry in header.items():
        dtype, (start, end), (count, *shape) = KINDS[entry["dtype"]], entry["data_offsets"], entry["shape"]
        size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        if not 0 <= start <= end <= most or count * size != end - start:
            raise ValueError(f"{name} is said to be where the file has no such bytes")
        columns[name] = Column(8 + length + start, size, dtype, tuple(shape))
    return about["structure"], columns


def _row(path: Path, file: FileIO, columns: Mapping[str, Column], number: int, shape: str) -> Row:
    cut = {}
    for name, column in columns.items():
        # Not mapped: where a page is not in memory, a fault for each costs ten times as much.
        data = bytearray(os.pread(file.fileno(), column.size, column.start + number * column.size))
        if len(data) < column.size:
            raise ValueError("too short")
        empty = torch.empty(0, dtype=column.dtype)
        cut[name] = (torch.frombuffer(data, dtype=column.dtype) if data else empty).reshape(column.shape)
    written = bytes(cut.pop(SUMS).tolist())
    tensors = {name.removeprefix(FIELD): t for name, t in cut.items()}
    row = Row(shape, tensors, checksum(shape, tensors))
    if _seal(path, number, row.sum) != written:
        raise ValueError("its checksum does not match its content")
    return row


def value(row: Row, device: torch.device | str = "cpu") -> Any:
    """What a row was made of."""
    return value_of(json.loads(row.shape), {name: t.to(device) for name, t in row.tensors.items()})
