"""A watch on a site, `fb.watch(run, site)`: bets that new rows come as its held-out rows did; an alarm when they win.

Each score of a row becomes its rank among the site's rows so far with the same predicted class; the fortunes of bets on
these ranks pass S / alpha, for one of S scores, with probability at most alpha over all time while nothing changes, no
matter how often one looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.errors import InputError, unknown
from fedbayes.evaluate import ood
from fedbayes.model.predictive import Predictive
from fedbayes.noise import generator
from fedbayes.runs import martingale as bets
from fedbayes.runs import watched
from fedbayes.runs.calibrated import posterior_of, scale_of
from fedbayes.runs.watched import Alarm, Channel, State
from fedbayes.scores.conformal import label_scores, normalised_residual, survival_residual
from fedbayes.training.run import Run
from fedbayes.training.tested import check_whole, predict_with

PIECE = 128  # rows that are predicted at once; a row has the same place whenever it comes, for equal bits
BLOCK = 1024  # uniforms of one address
MOST_GROUPS = 50
REFERENCES = ("own", "federation", "none")
CHOICE = {"classes": ("epistemic", "energy", "entropy"), "labels": ("epistemic", "max_logit", "entropy")}
MIX, LABEL, MEAN = "mix", "label", "mean"
NOISE = ("entropy", "aleatoric", LABEL)


class Seen(NamedTuple):
    """What the channels see of rows: bins by channel, groups by channel."""

    bins: dict[str, np.ndarray]
    groups: dict[str, np.ndarray]


class Watch:
    """A watch under way: `update(x)` with what comes in, `alarm` when something has changed."""

    def __init__(self, run: Run, state: State, folder: Path | None) -> None:
        self.run, self.state, self.folder = run, state, folder
        self.scores = tuple(c.name for c in state.channels)

    @property
    def alarm(self) -> Alarm | None:
        return self.state.alarm

    def update(self, x: Any, y: Any = None, *, times: Sequence[str] = ()) -> Alarm | None:
        """Bet on new rows, one after another; gives the first alarm there has been. `y`: targets, nan where not known.

        With a folder, what is known is on disk after every piece of rows: a watch that is killed goes on from there.
        """
        x = self.run.stored(x, self.state.site)
        y = self._labels(y, len(x))
        start = 0
        while start < len(x):
            size = min(PIECE - self.state.rows % PIECE, len(x) - start)
            rows = slice(start, start + size)
            self._piece(x[rows], None if y is None else y[rows], times[rows])
            if self.folder is not None:
                self.save()
            start += size
        return self.alarm

    def _labels(self, y: Any, count: int) -> Tensor | None:
        """Targets as they are bet on; refused where nothing is, for their change would never be told."""
        if y is not None and LABEL not in self.scores:
            several = self.run.task.clients.data.kind == "labels"
            why = "rows of several labels are watched without them" if several else f"it began so; {watched.MEND}"
            raise InputError(f"the watch on {self.state.site} takes no labels: {why}")
        return _known(self.run, y, count)

    def _piece(self, x: Tensor, y: Tensor | None, times: Sequence[str]) -> None:
        state = self.state
        known = torch.zeros(len(x), dtype=torch.bool) if y is None else ~y.double().reshape(len(x), -1).isnan().any(1)
        seen = see(self.run, x, y, self.scores, state.rows)
        columns = []
        for channel in state.channels:
            live = known.numpy() if channel.name == LABEL else np.ones(len(x), dtype=bool)
            first = state.labelled if channel.name == LABEL else state.rows
            uniforms = _uniforms(state, channel.name, first, int(live.sum()))
            bins, groups = seen.bins[channel.name][live], seen.groups[channel.name][live]
            after = [channel.now, *channel.add(bins, groups, uniforms)]
            # A row without a label leaves the fortune as it was.
            columns.append([after[i] for i in np.cumsum(live)])
        for i, now in enumerate(zip(*columns)):
            state.look(now, times[i] if i < len(times) else "")
        state.labelled += int(known.sum())

    def save(self, folder: str | Path | None = None) -> Path:
        """Write the state into a run's folder; gives its file."""
        where = self.folder if folder is None else Path(folder)
        if where is None:
            raise InputError("this watch has no folder: give one, such as the run's")
        path = watched.path_of(where, self.state.site)
        watched.write(path, self.state)
        return path

    def __repr__(self) -> str:
        s = self.state
        what = f"alarm at {s.alarm}" if s.alarm else f"quiet, 10^{s.level:.1f} of its limit"
        return f"Watch(site {s.site}: {s.rows} rows, {what})"


