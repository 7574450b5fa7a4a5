"""Natural federations: rows that came from hospitals, regions, mine fields and speaking roles, with their own tests."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedbayes.data.dataset import Dataset
from fedbayes.data.fetch import find
from fedbayes.data.formats import cells_of_mat, fetched, unpacked
from fedbayes.data.own import from_arrays
from fedbayes.data.sources import FILES
from fedbayes.data.survival import INTERVALS, cut_times
from fedbayes.files import arrays_in

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
REGIONS = 6
_FLAMBY_SEED, _FLAMBY_TRAIN = 43, 0.66
_HEART = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
_HEART_PLACES = (0, 1, 3, 4, 5, 7, 8, 9)
_LEVELS = {"cp": (2, (2, 3, 4)), "restecg": (6, (1, 2))}  # the first level of each is none of these
SCALINGS = ("site", "pooled", "none")


def heart_disease(*, split: int | None = None, standardise: str = "site", inner: int | None = None) -> Dataset:
    """Heart disease at four hospitals (Janosi et al., 1988), 13 features, with the rows and split of FLamby.

    Terrail et al. (2022): three columns that are mostly missing and rows with a missing value are dropped; a third of
    each hospital's patients is for the test. `split` is the seed of another such split. `standardise`: columns by
    the training rows of the hospital ("site", as FLamby), of all ("pooled"), or not at all ("none"). `inner` is a seed
    by which a fifth of each site's training rows takes the place of the test rows: for choosing options.
    """
    if standardise not in SCALINGS:
        raise ValueError(f"standardise is one of {', '.join(SCALINGS)}, not {standardise!r}")
    paths = find(FILES["heart-disease"]).paths
    tables = [_patients(path) for path in paths.values()]
    parts = [_cut(y, _FLAMBY_SEED if split is None else split) for _, y in tables]
    if standardise == "site":
        tables = [(_standardised(x, x[train]), y) for (x, y), (train, _) in zip(tables, parts)]
    elif standardise == "pooled":
        rows = np.concatenate([x[train] for (x, _), (train, _) in zip(tables, parts)])
        tables = [(_standardised(x, rows), y) for x, y in tables]
    columns = (*_HEART, *(f"{name}_{level}" for name, (_, levels) in _LEVELS.items() for level in levels))
    data = _by_owner("heart-disease", tables, parts, HOSPITALS, kind="classes")
    return _within(replace(data, columns=columns, class_names=("healthy", "disease")), inner)


def tcga_brca(
    *, split: int | None = None, standardise: bool = True, intervals: int = INTERVALS, inner: int | None = None
) -> Dataset:
    """Survival after breast cancer in six regions (TCGA-BRCA), 39 clinical features, with FLamby's split.

    Times are days. `split` is the seed of another split of each region, of the same sizes. `standardise` scales
    columns by all training rows; FLamby leaves them as they are. Curves are cut at `intervals` times. `inner` as for
    `heart_disease`.
    """
    paths = {Path(name).name: path for name, path in find(FILES["tcga-brca"]).paths.items()}
    table, folds = (_csv(paths[name]) for name in ("brca.csv", "train_test_split.csv"))
    with fetched(paths["train_test_split.csv"]):
        fold = {row["pid"]: row["fold2"].split("_") for row in folds}
    with fetched(paths["brca.csv"]):
        columns = tuple(name for name in table[0] if name not in ("pid", "E", "T"))
        table = [row for row in table if row["pid"] in fold]  # some have no region
        x = np.array([[float(row[name]) for name in columns] for row in table])
        y = np.array([[float(row["T"]), float(row["E"])] for row in table])
        region = np.array([int(fold[row["pid"]][1]) for row in table])
        train = np.array([fold[row["pid"]][0] == "train" for row in table])
    tables, parts = [], []
    for k in range(REGIONS):
        rows = np.flatnonzero(region == k)
        own = np.flatnonzero(train[rows]), np.flatnonzero(~train[rows])
        tables.append((x[rows], y[rows]))
        parts.append(own if split is None else _cut(y[rows, 1].astype(int), split, len(own[0])))
    names = tuple(f"region {k}" for k in range(REGIONS))
    data = _by_owner("tcga-brca", tables, parts, names, kind="survival", standardise=standardise)
    return _within(replace(data, columns=columns, times=cut_times(data.y, intervals)), inner)


def landmine(*, split: int = 0, train: float = 0.5, inner: int | None = None) -> Dataset:
    """Mines among clutter in 29 fields by radar (Xue et al., 2007), 9 features; mines are 6 % of the rows.

    The set has no split of its own: a share of each field's mines and clutter, drawn by the seed `split`, is for
    training. Columns are scaled by all training rows. `inner` as for `heart_disease`.
    """
    if not 0 < train < 1:
        raise ValueError(f"train must be a share in (0, 1), not {train}")
    (path,) = find(FILES["landmine"]).paths.values()
    if path.suffix == ".mat":
        cells = cells_of_mat(path, ("feature", "label"))
        tables = [(x.astype(np.float32), y.ravel().astype(np.int64)) for x, y in zip(*cells)]
    else:
        with fetched(path):
            arrays = arrays_in(path)
            x, y, field = arrays["x"].astype(np.float32), arrays["y"].astype(np.int64), arrays["field"]
            tables = [(x[field == k], y[field == k]) for k in range(int(field.max()) + 1)]
    parts = [_cut(y, split, round(train * len(y))) for _, y in tables]
    names = tuple(f"field {k}" for k in range(len(tables)))
    data = _by_owner("landmine", tables, parts, names, kind="classes", standardise=True)
    return _within(replace(data, class_names=("clutter", "mine")), inner)


def shakespeare(
    *, length: int = 32, every: int = 4, speeches: int = 20, train: float = 0.8, inner: int | None = None
) -> Dataset:
    """The next character of a role's speech from those before it; one client for each speaking role.

    Roles with at least so many `speeches`; the first share of them (`train`), in the order of the plays, is for
    training. A row is `length` characters of a role's speeches, padded at its beginning, and every so many-th
    position makes one. Text: the plays as Karpathy (2015) put them together. `inner` as for `heart_disease`.
    """
    if length < 1 or every < 1 or speeches < 2 or not 0 < train < 1:
        raise ValueError("length and every must be at least 1, speeches at least 2, train a share in (0, 1)")
    (path,) = find(FILES["shakespeare"]).paths.values()
    with fetched(path):
        text = unpacked(path).decode()
        roles = {name: said for name, said in _speeches(text).items() if len(said) >= speeches}
        if not roles:
            raise ValueError(f"no role has {speeches} speeches")
    alphabet = sorted(set(text))
    number = {c: i for i, c in enumerate(alphabet)}
    tables, parts = [], []
    for said in roles.values():
        cut = min(max(round(train * len(said)), 1), len(said) - 1)
        pieces = [_windows("".join(lines), number, length, every) for lines in (said[:cut], said[cut:])]
        (x, y), (test_x, test_y) = pieces
        tables.append((np.concatenate([x, test_x]), np.concatenate([y, test_y])))
        parts.append((np.arange(len(y)), np.arange(len(y), len(y) + len(test_y))))
    data = _by_owner("shakespeare", tables, parts, tuple(roles), kind="classes", classes=len(alphabet))
    names = tuple(repr(c)[1:-1] for c in alphabet)
    return _within(replace(data, vocabulary=("<pad>", *alphabet), class_names=names), inner)


def _within(data: Dataset, seed: int | None) -> Dataset:
    """A fifth of each owner's training rows, by a seed, as test rows in place of the set's own."""
    if seed is None:
        return data
    assert data.owner is not None
    random = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(data.y), dtype=torch.bool)
    for k in range(data.owners):
        own = (data.owner == k).nonzero().flatten()
        held[own[torch.randperm(len(own), generator=random)[: len(own) // 5]]] = True
    data = replace(data, test_x=data.x[held], test_y=data.y[held], test_owner=data.owner[held])
    assert data.owner is not None
    return replace(data, x=data.x[~held], y=data.y[~held], owner=data.owner[~held])


def _patients(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and disease of a hospital's patients without a missing value in the columns that are kept."""
    with fetched(path):
        rows = [row for row in csv.reader(io.StringIO(unpacked(path).decode())) if row]
        if any(len(row) != 14 for row in rows):
            raise ValueError("a row does not have 14 columns")
        kept = [*range(10), 13]
        whole = np.array([[float(row[i]) for i in kept] for row in rows if all(row[i] != "?" for i in kept)])
        if not len(whole):
            raise ValueError("no patient has all values")
    dummies = [whole[:, [place]] == levels for place, levels in _LEVELS.values()]
    return np.concatenate([whole[:, _HEART_PLACES], *dummies], 1), (whole[:, -1] > 0).astype(np.int64)


