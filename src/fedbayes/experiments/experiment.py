"""An experiment as a frozen record, read from TOML with every key and value checked, and written back."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, one_line, shown, unknown
from fedbayes.experiments import toml
from fedbayes.experiments.keys import RECORDS, TABLED, TABLES, Keys, Table
from fedbayes.files import reading, text_of
from fedbayes.options import (
    Check,
    check_values,
    is_number,
    options_of,
    record,
    record_of,
    share,
    subtable,
)
from fedbayes.training.settings import FOR_TABLES


@record
class Experiment(Keys):
    """What to train on what, and for how long.

    `data`, `network`, `partition`, `method` and `likelihood` are names of the library's tables, or the user's own code
    as `package.module:object`, and so are `stages`. `methods` makes it a comparison: one run per method, and `method`
    is the one that `fedbayes.load` gives. `options` are those of all methods; a table inside it, under a method's name,
    is for that method alone.
    """

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The methods that are trained: those of a comparison, or the one."""
        return self.methods or (self.method,)

    def options_of(self, method: str) -> dict[str, Any]:
        """The options of one method: the common ones, then those of its own table."""
        common = {k: v for k, v in self.options.items() if not isinstance(v, Mapping) or k in TABLED}
        return {**common, **self.options.get(method, {})}

    @property
    def settled(self) -> Experiment:
        """The same experiment; with one method, the options of its own table among the common ones."""
        return self if self.methods else self.only(self.method)

    def only(self, method: str) -> Experiment:
        """The same experiment with one method of the comparison."""
        options = self.options_of(method)
        tables = {k: v for k, v in options.items() if isinstance(v, Mapping) and k not in TABLED}
        common = {k: v for k, v in options.items() if k not in tables}
        return replace(self, method=method, methods=(), options={**common, **({method: tables} if tables else {})})


WRITTEN = ("data", "network", "partition", "clients", "method", "rounds", "seed")  # in every run folder
DEEPEST = 8  # levels of tables and lists
LISTS = ("methods", "stages", "on_round")  # which are not written where they are empty
LONGEST = 50  # dots in a word

KEYS = options_of(Experiment)


def experiment_of(values: Table, where: str = "experiment") -> Experiment:
    """A record from a mapping; an unknown key or a value of the wrong kind is an error that names it."""
    for key, v in values.items():
        _check_plain(v, f"{where}: {key}")
        if key not in KEYS:
            raise unknown(f"key in {where}", key, KEYS, "options of a method are written below [options]; ")
    if values.get("data") == TABLES:
        values = _for_tables(values)
    experiment = record_of(Experiment, {key: _as_held(key, v) for key, v in values.items()}, where)
    if experiment.methods:
        _check_comparison(experiment, where, named="method" in values)
        if "method" not in values:
            experiment = replace(experiment, method=experiment.methods[-1])
    return experiment


def _for_tables(values: Table) -> Table:
    """An experiment on tables with what suits them where it names no method, no network or no number of rounds."""
    named = "method" in values or "methods" in values
    options = values.get("options", {})
    if isinstance(options, Mapping) and not named:
        values = {**values, "method": FOR_TABLES.method, "options": {**FOR_TABLES.options, **options}}
    return {"network": FOR_TABLES.network, "rounds": FOR_TABLES.rounds, **values}


def _as_held(key: str, v: Any) -> Any:
    """A value as the record holds it: lists are fixed, and a whole number that stands for a share is one."""
    if isinstance(v, list):
        return tuple(v)
    return float(v) if key in KEYS and check_of(key) is share and is_number(v) else v


def check_of(key: str) -> Check:
    """What a key must be."""
    check: Check = KEYS[key].metadata["check"]
    return check


def _check_plain(v: Any, where: str, depth: int = 0) -> None:
    """Refuse what no option can be: dates, numbers that are none or beyond 64 bits, nests without end."""
    if depth > DEEPEST:
        raise InputError(f"{where} holds tables or lists nested more than {DEEPEST} deep; write it flat")
    if isinstance(v, Mapping | list | tuple):
        for inner in v.values() if isinstance(v, Mapping) else v:
            _check_plain(inner, where, depth + 1)
    elif isinstance(v, float) and math.isnan(v):
        raise InputError(f"{where} holds nan; give a number")
    elif isinstance(v, int) and not -(2**63) <= v < 2**63:
        raise InputError(f"{where} holds {shown(v)}; whole numbers end at 64 bits")
    elif not isinstance(v, str | int | float):
        raise InputError(f"{where} holds a {type(v).__name__}; give text, numbers, true or false, lists or tables")


def _check_comparison(experiment: Experiment, where: str, named: bool) -> None:
    methods = experiment.methods
    if named and experiment.method not in methods:
        raise InputError(
            f"{where}: method {experiment.method!r} is not one of methods ({', '.join(methods)}); "
            "name one of them, or give methods = []"
        )
    folders = [folder_name(method) for method in methods]
    if len(set(folders)) < len(folders):
        raise InputError(f"{where}: methods name one twice ({', '.join(methods)}); each gets a folder of its name")


