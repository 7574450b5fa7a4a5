"""A user's own files as a `Dataset`: folders of .npy, and CSV tables, in one piece or one per client."""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fedbayes.data.dataset import Dataset
from fedbayes.data.own import from_arrays, kind_of
from fedbayes.data.values import is_number
from fedbayes.errors import shown
from fedbayes.files import array_in, arrays_in, memory, reading, size_of

Parts = dict[str, np.ndarray]


def from_folder(path: str | Path, *, name: str | None = None, **options: Any) -> Dataset:
    """A folder of x.npy, y.npy and perhaps test_x.npy, test_y.npy; options as in `from_arrays`.

    Without x.npy: one sub-folder of such files, or one .npz with such entries, per client, in the order of their names;
    the rows then have owners for the partition `natural`. A test part of all clients together may lie beside them; it
    then stands in place of their own.
    """
    path = Path(path)
    name = name or path.name
    if (path / "x.npy").is_file():
        part = _parts(path)
        return from_arrays(part["x"], part["y"], part.get("test_x"), part.get("test_y"), name=name, **options)
    homes = sorted(p for p in path.glob("*") if p.suffix == ".npz" or (p / "x.npy").is_file())
    if not homes:
        raise FileNotFoundError(f"{path} has no x.npy, and no sub-folder or .npz of a client with one")
    clients = [_parts(home) for home in homes]
    shared = _parts(path, needed=()) if (path / "test_x.npy").is_file() else {}
    return _owned(clients, [home.stem if home.suffix == ".npz" else home.name for home in homes], shared, name, options)


def from_csv(
    path: str | Path | Sequence[str | Path],
    target: str | Sequence[str],
    *,
    test: str | Path | float = 0.2,
    kind: str | None = None,
    owner: str | None = None,
    standardise: bool = True,
    name: str | None = None,
) -> Dataset:
    """Tables of numbers with a head line: all columns but `target` (and `owner`) are inputs, matched by their names.

    Tables with categories, dates or missing values are read by `from_tables`.

    `path` is one file, or a list or folder with one file per site; `owner` names a column that says whose row it is.
    Sites are named by their files, or by the values of that column. `test` is a file, or the share of rows cut off
    each site, evenly spread over it: sites then have test rows of their own. Classes may be words. Without `kind`
    targets are real.
    """
    files = _csv_files(path)
    targets = [target] if isinstance(target, str) else list(target)
    columns = _input_columns(files[0], targets, owner)
    sites = [file.stem if len(files) > 1 else "" for file in files]
    tables = [_table(file, columns, targets, owner, site) for file, site in zip(files, sites, strict=True)]
    joined = _Table(*(np.concatenate(parts) for parts in zip(*tables, strict=True)))
    if isinstance(test, str | Path):
        test_table = _table(Path(test), columns, targets, owner, "")
    else:
        rows = _spread_by_site(joined.who, test)
        joined, test_table = _pick(joined, ~rows), _pick(joined, rows)
    y, test_y, names, kind = _numbered(joined.y, test_table.y, kind)
    data = from_arrays(
        joined.x,
        y,
        test_table.x,
        test_y,
        kind=kind,
        class_names=names,
        name=name or (Path(path).stem if isinstance(path, str | Path) else files[0].stem),
        standardise=standardise,
    )
    data = replace(data, columns=tuple(columns))
    shared = isinstance(test, str | Path) and owner is None
    return (
        data
        if owner is None and len(files) == 1
        else _with_owners(data, joined.who, None if shared else test_table.who)
    )


class _Table(NamedTuple):
    """Inputs float64 [n, F]; targets [n, D] and owners [n] as they are written."""

    x: np.ndarray
    y: np.ndarray
    who: np.ndarray


def _pick(table: _Table, rows: np.ndarray) -> _Table:
    return _Table(*(part[rows] for part in table))


def _with_owners(data: Dataset, who: np.ndarray, test_who: np.ndarray | None) -> Dataset:
    """Owners by the order of their names; those with test rows alone come after the others."""
    names = sorted(set(who.tolist()))
    if test_who is not None:
        names += sorted(set(test_who.tolist()) - set(names))
    number = {site: i for i, site in enumerate(names)}
    owner, test_owner = (
        None if part is None else torch.tensor([number[site] for site in part.tolist()], dtype=torch.int64)
        for part in (who, test_who)
    )
    return replace(data, owner=owner, test_owner=test_owner, owner_names=tuple(map(str, names)))


