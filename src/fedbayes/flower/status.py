"""Where a federation stands: what its server is doing now, who is waited for, and whether anybody works on it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import InputError, printable
from fedbayes.experiments.experiment import Experiment, folder_name
from fedbayes.files import reading, text_of, write_atomically
from fedbayes.runs import journal
from fedbayes.runs.home import experiment_in, in_use

FILE = "status.json"
SOON, EVERY = 1.0, 5.0  # seconds between two writes where somebody has answered, and where nothing happens


class Sign:
    """A server's sign of life: one small file in the run folder, written when something happens.

    `names`: it says who is waited for and who has answered, which of private clients nobody must know.
    """

    def __init__(self, folder: Path, *, names: bool = True) -> None:
        self.folder, self.names, self.round, self.written = folder, names, 0, 0.0
        self.last: dict[str, Any] = {}

    def show(self, phase: str, waiting: Iterable[int | None] = (), answered: Iterable[int | None] = ()) -> None:
        """Write what is being done: at once where a phase begins, after a moment where somebody has answered."""
        now = time.time()
        doing: dict[str, Any] = {"round": self.round + 1, "phase": phase}
        if self.names:
            doing |= {"waiting": _sorted(waiting), "answered": _sorted(answered)}
        begun = self.last.get("phase") != phase or self.last.get("round") != doing["round"]
        news = {**self.last, **doing} != self.last
        if not begun and now - self.written < (SOON if news else EVERY):
            return
        if begun:
            doing["since"] = now
        self.last = {"since": now, **self.last, **doing}
        self.written = now
        with suppress(OSError):  # a full disk is for the journal to say; this is not worth a round
            write_atomically(self.folder / FILE, json.dumps({**self.last, "time": now}))


def _sorted(clients: Iterable[int | None]) -> list[int]:
    return sorted(k for k in clients if k is not None)


class Standing(NamedTuple):
    """A run as an operator sees it."""

    name: str
    round: int
    rounds: int
    finished: bool
    alive: bool
    quiet: float  # seconds since its server wrote anything
    last: Mapping[str, Any]  # the record of the last round
    doing: Mapping[str, Any]  # what the server does now, where it says so


def standings(folder: str | Path) -> list[Standing]:
    """The runs of a folder: one, or one for each method of a comparison."""
    folder = Path(folder)
    experiment = experiment_in(folder)
    alive = in_use(folder)
    if not experiment.methods:
        return [_standing(experiment.method, folder, experiment, alive)]
    places = [(method, folder / folder_name(method)) for method in experiment.methods]
    return [_standing(method, place, experiment.only(method), alive) for method, place in places]


def _standing(name: str, folder: Path, experiment: Experiment, alive: bool) -> Standing:
    records = journal.read(folder)
    last = records[-1] if records else {}
    finished = len(records) >= experiment.rounds or "stopped" in last
    written = [path.stat().st_mtime for path in (folder / journal.LINES, folder / FILE) if path.is_file()]
    quiet = time.time() - max(written) if written else 0.0
    doing = {} if finished else _doing(folder / FILE)
    return Standing(name, len(records), experiment.rounds, finished, alive and not finished, quiet, last, doing)


def _doing(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with reading(path, "delete it; it is written again"):
        doing = json.loads(text_of(path))
        kinds = {"round": int, "phase": str, "since": int | float, "waiting": list, "answered": list}
        doing = {"waiting": [], "answered": [], **doing} if isinstance(doing, dict) else {}
        if not all(isinstance(doing.get(key), kind) for key, kind in kinds.items()):
            raise InputError(f"{path} is no sign of a server; delete it, it is written again")
        return doing


def lines(run: Standing) -> list[str]:
    """A run in a few lines for an operator."""
    state = "finished" if run.finished else "in progress" if run.alive else "not finished, and nobody works on it"
    shown = [f"{run.name}: {state}, {run.round} of {run.rounds} rounds, silent for {run.quiet:.0f} s"]
    if run.last:
        last = run.last
        if "took_part" in last:  # of private clients nobody is told of
            took = f"{last.get('seconds', 0):.1f} s: {_phases(last.get('phases', {}))}"
            shown += [f"  round {last['round']} took {took}", f"  took part: {_names(last['took_part'])}"]
        shown += [f"  left out: client {k}: {printable(why)}" for k, why in last.get("left_out", {}).items()]
    if run.doing and run.alive:
        seconds = time.time() - run.doing["since"]
        waits = f", waiting for {_names(run.doing['waiting'])}" if run.doing["waiting"] else ""
        shown.append(f"  now: round {run.doing['round']}, {run.doing['phase']} for {seconds:.0f} s{waits}")
    return shown


def _phases(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items()) or "no times"


def _names(clients: list[Any], most: int = 20) -> str:
    text = ", ".join(str(k) for k in clients[:most]) or "nobody"
    return text + (f" and {len(clients) - most} more" if len(clients) > most else "")
