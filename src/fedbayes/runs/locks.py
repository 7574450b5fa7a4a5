"""Locks on files that go with the process, however it ends: the system's own where it has shared ones, else filelock's.

Without shared locks (Windows) each process that shares has a file of its own beside the lock. Everybody takes his own
file first and looks at the others' then, so that of two who may not be together at least one sees the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

from filelock import FileLock, Timeout

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None


class Held(Exception):
    """Another process holds the lock."""


@contextmanager
def lock(path: Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold a lock file, alone or with others that share it; `Held` where that can't be, unless told to wait."""
    if fcntl is None:
        with _by_files(path, shared, -1 if wait else 0):
            yield
        return
    with path.open("w", encoding="utf-8") as file:
        way = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(file, way)
        except OSError as error:
            raise Held(str(path)) from error
        yield


@contextmanager
def _by_files(path: Path, shared: bool, timeout: float) -> Iterator[None]:
    mine = path.with_name(f"{path.name}-{os.getpid()}") if shared else path
    try:
        with ExitStack() as held:
            held.enter_context(FileLock(mine).acquire(timeout=timeout))
            for other in [path] if shared else sorted(path.parent.glob(f"{path.name}-*")):
                with FileLock(other).acquire(timeout=timeout):
                    pass  # nobody has it now, and whoever comes later sees ours
            yield
    except Timeout as error:
        raise Held(str(path)) from error


def is_held(path: Path) -> bool:
    """Whether a process holds the lock now."""
    if not path.is_file():
        return False
    try:
        with lock(path, shared=fcntl is not None):
            return False
    except Held:
        return True