def watch(
    run: Run,
    site: int | str,
    *,
    scores: Sequence[str] | None = None,
    alpha: float | None = None,
    reference: str | None = None,
    labels: bool = True,
    folder: str | Path | None = None,
) -> Watch:
    """A watch on a site, by number or name; where the folder holds one of that site, it goes on as it began.

    `scores` are those of `fb.ood` that the run allows, `alpha` is the chance of a false alarm, .05 by default.
    `reference` are the rows to compare with: the site's `own` held-out rows, as by default, those of the `federation`
    (for a place that is no site of it), or `none`, where a stream is compared with its own beginning. `labels` adds
    bets on labels, for rows whose label becomes known.
    """
    check_whole(run)
    if alpha is not None and not 0 < alpha < 1:
        raise InputError(f"alpha is the chance of a false alarm, above 0 and below 1, not {alpha}")
    if reference is not None and reference not in REFERENCES:
        raise unknown("reference", reference, REFERENCES)
    name = _name(run, site, reference or "own")
    if folder is not None and (state := watched.at(folder, name)) is not None:
        if state.run != _posterior(run):
            raise InputError(f"{watched.path_of(folder, name)} watches another posterior; {watched.MEND}")
        if fault := _otherwise(run, state, scores, alpha, reference):
            raise InputError(f"{watched.path_of(folder, name)} began with {fault}; {watched.MEND}")
        return Watch(run, state, Path(folder))
    alpha, reference = 0.05 if alpha is None else alpha, "own" if reference is None else reference
    chosen = channels_of(run, scores, labels)
    x, y = _reference(run, name, reference)
    seen = see(run, x, y, chosen, 0)
    classes = run.task.clients.data.classes
    made = []
    for channel in chosen:
        groups, bins = _shape(run, channel, classes)
        counts = bets.ranks_of(seen.bins[channel], groups, seen.groups[channel], bins).counts
        mix = bets.begin_mix(classes) if channel == MIX else None
        fortune = bets.begin(len(bets.RATES) if channel == MIX else len(bets.BETAS))
        made.append(Channel(channel, kind_of(channel), counts, fortune, mix))
    state = State(name, alpha, run.task.seed, len(x), made, run=_posterior(run))
    return Watch(run, state, None if folder is None else Path(folder))


def _otherwise(
    run: Run, state: State, scores: Sequence[str] | None, alpha: float | None, reference: str | None
) -> str | None:
    """What of a watch is not as asked for now; None where all is that is asked for."""
    began = [channel.name for channel in state.channels if channel.name not in (MIX, MEAN, LABEL)]
    if scores is not None and set(scores) != set(began):
        return f"scores {','.join(began)}"
    if alpha is not None and alpha != state.alpha:
        return f"alpha {state.alpha:g}"
    if reference is not None and len(_reference(run, state.site, reference)[0]) != state.reference:
        return f"a reference of {state.reference} rows"
    return None


def channels_of(run: Run, scores: Sequence[str] | None, labels: bool) -> tuple[str, ...]:
    """The scores that are bet on: those chosen, what is predicted, and labels."""
    data = run.task.clients.data
    able = ood.names(run, data.x[:1])
    usual = [name for name in CHOICE.get(data.kind, ("epistemic",)) if name in able]
    if not usual and scores is None and data.kind in ("real", "survival"):
        usual = ["mahalanobis"]
    chosen = usual if scores is None else list(dict.fromkeys(scores))
    for name in chosen:
        if name not in able:
            raise unknown("score for this run", name, able)
    beside = [MIX] if data.kind == "classes" else [MEAN] if data.kind in ("real", "survival") else []
    return (*chosen, *beside, *([LABEL] if labels and data.kind != "labels" else []))


def kind_of(channel: str) -> str:
    """What a change of a score is a sign of."""
    return "label mix" if channel in (MIX, MEAN) else "noise" if channel in NOISE else "inputs"


def _shape(run: Run, channel: str, classes: int) -> tuple[int, int]:
    """Groups and bins of a channel."""
    if channel == MIX:
        return 1, classes
    return (classes if _grouped(run) else 1), len(bets.EDGES) + 1


def _grouped(run: Run) -> bool:
    data = run.task.clients.data
    return data.kind == "classes" and data.classes <= MOST_GROUPS


def see(run: Run, x: Tensor, y: Tensor | None, channels: Sequence[str], start: int) -> Seen:
    """What the channels see of rows that follow `start` earlier ones; labels only where they are given."""
    of_ood = [name for name in channels if name in ood.SCORES]
    values: dict[str, list[np.ndarray]] = {name: [] for name in channels}
    groups: dict[str, list[np.ndarray]] = {name: [] for name in channels}
    distance = ood.fit_distance(run) if "mahalanobis" in of_ood and len(x) else None
    first = 0
    while first < len(x):
        place = (start + first) % PIECE
        size = min(PIECE - place, len(x) - first)
        rows = slice(first, first + size)
        # The rest of the piece is filled: what a network's products round to depends on how many rows there are.
        full = x[rows][:1].expand(PIECE, *x.shape[1:]).clone()
        full[place : place + size] = x[rows]
        here = slice(place, place + size)
        p = predict_with(run.task, run.parts, full).cpu().at(torch.arange(PIECE)[here])
        strange = ood.scores(run, full, only=of_ood, distance=distance) if of_ood else {}
        predicted = p.mean.argmax(-1) if p.kind == "classes" else torch.zeros(size, dtype=torch.int64)
        for name in channels:
            own = strange[name][here] if name in strange else None
            values[name].append(_bins(run, name, p, None if y is None else y[rows], own))
            groups[name].append(predicted.numpy() if _grouped(run) and name != MIX else np.zeros(size, dtype=np.int64))
        first += size
    nothing = [np.zeros(0, dtype=np.int64)]
    return Seen(*({k: np.concatenate(v or nothing).astype(np.int64) for k, v in d.items()} for d in (values, groups)))


