"""Pieces of a federation that are the user's own: what their code must give, checked before any training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbayes.data import Dataset
from fedbayes.data.dataset import Dealer
from fedbayes.data.partition import Partition, Shares
from fedbayes.errors import InputError
from fedbayes.experiments.own_code import check_options, imported, parameters, users_code

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
    given = {**options, "data": data} if "data" in [p.name for p in known] else dict(options)

    def deal(labels: np.ndarray, clients: int, rng: np.random.Generator) -> Any:
        with users_code("partition", path):
            rows = partition(labels, clients, rng, **given)
        if not isinstance(rows, Shares | list | tuple):
            raise InputError(
                f"partition {path} gave a {type(rows).__name__}; it must give a list of row numbers for each client"
            )
        return rows

    return deal
