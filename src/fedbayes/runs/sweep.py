"""A sweep: one experiment over lists of values, its members trained together as one program where they can be.

Every member is a run folder of its own, so that reports, predictions and resumption work on each.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedbayes.data import from_clients
from fedbayes.engine.stacked import Stacked
from fedbayes.errors import Diverged, InputError
from fedbayes.experiments.build import (
    build,
    clients_of,
    data_of,
    keeps_apart,
    method_of,
    options_of_method,
    records_of,
)
from fedbayes.experiments.experiment import Experiment, table_of, to_toml, with_settings
from fedbayes.experiments.keys import TABLES
from fedbayes.experiments.tables import check_spread
from fedbayes.federation.schedule import POISSON, SYNCHRONOUS
from fedbayes.options import options_of
from fedbayes.runs import journal
from fedbayes.runs.folder import Watch, train
from fedbayes.runs.home import SWEEP, ledger_of, locked, refuse_another
from fedbayes.runs.recording import CONFIG, Recording, write_once
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Run
from fedbayes.training.task import Task

# Keys of an experiment in which members of one tensor program may differ.
FREE = {name for name, f in options_of(Experiment).items() if f.metadata["kind"] == "server"}


def values_of(over: str) -> tuple[str, list[str]]:
    """`seed=0..4` or `kl_weight=1e-5,1e-4` as a key and its values.

    >>> values_of("seed=0..3")
    ('seed', ['0', '1', '2', '3'])
    """
    key, sign, text = over.partition("=")
    if not sign or not key.strip() or not text.strip():
        raise InputError(f"--over {over!r}: write key=first..last or key=a,b,c")
    span = re.fullmatch(r"\s*(-?\d+)\.\.(-?\d+)\s*", text)
    if span:
        first, last = map(int, span.groups())
        if last < first:
            raise InputError(f"--over {over!r}: the last value is below the first")
        return key.strip(), [str(v) for v in range(first, last + 1)]
    return key.strip(), [v.strip() for v in text.split(",") if v.strip()]


def members_of(experiment: Experiment, overs: Sequence[str]) -> dict[str, Experiment]:
    """Every combination of the values, by the name of its folder (`seed=0,lr=0.1`)."""
    if not overs:
        raise InputError("a sweep needs at least one --over, such as --over seed=0..4")
    if experiment.methods:
        raise InputError("a sweep has one method; set methods=[] and method=NAME")
    keys = [key for key, _ in map(values_of, overs)]
    if twice := next((key for i, key in enumerate(keys) if key in keys[:i]), None):
        raise InputError(f"--over {twice} is given twice; give its values together, such as --over {twice}=1,2")
    lists = [[f"{key}={v}" for v in values] for key, values in map(values_of, overs)]
    return {
        ",".join(settings).replace("/", "-"): with_settings(experiment, settings, options_of_method)
        for settings in itertools.product(*lists)
    }


def program_of(member: Experiment) -> str:
    """What must be equal for two members to be one program, as text."""
    table = {k: v for k, v in table_of(member).items() if k not in FREE}
    kinds = {name: f.metadata["kind"] for name, f in records_of(member.method).items()}
    # With defaults filled in: one of them may depend on another option, as the prior does on the rule.
    options = {**table.get("options", {}), **method_of(member).options}
    table["options"] = {
        name: bool(v) if kinds.get(name) == "switch" else v
        for name, v in sorted(options.items())
        if kinds.get(name) not in ("scalar", "server")
    }
    return repr(sorted(table.items(), key=lambda row: row[0]))


def sweep(
    experiment: Experiment, overs: Sequence[str], folder: str | Path, watch: Watch | None = None
) -> dict[str, Run]:
    """Train every member into a folder below `folder`, going on with what is there already."""
    watch, folder = watch or Watch(), Path(folder)
    members = members_of(experiment, overs)
    for name, member in members.items():
        refuse_another(member, folder / name)
        if not (folder / name / CONFIG).is_file():
            check_spread(member)
    with locked(folder):  # a member that is resumed by itself shares this lock
        tasks = build_members(members)
        write_once(folder / SWEEP, to_toml(experiment) + "".join(f"# --over {over}\n" for over in overs))
        return _train(members, tasks, folder, watch)


def _train(members: Mapping[str, Experiment], tasks: Mapping[str, Task], folder: Path, watch: Watch) -> dict[str, Run]:
    """Every member by its group; a member that diverges does not stop the others."""
    runs: dict[str, Run] = {}
    failures: list[Diverged] = []
    for names in _groups(members, tasks):
        if len(names) > 1:
            runs |= _together({n: members[n] for n in names}, {n: tasks[n] for n in names}, folder, watch)
        else:
            try:
                runs[names[0]] = train(members[names[0]], tasks[names[0]], folder / names[0], watch, called=names[0])
            except Diverged as error:  # its journal and the terminal say so; the others go on
                failures.append(error)
    failed = [run.journal for run in runs.values() if run.journal and "diverged" in run.journal[-1]]
    if len(failed) + len(failures) == len(members):
        raise Diverged(f"all {len(members)} members diverged: {failures[0] if failures else failed[0][-1]['diverged']}")
    return {name: runs[name] for name in members if name in runs}


def build_members(members: Mapping[str, Experiment]) -> dict[str, Task]:
    """The members' tasks; data that several of them name is loaded once."""
    loaded: dict[str, Any] = {}
    tasks = {}
    for name, member in members.items():
        # A data function that gives one client at a time gives other data where there are more clients, and the coding
        # of tables is fitted on the sites that take part.
        clients = member.clients if keeps_apart(member) else None
        left_out = member.leave_out if member.data == TABLES else None
        key = repr((member.data, member.data_options, clients, left_out))
        if key not in loaded:
            data = data_of(member)
            loaded[key] = from_clients(data) if isinstance(data, list) else data
        tasks[name] = build(member, clients=clients_of(member, loaded[key]))
    return tasks