def folder_name(method: str) -> str:
    """The sub-folder of a method in a comparison: its name, or that of the user's object."""
    return method.rpartition(":")[2].rpartition(".")[2]


def table_of(experiment: Experiment) -> dict[str, Any]:
    """The record as a mapping without what is not set; `experiment_of` is its inverse."""
    rows = ((name, getattr(experiment, name)) for name in KEYS)
    return {name: v for name, v in rows if not (v is None or v == {} or (name in LISTS and not v))}


def to_toml(experiment: Experiment) -> str:
    """The record as TOML text."""
    return toml.dumps(table_of(experiment))


def table_in(text: str, where: str) -> dict[str, Any]:
    """The table of a TOML text."""
    if any(step.count(".") > LONGEST for step in re.split(r"""[\s=,#"'{}\[\]]+""", text)):
        raise InputError(f"{where} has a key of more than {LONGEST} steps; write it flat")  # tomllib takes hours
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid TOML: {one_line(error)}; mend it there") from error


def from_toml(text: str, where: str = "experiment") -> Experiment:
    """A record from TOML text."""
    return experiment_of(table_in(text, where), where)


def read(path: str | Path) -> Experiment:
    """A record from a TOML file."""
    if not Path(path).exists():
        raise InputError(f"there is no file {path}; give a TOML file or the name of an experiment")
    with reading(path, "give a small UTF-8 file of TOML", "can't be read as text"):
        text = text_of(path)
    return from_toml(text, str(path))


def read_whole(path: str | Path) -> Experiment:
    """A record from a file that `to_toml` wrote: nothing that it always writes may be missing."""
    experiment = read(path)
    table = tomllib.loads(text_of(path))
    if missing := [key for key in WRITTEN if key not in table]:
        raise InputError(f"{path} has lost its {missing[0]}; put it back from a copy, or start anew in another folder")
    return experiment


def with_settings(
    experiment: Experiment, settings: Iterable[str], options_of: Callable[[str], Iterable[str]]
) -> Experiment:
    """The experiment with `key=value` settings laid over it, as `--set` gives them.

    A key is one of the record's, a dotted path into one of its tables (`options.fedavg.lr`), or the bare name of an
    option, which goes to each method that takes it (`options_of(method)` says which). A value is TOML, else text; what
    would be a number is text where the key takes no number.
    """
    table = table_of(experiment)
    for setting in settings:
        key, sign, text = setting.partition("=")
        path = key.strip().split(".")
        if not sign or not all(path):
            raise InputError(f"--set {setting!r}: write key=value, such as rounds=50 or options.lr=0.1")
        v = _suited(parse(text.strip(), path[0]), text.strip(), path)
        if path[0] in KEYS:
            _lay(table, path, v, setting)
            continue
        # `methods` may itself be set, so ask the table as it stands.
        methods = tuple(table.get("methods", ())) or (table["method"],)
        takers = [m for m in methods if path[0] in options_of(m)]
        if not takers or len(path) > 1:
            raise unknown("key in --set", key, [*KEYS, *sorted({o for m in methods for o in options_of(m)})])
        own = table.get("options", {}).get(methods[0])
        if len(methods) == 1 and not (isinstance(own, Mapping) and path[0] in own):  # a table of its own would win
            _lay(table, ["options", *path], v, setting)
        else:
            for method in takers:
                _lay(table, ["options", method, *path], v, setting)
    return experiment_of(table, "--set")


def parse(text: str, key: str) -> Any:
    """A value of a setting: TOML, a list where the key is one, else text."""
    for written in (text, _with_all_digits(text)):
        try:
            return tomllib.loads(f"v = {written}")["v"]
        except (ValueError, RecursionError):
            continue
    if key in KEYS and isinstance(KEYS[key].default, tuple):
        return _words(text)
    return text


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _suited(v: Any, text: str, path: list[str]) -> Any:
    """A setting's value in the form that its key takes: as it was read, else as text, else as a list of words."""
    known = KEYS if not path[1:] else options_of(RECORDS[path[0]]) if path[0] in RECORDS else {}
    check = known[path[-1]].metadata["check"] if path[-1] in known and len(path) < 3 else None
    forms = (v, text, _words(text))
    return v if check is None else next((form for form in forms if check.holds(form)), v)


def _with_all_digits(text: str) -> str:
    """Numbers as TOML has them: `.2` and `5.` are 0.2 and 5.0 there.

    >>> _with_all_digits("[-.2, 5., 1.e-3]")
    '[-0.2, 5.0, 1.0e-3]'
    """
    return re.sub(r"(?<=\d)\.(?!\d)", ".0", re.sub(r"(?<![\w.])\.(?=\d)", "0.", text))


def _lay(table: dict[str, Any], path: list[str], v: Any, setting: str) -> None:
    """Set a value deep in a table; tables on the way are copied, so that no other record changes."""
    *way, last = path
    for step in way:
        inner = table.get(step, {})
        if not isinstance(inner, Mapping) or (step == way[0] and check_of(step) is not subtable):
            raise InputError(f"--set {setting!r}: {step} is no table; write {step}=value")
        table[step] = dict(inner)
        table = table[step]
    table[last] = v
