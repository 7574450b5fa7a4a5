"""Run folders of adapters: they hold what is trained alone, go on after a stop, and notice another body."""

from dataclasses import replace

import numpy as np
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


def test_rows_of_several_tensors_are_predicted_from_a_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fields_code.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "import fedbayes as fb\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)\n"
        "    def forward(self, ids, mask):\n"
        "        return {'logits': self.head((self.words(ids) * mask[..., None]).sum(1))}\n"
        "def data():\n"
        "    ids = torch.arange(60).reshape(20, 3) % 9\n"
        "    x = {'ids': ids, 'mask': ids > 2}\n"
        "    return fb.data.from_arrays(x, ids[:, 0] % 2, x, ids[:, 0] % 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    x = replace(SMALL, data="fields_code:data", network="fields_code:Net", network_options={}, adapters={"rank": 2})
    done = run(x, tmp_path / "run")["pvi"]
    ids = np.arange(6).reshape(2, 3)
    np.savez(tmp_path / "x.npz", ids=ids, mask=ids > 2)
    command = [
        "predict",
        str(tmp_path / "run"),
        "--input",
        str(tmp_path / "x.npz"),
        "--output",
        str(tmp_path / "p.csv"),
    ]
    out = CliRunner().invoke(app, command)
    assert out.exit_code == 0, out.output
    rows = np.genfromtxt(tmp_path / "p.csv", delimiter=",", names=True)
    probs = done.predict({"ids": ids, "mask": ids > 2}).probs
    np.testing.assert_allclose(_probs(rows), probs.numpy(), atol=1e-4)


def _probs(rows):
    """The columns of probabilities, in their order."""
    return np.stack([rows[name] for name in rows.dtype.names if name.startswith("p")][:2], 1)