def _groups(members: Mapping[str, Experiment], tasks: Mapping[str, Task]) -> list[list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, member in members.items():
        task = tasks[name]
        # What a client of the user's own closes over is not known.
        joins = can_join(task) and "client" not in member.options_of(member.method)
        key = (program_of(member), closed_over(task)) if joins else (name, "")
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def closed_over(task: Task) -> str:
    """A digest of the tensors that a network holds as plain attributes: no input of a step, they are one program's."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in task.program.model.module.modules():
        for name, value in vars(layer).items():
            if not name.startswith("_"):
                for leaf in tree_leaves(value):
                    if isinstance(leaf, Tensor):
                        digest.update(leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def can_join(task: Task) -> bool:
    """Whether a task may be trained with others as one program."""
    joined = task.scheduler.name in (SYNCHRONOUS, POISSON) and not task.on_round
    return isinstance(task.engine, Stacked) and joined


def _together(
    members: Mapping[str, Experiment], tasks: Mapping[str, Task], folder: Path, watch: Watch
) -> dict[str, Run]:
    title = f"{len(members)} runs"
    recordings = {name: Recording(members[name], tasks[name], folder / name) for name in members}
    longest = max(recordings.values(), key=lambda r: (r.task.rounds, len(r.records)))
    watch.begun(title, longest.task, longest.records)
    for records in record_together(list(recordings.values())):
        watch.round(mean_record(records))
    ended = {name: recording.end() for name, recording in recordings.items()}
    watch.ended(title, all(was_finished for _, was_finished in ended.values()))
    return {name: replace(run, ledger=ledger_of(folder / name)) for name, (run, _) in ended.items()}


def record_together(recordings: Sequence[Recording]) -> Iterator[list[journal.Record]]:
    """Take runs to their ends as one program, each from where it was left; yields the records of every round."""
    left = [r for r in recordings if not r.task.done(r.progress)]
    for entries in rounds_together([r.task for r in left], [r.progress for r in left], [r.own for r in left]):
        for recording, entry in zip(left, entries):
            if entry is not None:
                recording.add(*entry)
        yield [entry[1] for entry in entries if entry is not None]


def mean_record(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One record to show for all members: the mean of their scores."""
    records = list(records)
    scored = [r["test"] for r in records if r.get("test")]
    means = {key: sum(r[key] for r in scored) / len(scored) for key in scored[0]} if scored else {}
    notes = [*dict.fromkeys(note for r in records for note in r.get("notes", ()))]
    left_out = {k: why for r in records for k, why in r.get("left_out", {}).items()}
    return {"round": max(r["round"] for r in records), "test": means, "left_out": left_out, "notes": notes}
