"""The user's own code: named in a file as package.module:name, imported at one door, and called with its options."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedbayes.errors import InputError, one_line, unknown
from fedbayes.experiments.trust import check_module, check_object, check_step


def imported(path: str, what: str) -> Any:
    """The user's object named `package.module:object`; the folder in which the command runs is searched too.

    The one place where code is imported that an experiment names: whose it is, is asked before anything of it runs.
    """
    module, _, name = path.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    check_module(module, what)
    try:
        with users_code(what, path):
            target: Any = importlib.import_module(module)
        for step in name.split("."):
            check_step(target, step, path, what)
            target = getattr(target, step)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{what} {path!r} can't be imported ({one_line(error)}); write package.module:object, "
            "and run where the module can be found"
        ) from error
    check_object(target, path, what)
    return target


@contextmanager
def users_code(what: str, path: str) -> Iterator[None]:
    """Run the user's own code: an unexpected error in it becomes one line that names its place."""
    try:
        yield
    except (ImportError, ValueError, TypeError, FileNotFoundError):
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{what} {path} failed in {last.filename}, line {last.lineno} ({type(error).__name__}: {one_line(error)}); "
            "mend it there, --debug shows the way to it"
        ) from error


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn the errors of values that don't fit into one line that names the place."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(f"{what}: it does not fit in memory ({one_line(error)}); give smaller numbers") from error
    except (ValueError, TypeError, ArithmeticError, FileNotFoundError) as error:
        raise InputError(f"{what}: {' '.join(str(error).split())}") from error


def in_one_line(function: Callable[..., Any], what: str, path: str) -> Callable[..., Any]:
    """The user's function, whose errors are said in one line."""

    @functools.wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        with naming(f"{what} {path}"), users_code(what, path):
            return function(*args, **options)

    return guarded


def called(make: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    """What a function gives for options, each of which it must know, and none of which it may miss."""
    check_options(parameters(make), options, what)
    return make(**options)


def check_options(known: Sequence[inspect.Parameter], options: Mapping[str, Any], what: str) -> None:
    """Refuse an option that is none of the parameters, and a parameter without a default that is given none."""
    names = [p.name for p in known]
    for name in options:
        if name not in names:
            none = InputError(f"{what} takes no options; leave {name!r} out")
            raise unknown(f"option of {what}", name, names) if names else none
    missing = [p.name for p in known if p.default is p.empty and p.name not in options]
    if missing:
        raise InputError(f"{what} needs {missing[0]!r}; set it in the options, such as {missing[0]} = 0.5")


def parameters(make: Callable[..., Any]) -> list[inspect.Parameter]:
    """What a function takes by name."""
    return [p for p in inspect.signature(make).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
