"""Experiments: TOML there and back, checked keys, settings laid over."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.errors import InputError, unknown
from fedbayes.experiments import toml
from fedbayes.experiments.experiment import KEYS, Experiment, experiment_of, from_toml, read, to_toml, with_settings
from fedbayes.experiments.included import EXPERIMENTS, find

words = st.text(min_size=1, max_size=12)
plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=12)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
tables = st.recursive(
    st.dictionaries(words, values, max_size=3),
    lambda inner: st.dictionaries(words, values | inner, max_size=3),
    max_leaves=6,
)
experiments = st.builds(
    Experiment,
    data=words,
    clients=st.integers(1, 10**6),
    test_per_client=st.none() | st.integers(0, 100),
    method=words,
    rounds=st.integers(0, 10**6),
    cohort=st.none() | st.integers(1, 100) | st.floats(0.01, 1),
    frozen=st.lists(words, max_size=3).map(tuple),
    dropout=st.floats(0, 0.99),
    patience=st.none() | st.integers(1, 9),
    likelihood=st.none() | words,
    data_options=tables,
    options=tables,
)


def options_of(method: str) -> list[str]:
    return {"fedavg": ["lr"], "feduab": ["lr", "draws"]}.get(method, [])


@given(experiments)
def test_an_experiment_comes_back_from_toml(experiment):
    assert from_toml(to_toml(experiment)) == experiment


@given(tables)
@settings(max_examples=200)
def test_written_toml_reads_as_the_same_table(table):
    assert tomllib.loads(toml.dumps(table)) == table


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_of_the_library_come_back_from_toml(name):
    assert from_toml(to_toml(EXPERIMENTS[name])) == EXPERIMENTS[name]


def test_every_field_has_a_checked_key():
    assert list(KEYS) == [*Experiment.__dataclass_fields__]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"round": 3}, "did you mean 'rounds'"),
        ({"rounds": 2.5}, "rounds must be a whole number, not 2.5"),
        ({"rounds": True}, "rounds must be"),
        ({"rounds": -1}, "rounds must be"),
        ({"clients": 0}, "clients must be a whole number of at least 1"),
        ({"cohort": "all"}, "cohort must be"),
        ({"methods": "fedavg"}, "methods must be a list"),
        ({"options": 3}, "options must be a table"),
        ({"dropout": 1.0}, "dropout must be a share"),
        ({"data": ""}, "data must be text"),
        ({"methods": ["fedavg"], "method": "feduab"}, "not one of methods"),
        ({"methods": ["fedavg", "fedavg"]}, "twice"),
    ],
)
def test_a_bad_key_or_value_is_named(table, said):
    with pytest.raises(InputError, match=said) as caught:
        experiment_of(table)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_toml_or_is_not_there_is_named(tmp_path):
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"bad\.toml is not valid TOML"):
        read(tmp_path / "bad.toml")
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.toml")
    with pytest.raises(InputError, match="did you mean 'quickstart'"):
        find("quickstat")


def test_settings_reach_keys_tables_and_options():
    two = Experiment(methods=("fedavg", "feduab"))
    made = with_settings(
        two, ["rounds=7", "cohort=0.5", "partition=dirichlet", "partition_options.alpha=0.3", "draws=4"], options_of
    )
    assert (made.rounds, made.cohort, made.partition) == (7, 0.5, "dirichlet")
    assert made.partition_options == {"alpha": 0.3}
    assert made.options_of("feduab") == {"draws": 4}
    assert made.options_of("fedavg") == {}
    both = with_settings(two, ["lr=0.2", "options.fedavg.lr=0.1"], options_of)
    assert (both.options_of("fedavg"), both.options_of("feduab")) == ({"lr": 0.1}, {"lr": 0.2})
    own = Experiment(method="fedavg", options={"fedavg": {"lr": 0.05, "epochs": 1}})
    assert with_settings(own, ["lr=0.3"], options_of).options_of("fedavg") == {"lr": 0.3, "epochs": 1}
    one = with_settings(Experiment(), ["method=fedavg", "lr=1"], options_of)
    assert one.options == {"lr": 1}
    assert with_settings(two, ["methods=fedavg", "method=fedavg"], options_of).methods == ("fedavg",)
    assert two.options == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("adapters.pattern=1", "1"),
        ("adapters.pattern=1.5", "1.5"),
        ('adapters.pattern=["1", "3"]', ["1", "3"]),
        ("adapters.rank=1", 1),
        ("adapters.path=7", "7"),
        ("adapters.full=5", ["5"]),
        ("adapters.full=head.*, 5", ["head.*", "5"]),
        ("adapters.both=true", True),
    ],
)
def test_a_setting_is_read_in_the_form_that_its_key_takes(setting, value):
    key = setting.partition("=")[0].removeprefix("adapters.")
    laid = with_settings(Experiment(), [setting], options_of).adapters[key]
    assert laid == value
    assert type(laid) is type(value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rounds", "write key=value"),
        ("ruonds=3", "did you mean 'rounds'"),
        ("rounds.x=3", "rounds is no table"),
        ("draws=3", "unknown key"),
        ("rounds=many", "rounds must be a whole number, not 'many'"),
    ],
)
def test_a_bad_setting_is_named(setting, said):
    with pytest.raises(InputError, match=said):
        with_settings(Experiment(method="fedavg"), [setting], options_of)


def test_an_option_of_a_method_among_the_keys_is_told_its_place():
    with pytest.raises(InputError, match=r"key in x\.toml 'lr': options of a method are written below \[options\]"):
        from_toml('data = "digits"\nlr = 0.1\n', "x.toml")


def test_of_many_names_only_the_nearest_is_said():
    near = str(unknown("key in x", "rouds", KEYS))
    assert "did you mean 'rounds'? it is one of" in near
    assert "partition" not in near
    assert "partition" in str(unknown("key in x", "colour", KEYS))
    assert "did you mean 'draws'? there are draws, points" in str(unknown("name", "draw", ["points", "draws"]))
