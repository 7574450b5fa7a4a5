"""Tables as named columns, one table per site: from CSV and Parquet files, data frames and mappings."""

from __future__ import annotations

import csv
import glob
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbayes.data.interchange import columns_of
from fedbayes.data.lists import columns_of_lists, has_lists
from fedbayes.data.values import Values, canonical, is_number, texts
from fedbayes.errors import InputError, unknown
from fedbayes.files import memory, reading, size_of

BLANKS = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")  # texts that stand for a missing value
SUFFIXES = (".csv", ".tsv", ".parquet")  # what is taken from a folder
MEND = "save it as UTF-8 text with a comma between columns"
PARQUET = {"pyarrow.parquet": "read_table", "polars": "read_parquet", "pandas": "read_parquet"}  # the first there is


class SiteTable(NamedTuple):
    """A site's rows: its name, and its columns by name."""

    site: str
    columns: dict[str, Values]

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())).data) if self.columns else 0

    def pick(self, rows: np.ndarray) -> SiteTable:
        """Some of the rows, by number or by flags."""
        return self._replace(columns={name: v._replace(data=v.data[rows]) for name, v in self.columns.items()})


def site_tables(
    sites: Any,
    *,
    site: str | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    blanks: Sequence[str] = BLANKS,
) -> list[SiteTable]:
    """The tables of all sites, in the order of their names, or of a list or mapping.

    `sites` is a folder, a pattern (`sites/*.csv`), a file or a data frame, a list of files, or a mapping from names to
    files or frames. `site` names the column that says whose a row is; `columns` is the head of files that have none,
    `drop` what is left out of all.
    """
    tables = [
        SiteTable(name, _checked(name, _columns(source, columns, tuple(blanks)))) for name, source in _sources(sites)
    ]
    known = {name for table in tables for name in table.columns}
    drop = [drop] if isinstance(drop, str) else drop
    for name in drop:
        if name not in known:
            raise unknown("column to drop", name, known)
    tables = [t._replace(columns={n: v for n, v in t.columns.items() if n not in drop}) for t in tables]
    if site is not None:
        refuse_other_columns("table", [(t.site, [name for name in t.columns if name != site]) for t in tables])
        tables = [part for table in tables for part in _by_column(table, site)]
        merged: dict[str, list[SiteTable]] = {}
        for table in tables:
            merged.setdefault(table.site, []).append(table)
        tables = [_joined(parts) for _, parts in sorted(merged.items())]
    names = [table.site for table in tables]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two tables are called {twice!r}; give a mapping from names of sites to tables")
    return tables


def refuse_other_columns(what: str, columns: Sequence[tuple[str, Collection[str]]]) -> None:
    """Refuse sites, or tables, that do not have the same columns; the mend names all that some lack."""
    (first, wanted), *others = columns
    names = dict.fromkeys(name for _, held in columns for name in held)
    partial = [name for name in names if not all(name in held for _, held in columns)]
    everywhere = "it everywhere" if len(partial) == 1 else f"all {len(partial)} that some lack"
    for other, held in others:
        pairs = ((other, held, first, wanted), (first, wanted, other, held))
        for lacks, short, has, long in pairs:
            if (name := next((name for name in long if name not in short), None)) is not None:
                raise InputError(
                    f"{what} {lacks} has no column {name!r}, which {what} {has} has; add it there (an empty field is "
                    f"a missing value), or drop {everywhere}: drop = {partial}"
                )


def table_of(source: Any, columns: Sequence[str] = (), blanks: Sequence[str] = BLANKS, name: str = "") -> SiteTable:
    """One table: of a file, a data frame or a mapping from names to values."""
    name = name or (Path(source).name if isinstance(source, str | Path) else "the table")
    return SiteTable(name, _checked(name, _columns(source, columns, tuple(blanks))))


def _sources(sites: Any) -> list[tuple[str, Any]]:
    if isinstance(sites, Mapping) and not _is_columns(sites):
        return [(str(name), source) for name, source in sites.items()]
    if isinstance(sites, list | tuple):
        if not all(isinstance(one, str | Path) for one in sites):
            raise InputError("tables: give data frames as a mapping from names of sites to frames")
        return [(Path(one).stem, one) for one in sites]
    if not isinstance(sites, str | Path):
        return [("all", sites)]
    path = Path(sites)
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES and not one.name.startswith("."))
    elif any(sign in str(sites) for sign in "*?["):
        files = sorted(Path(one) for one in glob.glob(str(sites)))
    else:
        files = [path]
    if not files:
        raise InputError(f"{sites} holds no table; give a folder or a pattern with one .csv or .parquet per site")
    return [(_stem(file, files), file) for file in files]


def _stem(file: Path, files: Sequence[Path]) -> str:
    """A file's name without its suffix, and without what all files have in front of a dot."""
    head = file.stem.partition(".")[0] + "."
    return file.stem.removeprefix(head) if len(files) > 1 and all(f.stem.startswith(head) for f in files) else file.stem


