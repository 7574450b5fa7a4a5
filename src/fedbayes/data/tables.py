"""Regression tables: the UCI sets with their standard splits."""

import io
from pathlib import Path

import numpy as np

from fedbayes.data import formats
from fedbayes.data.cache import Arrays, decoded
from fedbayes.data.dataset import Dataset
from fedbayes.data.fetch import find
from fedbayes.data.own import from_arrays
from fedbayes.data.sources import FILES, UCI_FOLDS, uci_files
from fedbayes.files import bytes_of, reading, size_of

_YEAR_TRAIN = 463_715  # The rest are for the test: no artist is in both parts.


def uci(name: str, *, fold: int = 0, standardise: bool = True) -> Dataset:
    """A UCI set with one of the splits of Hernandez-Lobato and Adams (2015): 20 folds, 5 for protein."""
    if not 0 <= fold < UCI_FOLDS[name]:
        raise ValueError(f"{name} has folds 0 to {UCI_FOLDS[name] - 1}, not {fold}")
    part = {Path(file).stem: values for file, values in _numbers(find(uci_files(name, fold)).paths).items()}
    table = part["data"]
    rows = {key: part[f"index_{key}_{fold}"].astype(int).ravel() for key in ("train", "test")}
    seen = np.concatenate([rows["train"], rows["test"]])
    if not np.array_equal(np.sort(seen), np.arange(len(table))):
        raise ValueError(
            f"{name}, fold {fold}: training and test rows do not make up the {len(table)} rows of the table"
        )
    x, y = (_columns(table, part[key], f"{name}, {key}") for key in ("index_features", "index_target"))
    train, test = rows["train"], rows["test"]
    return from_arrays(x[train], y[train], x[test], y[test], kind="real", name=name, standardise=standardise)


def year(*, standardise: bool = True) -> Dataset:
    """YearPredictionMSD: 90 sound features and the year of a song, with its one standard split."""
    path = next(iter(find(FILES["year"]).paths.values()))

    def make() -> Arrays:
        with formats.fetched(path):
            raw = formats.zip_members(path)[0] if path.suffix == ".zip" else bytes_of(path)
            return {"table": np.loadtxt(io.BytesIO(raw), np.float32, delimiter=",", ndmin=2)}

    table = decoded("year", [path], make)["table"]
    if table.shape[1] < 2:
        raise ValueError(f"{path} has {table.shape[1]} columns, not a year and its features: fetch it again")
    x, y, cut = table[:, 1:], table[:, :1], min(_YEAR_TRAIN, len(table))
    return from_arrays(x[:cut], y[:cut], x[cut:], y[cut:], kind="real", name="year", standardise=standardise)


def _numbers(paths: dict[str, Path]) -> dict[str, np.ndarray]:
    out = {}
    for file, path in paths.items():
        with reading(path, "delete it and fetch it again", "is not a whole table of numbers"):
            size_of(path)
            out[file] = np.loadtxt(path, ndmin=2)
            if not np.isfinite(out[file]).all():
                raise ValueError("it holds values that are not finite")
    return out


def _columns(table: np.ndarray, numbers: np.ndarray, where: str) -> np.ndarray:
    """The columns of a table by their numbers."""
    chosen = numbers.ravel()
    if not np.isin(chosen, np.arange(table.shape[1])).all():
        raise ValueError(f"{where} names columns that the table of {table.shape[1]} does not have: fetch it again")
    return table[:, chosen.astype(int)]
