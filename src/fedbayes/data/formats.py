"""Readers of the files that benchmarks come in; none of them unpickles."""

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path

import numpy as np

from fedbayes.data.cache import Arrays
from fedbayes.files import check_members, grown, most_unpacked, reading, size_of, text_of

TEXT = 1 << 30  # bytes of a JSON file
LEAF_PIXELS = 28 * 28


def fetched(path: Path) -> AbstractContextManager[None]:
    """Read a file that can be fetched again inside this."""
    return reading(path, "delete it and fetch it again", "is truncated or damaged")


def unpacked(path: Path) -> bytes:
    """The bytes of a file, through gzip or xz where its name says so, with an end to how far it grows."""
    with fetched(path):
        size = size_of(path)
        with path.open("rb") as file:
            if path.suffix == ".gz":
                with gzip.open(file) as stream:
                    return grown(stream, path, size)
            if path.suffix == ".xz":
                with lzma.open(file) as stream:
                    return grown(stream, path, size)
            return file.read()


def zip_members(path: Path, names: list[str] | None = None) -> list[bytes]:
    """Members of an archive by name, or all of them, read in place."""
    with fetched(path):
        size = size_of(path)
        with zipfile.ZipFile(path) as archive:
            wanted = [archive.getinfo(name) for name in names] if names else archive.infolist()
            check_members(wanted, path, size)
            return [archive.read(member) for member in wanted]


def tar_members(path: Path, names: list[str]) -> list[bytes]:
    """Regular members of an archive by the last part of their name, read in place; links are not followed."""
    raw = unpacked(path)
    content: dict[str, bytes] = {}
    with fetched(path):
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            for member in archive:
                leaf = member.name.rsplit("/", 1)[-1]
                plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
                if leaf in names and plain:
                    content[leaf] = raw[member.offset_data : member.offset_data + member.size]
        if missing := [name for name in names if name not in content]:
            raise ValueError(f"it has no {missing[0]}")
    return [content[name] for name in names]


def idx(raw: bytes, where: str) -> np.ndarray:
    """The IDX format of the MNIST family: 0, 0, type 8 (bytes), number of axes, big-endian sizes, bytes."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{where} is not an IDX file of bytes")
    start = 4 + 4 * raw[3]
    shape: list[int] = np.frombuffer(raw[4:start], ">u4").tolist() if len(raw) >= start else []
    if not shape or len(raw) - start != prod(shape):
        raise ValueError(f"{where} should hold {prod(shape)} bytes ({shape}), it has {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def idx_pair(images: bytes, labels: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as [n, 1, height, width] and labels as int64."""
    x, y = idx(images, f"{where}, images"), idx(labels, f"{where}, labels")
    if x.ndim != 3 or y.ndim != 1:
        raise ValueError(f"{where}: images are {list(x.shape)} and labels {list(y.shape)}, not [n, height, width], [n]")
    if len(x) != len(y):
        raise ValueError(f"{where}: {len(x)} images but {len(y)} labels: these files do not belong together")
    return x[:, None], y.astype(np.int64)


def cifar(raw: bytes, label_bytes: int, where: str) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR's binary version: a row is the label bytes (the last is the fine one) and 3 planes of 32 x 32."""
    row = label_bytes + 3072
    if not raw or len(raw) % row:
        raise ValueError(f"{where} has {len(raw)} bytes, not a multiple of {row}: it is cut short or of another kind")
    table = np.frombuffer(raw, np.uint8).reshape(-1, row)
    return table[:, label_bytes:].reshape(-1, 3, 32, 32), table[:, label_bytes - 1].astype(np.int64)


