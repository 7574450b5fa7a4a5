"""Checkpoints of a run: one file per checkpointed round, the last two kept, each whole or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, from_toml, table_of, to_toml
from fedbayes.federation.accounting import Account, Spent
from fedbayes.federation.flight import Flight
from fedbayes.federation.kept import apart
from fedbayes.federation.program import FederationState
from fedbayes.federation.stages import SERVER_STEP
from fedbayes.files import settle
from fedbayes.posterior.values import Parts
from fedbayes.runs import sealed
from fedbayes.runs.own import Index
from fedbayes.training.private import Accounts
from fedbayes.training.task import Best, Progress, Task

KEPT = 2
ROW = "run"
# What may differ between a checkpoint and the run that goes on from it: where and how long, not what.
FREE = ("device", "engine", "compile", "at_once", "recompute", "rounds", "checkpoint_every", "flower", "on_round")


# Where these are unchanged, a run continues with as many clients at once: its noise on a GPU depends on it.
AT_ONCE = ("device", "engine", "at_once", "recompute")


class Checkpoint(NamedTuple):
    """The progress after a round, where each client's own state lies, and how many clients ran at once."""

    progress: Progress
    own: Index
    widths: Mapping[str, Sequence[int]]
    line: str = ""  # of the journal, of a private round


def paths(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((folder / "checkpoints").glob("round-*.safetensors"))


def name_of(folder: Path, number: int) -> Path:
    """The checkpoint of a round."""
    return folder / "checkpoints" / f"round-{number:06d}.safetensors"


def write(
    folder: Path, experiment: Experiment, task: Task, progress: Progress, own: Mapping[str, Any], line: str = ""
) -> None:
    """Commit a round; a crash after this call loses nothing up to this round.

    `line` is its line in the journal where that is written afterwards: nothing of a private round is seen before it is
    committed. Nor is a hash of the rows kept then, by which a guess at them could be tried.
    """
    best = progress.best
    private = task.privacy is not None
    sealed.write(
        name_of(folder, progress.state.round),
        {
            ROW: {
                "config": to_toml(experiment),
                **({} if private else {"rows": task.clients.train.digest}),
                **({"accounts": _plain(progress.accounts), "line": line} if private else {}),
                **({"body": task.program.model.body} if task.program.model.body else {}),
                "round": progress.state.round,
                "version": progress.state.version,
                "broadcast": {**progress.state.broadcast, **progress.state.kept.as_parts()},
                "stages": dict(progress.state.stages),
                "flight": progress.state.flight.as_row(),
                "best": None if best is None else _row(best),
                "stopped": progress.stopped,
                "own": own,
                "widths": {name: list(widths) for name, widths in task.widths().items()},
            }
        },
    )
    if private:
        settle(folder / "checkpoints")
    for path in paths(folder)[:-KEPT]:
        path.unlink()


def _plain(accounts: Accounts) -> dict[str, list[list[float]]]:
    return {name: [list(spent) for spent in account] for name, account in accounts.items()}


def _accounts(rows: Mapping[str, Any]) -> dict[str, Account]:
    return {name: tuple(Spent(*spent) for spent in account) for name, account in rows.items()}


def read(path: Path, experiment: Experiment, task: Task, *, rows: str | None = None) -> Checkpoint:
    """A checkpoint for this experiment and network; an InputError names the file and the mend.

    `rows` is the digest of the clients' rows where training may go on from it.
    """
    try:
        row = sealed.read(path, ROW, task.device)
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise InputError(
            f"checkpoint {path} can't be used: {error}; put it back from a copy{_or_delete(task)}"
        ) from error
    if path != name_of(path.parent.parent, row["round"]):
        raise InputError(
            f"checkpoint {path} holds round {row['round']}, not the round of its name; "
            f"put it back from a copy{_or_delete(task)}"
        )
    then = from_toml(row["config"], str(path))
    _check_config(path, experiment, then)
    if rows is not None and row.get("rows", rows) != rows:
        raise InputError(f"checkpoint {path} was trained on other rows of the clients; put it back from a copy")
    if row.get("body", task.program.model.body) != task.program.model.body:
        raise InputError(f"checkpoint {path} was trained over other frozen weights; load those that it began with")
    best = None if row["best"] is None else _best(row["best"])
    broadcast, beside = apart(row["broadcast"])
    for parts in (broadcast, *([] if best is None else [best.broadcast])):
        _check_layouts(path, parts, task.program.initial)
    stages = row["stages"] if "stages" in row else {SERVER_STEP: row["optimiser"]}  # a file of version 0.1 has one
    states = {s.name: stages[s.name] if s.name in stages else s.init(broadcast) for s in task.program.stages}
    flight = Flight.of_row(row["flight"]) if "flight" in row else Flight()
    for sent in flight.sent.values():
        _check_layouts(path, sent.broadcast, task.program.initial)
    state = FederationState(row["round"], broadcast, states, beside, row.get("version", row["round"]), flight)
    same = all(getattr(then, name) == getattr(experiment, name) for name in AT_ONCE)
    progress = Progress(state, best, row["stopped"], accounts=_accounts(row.get("accounts", {})))
    return Checkpoint(progress, Index(row["own"]), row.get("widths", {}) if same else {}, row.get("line", ""))


def _or_delete(task: Task) -> str:
    """What else mends a checkpoint; not of a private run, whose round would be released for a second time."""
    return "" if task.privacy is not None else ", or delete it to go on from the one before"


def _row(best: Best) -> dict[str, Any]:
    return {"score": best.score, "round": best.round, "broadcast": {**best.broadcast, **best.kept.as_parts()}}


def _best(row: Mapping[str, Any]) -> Best:
    return Best(row["score"], row["round"], *apart(row["broadcast"]))


def own_index(path: Path) -> Index:
    """Where a checkpoint says that each client's own state lies; empty where it can't be read."""
    try:
        return Index(sealed.read(path, ROW, torch.device("cpu"))["own"])
    except (ValueError, OSError):
        return Index()


def _check_config(path: Path, now: Experiment, then: Experiment) -> None:
    a, b = table_of(now), table_of(then)
    changed = sorted(k for k in {*a, *b} - {*FREE} if a.get(k) != b.get(k))
    if changed:
        raise InputError(
            f"checkpoint {path} belongs to another experiment ({', '.join(changed)} differ from config.toml); "
            "restore config.toml, or run into another folder"
        )


def _check_layouts(path: Path, parts: Parts, ours: Parts) -> None:
    for part in {*parts, *ours}:
        if part not in parts or part not in ours:
            raise InputError(f"checkpoint {path}: part {part!r} is on one side only; was it of another network?")
        then, now = parts[part], ours[part]
        same = type(then) is type(now) and then.mean.shape == now.mean.shape
        if not same or (then.layout and now.layout and then.layout.fingerprint != now.layout.fingerprint):
            raise InputError(
                f"checkpoint {path} is of another network: its part {part!r} has {then.mean.shape[-1]} weights "
                f"as {type(then).__name__}, the network here {now.mean.shape[-1]} as {type(now).__name__} "
                "(layouts differ); use the network that it was made with"
            )
