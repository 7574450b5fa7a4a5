"""Decoded arrays kept as .npy files with checksums in the user's cache folder."""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedbayes.files import FAULTS

Arrays = dict[str, np.ndarray]
_VERSION = 1  # Raise when a decoder changes what it gives.


def cache_folder() -> Path:
    """FEDBAYES_CACHE, else fedbayes in XDG_CACHE_HOME, else in ~/.cache."""
    if own := os.environ.get("FEDBAYES_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "fedbayes"


def decoded(name: str, files: Sequence[Path], make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` decodes from these files, read back from the cache as long as the files are the same.

    A damaged entry is made anew; a cache that cannot be written costs time, not the result.
    """
    stamp = [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    key = hashlib.sha256(json.dumps([_VERSION, name, stamp]).encode()).hexdigest()[:16]
    folder = cache_folder() / "decoded" / f"{name}-{key}"
    with suppress(*FAULTS):
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        return {part: _read(folder / f"{part}.npy", digest) for part, digest in index.items()}
    arrays = make()
    with suppress(OSError):
        _write(folder, arrays)
    return arrays


def _read(path: Path, digest: str) -> np.ndarray:
    """One pass over the bytes for both the checksum and the array."""
    raw = bytearray(path.stat().st_size)
    with path.open("rb") as file:
        file.readinto(raw)
    if _digest(raw) != digest:
        raise ValueError(f"{path} does not have the checksum it was written with")
    head = io.BytesIO(bytes(raw[:4096]))
    np.lib.format.read_magic(head)
    shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    return np.frombuffer(raw, dtype, offset=head.tell()).reshape(shape)


def _write(folder: Path, arrays: Arrays) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
    try:
        index = {}
        for part, array in arrays.items():
            with (work / f"{part}.npy").open("wb") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            index[part] = _digest((work / f"{part}.npy").read_bytes())
        (work / "index.json").write_text(json.dumps(index), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _digest(raw: bytes | bytearray) -> str:
    return hashlib.sha256(raw).hexdigest()
