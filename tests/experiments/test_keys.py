"""Every key of an experiment, of its `pretrain` and of Flower's settings is a record: no value escapes its check."""

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

import fedbayes as fb
from fedbayes.data.augment import AUGMENTATIONS
from fedbayes.engine import choice
from fedbayes.errors import InputError
from fedbayes.experiments import toml
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment, experiment_of, from_toml
from fedbayes.experiments.keys import TABLED, Pretraining
from fedbayes.flower.settings import Settings, settings_of
from fedbayes.methods import METHODS
from fedbayes.options import KINDS, options_of
from fedbayes.runs.sweep import program_of
from fedbayes.training import settings
from fedbayes.training.settings import Bounding, Judging, Privacy, Scheduling, Training

WRONG: tuple[Any, ...] = (math.nan, math.inf, -1.5, 10**40, True, "", "no such name", ["a", 1], {"no such key": {}})
SMALL = Experiment(network="linear", clients=3, rounds=1, method="fedavg", options={"epochs": 1})
RECORDS = (Experiment, Settings, Pretraining)


def wrong_values(record: Any, name: str) -> list[Any]:
    """What an option must not be; an option that takes nearly everything would show up here."""
    check = options_of(record)[name].metadata["check"]
    values = [v for v in WRONG if not check.holds(v)]
    assert len(values) >= 5
    return values


def refused(name: str, give: Any) -> None:
    with pytest.raises(InputError, match=name) as caught:
        give()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("record", "name"), [(record, name) for record in RECORDS for name in options_of(record)])
def test_no_value_escapes_its_check(record: Any, name: str) -> None:
    metadata = options_of(record)[name].metadata
    assert metadata["about"]
    assert metadata["kind"] in KINDS
    for wrong in wrong_values(record, name):
        refused(name, lambda wrong=wrong: record(**{name: wrong}))


@pytest.mark.parametrize("name", options_of(Experiment))
def test_no_value_of_a_file_escapes_its_check(name: str) -> None:
    for wrong in wrong_values(Experiment, name):
        refused(name, lambda wrong=wrong: experiment_of({name: wrong}, "small.toml"))
        refused(name, lambda wrong=wrong: from_toml(toml.dumps({name: wrong})))


@pytest.mark.parametrize("name", options_of(Settings))
def test_no_setting_of_flower_escapes_its_check(name: str) -> None:
    for wrong in wrong_values(Settings, name):
        refused(name, lambda wrong=wrong: settings_of({name: wrong}, 5))


@pytest.mark.parametrize("name", options_of(Pretraining))
def test_no_setting_of_pretraining_escapes_its_check(name: str) -> None:
    for wrong in wrong_values(Pretraining, name):
        refused(name, lambda wrong=wrong: build(replace(SMALL, pretrain={name: wrong})))


GROUPS = (Training, Scheduling, Bounding, Privacy, Judging)


@pytest.mark.parametrize(("record", "name"), [(group, name) for group in GROUPS for name in options_of(group)])
def test_fit_takes_the_same_keys_with_the_same_defaults_and_checks(record: Any, name: str) -> None:
    default = inspect.signature(fb.fit).parameters[name].default
    field = options_of(record)[name]
    # How many rounds depends on the data; an empty table is given as none.
    assert default == field.default or (default is None and (name == "rounds" or field.default_factory is dict))
    clients = fb.data.load("digits").split(fb.partition.iid(), clients=3)
    for wrong in wrong_values(record, name):
        refused(name, lambda wrong=wrong: fb.fit(nn.Linear(64, 10), clients, **{name: wrong}))


@pytest.mark.parametrize("name", ["data", "network", "partition", "method", "likelihood", "device"])
def test_a_name_that_is_in_no_table_is_refused_when_the_task_is_built(name: str) -> None:
    refused(name, lambda: build(replace(SMALL, **{name: "no such name"})))


TABLES = [name for name, f in options_of(Experiment).items() if f.default_factory is dict]


@pytest.mark.parametrize("table", TABLES)
def test_an_unknown_key_of_a_table_is_refused(table: str) -> None:
    given = {"no_such_key": 1}
    if table == "flower":
        refused("no_such_key", lambda: settings_of(given, 5))
    else:
        refused("no_such_key", lambda: build(replace(SMALL, likelihood="classes", **{table: given})))


def test_an_option_that_may_be_a_table_is_told_from_a_methods_own_table() -> None:
    tabled = {
        name for method in METHODS.values() for name, f in options_of(method).items() if f.metadata["check"].holds({})
    }
    assert set(TABLED) == tabled
    x = Experiment(method="fedvi", options={"initial": {"*": 0.2}, "fedavg": {"lr": 0.3}, "fedvi": {"lr": 0.1}})
    assert x.options_of("fedvi") == x.settled.options_of("fedvi") == {"initial": {"*": 0.2}, "lr": 0.1}
    nested = replace(x, options={"fedvi": {"initial": {"*": 0.2}, "of_mine": {"a": 1}}})
    assert nested.only("fedvi").options_of("fedvi") == {"initial": {"*": 0.2}, "of_mine": {"a": 1}}
    scale = build(replace(SMALL, method="fedvi", options={"initial": {"*": 0.2}})).program.initial["model"].scale
    assert (scale == 0.2).all()


def test_names_of_choices_are_those_of_the_tables_they_stand_for() -> None:
    assert set(settings.COMPILE) == set(choice.COMPILE)
    assert set(settings.AUGMENTATIONS) == set(AUGMENTATIONS)


@pytest.mark.parametrize("name", options_of(Experiment))
def test_a_sweep_trains_members_apart_that_differ_in_a_key_of_the_program(name: str) -> None:
    f = options_of(Experiment)[name]
    if name in ("method", "methods", "options"):
        pytest.skip("by the options' own kinds: tests/laws/test_sweeps.py")
    other = next(
        v
        for v in (
            "tf32",
            "stacked",
            "on",
            "accuracy",
            "crop_flip",
            "noise",
            "buffered",
            "lognormal",
            "balanced",
            "rows",
            7,
            0.5,
            True,
            ("a:b",),
            {"a": 1},
        )
        if _fits(f, v)
    )
    same = program_of(replace(SMALL, **{name: other})) == program_of(SMALL)
    assert same == (f.metadata["kind"] == "server")


def _fits(f: Any, value: Any) -> bool:
    default = {} if f.default_factory is dict else f.default
    return f.metadata["check"].holds(value) and value != default
