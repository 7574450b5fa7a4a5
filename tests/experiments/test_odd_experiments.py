"""Experiment files that no parser should have to take: each is refused in one line, at once."""

import re
import time

import pytest

from fedbayes.errors import InputError
from fedbayes.experiments.build import build, data_of, network_of
from fedbayes.experiments.experiment import Experiment, experiment_of, read


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a = " + b"[" * 100_000, "not valid TOML"),
        (b"seed = 0x" + b"f" * 9000, "seed holds a number of 36000 bits"),
        (b"target_loss = 0x" + b"f" * 9000, "target_loss holds a number of 36000 bits"),
        (b"seed = " + b"9" * 5000, "not valid TOML"),
        (b"[options]\nlr = 1979-05-27", "options holds a date"),
        (b"[options]\nlr = nan", "options holds nan"),
        (b"target_loss = inf", "target_loss must be a number"),
        (b"a." * 20_000 + b"b = 1", "a key of more than 50 steps"),
        (b"[options]\nx = " + b"[" * 30 + b"]" * 30, "nested more than 8 deep"),
        (b"#" + b"x" * (2 << 20), "has 2 MiB, the most is 1 MiB"),
        (b'data = "\xff"', "can't be read as text"),
        (b"x" * 100_000 + b" = 1", "unknown key"),
    ],
)
def test_odd_files_are_refused_at_once(tmp_path, content, says):
    (tmp_path / "odd.toml").write_bytes(content)
    began = time.monotonic()
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        read(tmp_path / "odd.toml")
    assert len(str(caught.value)) < 1000
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hidden": [10**7, 10**7]}, "would have weights of"),
        ({"hidden": [10**12]}, "hidden must be at most"),
        ({"hidden": [-3]}, "can't be built with"),
        ({"hidden": "abc"}, "can't be built with"),
    ],
)
def test_networks_that_can_not_be_are_refused_before_they_take_memory(options, says):
    experiment = Experiment(network="mlp", network_options=options)
    with pytest.raises(InputError, match=says):
        network_of(experiment, data_of(experiment))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"server": 0.5}, "server must be text"),
        ({"rule": ["dwc"]}, "rule must be text"),
        ({"points": "head"}, "points must be a list of names"),
        ({"lr": "fast"}, "lr must be positive"),
    ],
)
def test_options_of_another_kind_are_refused(options, says):
    with pytest.raises(InputError, match=says):
        build(experiment_of({"method": "fedvi", "options": options}))


def test_an_error_of_the_users_own_code_is_said_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "odd_code.py").write_text("def rows():\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=r"data odd_code:rows failed in .*odd_code\.py, line 2 \(ZeroDivisionError"):
        data_of(Experiment(data="odd_code:rows"))
    (tmp_path / "odd_exit.py").write_text("import sys\n\n\ndef rows():\n    sys.exit(3)\n")
    with pytest.raises(InputError, match=r"data odd_exit:rows failed .*SystemExit"):
        data_of(Experiment(data="odd_exit:rows"))
