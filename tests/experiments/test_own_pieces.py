"""Pieces of the user's own in an experiment file, as package.module:name: run end to end, and refused in one line."""

import re
import sys
from pathlib import Path

import pytest
import torch

import fedbayes as fb
from fedbayes.cli import main

MINE = '''
"""A user's module."""

import numpy as np
from fedbayes.data import from_arrays, partition


def by_side(labels, clients, rng, *, data, edge=0.5):
    """Left and right of an edge of the first pixels' sum, each cut in two."""
    bright = data.x.float().flatten(1).sum(1).numpy()
    left = bright < np.quantile(bright, edge)
    return [part for side in (left, ~left) for part in np.array_split(np.flatnonzero(side), clients // 2)]


finished = partition.labels_per_client(3)


def silent(labels, clients, rng):
    return None


def outside(labels, clients, rng):
    return [[10**6]] * clients


def failing(labels, clients, rng):
    return {}["no such key"]


def short(clients):
    return []
'''

EXPERIMENT = """
data = "digits"
network = "linear"
clients = 4
rounds = 2
method = "fedavg"
engine = "{engine}"
{keys}
[options]
epochs = 1
batch = 40
"""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The folder in which a user works, with a module of their own."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def written(home: Path, keys: str, engine: str = "loop", options: str = "") -> Path:
    path = home / f"{engine}.toml"
    path.write_text(EXPERIMENT.format(engine=engine, keys=keys) + options)
    return path


def trained(home: Path, monkeypatch, keys: str, engine: str, options: str = "") -> fb.Run:
    """The run of an experiment file, by the command line."""
    path = written(home, keys, engine, options)
    monkeypatch.setattr(sys, "argv", ["fedbayes", "run", str(path), "--output", str(home / engine)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    return fb.load(home / engine)


def refusal(home: Path, monkeypatch, capsys, keys: str, options: str = "") -> str:
    """The line that answers an experiment file, whose exit code is 2."""
    monkeypatch.setattr(sys, "argv", ["fedbayes", "run", str(written(home, keys, "loop", options))])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_partition_of_the_users_own_deals_the_rows(home, monkeypatch, engine):
    run = trained(home, monkeypatch, 'partition = "mine:by_side"\npartition_options = {edge = 0.25}', engine)
    clients = run.task.clients
    brightness = [clients.data.x[clients.train_rows(k)].float().flatten(1).sum(1) for k in range(4)]
    assert max(b.max() for b in brightness[:2]) < min(b.min() for b in brightness[2:])
    share = sum(map(len, brightness[:2])) / sum(map(len, brightness))
    assert abs(share - 0.25) < 0.02  # equal sums are not parted
    assert len(run.journal) == 2


def test_a_finished_partition_is_taken_as_it_is(home, monkeypatch):
    run = trained(home, monkeypatch, 'partition = "mine:finished"', "loop")
    assert ((run.task.clients.label_counts() > 0).sum(1) == 3).all()
    same = fb.partition.labels_per_client(3)
    ours = run.task.clients.data.split(same, clients=4, seed=0)
    assert all(torch.equal(ours.train_rows(k), run.task.clients.train_rows(k)) for k in range(4))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('partition = "mine:by_sied"', "partition 'mine:by_sied' can't be imported"),
        ('partition = "nobodys:by_side"', "No module named 'nobodys'"),
        ('partition = "by_side"', "unknown partition 'by_side'"),
        ('partition = "mine:by_side"\npartition_options = {egde = 1}', "did you mean 'edge'"),
        ('partition = "mine:finished"\npartition_options = {edge = 1}', "takes none"),
        ('partition = "mine:silent"', "gave a NoneType; it must give a list of row numbers"),
        ('partition = "mine:outside"', "rows outside 0.."),
        ('partition = "mine:failing"', "failed in .*mine.py, line"),
        ('partition = "mine:short"', r"must be a Partition or a function \(labels, clients, rng\)"),
        ('partition = "mine:np"', r"must be a Partition or a function"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_in_one_line(home, monkeypatch, capsys, keys, words):
    assert re.search(words, refusal(home, monkeypatch, capsys, keys))
