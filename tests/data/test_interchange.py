"""Data frames by the interchange protocol, from a producer of its own: each kind of column, each way to be missing."""

import numpy as np
import pytest

from fedbayes.data.frames import table_of
from fedbayes.errors import InputError


class Buffer:
    def __init__(self, array):
        self.array = np.ascontiguousarray(array)
        self.bufsize, self.ptr = self.array.nbytes, self.array.ctypes.data


class Column:
    """A column over numpy arrays, as the protocol describes it."""

    def __init__(self, kind, data, *, null=(0, None), validity=None, offsets=None, bits=None, form="", categories=None):
        self.data, self.null, self.valid, self.offs = np.asarray(data), null, validity, offsets
        self.count = len(offsets) - 1 if offsets is not None else len(self.data)
        self.dtype = (kind, bits or self.data.itemsize * 8, form, "=")
        self.offset, self.describe_null, self.categories = 0, null, categories

    def size(self):
        return self.count

    @property
    def describe_categorical(self):
        words, ordered = self.categories
        return {"is_ordered": ordered, "is_dictionary": True, "categories": strings(words)}

    def get_buffers(self):
        kind = 0 if self.dtype[0] == 23 else self.dtype[0]
        pairs = {
            "data": (Buffer(self.data), (kind, self.data.itemsize * 8, "", "=")),
            "validity": None,
            "offsets": None,
        }
        if self.valid is not None:
            bits = 1 if self.null[0] == 3 else 8
            pairs["validity"] = (Buffer(self.valid), (20, bits, "b", "="))
        if self.offs is not None:
            pairs["offsets"] = (Buffer(self.offs), (0, self.offs.itemsize * 8, "", "="))
        return pairs


def strings(words, null=(0, None), validity=None, size=np.int64):
    content = "".join(words).encode()
    offsets = np.cumsum([0, *(len(word.encode()) for word in words)]).astype(size)
    return Column(21, np.frombuffer(content, np.uint8), offsets=offsets, null=null, validity=validity, form="U")


class Frame:
    def __init__(self, **columns):
        self.columns = columns

    def __dataframe__(self, allow_copy=True):
        return self

    def get_chunks(self):
        return [self]

    def column_names(self):
        return list(self.columns)

    def get_column_by_name(self, name):
        return self.columns[name]


def values(column):
    found = table_of(Frame(x=column)).columns["x"]
    return found.kind, [None if v is None or v != v else v for v in found.data.tolist()]


NAT = np.iinfo(np.int64).min
BITS, BYTES = np.array([0b01], np.uint8), np.array([0, 1], np.uint8)
PACKED = Column(20, np.array([0b10], np.uint8), bits=1)
LETTERS, LEVELS = (["a", "b"], False), (["low", "high"], True)
COLUMNS = {
    "whole numbers": (Column(0, np.array([3, -4], np.int32)), ("number", [3, -4])),
    "bytes": (Column(1, np.array([3, 255], np.uint8)), ("number", [3, 255])),
    "nan": (Column(2, np.array([0.5, np.nan]), null=(1, None)), ("number", [0.5, None])),
    "sentinel": (Column(0, np.array([3, -1]), null=(2, -1)), ("number", [3, None])),
    "bit mask": (Column(0, np.array([3, 9]), null=(3, 0), validity=BITS), ("number", [3, None])),
    "byte mask": (Column(0, np.array([3, 9]), null=(4, 1), validity=BYTES), ("number", [3, None])),
    "booleans": (Column(20, np.array([True, False])), ("number", [1, 0])),
    "packed booleans": (PACKED, ("number", [0, 1])),
    "texts": (strings(["ä", "", "long"]), ("", ["ä", None, "long"])),
    "short offsets": (strings(["a", "b"], (4, 1), BYTES, np.int32), ("", ["a", None])),
    "categories": (
        Column(23, np.array([1, 0, -1], np.int8), null=(2, -1), categories=LETTERS),
        ("category", ["b", "a", None]),
    ),
    "ordered": (Column(23, np.array([1, 0], np.int8), categories=LEVELS), ("ordered", ["high", "low"])),
    "moments": (Column(22, np.array([86400 * 10**9 * 3, NAT]), null=(2, NAT), form="tsn:"), ("date", [3, None])),
    "days": (Column(22, np.array([7, 8], np.int32), form="tdD"), ("date", [7, 8])),
}
PACKED.count = 2


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_every_kind(kind):
    column, expected = COLUMNS[kind]
    assert values(column) == expected


def test_a_buffer_that_is_too_short_is_refused():
    column = Column(0, np.array([1, 2], np.int64))
    column.count = 5
    with pytest.raises(InputError, match="16 bytes for 5 values"):
        values(column)


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="'x' of the data frame is of kind 99"):
        values(Column(99, np.zeros(2)))