def meds(paths: list[Path]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Several files of packed images; the next ones are unpacked while one is decoded."""
    with ThreadPoolExecutor(2) as pool:
        return [med(raw, str(path)) for raw, path in zip(pool.map(unpacked, paths), paths, strict=True)]


def med(packed: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """32 x 32 colour images packed without loss: labels, then residuals of the planes G, R - G, B - G.

    A pixel is guessed as the median of left, up and left + up - corner (LOCO-I, Weinberger et al., 2000);
    everything is modulo 256.
    """
    raw = np.frombuffer(packed, np.uint8)
    n, rest = divmod(raw.size, 3073)
    if rest or not n:
        raise ValueError(
            f"{where} unpacks to {raw.size} bytes, not a multiple of 3073: it is cut short or of another kind"
        )
    # Pixels outermost, so that every step below is one pass over contiguous memory.
    pixels = np.ascontiguousarray(raw[n:].reshape(3 * n, 1024).T).reshape(32, 32, 3, n)
    above = np.zeros((33, 3, n), np.int16)
    for row in range(32):
        line = np.zeros_like(above)
        for column in range(32):
            left, up, value = line[column], above[column + 1], line[column + 1]
            np.subtract(left + up, above[column], out=value)
            np.maximum(value, np.minimum(left, up), out=value)
            np.minimum(value, np.maximum(left, up), out=value)
            value += pixels[row, column]
            value[0] &= 255
            value[1:] += value[0]
            value[1:] &= 255
            pixels[row, column] = value  # The colours themselves: the differences go on in `line`.
            value[1:] -= value[0]
        above = line
    images = np.ascontiguousarray(pixels.reshape(1024, 3, n).transpose(2, 1, 0)[:, [1, 0, 2]])
    return images.reshape(n, 3, 32, 32), raw[:n].astype(np.int64)


def cells_of_mat(path: Path, names: tuple[str, ...]) -> list[list[np.ndarray]]:
    """Cell arrays of a MATLAB file, by name: lists of two-dimensional arrays of numbers, equally long."""
    content = _mat(path, names)
    with fetched(path):
        cells = [[np.asarray(cell) for cell in content[name].ravel()] for name in names]
        if any(cell.dtype.kind not in "fiub" or cell.ndim != 2 for own in cells for cell in own):
            raise ValueError(f"{', '.join(names)} are not cells of numbers")
        for each in zip(*cells, strict=True):
            if len({len(cell) for cell in each}) > 1:
                raise ValueError(f"cells of {', '.join(names)} are of different lengths")
    return cells


def _mat(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Variables of a MATLAB file by name; what is said to be too large is not unpacked."""
    from scipy.io import loadmat, whosmat
    from scipy.io.matlab import MatReadError

    with fetched(path):
        most = most_unpacked(size_of(path))
        try:
            for name, shape, _ in whosmat(path):
                if prod(shape) > most:
                    raise ValueError(f"{name} is said to be {list(shape)}, more than so small a file can hold")
            content = loadmat(path, variable_names=list(names))
        except MatReadError as error:
            raise ValueError(str(error)) from error
        return {name: content[name] for name in names}


def svhn_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """SVHN's cropped digits: X [32, 32, 3, n], y with 10 for the digit 0."""
    content = _mat(path, ("X", "y"))
    with fetched(path):
        x, y = content["X"], content["y"].reshape(-1).astype(np.int64)
    if x.ndim != 4 or x.shape[-1] != len(y) or x.dtype != np.uint8:
        raise ValueError(f"{path}: X is {x.dtype} {list(x.shape)} for {len(y)} labels, expected bytes [32, 32, 3, n]")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def leaf(files: list[Path]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """LEAF's JSON: inputs float32 [n, features], labels, and the user of each row."""
    xs, ys, users = [], [], []
    for path in files:
        with reading(path, "make it again", "is not a whole LEAF file"):
            content = json.loads(text_of(path, TEXT))
            for user in content["users"]:
                x = np.array(content["user_data"][user]["x"], np.float32).reshape(-1, LEAF_PIXELS)
                y = np.array(content["user_data"][user]["y"], np.int64).reshape(-1)
                if len(x) != len(y):
                    raise ValueError(f"user {user} has {len(x)} inputs but {len(y)} labels")
                xs.append(x)
                ys.append(y)
                users += [user] * len(y)
    return np.concatenate(xs), np.concatenate(ys), users


def joined(parts: list[tuple[np.ndarray, np.ndarray]], test: list[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """Training and test parts of one shape under the names that the cache keeps."""
    names = ("x", "y"), ("test_x", "test_y")
    return {
        name: np.concatenate([pair[i] for pair in pairs])
        for keys, pairs in zip(names, (parts, test), strict=True)
        for i, name in enumerate(keys)
    }
