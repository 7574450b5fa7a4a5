"""Files of rows that have one structure: each tensor stacked over the rows, a checksum a row, read in place.

A row is a slice of a mapped file, so that reading one costs its own bytes, whatever the file holds beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from fedbayes.errors import InputError
from fedbayes.files import write_atomically
from fedbayes.study.sealed import BROKEN, checksum, structure, value_of

VERSION = 1
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
    sums = [torch.tensor(list(bytes.fromhex(row.sum)), dtype=torch.uint8) for row in rows]
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


def read(path: Path, numbers: Sequence[int]) -> list[Row]:
    """Some rows of a file, each compared with its checksum; ValueError where it is not what was written."""
    try:
        with safe_open(str(path), "pt") as file:
            header = json.loads((file.metadata() or {})["fedbayes.rows"])
            if header["version"] > VERSION:
                raise InputError(f"{path} was written by a newer fedbayes (format {header['version']})")
            columns = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
            made = [_row(columns, number, header["structure"]) for number in numbers]
    except BROKEN as error:
        raise ValueError(f"it is cut short or not a file of rows ({type(error).__name__})") from error
    for row in made:
        if checksum(row.shape, row.tensors) != row.sum:
            raise ValueError("its checksum does not match its content")
    return made


def _row(columns: Mapping[str, Any], number: int, shape: str) -> Row:
    cut = {name: column[number : number + 1][0] for name, column in columns.items()}
    written = bytes(cut.pop(SUMS).tolist()).hex()
    return Row(shape, {name.removeprefix(FIELD): t for name, t in cut.items()}, written)


def value(row: Row, device: torch.device | str = "cpu") -> Any:
    """What a row was made of."""
    # A copy: what was read is the file itself, mapped.
    return value_of(json.loads(row.shape), {name: t.to(device, copy=True) for name, t in row.tensors.items()})