def _bins(run: Run, name: str, p: Predictive, y: Tensor | None, strange: Tensor | None) -> np.ndarray:
    """The bins of one channel's scores, of which `strange` are those of `fb.ood`."""
    if strange is not None:
        return bets.bins_of(strange.double().numpy())
    if name == MIX:
        return p.mean.argmax(-1).numpy()
    if name == MEAN:  # as targets are standardised: large ones would all fall into the last bin
        units = run.task.clients.data.target_scale
        mean = p.mean if units is None else units.apply(p.mean)
        return bets.bins_of(mean.double().mean(-1).numpy())
    if y is None:
        return np.zeros(len(p.mean), dtype=np.int64)
    if p.kind == "classes":
        return bets.bins_of(label_scores(1 - p.probs.double(), y.double().nan_to_num(0).long()).numpy())
    y = y.double().nan_to_num(0)
    if p.kind == "survival":
        return bets.bins_of(survival_residual(p.survival, torch.tensor(p.times), y[:, 0]).numpy())
    one = torch.ones(p.mean.shape[-1])
    return bets.bins_of(normalised_residual(p.mean, scale_of(p, one), y.reshape(p.mean.shape)).numpy())


def _uniforms(state: State, channel: str, first: int, count: int) -> np.ndarray:
    """The uniforms of rows by their number, whatever piece they come in."""
    blocks = range(first // BLOCK, (first + count) // BLOCK + 1)
    drawn = [
        torch.rand(BLOCK, generator=generator(state.seed, "watch", state.site, channel, b), dtype=torch.float64)
        for b in blocks
    ]
    skip = first % BLOCK
    return torch.cat(drawn)[skip : skip + count].numpy()


def _name(run: Run, site: int | str, reference: str) -> str:
    clients = run.task.clients
    names = [clients.name(k) for k in range(len(clients))]
    if str(site) in names:
        return str(site)
    if reference == "own":
        if str(site).isdecimal() and int(site) < len(names):
            return names[int(site)]
        raise unknown("site", str(site), names)
    return str(site)


def _reference(run: Run, name: str, reference: str) -> tuple[Tensor, Tensor]:
    """Held-out rows and their targets in their own units: test rows, else validation rows."""
    clients, task = run.task.clients, run.task
    data = clients.data
    count = len(clients)
    if reference == "none":
        return data.x[:0], data.y[:0]
    wanted = [k for k in range(count) if reference == "federation" or clients.name(k) == name]
    tests = torch.cat([clients.test_rows(k) for k in wanted]).unique()
    if len(tests):
        return data.test_x[tests], _units(run, data.test_y[tests])
    if task.validation_sizes is None:
        raise InputError(f"watch: {name} has no held-out rows to compare with; give the run a test or validation share")
    pieces = task.validation.split(task.validation_sizes.tolist())
    rows = torch.cat([pieces[k] for k in wanted])
    return data.x[rows], _units(run, data.y[rows])


def _units(run: Run, y: Tensor) -> Tensor:
    units = run.task.clients.data.target_scale
    return y if units is None else units.undo(y)


def _known(run: Run, y: Any, count: int) -> Tensor | None:
    """Targets in their own units, one per row, nan where not known."""
    if y is None:
        return None
    y = torch.as_tensor(np.asarray(y)).double()
    data = run.task.clients.data
    if len(y) != count:
        raise InputError(f"y has {len(y)} targets for {count} rows; give one per row, nan where it is not known")
    if data.kind == "classes":
        there = y[~y.isnan()]
        if not bool(((there >= 0) & (there < data.classes) & (there == there.round())).all()):
            raise InputError(f"y must be classes from 0 to {data.classes - 1}, nan where not known")
    if data.kind in ("real", "survival"):
        y = y.reshape(count, -1)
        width = data.y[:1].numel() if data.kind == "real" else 1  # of survival the time is all that is asked
        if y.shape[1] < width:
            raise InputError(f"y has one number for each row, the run predicts {width}; give all, or leave labels out")
    return y


def _posterior(run: Run) -> str:
    """What names the posterior that is watched: its method, its round and its checksum."""
    known = posterior_of(run)
    return f"{run.task.method}, round {known['rounds']}, {known['posterior']}"
