"""The keys of an experiment as records: what is learned, how rows are spread, by which methods, and how it is kept.

How it is trained and judged are the records of `training.settings`. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedbayes.federation.waiting import BufferOptions, DelayOptions
from fedbayes.model.adapters import Adapters
from fedbayes.options import (
    Check,
    at_least_one,
    check_values,
    flag,
    name_in,
    number,
    option,
    patterns,
    record,
    subtable,
    text,
    whole,
)
from fedbayes.training.settings import ENGINES, Bounding, Judging, Privacy, Scheduling, Training

Table = Mapping[str, Any]
FLOWER = "flower"  # the engine that carries rounds to other machines; a task of its own stands on each of them
SAVED = "own"  # the network that a folder names where it was written by `fb.save`

TABLES = "tables"  # the data of a user's own sites; its options are those of `fb.data.from_tables`
TABLED = ("initial", "client_options")  # options that may be tables; any other table in `options` is a method's own


def _names_stage(v: Any) -> bool:
    path = v.get("stage") if isinstance(v, Mapping) else v
    return isinstance(path, str) and ":" in path


stage_list = Check(
    "a list of package.module:name, or of tables {stage = package.module:name, ...}",
    lambda v: isinstance(v, list | tuple) and all(map(_names_stage, v)),
)


client_name = Check(
    "a client's number or name",
    lambda v: (isinstance(v, int) and not isinstance(v, bool) and v >= 0) or (isinstance(v, str) and bool(v)),
)


@record
class Problem:
    """What is learned, from which rows."""

    data: str = option(
        "a data set's name, see `fedbayes datasets`, or `tables`: own tables, one per site",
        text,
        default="digits",
        importable=True,
    )
    data_options: Table = option("of the data set, or of the function that gives it", subtable, factory=dict)
    network: str = option("a network's name, see `fedbayes networks`", text, default="mlp", importable=True)
    network_options: Table = option(
        "of the network; `dropout` gives any network dropout, save in `undropped`", subtable, factory=dict
    )
    likelihood: str | None = option(
        "of the targets; by default what their kind asks for", text, default=None, importable=True
    )
    likelihood_options: Table = option("of the likelihood", subtable, factory=dict)


@record
class Spread:
    """Who holds which rows."""

    partition: str = option(
        "how rows are spread over clients, see `fedbayes partitions`",
        text,
        default="iid",
        kind="server",
        importable=True,
    )
    partition_options: Table = option("of the partition", subtable, factory=dict, kind="server")
    clients: int = option("how many there are", at_least_one, default=20, kind="server")
    test_per_client: int | None = option("test rows of each client; by default its share", whole(0), default=None)
    central: bool = option("one client holds the rows of all", flag, default=False)
    leave_out: int | str | None = option(
        "a client, by number or name, that takes no part; all of its rows are the test set", client_name, default=None
    )


@record
class Composition:
    """By which methods it is trained."""

    method: str = option("the method's name, see `fedbayes methods`", text, default="feduab", importable=True)
    methods: tuple[str, ...] = option(
        "methods to compare, one run per method; `method` is the one that `fedbayes.load` gives", patterns, default=()
    )
    stages: tuple[str | Table, ...] = option(
        "what the server does with the pooled parts after the method's own stages, in order", stage_list, default=()
    )
    options: Table = option(
        "of all methods; a table inside, under a method's name, is for that method alone", subtable, factory=dict
    )
    init: str | None = option(
        "a .safetensors file of the network's weights to begin with; by default they are drawn",
        text,
        default=None,
        kind="server",
    )
    pretrain: Table = option("training at the server before the first round", subtable, factory=dict)


@record
class Upkeep:
    """How a run is kept and carried."""

    checkpoint_every: int | None = option(
        "rounds between checkpoints; by default one every two seconds", at_least_one, default=None, kind="server"
    )
    on_round: tuple[str, ...] = option(
        "your own functions (run, record), called after each round; one that gives True or a reason stops the run",
        Check("a list of package.module:name", lambda v: isinstance(v, list | tuple) and all(map(_names_stage, v))),
        default=(),
        kind="server",
        importable=True,
    )
    flower: Table = option("how Flower carries it to other machines", subtable, factory=dict)


# In the order in which files are written.
GROUPS = (Problem, Spread, Composition, Training, Scheduling, Bounding, Privacy, Judging, Upkeep)


@record
class Keys(Upkeep, Judging, Privacy, Bounding, Scheduling, Training, Composition, Spread, Problem):
    """All keys of an experiment."""

    engine: str = option(
        "how clients are run",
        name_in({**ENGINES, FLOWER: "on other machines, or simulated ones"}),
        default="auto",
    )


@record
class Pretraining:
    """Training at the server: at most so many epochs on its rows, stopped early by the accuracy on a share of them."""

    epochs: int = option("passes over the server's rows at most", at_least_one, default=100)
    patience: int = option("epochs without a better one before it ends", at_least_one, default=10)
    validation: float = option(
        "share of the server's rows held out", number("a share in (0, 1)", lambda v: 0 < v < 1), default=0.1
    )
    options: Table = option("of the method, where the server's are others than the clients'", subtable, factory=dict)

    def __post_init__(self) -> None:
        check_values(self)


# Keys that are tables with a record of their own.
RECORDS = {
    "adapters": Adapters,
    "pretrain": Pretraining,
    "schedule_options": BufferOptions,
    "delay_options": DelayOptions,
}
