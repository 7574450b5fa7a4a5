"""Readers of the files that benchmarks come in; none of them unpickles."""

import gzip
import json
import lzma
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fedbayes.data.cache import Arrays


def unpacked(path: Path) -> bytes:
    """The bytes of a file, through gzip or xz where its name says so."""
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): delete it and fetch it again") from error


def zip_members(path: Path, names: list[str] | None = None) -> list[bytes]:
    """Members of an archive by name, or all of them, read in place."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [archive.read(name) for name in names or archive.namelist()]
    except (zipfile.BadZipFile, KeyError, zlib.error, EOFError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): delete it and fetch it again") from error


def tar_members(path: Path, names: list[str]) -> list[bytes]:
    """Members of an archive by the last part of their name, read in place."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                leaf = member.name.rsplit("/", 1)[-1]
                if leaf in names and (file := archive.extractfile(member)):
                    found[leaf] = file.read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}): delete it and fetch it again") from error
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"{path} has no {missing[0]}: delete it and fetch it again")
    return [found[name] for name in names]


def idx(raw: bytes, where: str) -> np.ndarray:
    """The IDX format of the MNIST family: 0, 0, type 8 (bytes), number of axes, big-endian sizes, bytes."""
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise ValueError(f"{where} is not an IDX file of bytes")
    start = 4 + 4 * raw[3]
    shape = np.frombuffer(raw[4:start], ">u4").astype(int)
    if len(raw) - start != shape.prod():
        raise ValueError(f"{where} should hold {shape.prod()} bytes ({shape.tolist()}), it has {len(raw) - start}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def idx_pair(images: bytes, labels: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Images as [n, 1, height, width] and labels as int64."""
    x, y = idx(images, f"{where}, images"), idx(labels, f"{where}, labels")
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


def svhn_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """SVHN's cropped digits: X [32, 32, 3, n], y with 10 for the digit 0."""
    from scipy.io import loadmat

    try:
        content = loadmat(path)
        x, y = content["X"], content["y"].reshape(-1).astype(np.int64)
    except Exception as error:  # Whatever scipy meets in a damaged file.
        raise ValueError(f"{path} is truncated or damaged ({error}): delete it and fetch it again") from error
    if x.ndim != 4 or x.shape[-1] != len(y):
        raise ValueError(f"{path}: X is {list(x.shape)} for {len(y)} labels, expected [32, 32, 3, n]")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def leaf(files: list[Path]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """LEAF's JSON: inputs float32 [n, features], labels, and the user of each row."""
    xs, ys, users = [], [], []
    for path in files:
        try:
            content = json.loads(path.read_text())
            for user in content["users"]:
                xs.append(np.array(content["user_data"][user]["x"], np.float32))
                ys.append(np.array(content["user_data"][user]["y"], np.int64))
                users += [user] * len(ys[-1])
                if len(xs[-1]) != len(ys[-1]):
                    raise ValueError(f"user {user} has {len(xs[-1])} inputs but {len(ys[-1])} labels")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a whole LEAF file ({error}): make it again") from error
    return np.concatenate(xs), np.concatenate(ys), users


def joined(parts: list[tuple[np.ndarray, np.ndarray]], test: list[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """Training and test parts of one shape under the names that the cache keeps."""
    names = ("x", "y"), ("test_x", "test_y")
    return {
        name: np.concatenate([pair[i] for pair in pairs])
        for keys, pairs in zip(names, (parts, test), strict=True)
        for i, name in enumerate(keys)
    }
