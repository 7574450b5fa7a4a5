"""An experiment as a frozen record, read from TOML with every key and value checked, and written back."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, one_line, shown, unknown
from fedbayes.experiments import toml
from fedbayes.files import reading, text_of

Table = Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What to train on what, and for how long.

    `data`, `network`, `partition`, `method` and `likelihood` are names of the library's tables; all but `partition`
    may also be the user's own code as `package.module:object`. `methods` makes it a comparison: one run a method, and
    `method` is the one that `fedbayes.load` gives. `options` are those of all methods; a table inside it, under a
    method's name, is for that method alone.
    """

    data: str = "digits"
    network: str = "mlp"
    partition: str = "iid"
    clients: int = 20
    central: bool = False  # one client holds the rows of all
    test_per_client: int | None = None
    method: str = "feduab"
    methods: tuple[str, ...] = ()
    rounds: int = 50
    cohort: int | float | None = None
    seed: int = 0
    device: str = "cpu"
    engine: str = "auto"
    compile: str = "auto"
    at_once: int | None = None  # clients that are trained side by side; by default as many as fit
    precision: str = "float32"
    likelihood: str | None = None
    frozen: tuple[str, ...] = ()
    augment: str | None = None  # of training images: crop_flip
    dropout: float = 0.0
    validation: float = 0.0
    patience: int | None = None
    monitor: str = "nll"  # or accuracy: the validation score that chooses the best round
    evaluate_every: int = 1
    personal_every: int = 0  # rounds between evaluations of the clients' personal models; 0: none
    target_loss: float | None = None
    target_accuracy: float | None = None
    checkpoint_every: int | None = None  # rounds; by default every two seconds
    data_options: Table = field(default_factory=dict)
    network_options: Table = field(default_factory=dict)
    partition_options: Table = field(default_factory=dict)
    likelihood_options: Table = field(default_factory=dict)
    pretrain: Table = field(default_factory=dict)  # training at the server before the first round
    flower: Table = field(default_factory=dict)  # how Flower carries it: min_clients, timeout, dtype, ...
    options: Table = field(default_factory=dict)

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The methods that are trained: those of a comparison, or the one."""
        return self.methods or (self.method,)

    def options_of(self, method: str) -> dict[str, Any]:
        """The options of one method: the common ones, then those of its own table."""
        common = {k: v for k, v in self.options.items() if not isinstance(v, Mapping)}
        return {**common, **self.options.get(method, {})}

    @property
    def settled(self) -> Experiment:
        """The same experiment; with one method, the options of its own table among the common ones."""
        return self if self.methods else self.only(self.method)

    def only(self, method: str) -> Experiment:
        """The same experiment with one method of the comparison."""
        return replace(self, method=method, methods=(), options=self.options_of(method))


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and not isinstance(v, bool) and -math.inf < v < math.inf


def _words(v: Any) -> bool:
    return isinstance(v, list | tuple) and all(isinstance(word, str) for word in v)


TEXT = ("text", lambda v: isinstance(v, str) and v != "")
NAMES = ("a list of names", _words)
SHARE = ("a share in [0, 1)", lambda v: _number(v) and 0 <= v < 1)
TABLE = ("a table of options", lambda v: isinstance(v, Mapping))
AT_LEAST_1 = ("a whole number of at least 1", _whole(1))

WRITTEN = ("data", "network", "partition", "clients", "method", "rounds", "seed")  # in every run folder
DEEPEST = 8  # levels of tables and lists
LONGEST = 50  # dots in a word

# Each key's requirement, in words and as a test.
KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "data": TEXT,
    "network": TEXT,
    "partition": TEXT,
    "clients": AT_LEAST_1,
    "central": ("true or false", lambda v: isinstance(v, bool)),
    "test_per_client": ("a whole number", _whole(0)),
    "method": TEXT,
    "methods": NAMES,
    "rounds": ("a whole number", _whole(0)),
    "cohort": ("a number of clients, or a fraction of them such as 0.1", lambda v: _number(v) and v > 0),
    "seed": ("a whole number", _whole(0)),
    "device": TEXT,
    "engine": TEXT,
    "compile": TEXT,
    "at_once": AT_LEAST_1,
    "precision": TEXT,
    "likelihood": TEXT,
    "frozen": NAMES,
    "augment": TEXT,
    "dropout": SHARE,
    "validation": SHARE,
    "patience": AT_LEAST_1,
    "monitor": TEXT,
    "evaluate_every": AT_LEAST_1,
    "personal_every": ("a whole number of rounds, 0 for never", _whole(0)),
    "target_loss": ("a number", _number),
    "target_accuracy": ("a share in (0, 1]", lambda v: _number(v) and 0 < v <= 1),
    "checkpoint_every": AT_LEAST_1,
    "data_options": TABLE,
    "network_options": TABLE,
    "partition_options": TABLE,
    "likelihood_options": TABLE,
    "pretrain": TABLE,
    "flower": TABLE,
    "options": TABLE,
}


def experiment_of(table: Table, where: str = "experiment") -> Experiment:
    """A record from a mapping; an unknown key or a value of the wrong kind is an error that names it."""
    for key, v in table.items():
        if key not in KEYS:
            raise unknown(f"key in {where}", key, KEYS)
        words, fine = KEYS[key]
        if not fine(v):
            raise InputError(f"{where}: {key} must be {words}, not {shown(v)}")
        _check_plain(v, f"{where}: {key}")
    made: dict[str, Any] = {
        k: tuple(v) if KEYS[k] is NAMES else float(v) if KEYS[k] is SHARE else v for k, v in table.items()
    }
    experiment = Experiment(**made)
    if experiment.methods:
        _check_comparison(experiment, where, given="method" in table)
        if "method" not in table:
            experiment = replace(experiment, method=experiment.methods[-1])
    return experiment


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


def _check_comparison(experiment: Experiment, where: str, given: bool) -> None:
    methods = experiment.methods
    if given and experiment.method not in methods:
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
    rows = ((f.name, getattr(experiment, f.name)) for f in fields(experiment))
    return {name: v for name, v in rows if not (v is None or v == {} or (name == "methods" and not v))}


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
    option, which goes to each method that takes it (`options_of(method)` says which). A value is TOML, else text.
    """
    table = table_of(experiment)
    for setting in settings:
        key, sign, text = setting.partition("=")
        path = key.strip().split(".")
        if not sign or not all(path):
            raise InputError(f"--set {setting!r}: write key=value, such as rounds=50 or options.lr=0.1")
        v = _parse(text.strip(), path[0])
        if path[0] in KEYS:
            _lay(table, path, v, setting)
            continue
        # `methods` may itself be set, so ask the table as it stands.
        methods = tuple(table.get("methods", ())) or (table["method"],)
        takers = [m for m in methods if path[0] in options_of(m)]
        if not takers or len(path) > 1:
            raise unknown("key in --set", key, [*KEYS, *sorted({o for m in methods for o in options_of(m)})])
        if len(methods) == 1:
            _lay(table, ["options", *path], v, setting)
        else:
            for method in takers:
                _lay(table, ["options", method, *path], v, setting)
    return experiment_of(table, "--set")


def _parse(text: str, key: str) -> Any:
    for written in (text, _with_all_digits(text)):
        try:
            return tomllib.loads(f"v = {written}")["v"]
        except (ValueError, RecursionError):
            continue
    if key in KEYS and KEYS[key] is NAMES:
        return [word.strip() for word in text.split(",") if word.strip()]
    return text


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
        if not isinstance(inner, Mapping) or (step == way[0] and KEYS[step] is not TABLE):
            raise InputError(f"--set {setting!r}: {step} is no table; write {step}=value")
        table[step] = dict(inner)
        table = table[step]
    table[last] = v