def _is_columns(table: Mapping[Any, Any]) -> bool:
    """Whether a mapping holds columns of values, and not tables."""
    values = list(table.values())
    return bool(values) and all(
        isinstance(v, np.ndarray | list | tuple)
        and not isinstance(v, SiteTable)
        and not (len(v) and isinstance(v[0], list | tuple))
        for v in values
    )


def _checked(site: str, columns: dict[str, Values]) -> dict[str, Values]:
    sizes = {name: len(v.data) for name, v in columns.items()}
    if not sizes or not any(sizes.values()):
        raise InputError(f"site {site} has no rows; leave it out, or give it at least one")
    first = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != first:
            raise InputError(f"site {site}, column {name!r} has {size} values, the others {first}; make them equal")
    return columns


def _columns(source: Any, head: Sequence[str], blanks: tuple[str, ...]) -> dict[str, Values]:
    if isinstance(source, SiteTable):
        return source.columns
    if isinstance(source, str | Path):
        path = Path(source)
        if not path.exists():
            raise InputError(f"there is no file {path}; give the tables of the sites")
        source = _parquet(path) if path.suffix == ".parquet" else source
        if isinstance(source, str | Path):
            return _text_file(path, head, blanks)
    if has_lists(source):
        return columns_of_lists(source, blanks)
    if hasattr(source, "__dataframe__"):
        return columns_of(source, blanks)
    if isinstance(source, Mapping):
        return {str(name): _plain(np.asarray(values), str(name), blanks) for name, values in source.items()}
    raise InputError(
        f"a {type(source).__name__} is no table; give a file, a data frame or a mapping from columns to values"
    )


def _text_file(path: Path, head: Sequence[str], blanks: tuple[str, ...]) -> dict[str, Values]:
    with reading(path, MEND):
        size_of(path, memory() // 16)
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max(",;\t", key=first.count))
            numbered = [(reader.line_num, line) for line in reader if any(field.strip() for field in line)]
    names = list(head) or [name.strip() for name in (numbered.pop(0)[1] if numbered else [])]
    if numbered and not head and all(is_number(name) for name in names):
        raise InputError(f"{path} has no line of names at its top; give columns=[...], the names of its columns")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice or "" in names:
        what = f"two columns {twice[0]!r}" if twice else "a column without a name"
        raise InputError(f"{path} has {what}; give every column a name of its own")
    for number, line in numbered:
        if len(line) != len(names):
            raise InputError(f"{path}, line {number}: {len(line)} fields under {len(names)} columns; mend that line")
    blank = set(blanks)
    words = [[None if (word := field.strip()) in blank else word for field in line] for _, line in numbered]
    return {name: Values(texts([line[j] for line in words])) for j, name in enumerate(names)}


def _plain(values: np.ndarray, name: str, blanks: tuple[str, ...]) -> Values:
    """An array of numbers, dates or texts as a column."""
    if values.ndim != 1:
        raise InputError(f"column {name!r} has shape {list(values.shape)}; give one value per row")
    if values.dtype.kind in "fiub":
        return Values(values.astype(np.float64), "number")
    if values.dtype.kind == "M":
        days = values.astype("datetime64[s]").astype(np.float64) / 86400
        return Values(np.where(np.isnat(values), np.nan, days), "date")
    words = [None if v is None or (isinstance(v, float) and np.isnan(v)) else str(v).strip() for v in values.tolist()]
    return Values(texts([None if word in blanks else word for word in words]))


def _by_column(table: SiteTable, site: str) -> Iterator[SiteTable]:
    if site not in table.columns:
        raise InputError(f"{table.site} has no column {site!r} of sites; it has {', '.join(table.columns)}")
    owners = canonical(table.columns[site].data)
    if any(owner is None for owner in owners):
        row = next(i for i, owner in enumerate(owners) if owner is None)
        raise InputError(f"column {site!r} says no site at row {row + 1}; fill it in, or leave that row out")
    rest = table._replace(columns={name: v for name, v in table.columns.items() if name != site})
    for owner in sorted(set(owners.tolist())):
        yield rest.pick(owners == owner)._replace(site=owner)


def _joined(parts: Sequence[SiteTable]) -> SiteTable:
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: values._replace(data=np.concatenate([part.columns[name].data for part in parts]))
        for name, values in parts[0].columns.items()
    }
    return parts[0]._replace(columns=columns)


def _parquet(path: Path) -> Any:
    for module, function in PARQUET.items():
        try:
            read = getattr(import_module(module), function)
        except ImportError:
            continue
        with reading(path, "give a whole Parquet file"):
            size_of(path)
            return read(path)
    raise InputError(f"{path}: Parquet files need pyarrow, polars or pandas; install one, or save the table as .csv")
