"""Options that methods hand on: from one to the method it is built on, each checked by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import unwrap
from typing import Any, TypeVar

from fedbayes.composition import CHOICES, Method
from fedbayes.errors import InputError, shown, unknown
from fedbayes.refined import OPTIONS, Refinement, refined

Make = TypeVar("Make", bound=Callable[..., Any])


def refinable(make: Callable[..., Method]) -> Callable[..., Method]:
    """The method maker, which also takes the options of `refined`: `refine` = "flow", and those that go with it."""

    @wraps(make)
    def made(**options: Any) -> Method:
        asked = {name: options.pop(name) for name in OPTIONS if name in options}
        if asked and "refine" not in asked:
            raise InputError(f'{next(iter(asked))} goes with a refinement: set refine = "flow" or "laplace"')
        method = make(**options)
        return refined(method, **asked) if asked else method

    return made


def builds_on(*bases: Callable[..., Any]) -> Callable[[Make], Make]:
    """Marks a maker that hands its remaining options on to others: theirs are its own too."""

    def marked(make: Make) -> Make:
        vars(make)["bases"] = bases
        return make

    return marked


def option_names(make: Callable[..., Any]) -> list[str]:
    """The options that a method takes, those of the methods it builds on included."""
    return list(defaults(make))


def defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """The options that a method takes, with their defaults."""
    plain = unwrap(make)
    own = dict(plain.__kwdefaults__ or {})
    if plain is not make:
        own |= {name: field.default for name, field in Refinement.__dataclass_fields__.items()}
    for base in getattr(make, "bases", ()):
        own |= {name: value for name, value in defaults(base).items() if name not in own}
    return own


def call(make: Callable[..., Method], options: dict[str, Any]) -> Method:
    """A method by its maker, each option checked by name."""
    known = defaults(make)
    for name, value in options.items():
        if name not in known:
            raise unknown(f"option of {make.__name__}", name, known)
        _check_kind(name, value, known[name])
    return make(**options)


def _check_kind(name: str, value: Any, default: Any) -> None:
    """Refuse a plain value of another kind than the default's: true or false, text, a list of names."""
    if isinstance(default, bool):
        words, fine = "true or false", isinstance(value, bool)
    elif isinstance(default, tuple):
        words = "a list of names"
        fine = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
    elif isinstance(default, str) or (default is None and name in CHOICES):
        words, fine = "text", not isinstance(value, bool | int | float | list | tuple | Mapping)
    else:
        return
    if not fine:
        raise InputError(f"{name} must be {words}, not {shown(value)}")


def refuse(method: str, options: Mapping[str, Any], name: str, why: str) -> None:
    """Refuse an option that a method fixes."""
    if name in options:
        raise InputError(f"{name} is fixed in {method}: {why}")