def _csv_files(path: str | Path | Sequence[str | Path]) -> list[Path]:
    if not isinstance(path, str | Path):
        files = [Path(file) for file in path]
    else:
        files = sorted(Path(path).glob("*.csv")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise FileNotFoundError(f"no .csv in {path}")
    return files


def _parts(home: Path, needed: tuple[str, ...] = ("x", "y")) -> Parts:
    if home.suffix == ".npz":
        arrays = arrays_in(home)
    else:
        files = {key: home / f"{key}.npy" for key in ("x", "y", "test_x", "test_y")}
        arrays = {key: array_in(file) for key, file in files.items() if file.is_file()}
    for key, array in arrays.items():
        if array.ndim < 1 or array.dtype.kind not in "fiub":
            raise ValueError(f"{home}: {key} is {array.dtype} {list(array.shape)}, not rows of numbers: save those")
    if len(tests := [key for key in ("test_x", "test_y") if key in arrays]) == 1:
        raise ValueError(f"{home} has {tests[0]} alone: save test_x and test_y together, or neither")
    for key in needed:
        if key not in arrays:
            raise FileNotFoundError(f"{home} has no {key}")
    return arrays


def _owned(clients: list[Parts], homes: list[str], shared: Parts, name: str, options: dict[str, Any]) -> Dataset:
    for home, part in zip(homes, clients, strict=True):
        if len(part["x"]) == 0 or len(part["x"]) != len(part["y"]):
            raise ValueError(
                f"client {home}: {len(part['x'])} inputs and {len(part['y'])} targets: give one each, at least one"
            )
    own_tests = not shared and any("test_x" in part for part in clients)
    tests = [part for part in clients if "test_x" in part] if own_tests else [shared] if shared else []
    joined = {key: np.concatenate([part[key] for part in clients]) for key in ("x", "y")}
    joined |= {key: np.concatenate([part[key] for part in tests]) for key in ("test_x", "test_y") if tests}
    data = from_arrays(joined["x"], joined["y"], joined.get("test_x"), joined.get("test_y"), name=name, **options)
    owner = np.repeat(np.arange(len(clients)), [len(part["x"]) for part in clients])
    data = replace(data, owner=torch.from_numpy(owner), owner_names=tuple(homes))
    if not own_tests:
        return data
    test_owner = np.repeat(np.arange(len(clients)), [len(part.get("test_x", ())) for part in clients])
    return replace(data, test_owner=torch.from_numpy(test_owner))


def _input_columns(path: Path, targets: list[str], owner: str | None) -> list[str]:
    """The columns of a table that are inputs, in its order."""
    head = _lines(path)[0]
    for column in [*targets, *([owner] if owner else [])]:
        if column not in head:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(head)}")
    return [column for column in head if column not in targets and column != owner]


def _lines(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names at a table's top, and its other lines, each with its number in the file, without blank ones."""
    with reading(path, "save it as UTF-8 text with a comma between columns"):
        size_of(path, memory() // 16)
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, line) for line in reader if line]
    head = [column.strip() for column in lines.pop(0)[1]] if lines else []
    twice = [column for i, column in enumerate(head) if column in head[:i]]
    if twice:
        raise ValueError(f"{path} has two columns {twice[0]!r}: give every column a name of its own")
    return head, lines


def _table(path: Path, columns: list[str], targets: list[str], owner: str | None, site: str) -> _Table:
    """A file's rows under the columns that all files have, found by name; `site` owns them without an owner column."""
    head, lines = _lines(path)
    needed = [*columns, *targets, *([owner] if owner else [])]
    for column in needed:
        if column not in head:
            raise ValueError(f"{path} has no column {column!r}; it has {', '.join(head)}")
    for column in head:
        if column not in needed:
            raise ValueError(
                f"{path} has a column {column!r} that the other tables lack: leave it out, or add it there"
            )
    if not lines:
        raise ValueError(f"{path} has no rows")
    for i, line in lines:
        if len(line) != len(head):
            raise ValueError(f"{path}, line {i}: {len(line)} fields under {len(head)} columns")
    table = np.array([line for _, line in lines])
    x = np.empty((len(lines), len(columns)))
    for j, column in enumerate(columns):
        words = table[:, head.index(column)]
        try:
            x[:, j] = words.astype(np.float64)
        except ValueError as error:
            pairs = [*zip([number for number, _ in lines], words.tolist())]
            at, word = next((pair for pair in pairs if not is_number(pair[1])), pairs[0])
            raise ValueError(
                f"{path}, column {column!r}, line {at}: {shown(word)} is not a number: mend it, or leave the column "
                "out; from_tables takes tables with missing values, categories and dates"
            ) from error
    who = table[:, head.index(owner)] if owner else np.full(len(lines), site)
    return _Table(x, table[:, [head.index(column) for column in targets]], who)


def _spread_by_site(who: np.ndarray, share: float) -> np.ndarray:
    """True for a share of each site's rows, at even distances."""
    rows = np.zeros(len(who), bool)
    for site in np.unique(who):
        own = np.flatnonzero(who == site)
        rows[own] = _spread(len(own), share)
        if rows[own].all():
            raise ValueError(f"test={share} leaves {site or 'the table'} no row to train on: lower it")
    return rows


def _spread(n: int, share: float) -> np.ndarray:
    """True for a share of n rows at even distances."""
    if not 0 <= share < 1:
        raise ValueError(f"test is a file or a share in [0, 1), not {share}")
    steps = np.floor(np.arange(n + 1) * share + 0.5)
    return np.diff(steps) > 0


def _numbered(
    y: np.ndarray, test_y: np.ndarray, kind: str | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], str]:
    """Targets as numbers, the names of classes, and the kind; classes by the order of names, whole numbers by value."""
    if kind != "classes":
        try:
            values, test_values = y.astype(np.float64), test_y.astype(np.float64)
        except ValueError as error:
            raise ValueError(f"targets must be numbers ({error}): for words pass kind='classes'") from error
        return values, test_values, (), kind or kind_of([torch.from_numpy(values)])
    if y.shape[1] != 1:
        raise ValueError(f"classes come in one column, not {y.shape[1]}")
    seen = sorted({*y[:, 0], *test_y[:, 0]}, key=lambda v: (0, int(v), "") if v.lstrip("-").isdigit() else (1, 0, v))
    number = {value: i for i, value in enumerate(seen)}
    train, test = (np.array([number[v] for v in part[:, 0]], np.int64) for part in (y, test_y))
    return train, test, tuple(str(v) for v in seen), kind
