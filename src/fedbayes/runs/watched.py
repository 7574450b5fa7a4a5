"""What a watch on a site has seen so far: bets, counts, history and alarms, in one file. Needs no torch."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbayes.errors import InputError
from fedbayes.files import arrays_in, reading, write_atomically
from fedbayes.runs import martingale as bets

FOLDER = "watch"
KINDS = {"inputs": "the inputs changed", "label mix": "the mix of labels changed", "noise": "labels are noisier"}
HOW = frozenset({*bets.MEANING, "changed"})  # what an alarm may say of its score
SETTLED = 50  # rows after the first alarm by which its kind is settled: at first the quickest score speaks alone
LONGEST = 512  # points of a history
MEND = "delete it, and the watch begins anew"


class Alarm(NamedTuple):
    """A fortune that passed its limit: after which row, when, by which score, what has probably changed, and how."""

    row: int
    time: str
    score: str
    kind: str
    how: str

    def __str__(self) -> str:
        at = f" ({self.time})" if self.time else ""
        return f"row {self.row}{at}: {KINDS[self.kind]}; {self.score} {self.how}"


@dataclass
class Channel:
    """One score's bets: counts [G, B] of all rows so far, the fortune, and for class numbers how they came lately."""

    name: str
    kind: str
    counts: np.ndarray
    fortune: bets.Fortune
    mix: bets.Mix | None = None

    def add(self, bins: np.ndarray, groups: np.ndarray, uniforms: np.ndarray) -> list[tuple[float, str]]:
        """Bet on rows one after another; after each the logarithm of the fortune, and which bet has won most."""
        before = self.counts[0]
        ranks, p = bets.p_values(bets.Ranks(self.counts), bins, uniforms, groups)
        logs = []
        for value, label in zip(p, bins):
            if self.mix is None:
                odds = bets.beta_odds(value)
            else:
                self.mix, odds = bets.mix_odds(self.mix, before, value, label)
                before = before + (np.arange(len(before)) == label)
            self.fortune = bets.bet(self.fortune, odds)
            logs.append(self.now)
        self.counts = ranks.counts
        return logs

    @property
    def now(self) -> tuple[float, str]:
        """The logarithm of the fortune, and which bet has won most, in words."""
        how = "changed" if self.mix is not None else bets.MEANING[int(np.argmax(self.fortune.logs))]
        return float(self.fortune.log), how


@dataclass
class State:
    """A site's watch: its channels, the rows seen, a thinned history of the fortunes, the first alarm of each score."""

    site: str
    alpha: float
    seed: int
    reference: int  # rows that it began with
    channels: list[Channel]
    rows: int = 0
    labelled: int = 0
    step: int = 1  # rows between two points of the history
    history: list[list[float]] = field(default_factory=list)  # rows, then the logarithm of each channel's fortune
    alarms: list[Alarm] = field(default_factory=list)
    run: str = ""  # what names the posterior that is watched

    @property
    def limit(self) -> float:
        """The logarithm of the fortune at which a score alarms: of S scores each may err with alpha / S."""
        return math.log(len(self.channels) / self.alpha)

    @property
    def logs(self) -> dict[str, float]:
        """The logarithm of every score's fortune now."""
        return {c.name: float(c.fortune.log) for c in self.channels}

    @property
    def alarm(self) -> Alarm | None:
        """The first alarm; None while all is quiet."""
        return self.alarms[0] if self.alarms else None

    @property
    def level(self) -> float:
        """How near to an alarm it is: the largest fortune over its limit, in powers of ten; 0 is an alarm."""
        return (max(self.logs.values()) - self.limit) / math.log(10)

    def kind(self, logs: Sequence[float]) -> str:
        """What has probably changed: the inputs, where a score of theirs alarms, or has half of the best evidence.

        Other scores move with the inputs; those of the inputs, taken by predicted class, hardly move with the rest.
        """
        best = int(np.argmax(logs))
        own = [log for c, log in zip(self.channels, logs) if c.kind == "inputs"]
        return "inputs" if own and max(own) >= min(0.5 * logs[best], self.limit) else self.channels[best].kind

    def look(self, now: Sequence[tuple[float, str]], time: str) -> None:
        """A row further: note scores that pass their limit for the first time; settle what the first alarm is."""
        self.rows += 1
        logs = [log for log, _ in now]
        known = {a.score for a in self.alarms}
        for channel, (log, how) in zip(self.channels, now):
            if log >= self.limit and channel.name not in known:
                self.alarms.append(Alarm(self.rows, time, channel.name, self.kind(logs), how))
        if self.alarms and self.rows <= self.alarms[0].row + SETTLED:
            self.alarms[0] = self.alarms[0]._replace(kind=self.kind(logs))
        self.remember(logs)

    def remember(self, logs: Sequence[float]) -> None:
        """A point of the history; every other is dropped when there are too many."""
        if self.rows % self.step:
            return
        self.history.append([float(self.rows), *logs])
        if len(self.history) > LONGEST:
            self.step *= 2
            self.history = [point for point in self.history if int(point[0]) % self.step == 0]


