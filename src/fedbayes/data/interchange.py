"""Columns of data frames by the dataframe interchange protocol: of pandas, polars, pyarrow and others, without them."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np

from fedbayes.data.values import Values, canonical, texts
from fedbayes.errors import InputError

BOOL, STRING, CATEGORY, TIME = 20, 21, 23, 22  # kinds of the dataframe interchange protocol; 0, 1, 2 are numbers
NUMBERS = {0: "i", 1: "u", 2: "f"}
PER_DAY = {"s": 86400, "m": 86400e3, "u": 86400e6, "n": 86400e9}


def columns_of(frame: Any, blanks: tuple[str, ...]) -> dict[str, Values]:
    """The columns of a data frame, by the dataframe interchange protocol: of pandas, polars, pyarrow and others."""
    inner = frame.__dataframe__(allow_copy=True)
    parts: dict[str, list[Values]] = {}
    for chunk in inner.get_chunks():
        for name in chunk.column_names():
            column = chunk.get_column_by_name(name)
            parts.setdefault(str(name), []).append(_column(column, str(name), blanks))
    return {name: v[0]._replace(data=np.concatenate([one.data for one in v])) for name, v in parts.items()}


def _column(column: Any, name: str, blanks: tuple[str, ...]) -> Values:
    kind, bits, format_, _ = column.dtype
    kind = int(kind)
    buffers = column.get_buffers()
    size, start = column.size(), column.offset or 0
    if kind == CATEGORY:
        about = column.describe_categorical
        words = canonical(_column(about["categories"], name, blanks).data).tolist()
        codes = _array(buffers["data"][0], _data_type(buffers["data"]), size, start).astype(np.int64)
        gone = _missing(column, buffers, codes.astype(np.float64), size, start) | (codes < 0)
        values = texts([None if lost else words[code] for code, lost in zip(codes.tolist(), gone.tolist())])
        return Values(values, "ordered", tuple(words)) if about["is_ordered"] else Values(values, "category")
    if kind == STRING:
        words_of = _strings(buffers, size, start)
        gone = _missing(column, buffers, None, size, start)
        return Values(texts([None if lost or w in blanks else w for w, lost in zip(words_of, gone.tolist())]))
    if kind == BOOL:
        data = _bits(buffers["data"][0], size, start) if bits == 1 else _array(buffers["data"][0], "u1", size, start)
    elif kind in NUMBERS:
        data = _array(buffers["data"][0], f"{NUMBERS[kind]}{bits // 8}", size, start)
    elif kind == TIME:
        data = _array(buffers["data"][0], f"i{bits // 8}", size, start)
    else:
        raise InputError(f"column {name!r} of the data frame is of kind {kind}; turn it into numbers, texts or dates")
    values = data.astype(np.float64)
    gone = _missing(column, buffers, values, size, start)
    if kind == TIME:  # tdD: days; tsu:, tsn:UTC: moments in microseconds, nanoseconds
        gone |= data == np.iinfo(data.dtype).min
        values = values / (1.0 if format_.startswith("tdD") else PER_DAY[format_[2]])
    return Values(np.where(gone, np.nan, values), "date" if kind == TIME else "number")


def _data_type(pair: Any) -> str:
    kind, bits, _, _ = pair[1]
    return f"{NUMBERS[int(kind)]}{bits // 8}"


def _array(buffer: Any, dtype: str, size: int, start: int) -> np.ndarray:
    """Values of a buffer, copied: its owner may let go of it."""
    kind = np.dtype(dtype)
    if (start + size) * kind.itemsize > buffer.bufsize:
        raise InputError(f"a buffer of the data frame holds {buffer.bufsize} bytes for {start + size} values")
    if not size:
        return np.zeros(0, kind)
    content = (ctypes.c_byte * buffer.bufsize).from_address(buffer.ptr)
    return np.frombuffer(content, kind, count=start + size)[start:].copy()


def _bits(buffer: Any, size: int, start: int) -> np.ndarray:
    packed = _array(buffer, "u1", -(-(start + size) // 8), 0)
    return np.unpackbits(packed, bitorder="little")[start : start + size]


def _strings(buffers: Any, size: int, start: int) -> list[str]:
    if not buffers["offsets"]:
        raise InputError("a text column of the data frame has no offsets; turn it into a list")
    buffer, (_, bits, _, _) = buffers["offsets"]
    offsets = _array(buffer, f"i{bits // 8}", size + 1, start).tolist()
    content = _array(buffers["data"][0], "u1", offsets[-1] if size else 0, 0).tobytes()
    return [content[a:b].decode("utf-8").strip() for a, b in pairwise(offsets)]


def _missing(column: Any, buffers: Any, values: np.ndarray | None, size: int, start: int) -> np.ndarray:
    """Which values are missing, by whichever of the protocol's five ways the column has."""
    how, value = column.describe_null
    how = int(how)
    if how == 0:
        return np.zeros(size, bool)
    if how == 1:
        return np.isnan(values) if values is not None else np.zeros(size, bool)
    if how == 2:
        return values == value if values is not None else np.zeros(size, bool)
    buffer, (_, bits, _, _) = buffers["validity"]
    flags = _bits(buffer, size, start) if how == 3 or bits == 1 else _array(buffer, "u1", size, start)
    return flags == value
