"""Files that are either whole or absent."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: str | Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write to a temporary neighbour, flush it to disk, rename: a reader, or a crash, never meets half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    pieces = [data] if isinstance(data, bytes) else data
    # Not mkstemp: its files are for the owner alone, whatever the umask says.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