def path_of(folder: str | Path, site: str) -> Path:
    """The file of a site's watch in a run's folder; a checksum tells names apart that files can't hold as they are."""
    name = _plain(site)
    mark = "" if name == site else f"-{hashlib.blake2b(site.encode(), digest_size=4).hexdigest()}"
    return Path(folder) / FOLDER / f"{name}{mark}.npz"


def _plain(site: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", site)


def write(path: Path, state: State) -> None:
    """Write a state, whole or not at all."""
    head: dict[str, Any] = {name: getattr(state, name) for name in HEAD}
    head["alarms"] = [list(alarm) for alarm in state.alarms]
    head["channels"] = [[c.name, c.kind, c.fortune.rows, c.mix is not None] for c in state.channels]
    arrays: dict[str, np.ndarray] = {"head": np.array(json.dumps(head)), "history": _grid(state)}
    for i, c in enumerate(state.channels):
        arrays |= {f"counts_{i}": c.counts, f"logs_{i}": c.fortune.logs}
        if c.mix is not None:
            arrays[f"lately_{i}"] = c.mix.lately
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    write_atomically(path, file.getvalue())


HEAD = ("site", "alpha", "seed", "reference", "rows", "labelled", "step", "run")


def _grid(state: State) -> np.ndarray:
    return np.array(state.history, dtype=np.float64).reshape(len(state.history), 1 + len(state.channels))


def read(path: Path) -> State:
    """The state of a file."""
    arrays = arrays_in(path, MEND)
    with reading(path, MEND):
        head = json.loads(str(arrays["head"]))
        channels = []
        for i, (name, kind, rows, mixes) in enumerate(head["channels"]):
            fortune = bets.Fortune(int(rows), arrays[f"logs_{i}"].astype(np.float64))
            counts = arrays[f"counts_{i}"].astype(np.float64)
            if counts.ndim != 2 or fortune.logs.ndim != 1 or np.isnan(fortune.logs).any():
                raise ValueError(f"its channel {name!r} is damaged")
            mix = bets.Mix(arrays[f"lately_{i}"].astype(np.float64)) if mixes else None
            channels.append(Channel(str(name), str(kind), counts, fortune, mix))
        alarms = [Alarm(int(a[0]), *map(str, a[1:])) for a in head["alarms"]]
        if any(a.kind not in KINDS for a in alarms) or not channels:
            raise ValueError("its head is damaged")
        history = arrays["history"].reshape(-1, 1 + len(channels)).tolist()
        known = {name: head[name] for name in HEAD}
        return State(**known, channels=channels, history=history, alarms=alarms)


def states_in(folder: str | Path) -> list[State]:
    """The watches of a run's folder, by site; a file that can't be read is named, and the others are."""
    states = []
    for path in sorted((Path(folder) / FOLDER).glob("*.npz")):
        try:
            states.append(read(path))
        except InputError as error:
            warnings.warn(f"a watch was left out: {error}", stacklevel=2)
    return states


def at(folder: str | Path, site: str) -> State | None:
    """The state of a site's watch, where there is one; refused where the file is another site's."""
    path = path_of(folder, site)
    earlier = path.with_name(f"{_plain(site)}.npz")  # its name without a checksum
    if not path.is_file() and earlier.is_file() and read(earlier).site == site:
        earlier.rename(path)
    if not path.is_file():
        return None
    state = read(path)
    if state.site != site:
        raise InputError(f"{path} is of site {state.site!r}, not {site!r}; {MEND}")
    return state