def _cut(y: np.ndarray, seed: int, train: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for the test, by class where every class has at least three rows: FLamby's way."""
    from sklearn.model_selection import train_test_split

    count = np.bincount(y)[np.unique(y)]
    by_class = y if len(count) > 1 and count.min() > 2 else None
    share: float | int = _FLAMBY_TRAIN if train is None else train
    rest: float | int = 1.0 - _FLAMBY_TRAIN if train is None else len(y) - train
    parts = train_test_split(
        np.arange(len(y)), train_size=share, test_size=rest, random_state=seed, shuffle=True, stratify=by_class
    )
    return np.sort(parts[0]), np.sort(parts[1])


def _standardised(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Columns in deviations (of a sample) from the mean of some rows; those that are constant there become zero."""
    scale = rows.std(0, ddof=1)
    return np.where(scale > 0, (x - rows.mean(0)) / np.where(scale > 0, scale, 1), 0)


def _by_owner(
    name: str,
    tables: Sequence[tuple[np.ndarray, np.ndarray]],
    parts: Sequence[tuple[np.ndarray, np.ndarray]],
    names: tuple[str, ...],
    *,
    kind: str,
    classes: int | None = None,
    standardise: bool = False,
) -> Dataset:
    """One set of all owners' rows, each part in the order of the owners."""
    arrays, owners = [], []
    for which in (0, 1):
        own = [(x[part[which]], y[part[which]]) for (x, y), part in zip(tables, parts)]
        arrays += [np.concatenate(column) for column in zip(*own)]
        owners.append(torch.repeat_interleave(torch.arange(len(own)), torch.tensor([len(y) for _, y in own])))
    data = from_arrays(*arrays, kind=kind, classes=classes, name=name, standardise=standardise)
    return replace(data, owner=owners[0], test_owner=owners[1], owner_names=names)


def _csv(path: Path) -> list[dict[str, str]]:
    with fetched(path):
        rows = list(csv.DictReader(io.StringIO(unpacked(path).decode())))
        if not rows:
            raise ValueError("it has no rows")
        return rows


def _speeches(text: str) -> dict[str, list[str]]:
    """What each role says, speech by speech: a line `NAME:`, and what follows up to an empty line."""
    roles: dict[str, list[str]] = {}
    for speech in text.split("\n\n"):
        head, line, said = speech.strip("\n").partition("\n")
        if line and head.endswith(":"):
            roles.setdefault(head[:-1], []).append(said + "\n")
    return roles


def _windows(text: str, number: dict[str, int], length: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Contexts int64 [n, length], 0 before the beginning, and the number of the character that follows each."""
    codes = np.array([number[c] for c in text], np.int64)
    padded = np.concatenate([np.zeros(length, np.int64), codes + 1])
    starts = np.arange(0, len(codes), every)
    return padded[starts[:, None] + np.arange(length)], codes[starts]
