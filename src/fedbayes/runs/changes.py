"""A run that goes on otherwise than it began: more rounds, another learning rate; recorded in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedbayes.errors import InputError
from fedbayes.experiments.build import build, clients_of, options_of_method, records_of
from fedbayes.experiments.experiment import Experiment, folder_name, read_whole, to_toml, with_settings
from fedbayes.files import write_atomically
from fedbayes.runs import checkpoint, coding, evaluation
from fedbayes.runs.home import experiment_in, locked
from fedbayes.runs.own import OwnFiles
from fedbayes.runs.recording import CHANGING, CONFIG
from fedbayes.training.task import Task

CHANGES = "changes.jsonl"  # one line per change: the round after which it holds, the key, before and after


class Step(NamedTuple):
    """One run whose experiment is to change, read and checked: nothing of it is written yet."""

    home: Path
    before: Experiment
    after: Experiment
    task: Task
    last: checkpoint.Checkpoint | None


def change(folder: str | Path, *, rounds: int | None = None, settings: Iterable[str] = ()) -> list[str]:
    """Let a run folder's experiment go on with more rounds or other numbers; gives a line for each change.

    What may change are `rounds` and the method's options that are numbers. A run that has ended, or that was stopped
    early, goes on; its last checkpoint is kept. Everything is checked before anything is written, and what is to be
    is written first: a change that is cut short is finished by `finish`.
    """
    folder = Path(folder)
    finish(folder)
    before = experiment_in(folder).settled
    after = with_settings(before, settings, options_of_method).settled
    after = after if rounds is None else replace(after, rounds=rounds)
    _check(before, after)
    with locked(folder):
        steps = _steps(folder, before, after)
        write_atomically(folder / CHANGING, to_toml(after))
        return _write(folder, steps, after)


def finish(folder: str | Path) -> list[str]:
    """Finish a change that was cut short between its writes; gives its lines, none where there is no such change."""
    folder = Path(folder)
    if not (folder / CHANGING).is_file():
        return []
    with locked(folder):
        before, after = read_whole(folder / CONFIG), read_whole(folder / CHANGING)
        return _write(folder, _steps(folder, before, after), after)


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


def _steps(folder: Path, before: Experiment, after: Experiment) -> list[Step]:
    """What is to change of each method's run; a wrong value of any is an error here."""
    clients = clients_of(before)
    steps = []
    for method in before.all_methods:
        home = folder / folder_name(method) if before.methods else folder
        then, now = before.only(method), after.only(method)
        build(now, clients=clients)
        coding.check_rows(home, clients)
        task, paths = build(then, clients=clients), checkpoint.paths(home)
        steps.append(Step(home, then, now, task, _last(paths[-1], then, now, task) if paths else None))
    return steps


def _last(path: Path, before: Experiment, after: Experiment, task: Task) -> checkpoint.Checkpoint:
    """A checkpoint, whether or not it was sealed anew before a change was cut short."""
    rows = task.clients.train.digest
    try:
        return checkpoint.read(path, before, task, rows=rows)
    except InputError:
        return checkpoint.read(path, after, task, rows=rows)


def _write(folder: Path, steps: Iterable[Step], after: Experiment) -> list[str]:
    """Seal every run's last checkpoint under its changed experiment; every write may be done twice."""
    lines = [line for step in steps for line in _changed(step)]
    write_atomically(folder / CONFIG, to_toml(after))
    (folder / "samples.npz").unlink(missing_ok=True)
    (folder / CHANGING).unlink()
    return lines


def _changed(step: Step) -> list[str]:
    """Record the change of one run, and seal its last checkpoint anew."""
    home, before, after, task, last = step
    rows = list(_differences(before.options_of(before.method), after.options_of(after.method)))
    rows += [("rounds", before.rounds, after.rounds)] if before.rounds != after.rounds else []
    number = 0 if last is None else last.progress.state.round
    _record(home / CHANGES, [{"after_round": number, "key": name, "before": a, "after": b} for name, a, b in rows])
    if last is not None:
        own = OwnFiles(home / "own", task.device, last.own)
        checkpoint.write(home, after, task, last.progress._replace(stopped=False), own.index.as_tensors())
    write_atomically(home / CONFIG, to_toml(after))
    (home / evaluation.FILE).unlink(missing_ok=True)
    return [f"{before.method}: {name} = {new} after round {number} (was {_default(old)})" for name, old, new in rows]


def _record(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to the file of changes, unless it ends with them."""
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if not before.endswith(text):
        write_atomically(path, before + text)


def _default(value: Any) -> Any:
    return "by default" if value is None else value
