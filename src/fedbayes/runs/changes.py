"""A run that goes on otherwise than it began: more rounds, another learning rate; recorded in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError
from fedbayes.experiments.build import build, clients_of, options_of_method, records_of
from fedbayes.experiments.experiment import Experiment, folder_name, to_toml, with_settings
from fedbayes.files import write_atomically
from fedbayes.runs import checkpoint, evaluation
from fedbayes.runs.folder import experiment_in, locked
from fedbayes.runs.own import OwnFiles
from fedbayes.runs.recording import CONFIG

CHANGES = "changes.jsonl"  # one line per change: the round after which it holds, the key, before and after


def change(folder: str | Path, *, rounds: int | None = None, settings: Iterable[str] = ()) -> list[str]:
    """Let a run folder's experiment go on with more rounds or other numbers; gives a line for each change.

    What may change are `rounds` and the method's options that are numbers. A run that has ended, or that was stopped
    early, goes on; its last checkpoint is kept.
    """
    folder = Path(folder)
    before = experiment_in(folder).settled
    after = with_settings(before, settings, options_of_method).settled
    after = after if rounds is None else replace(after, rounds=rounds)
    _check(before, after)
    lines = []
    with locked(folder):
        clients = clients_of(before)
        for method in before.all_methods:
            home = folder / folder_name(method) if before.methods else folder
            lines += _changed(home, before.only(method), after.only(method), clients)
        write_atomically(folder / CONFIG, to_toml(after))
        (folder / "samples.npz").unlink(missing_ok=True)
    return lines


def _check(before: Experiment, after: Experiment) -> None:
    """Refuse changes of anything but rounds and numbers among the options."""
    if to_toml(replace(before, rounds=0, options={})) != to_toml(replace(after, rounds=0, options={})):
        raise InputError("resume --set: only the method's options that are numbers can change; begin another run")
    if before.private is not None:
        raise InputError("resume --rounds, --set: a private run's noise was chosen for its rounds; begin another run")
    if after.rounds < before.rounds:
        raise InputError(f"rounds: the run has {before.rounds} already; give more")
    for method in before.all_methods:
        records = records_of(method)
        for name, _, _ in _differences(before.options_of(method), after.options_of(method)):
            if name not in records or records[name].metadata["kind"] != "scalar":
                raise InputError(f"resume --set {name}: it shapes what is trained; only numbers such as lr can change")


def _differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)


def _changed(home: Path, before: Experiment, after: Experiment, clients: Any) -> list[str]:
    """Seal the last checkpoint of one run anew under its changed experiment."""
    rows = list(_differences(before.options_of(before.method), after.options_of(after.method)))
    rows += [("rounds", before.rounds, after.rounds)] if before.rounds != after.rounds else []
    paths = checkpoint.paths(home)
    number = 0
    if paths:
        task = build(before, clients=clients)
        last = checkpoint.read(paths[-1], before, task, rows=task.clients.train.digest)
        progress, number = last.progress, last.progress.state.round
        own = OwnFiles(home / "own", task.device, last.own)
        build(after, clients=clients)  # a wrong value fails before anything is written
        checkpoint.write(home, after, task, progress._replace(stopped=False), own.index.as_tensors())
    home.mkdir(parents=True, exist_ok=True)
    with (home / CHANGES).open("a", encoding="utf-8") as file:
        for name, old, new in rows:
            file.write(json.dumps({"after_round": number, "key": name, "before": old, "after": new}) + "\n")
    write_atomically(home / CONFIG, to_toml(after))
    (home / evaluation.FILE).unlink(missing_ok=True)
    return [f"{before.method}: {name} = {new} after round {number} (was {_default(old)})" for name, old, new in rows]


def _default(value: Any) -> Any:
    return "by default" if value is None else value
