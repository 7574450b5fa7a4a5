"""Files: written whole or not at all, and checked for size and kind before they are opened; a fault is one line.

A file from outside must be a regular one. What is packed may unpack to 100 times its size (64 MiB in any case) and to
2 GiB at most; an array must be as large as its header says, and fit into this machine's memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import lzma
import math
import os
import secrets
import stat
import struct
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fedbayes.errors import InputError, one_line

TEXT = 1 << 20  # bytes of a settings file
RATIO, LEAST, MOST = 100, 64 << 20, 2 << 30  # of what is packed
BLOCK = 1 << 20

# What the parsers of these formats raise when they meet damaged bytes.
FAULTS = (
    *(OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, EOFError, MemoryError),
    *(RuntimeError, SyntaxError, tokenize.TokenError, struct.error, csv.Error),
    *(zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError),
)


@contextmanager
def reading(path: str | Path, mend: str, fault: str = "can't be read") -> Iterator[None]:
    """Parse a file inside this: whatever its bytes do to the parser becomes one line that names the file."""
    try:
        yield
    except InputError:
        raise
    except FAULTS as error:
        raise InputError(f"{path} {fault} ({one_line(error)}); {mend}") from error


def memory() -> int:
    """Bytes of this machine's memory; 64 GiB where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 64 << 30


def size_text(size: int) -> str:
    """A number of bytes for reading."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.4g} TiB" if size < 1e6 else "more than 1e6 TiB"


def size_of(path: str | Path, most: int | None = None) -> int:
    """The size of a regular file; refused where it is something else, or larger than `most` (or than memory)."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise InputError(f"{path} is no regular file; give a file")
    most = memory() if most is None else most
    if about.st_size > most:
        raise InputError(f"{path} has {size_text(about.st_size)}, the most is {size_text(most)}; give a smaller file")
    return about.st_size


def bytes_of(path: str | Path, most: int | None = None) -> bytes:
    """The bytes of a regular file that is not larger than `most` (or than memory)."""
    size_of(path, most)
    return Path(path).read_bytes()


def text_of(path: str | Path, most: int = TEXT) -> str:
    """The text of a small UTF-8 file."""
    return bytes_of(path, most).decode("utf-8")


def most_unpacked(packed: int) -> int:
    """How large a packed file may grow."""
    return min(MOST, max(LEAST, RATIO * packed))


def grown(stream: IO[bytes] | gzip.GzipFile | lzma.LZMAFile, path: Path, packed: int) -> bytes:
    """All that a stream unpacks to, refused as soon as it is too much."""
    most, content = most_unpacked(packed), bytearray()
    while block := stream.read(BLOCK):
        content += block
        if len(content) > most:
            raise InputError(
                f"{path} ({size_text(packed)}) unpacks to more than {size_text(most)}, which no honest file of its "
                "size does; delete it and fetch it again"
            )
    return bytes(content)


def array_in(path: Path, mend: str = "save plain arrays with numpy.save") -> np.ndarray:
    """The array of a .npy file, without pickles; as large as the file is."""
    with reading(path, mend):
        size = size_of(path)
        with path.open("rb") as file:
            return _array(file, size)


def arrays_in(path: Path, mend: str = "save plain arrays with numpy.savez") -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, without pickles; their sizes are checked before they are unpacked."""
    with reading(path, mend):
        size = size_of(path)
        with zipfile.ZipFile(path) as archive:
            check_members(archive.infolist(), path, size)
            arrays = {}
            for member in archive.infolist():
                with archive.open(member) as file:
                    arrays[member.filename.removesuffix(".npy")] = _array(file, member.file_size)
            return arrays


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive does."""
    with path.open("rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06")


def check_members(members: list[zipfile.ZipInfo], path: Path, packed: int) -> None:
    """Refuse an archive whose members say that together they are too large."""
    total = sum(member.file_size for member in members)
    stored = all(member.compress_type == zipfile.ZIP_STORED for member in members)
    most = packed if stored else most_unpacked(packed)
    if total > most:
        raise InputError(
            f"{path} ({size_text(packed)}) says that it unpacks to {size_text(total)}, the most is {size_text(most)}; "
            "give its content unpacked"
        )


def array_of(content: bytes) -> np.ndarray:
    """The array of bytes in numpy's own format, without pickles: a view of them, exactly as large as they are."""
    file = io.BytesIO(content)
    shape, fortran, dtype = _header(file, len(content))
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """One array in numpy's own format, from a file of so many bytes."""
    shape, fortran, dtype = _header(file, size)
    wanted = math.prod(shape) * dtype.itemsize
    content = bytearray(file.read(wanted))
    if len(content) != wanted:
        raise ValueError(f"it ends after {size_text(len(content))} of {size_text(wanted)}")
    flat: np.ndarray = np.frombuffer(content, dtype) if wanted else np.zeros(math.prod(shape), dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def _header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type of an array, which must fill the rest of a file of so many bytes."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"numpy's format {version} is not known here")
    shape, fortran, dtype = read(file)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError("it holds Python objects or nothing, not numbers")
    if any(n < 0 for n in shape):
        raise ValueError(f"its shape is {shape}")
    wanted, rest = math.prod(shape) * dtype.itemsize, size - file.tell()
    if wanted != rest:
        raise ValueError(f"its header promises {size_text(wanted)}, the file holds {size_text(rest)}")
    return shape, fortran, dtype


def new_folder(path: str | Path) -> Path:
    """A folder that is there, made where it is not; refused where a file has its place."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{path} is a file, or below one, and no folder; give another") from error
    return path


def write_atomically(path: str | Path, content: bytes | str | Iterable[bytes | memoryview]) -> None:
    """Write to a temporary file beside it, flush it to disk, rename: neither a reader nor a crash finds half a file."""
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
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a full disk does not say where
        raise


def settle(folder: str | Path) -> None:
    """Wait until the names of a folder are on disk: a machine that stops must not forget a file that was renamed."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # a system on which folders can't be opened
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
