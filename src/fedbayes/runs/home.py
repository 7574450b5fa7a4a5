"""A run's folder before anything runs in it: which experiment it holds, and that one process alone works in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, folder_name, read_whole, table_of
from fedbayes.experiments.keys import SAVED
from fedbayes.runs import checkpoint, locks
from fedbayes.runs.recording import CHANGING, CONFIG
from fedbayes.runs.releases import Releases

LOCK = ".lock"
SWEEP = "sweep.toml"  # what the folder of a sweep has beside those of its members


def home_of(folder: str | Path) -> Path:
    """The folder in which the run lies that `load` gives: of a comparison its first method's."""
    experiment = experiment_in(folder).settled
    return Path(folder) / folder_name(experiment.method) if experiment.methods else Path(folder)


def experiment_in(folder: str | Path) -> Experiment:
    """The experiment that a run folder holds."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        if (Path(folder) / SWEEP).is_file():
            raise InputError(
                f"{folder} is a sweep: give one of its runs, such as {folder}/{next(_members(folder), 'NAME')}, "
                "or the same `fedbayes sweep` command again, which goes on with all of them"
            )
        raise InputError(f"{folder} is no run folder: it has no {CONFIG}; give the folder that `fedbayes run` wrote")
    if (Path(folder) / CHANGING).is_file():
        raise InputError(f"a change of {folder} was cut short; `fedbayes resume {folder}` finishes it")
    experiment = read_whole(path)
    _check_belongs(experiment, Path(folder))
    return experiment


def _members(folder: str | Path) -> Iterator[str]:
    """The names of a sweep's runs."""
    return (path.parent.name for path in sorted(Path(folder).glob(f"*/{CONFIG}")))


def _check_belongs(experiment: Experiment, folder: Path) -> None:
    """Refuse a config that does not name the runs of its folder: continuing would start another run beside them."""
    names = {folder_name(method) for method in experiment.methods}
    runs = {path.parent.name for path in folder.glob("*/checkpoints")}
    if strange := sorted(runs - names):
        raise InputError(
            f"{folder} holds a run of {strange[0]}, which {folder / CONFIG} does not name; put it back from a copy"
        )
    if names and checkpoint.paths(folder):
        raise InputError(
            f"{folder} holds one run, and {folder / CONFIG} names {len(names)} methods; put it back from a copy"
        )


def refuse_saved(experiment: Experiment, folder: Path) -> None:
    """Refuse to go on with a folder that `fb.save` has written: it holds no checkpoint."""
    if experiment.network == SAVED:
        raise InputError(
            f"{folder} was written by fb.save, and holds no checkpoint to go on from; fb.fit(..., init=fb.load(...)) "
            "begins with its posterior, and an experiment file by `fedbayes run` can go on"
        )


def refuse_another(experiment: Experiment, folder: Path) -> None:
    """Raise where a folder holds anything but this experiment."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder; give another --output")
    if not (folder / CONFIG).is_file():
        # Hidden files are the lock, or what a process left that was killed before it had begun.
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise InputError(f"{folder} is not empty and holds no run; give another --output")
        return
    theirs, ours = table_of(experiment_in(folder).settled), table_of(experiment.settled)
    changed = sorted(k for k in {*theirs, *ours} if theirs.get(k) != ours.get(k))
    if changed:
        raise InputError(
            f"{folder} holds another experiment ({', '.join(changed)} differ): go on with that one by "
            f"`fedbayes resume {folder}`, or give another --output"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder; the lock goes with the process, however it ends.

    A sweep has its folder to itself; members that are resumed one by one share it.
    """
    with ExitStack() as held:
        if (folder.parent / SWEEP).is_file():
            held.enter_context(_lock(folder.parent, shared=True))
        held.enter_context(_lock(folder, shared=False))
        yield


def ledger_of(home: Path) -> Releases:
    """What the run of a folder has released beside its rounds; while one is added nobody else works there."""
    whole = home.parent if (home.parent / CONFIG).is_file() else home  # of a comparison
    return Releases(home, lambda: locked(whole))


@contextmanager
def _lock(folder: Path, *, shared: bool) -> Iterator[None]:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, not a folder; give another --output")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no regular file; delete it")
    with ExitStack() as held:
        for left in range(5, -1, -1):  # who only asks whether it is in use holds it for a moment
            try:
                held.enter_context(locks.lock(path, shared=shared))
                break
            except locks.Held as error:
                if not left:
                    raise InputError(
                        f"{folder} is in use by another process; wait for it, or give another --output"
                    ) from error
                time.sleep(0.05)
        yield


def in_use(folder: Path) -> bool:
    """Whether a process works in the folder now."""
    return locks.is_held(folder / LOCK)
