"""Nested values of tensors in safetensors files whose rows carry checksums: what is read is what was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as unpack_safetensors
from safetensors.torch import save as pack_safetensors
from torch import Tensor

from fedbayes.errors import InputError, one_line
from fedbayes.files import FAULTS, size_of, write_atomically
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import KINDS

VERSION = 1
PLAIN = (bool, int, float, str, type(None))
BROKEN = (SafetensorError, *FAULTS)


def write(path: Path, rows: Mapping[str, Any]) -> None:
    """Write named rows, each a nesting of dicts, lists, tensors, posteriors and plain values, as one file or none."""
    write_atomically(path, pack(rows))


def pack(rows: Mapping[str, Any]) -> bytes:
    """Named rows as the bytes of such a file."""
    tensors: dict[str, Tensor] = {}
    shapes: list[str] = []  # rows of one kind have one structure, which is held once
    index: dict[str, list[Any]] = {}
    for row, value in rows.items():
        own: dict[str, Tensor] = {}
        shape = json.dumps(structure(value, "", own))
        if shape not in shapes:
            shapes.append(shape)
        index[row] = [shapes.index(shape), checksum(shape, own)]
        # A copy: safetensors refuses two names for one memory, such as the best broadcast and the last.
        tensors |= {f"{row}/{name}": t.clone() for name, t in own.items()}
    header = json.dumps({"version": VERSION, "structures": shapes, "rows": index})
    return pack_safetensors(tensors, metadata={"fedbayes": header})


def read(path: Path, row: str, device: torch.device | str = "cpu") -> Any:
    """One row of a file, its checksum compared; ValueError where the file is not whole."""
    try:
        size_of(path)
        with safe_open(str(path), "pt") as file:
            header = json.loads((file.metadata() or {})["fedbayes"])
            names = [name for name in file.keys() if name.startswith(f"{row}/")]  # noqa: SIM118  (not a mapping)
            return _row(header, row, {name: file.get_tensor(name) for name in names}, device, str(path))
    except InputError:
        raise
    except BROKEN as error:
        raise ValueError(f"it is cut short or not a file of fedbayes ({one_line(error)})") from error


def unpack(data: bytes, row: str, device: torch.device | str = "cpu") -> Any:
    """One row of what `pack` gave; KeyError where it has no such row, ValueError where it is not whole."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["fedbayes"])
        tensors = unpack_safetensors(data)
    except BROKEN as error:
        raise ValueError(f"it is cut short or not of fedbayes ({one_line(error)})") from error
    return _row(header, row, {name: t for name, t in tensors.items() if name.startswith(f"{row}/")}, device, "it")


def _row(header: Any, row: str, tensors: Mapping[str, Tensor], device: torch.device | str, where: str) -> Any:
    if header["version"] > VERSION:
        raise InputError(f"{where} was written by a newer fedbayes (format {header['version']}); update fedbayes")
    place, written = header["rows"][row]
    shape = header["structures"][place]
    own = {name.removeprefix(f"{row}/"): t for name, t in tensors.items()}
    if checksum(shape, own) != written:
        raise ValueError("its checksum does not match its content")
    # A copy: what safe_open gives is the file itself, mapped, and changes with it.
    return value_of(json.loads(shape), {name: t.to(device, copy=True) for name, t in own.items()})


def structure(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """What json can hold of a value; its tensors go into `tensors` under their path."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        t = value.detach().cpu()
        # Of one entry or none any stride is contiguous, but not every one can be read as bytes.
        tensors[path] = t.contiguous() if t.numel() > 1 else t.clone(memory_format=torch.contiguous_format)
        return {"tensor": path}
    for kind, cls in KINDS.items():
        if isinstance(value, cls):
            names = [name for name in cls.__dataclass_fields__ if name != "layout"]
            fields = {name: structure(getattr(value, name), f"{path}.{name}", tensors) for name in names}
            return {"posterior": kind, "layout": value.layout.to_json() if value.layout else None, "fields": fields}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: structure(v, f"{path}.{key}", tensors) for key, v in value.items()}}
    if type(value) in (list, tuple):
        items = [structure(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {"list" if type(value) is list else "tuple": items}
    raise InputError(
        f"a {type(value).__name__} at {path.strip('.') or 'the top'} can't be written to a checkpoint; "
        "keep tensors, posteriors, dicts, lists and plain numbers"
    )


def value_of(nest: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `structure`."""
    if isinstance(nest, PLAIN):
        return nest
    if "tensor" in nest:
        return tensors[nest["tensor"]]
    if "posterior" in nest:
        layout = Layout.from_json(nest["layout"]) if nest["layout"] else None
        fields = {name: value_of(v, tensors) for name, v in nest["fields"].items()}
        return KINDS[nest["posterior"]](**fields, layout=layout)
    if "dict" in nest:
        return {key: value_of(v, tensors) for key, v in nest["dict"].items()}
    kind = tuple if "tuple" in nest else list
    return kind(value_of(v, tensors) for v in nest[kind.__name__])


def checksum(shape: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of a structure and its tensors, in hex."""
    digest = hashlib.blake2b(shape.encode(), digest_size=16)
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)  # no copy, and other threads run on
    return digest.hexdigest()
