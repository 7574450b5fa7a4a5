"""Small images as PNG bytes, written by hand so that a page needs no image library."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np


def data_address(image: np.ndarray) -> str:
    """Bytes [H, W] or [H, W, 3] as a `data:image/png` address."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def png(image: np.ndarray) -> bytes:
    """Bytes [H, W] or [H, W, 3] as a PNG file."""
    height, width = image.shape[:2]
    colour = 2 if image.ndim == 3 else 0
    rows = b"".join(b"\0" + np.ascontiguousarray(row, dtype=np.uint8).tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
