"""Options as records: each option's type, default, meaning, check, choices and kind stand in one place.

Signatures, checks, the table in the docs, experiment files and sweeps all read the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from inspect import Signature, signature
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from fedbayes.errors import InputError, shown, unknown

Class = TypeVar("Class", bound=type)
Record = TypeVar("Record")
LARGEST = 3.4e38  # options become tensors of a network's precision

# What may differ between members of a sweep that are one tensor program.
KINDS = {
    "program": "part of the program: members that differ in it are trained apart",
    "scalar": "a number that the program reads",
    "switch": "a number that the program reads, but without it (0) the program is another",
    "server": "no part of the clients' program: the server's alone, the first broadcast, or who holds which rows",
}


class Check(NamedTuple):
    """A requirement in words and as a test; where the value must be one of a table's names, that table."""

    words: str
    holds: Callable[[Any], bool]
    choices: Collection[str] | None = None


def is_number(v: Any) -> bool:
    """Whether a value is a number that float32 can hold; true and false are none."""
    return isinstance(v, Real) and not isinstance(v, bool) and bool(-LARGEST < v < LARGEST)  # type: ignore[operator]


def number(words: str, holds: Callable[[Any], bool]) -> Check:
    return Check(words, lambda v: is_number(v) and holds(v))


def whole(least: int, words: str = "a whole number") -> Check:
    """A whole number that is not below `least`."""
    bound = "" if least == 0 else f" of at least {least}" if " of " not in words else f", at least {least}"
    return Check(words + bound, lambda v: isinstance(v, Integral) and is_number(v) and int(v) >= least)


def one_of(choices: Collection[str]) -> Check:
    """A name of a table; an object, such as a rule of the user's own, is left to whoever uses it."""

    def holds(v: Any) -> bool:
        return v in choices if isinstance(v, str) else type(v) not in (bool, int, float, list, tuple, dict)

    return Check("text", holds, choices)


def name_in(choices: Collection[str]) -> Check:
    """A name of a table, and nothing else."""
    return Check("text", lambda v: isinstance(v, str) and v in choices, choices)


def each(check: Check) -> Check:
    """The same requirement of one value, or of each in a table of values by pattern."""
    return check._replace(
        holds=lambda v: all(map(check.holds, v.values())) if isinstance(v, Mapping) else check.holds(v)
    )


def _texts(v: Any) -> bool:
    return isinstance(v, list | tuple) and all(isinstance(word, str) for word in v)


positive = number("positive", lambda v: v > 0)
not_negative = number("not negative", lambda v: v >= 0)
share = number("a share in [0, 1)", lambda v: 0 <= v < 1)
below_one = number("in [0, 1)", lambda v: 0 <= v < 1)
up_to_one = number("in (0, 1]", lambda v: 0 < v <= 1)
at_least_one = whole(1)
flag = Check("true or false", lambda v: isinstance(v, bool))
patterns = Check("a list of names", _texts)
finite = number("a number", lambda v: True)
text = Check("text", lambda v: isinstance(v, str) and v != "")
subtable = Check("a table of options", lambda v: isinstance(v, Mapping))


def option(
    about: str,
    check: Check | None = None,
    *,
    default: Any = MISSING,
    factory: Any = MISSING,
    kind: str = "program",
    importable: bool = False,
    rare: bool = False,
) -> Any:
    """A field of a record: what it means, what it must be, its default, and its kind (see `KINDS`).

    `factory` makes the default where it is a table: `factory=dict`. `None` is allowed where it is the default.
    `importable`: an experiment file may name an object of the user's own, as package.module:name. `rare` ones are
    shown last.
    """
    assert kind in KINDS
    metadata = {"about": about, "check": check, "kind": kind, "importable": importable, "rare": rare}
    return field(default=default, default_factory=factory, metadata=metadata)


def with_default(cls: Any, name: str, *, default: Any) -> Any:
    """A field of a record again, with another default: what a method fixes otherwise than the group it shares."""
    return field(default=default, metadata=options_of(cls)[name].metadata)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, with_default))
def record(cls: Class) -> Class:
    """A frozen dataclass with keyword arguments only, whose signature shows rare options last."""
    frozen: Any = dataclass(frozen=True, kw_only=True)(cls)
    rare = {f.name for f in fields(frozen) if f.metadata.get("rare")}
    shown = sorted(signature(frozen.__init__).parameters.values(), key=lambda p: p.name in rare)
    frozen.__signature__ = Signature([p for p in shown if p.name != "self"])
    return frozen


def options_of(cls: Any) -> dict[str, Field[Any]]:
    """The options of a record by name."""
    return {f.name: f for f in fields(cls) if "about" in f.metadata}


def check_names(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a name that is no option, and say which is nearest."""
    for name in names:
        if name not in known:
            raise unknown(f"option of {what}", name, known)


def check_values(values: Any) -> None:
    """Refuse values of a record that do not meet their check, each by name."""
    for name, f in options_of(values).items():
        value = getattr(values, name)
        if value is not None or f.default is not None:
            check_value(name, f, value)


def check_value(name: str, f: Field[Any], value: Any, where: str = "") -> None:
    """Refuse a value that does not meet the check of its option; `where` says what holds it."""
    check = f.metadata["check"]
    if check is None or check.holds(value):
        return
    if check.choices is not None and isinstance(value, str):
        raise unknown(name, value, check.choices)
    raise InputError(f"{where}{name} must be {check.words}, not {shown(value)}")


def record_of(cls: type[Record], values: Mapping[str, Any], where: str) -> Record:
    """A record from a table of a file: an unknown key or a value of the wrong kind is an error that names it."""
    known = options_of(cls)
    for name, value in values.items():
        if name not in known:
            raise unknown(f"key in {where}", name, known)
        check_value(name, known[name], value, f"{where}: ")
    return cls(**values)


class Row(NamedTuple):
    """An option as a table shows it."""

    name: str
    default: str  # as Python writes it; empty where it must be given
    words: str
    about: str


def described(cls: Any) -> list[Row]:
    """The options of a record as rows of a table; what the record fixes is left out."""
    fixed = getattr(cls, "fixed", ())
    rows = []
    for name, f in options_of(cls).items():
        if name in fixed:
            continue
        default = "{}" if f.default_factory is dict else "" if f.default is MISSING else repr(f.default)
        rows.append(Row(name, default, _requirement(f), f.metadata["about"]))
    return rows


def _requirement(f: Field[Any]) -> str:
    """What an option must be, in words; its choices by name."""
    check = f.metadata["check"]
    if check is None:
        return ""
    words = check.words if check.choices is None else ", ".join(check.choices)
    return f"{words} (or *own*)" if f.metadata["importable"] else str(words)
