"""Writers of tiny files in the formats of the benchmarks, from the formats' descriptions and not from the readers."""

import gzip
import json
import lzma
import struct
from pathlib import Path

import numpy as np


def images(n: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape)).astype(np.uint8)


def labels(n: int, classes: int) -> np.ndarray:
    return (np.arange(n) % classes).astype(np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx_bytes(array)))


def write_mnist(folder: Path, train: int = 30, test: int = 10, parts: tuple[str, ...] = ("train", "t10k")) -> None:
    for part, n in (("train", train), ("t10k", test)):
        if part in parts:
            write_idx(folder / f"{part}-images-idx3-ubyte.gz", images(n, (28, 28), n))
            write_idx(folder / f"{part}-labels-idx1-ubyte.gz", labels(n, 10))


def med_bytes(x: np.ndarray, y: np.ndarray) -> bytes:
    """Pack uint8 [n, 3, 32, 32]: pixel by pixel, as the format says, with Python's own integers."""
    n = len(x)
    red, green, blue = (x[:, c].astype(int) for c in range(3))
    residuals = np.zeros((3, n, 32, 32), np.uint8)
    for p, plane in enumerate((green, red - green, blue - green)):
        for k in range(n):
            for i in range(32):
                for j in range(32):
                    left = plane[k, i, j - 1] if j else 0
                    up = plane[k, i - 1, j] if i else 0
                    corner = plane[k, i - 1, j - 1] if i and j else 0
                    guess = sorted((left, up, left + up - corner))[1]
                    residuals[p, k, i, j] = (plane[k, i, j] - guess) % 256
    return y.tobytes() + residuals.tobytes()


def write_med(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(med_bytes(x, y)))


def cifar_bytes(x: np.ndarray, y: np.ndarray, coarse: np.ndarray | None = None) -> bytes:
    rows = [] if coarse is None else [coarse[:, None]]
    return np.concatenate([*rows, y[:, None], x.reshape(len(x), -1)], 1).astype(np.uint8).tobytes()


def write_leaf(path: Path, users: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": (x / 255).tolist(), "y": y.tolist()} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))
