"""Options that methods hand on: from one to the method it is built on, each checked by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import unwrap
from typing import Any, TypeVar

from fedbayes.composition import Method
from fedbayes.errors import InputError, unknown
from fedbayes.refined import OPTIONS, refined

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
    plain = unwrap(make)
    names = list(plain.__kwdefaults__ or {}) + (list(OPTIONS) if plain is not make else [])
    for base in getattr(make, "bases", ()):
        names += [n for n in option_names(base) if n not in names]
    return names


def call(make: Callable[..., Method], options: dict[str, Any]) -> Method:
    """A method by its maker, each option checked by name."""
    known = option_names(make)
    for name in options:
        if name not in known:
            raise unknown(f"option of {make.__name__}", name, known)
    return make(**options)


def refuse(method: str, options: Mapping[str, Any], name: str, why: str) -> None:
    """Refuse an option that a method fixes."""
    if name in options:
        raise InputError(f"{name} is fixed in {method}: {why}")
