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
    x = table[:, part["index_features"].astype(int).ravel()]
    y = table[:, part["index_target"].astype(int).ravel()]
    train, test = rows["train"], rows["test"]
    return from_arrays(x[train], y[train], x[test], y[test], kind="real", name=name, standardise=standardise)


def year(*, standardise: bool = True) -> Dataset:
    """YearPredictionMSD: 90 sound features and the year of a song, with its one standard split."""
    path = next(iter(find(FILES["year"]).paths.values()))

    def make() -> Arrays:
        raw = formats.zip_members(path)[0] if path.suffix == ".zip" else path.read_bytes()
        return {"table": np.loadtxt(io.BytesIO(raw), np.float32, delimiter=",", ndmin=2)}

    table = decoded("year", [path], make)["table"]
    x, y, cut = table[:, 1:], table[:, :1], min(_YEAR_TRAIN, len(table))
    return from_arrays(x[:cut], y[:cut], x[cut:], y[cut:], kind="real", name="year", standardise=standardise)


def _numbers(paths: dict[str, Path]) -> dict[str, np.ndarray]:
    out = {}
    for file, path in paths.items():
        try:
            out[file] = np.loadtxt(path, ndmin=2)
        except ValueError as error:
            raise ValueError(
                f"{path} is not a whole table of numbers ({error}): delete it and fetch it again"
            ) from error
    return out
