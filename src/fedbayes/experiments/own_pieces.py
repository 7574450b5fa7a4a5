"""Pieces of a federation that are the user's own: what their code must give, checked before any training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedbayes.data import Dataset
from fedbayes.data.dataset import Dealer
from fedbayes.data.partition import Partition, Shares
from fedbayes.errors import InputError
from fedbayes.experiments.own_code import called, check_options, imported, in_one_line, parameters, users_code
from fedbayes.federation.program import Stage

ASKED = ("labels", "clients", "rng")  # what a partition function is given, in order


def dealing(path: str, options: Mapping[str, Any], data: Dataset) -> Dealer:
    """The user's partition: a Partition, or a function `(labels, clients, rng, ...)` that gives each client's rows.

    The function may also ask for `data`, the whole Dataset, and for options.
    """
    partition = imported(path, "partition")
    if isinstance(partition, Partition):
        if options:
            raise InputError(f"partition_options: {path} is a finished partition and takes none; leave them out")
        return partition
    known = parameters(partition) if callable(partition) else []
    if len(known) < len(ASKED) or isinstance(partition, type):
        raise InputError(f"partition {path} must be a Partition or a function ({', '.join(ASKED)}) of rows by client")
    check_options([p for p in known[len(ASKED) :] if p.name != "data"], options, f"partition {path}")
    arguments = {**options, "data": data} if "data" in [p.name for p in known] else dict(options)

    def deal(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Any:
        with users_code("partition", path):
            rows = partition(labels, clients, rng, **arguments)
        if not isinstance(rows, Shares | list | tuple):
            raise InputError(
                f"partition {path} gave a {type(rows).__name__}; it must give a list of row numbers for each client"
            )
        return rows

    return deal


def stages_of(entries: Iterable[str | Mapping[str, Any]]) -> tuple[Stage, ...]:
    """The user's stages: each named by a path, or by a table with the path as `stage` and its options beside it."""
    return tuple(_stage(entry) if isinstance(entry, Mapping) else _stage({"stage": entry}) for entry in entries)


def _stage(entry: Mapping[str, Any]) -> Stage:
    """A Stage, or what a function of the options gives as one."""
    path, options = entry["stage"], {name: v for name, v in entry.items() if name != "stage"}
    stage = imported(path, "stage")
    if isinstance(stage, Stage):
        if options:
            raise InputError(
                f"stages: {path} is a finished stage and takes no options; leave {next(iter(options))} out"
            )
    elif callable(stage):
        stage = called(in_one_line(stage, "stage", path), options, f"stage {path}")
    if not isinstance(stage, Stage):
        raise InputError(f"stage {path} is a {type(stage).__name__}; it must be or give a fedbayes Stage")
    return stage._replace(init=in_one_line(stage.init, "stage", path), apply=in_one_line(stage.apply, "stage", path))
