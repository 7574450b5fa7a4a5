"""Where compiled code is kept between processes: a folder that nobody else can write to, for this processor.

Code is run when it is loaded, and Inductor's programs are pickles. So the folder must be the user's own, and so must
every folder above it, or be safe from others; where it is not, code is kept for this process alone.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from fedbayes.data.cache import cache_folder

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
PROCESSOR = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")  # of /proc/cpuinfo


def keep_programs() -> None:
    """Let Inductor keep what it compiles in our folder, unless the user has named another."""
    given = Path(os.environ.get(INDUCTOR) or default_folder())
    if given.parent == default_folder().parent and given.name.startswith(default_folder().name):
        os.environ[INDUCTOR] = str(code_folder() / "inductor")


def default_folder() -> Path:
    """Where Inductor keeps its programs, with the user's name behind it: it names it once it has compiled anything."""
    return Path(tempfile.gettempdir()) / "torchinductor_"


def code_folder() -> Path:
    """The folder of compiled code in the user's cache."""
    folder = cache_folder() / f"code-{_processor()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = writable_by_others(folder)
    except OSError as error:
        fault = f"{folder} can't be made: {error.strerror}"
    if fault is None and os.access(folder, os.W_OK):
        return folder
    warnings.warn(
        f"compiled programs are not kept for the next run: {fault or f'{folder} is read-only'}; "
        "FEDBAYES_CACHE names another folder",
        stacklevel=2,
    )
    return _for_this_process()


def writable_by_others(folder: Path) -> str | None:
    """Who else could put files into a folder, or put another in its place; None where nobody can."""
    if not hasattr(os, "getuid"):
        return None
    folder = folder.resolve()
    for place in (folder, *folder.parents):
        found = place.stat()
        shared = bool(found.st_mode & stat.S_ISVTX) and place != folder  # as /tmp is: each may remove only his own
        by_group = found.st_mode & stat.S_IWGRP and not _private(found.st_gid)
        if found.st_uid not in (os.getuid(), 0) or (place == folder and found.st_uid != os.getuid()):
            return f"{place} belongs to another user"
        if (found.st_mode & stat.S_IWOTH or by_group) and not shared:
            return f"other users may write to {place}"
    return None


def _private(group: int) -> bool:
    """Whether a group has no member but this user, as many systems give each user one."""
    import grp
    import pwd

    with suppress(KeyError):
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
        return found.gr_gid == user.pw_gid and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
    return False


def _processor() -> str:
    """A name for what this processor can do: a home shared by machines may hold code for another one."""
    described = [platform.machine(), platform.processor()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
        described += [line for line in lines if line.split(":")[0].strip() in PROCESSOR]
    return hashlib.blake2b("\n".join(described).encode(), digest_size=4).hexdigest()


@cache
def _for_this_process() -> Path:
    import atexit
    import shutil

    folder = tempfile.mkdtemp(prefix="fedbayes-code-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
