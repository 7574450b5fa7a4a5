"""Whose code an experiment may name: an experiment is a program, and a file from elsewhere must not choose what is run.

By default: code in a folder that the user has put on Python's path (where the command runs,
PYTHONPATH), and in installed packages that ask for fedbayes. Of other installed packages only those that are named by
`--trust` or `trust()`; Python's own modules never, and never a file in a run folder.
"""

from __future__ import annotations

import os
import re
import site
import sysconfig
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from fedbayes.errors import InputError

VARIABLE = "FEDBAYES_TRUST"  # names of packages, with commas; processes that are started from here inherit it
# Of fedbayes itself what makes pieces of a federation; other rooms write files, and an experiment would choose which.
PIECES = re.compile(r"fedbayes\.(networks|methods|federation|clients|model|data\.partition)(\..*)?")
ROOT = __name__.partition(".")[0]


def trust(*packages: str) -> None:
    """Let experiments in this process, and in those it starts, name code of these installed packages."""
    for name in packages:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise InputError(f"trust {name!r}: give the name of a package as it is imported, such as torchvision")
    os.environ[VARIABLE] = ",".join(dict.fromkeys((*trusted(), *packages)))


def trusted() -> tuple[str, ...]:
    """The packages that the user named."""
    return tuple(name for name in os.environ.get(VARIABLE, "").split(",") if name)


def check_module(module: str, what: str) -> None:
    """Refuse a module that an experiment may not name, before anything of it is run."""
    top = module.partition(".")[0]
    if top == "__main__":  # the script or notebook that asks
        return
    if top == ROOT:
        if not PIECES.fullmatch(module):
            raise InputError(f"{what} {module!r} is not one of fedbayes's pieces; name code of your own")
        return
    try:
        spec = find_spec(top)  # of a package without dots, which runs nothing
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return  # the import will say that there is none
    places = _places(spec)
    if not places or any(_pythons_own(place) for place in places):
        raise InputError(f"{what} {module!r} is a part of Python, which no experiment may run; name code of your own")
    for place in filter(_run_folder, places):
        raise InputError(f"{what} {module!r} lies in the run folder {place}, from which no code is run; move it")
    if any(map(_installed, places)) and top not in trusted() and not _made_for_us(top):
        raise InputError(
            f"{what} {module!r} is code of the installed package {top}, which does not ask for fedbayes: "
            f"if you know what it does there, say --trust {top}"
        )


def check_object(target: Any, path: str, what: str) -> None:
    """Refuse a function or class that a module has from elsewhere: `mine:system` after `from os import system`."""
    if isinstance(target, MethodType):
        target = target.__func__
    if not isinstance(target, FunctionType | BuiltinFunctionType | type):
        return
    home = getattr(target, "__module__", None)
    if not isinstance(home, str):
        raise InputError(f"{what} {path!r} is a part of Python, which no experiment may run; name code of your own")
    if home != path.partition(":")[0]:
        check_module(home, f"{what} {path!r}, which comes from")


def check_step(target: Any, step: str, path: str, what: str) -> None:
    """Refuse the way through a module into another, such as `mine:os.system`, and Python's own names in between."""
    if step.startswith("__"):
        raise InputError(f"{what} {path!r}: {step} is a name of Python's own; name a function or class of yours")
    if isinstance(target, ModuleType):
        check_module(target.__name__, f"{what} {path!r}, which leads to")


def _places(spec: ModuleSpec) -> list[Path]:
    """The folders that hold a module, or none for one that is built in."""
    if spec.submodule_search_locations:
        return [Path(place).absolute().parent for place in spec.submodule_search_locations]
    return [Path(spec.origin).absolute().parent] if spec.has_location and spec.origin else []


def _run_folder(place: Path) -> bool:
    """Whether a folder is one that `run` wrote, of one method or of several; not one in which runs were put."""
    several = all((place / name).exists() for name in ("config.toml", "report.html")) and any(
        place.glob("*/rounds.jsonl")
    )
    return several or (place / "rounds.jsonl").exists()


def _installed(place: Path) -> bool:
    return any(part in ("site-packages", "dist-packages") for part in place.parts) or place in _site_folders()


def _pythons_own(place: Path) -> bool:
    if _installed(place):
        return False
    libraries = {Path(sysconfig.get_path(name)).absolute() for name in ("stdlib", "platstdlib")}
    libraries |= {Path(os.__file__).absolute().parent}
    return any(place == library or library in place.parents for library in libraries)


@cache
def _site_folders() -> frozenset[Path]:
    named = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        *(sysconfig.get_path(n) for n in ("purelib", "platlib")),
    ]
    return frozenset(Path(folder).absolute() for folder in named)


@cache
def _made_for_us(top: str) -> bool:
    """Whether an installed package asks for fedbayes: then its functions are meant to be named in experiments."""
    needs = [line for name in packages_distributions().get(top, ()) for line in requires(name) or ()]
    return any(re.match(rf"{ROOT}(?![\w-])", line, re.IGNORECASE) for line in needs)
