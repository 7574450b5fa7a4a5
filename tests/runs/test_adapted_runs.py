"""Run folders of adapters: they hold what is trained alone, go on after a stop, and notice another body."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment, from_toml, to_toml
from fedbayes.runs.folder import run

SMALL = Experiment(
    data="digits",
    network="mlp",
    network_options={"hidden": [100]},
    clients=4,
    cohort=2,
    rounds=2,
    method="pvi",
    options={"epochs": 1, "test_draws": 2},
    adapters={"pattern": ["1"], "rank": 2},
)


def test_a_file_holds_what_is_trained_and_goes_on_where_it_stopped(tmp_path):
    whole = run(SMALL, tmp_path / "whole")["pvi"]
    run(replace(SMALL, rounds=1), tmp_path / "parts")
    assert CliRunner().invoke(app, ["resume", str(tmp_path / "parts"), "--rounds", "2"]).exit_code == 0
    again = fb.load(tmp_path / "parts")
    assert torch.equal(whole.posterior.mean, again.posterior.mean)
    assert whole.posterior.layout.names == ("1.lora_B", "3.weight", "3.bias")
    size = max(path.stat().st_size for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert size < 4 * (64 * 100), "the body alone has so many bytes"
    loaded = fb.load(tmp_path / "whole")
    x = loaded.task.clients.data.test_x[:5]
    merged = fb.load(tmp_path / "whole").module()
    assert [n for n, _ in merged.named_parameters()] == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert merged(x.float()).shape == (5, 10)


def test_another_body_is_refused(tmp_path, monkeypatch):
    run(SMALL, tmp_path / "run")
    from fedbayes.experiments import build

    network_of = build.network_of

    def other(x, data, width=1):
        network = network_of(x, data, width)
        network[1].weight.data += 1
        return network

    monkeypatch.setattr(build, "network_of", other)
    with pytest.raises(InputError, match="was trained over other frozen weights; load those that it began with"):
        fb.load(tmp_path / "run")


def test_the_table_is_read_checked_and_written():
    assert from_toml(to_toml(SMALL)).adapters == {"pattern": ["1"], "rank": 2}
    for table, says in (
        ({"ranks": 2}, "did you mean 'rank'"),
        ({"rank": -1}, "adapters: rank must be a whole number"),
        ({"pattern": []}, "adapters: pattern must be a pattern or a list of them"),
    ):
        with pytest.raises(InputError, match=says):
            fb.fit("linear", [(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))], adapters=table)


def test_the_command_line_sets_and_explains_it(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(to_toml(SMALL))
    made = CliRunner().invoke(
        app, ["run", str(path), "--set", "adapters.rank=3", "--set", "rounds=1", "--output", str(tmp_path / "r")]
    )
    assert made.exit_code == 0, made.output
    assert fb.load(tmp_path / "r").posterior.layout.shapes[0] == (100, 3)
    said = CliRunner().invoke(app, ["options", "adapters"]).output
    assert "rank = 8" in said
