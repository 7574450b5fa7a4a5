"""Pieces of the user's own in an experiment file, as package.module:name: run end to end, and refused in one line."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedbayes as fb
from fedbayes.cli import main
from fedbayes.experiments.build import build, network_of, without_federation
from fedbayes.experiments.experiment import from_toml, read, to_toml, with_settings
from fedbayes.runs import sweep
from fedbayes.runs.sweep import members_of
from fedbayes.training.fit import train

MINE = '''
"""A user's module."""

import numpy as np
import torch
from fedbayes.clients.client import Client, Phase, Upload
from fedbayes.data import partition
from fedbayes.federation.program import Stage
from fedbayes.posterior.values import Gaussian, Point


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


def shrinking(factor=0.5):
    """Only a part of the way to the pool; counts its rounds."""

    def apply(context, state, parts):
        old, q = context.order.broadcast["model"].mean, parts["model"]
        moved = Point(old + factor * (q.mean - old), q.layout)
        return {**parts, "model": moved}, state + 1, {"counted": float(state + 1)}

    return Stage("shrinking", lambda parts: torch.zeros(()), apply)


def same(context, state, parts):
    return parts, state, {}


def rest(context, state, parts):
    return {}, state, {}


def larger(context, state, parts):
    return {**parts, "model": Point(torch.zeros(3))}, state, {}


def crash(context, state, parts):
    return state["no such key"]


def nothing(parts):
    return None


still = Stage("still", nothing, same)
emptied = Stage("emptied", nothing, rest)
resized = Stage("resized", nothing, larger)
crashed = Stage("crashed", nothing, crash)
speechless = Stage("speechless", nothing, lambda context, state, parts: parts)
def descent(model, *, epochs, batch, shrink=1.0):
    """Plain gradient descent from the broadcast; the upload goes a part of the way."""

    def start(own, info):
        return info.broadcast["model"].mean

    def step(w, b, tape, info):
        def loss(w):
            weights = model.weights({"model": w})
            return model.nll(model.train_output(weights, b.x, tape, b.mask)[0], b.y, b.mask, weights)

        return w - info.options["lr"] * torch.func.grad(loss)(w)

    def finish(w, info):
        old = info.broadcast["model"].mean
        return Upload({"model": Point(old + shrink * (w - old), model.layouts["model"])}, {}, {})

    return Client(start, (Phase(step, epochs, batch),), finish)


def certain(model, *, epochs, batch):
    """The same with a narrow normal around it."""
    plain = descent(model, epochs=epochs, batch=batch)

    def finish(w, info):
        layout = model.layouts["model"]
        return Upload({"model": Gaussian(w, torch.full_like(w, 0.01), layout)}, {}, {})

    return plain._replace(finish=finish)


def broken(model, epochs, batch):
    return {}["no such key"]


second_step = Stage("server step", nothing, same)
'''

EXPERIMENT = """
data = "digits"
network = "linear"
clients = 4
rounds = 2
method = "{method}"
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


def written(home: Path, keys: str, engine: str = "loop", options: str = "", method: str = "fedavg") -> Path:
    path = home / f"{engine}.toml"
    path.write_text(EXPERIMENT.format(engine=engine, keys=keys, method=method) + options)
    return path


def trained(home: Path, monkeypatch, keys: str, engine: str, options: str = "", method: str = "fedavg") -> fb.Run:
    """The run of an experiment file, by the command line."""
    path = written(home, keys, engine, options, method)
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


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_stage_of_the_users_own_follows_the_methods(home, monkeypatch, engine):
    run = trained(home, monkeypatch, 'stages = [{stage = "mine:shrinking", factor = 0.25}, "mine:still"]', engine)
    assert [record["counted"] for record in run.journal] == [1, 2]
    assert set(run.progress.state.stages) == {"shrinking", "still"}
    plain = build(replace(read(home / f"{engine}.toml"), stages=(), rounds=1))
    start, one = plain.program.initial["model"].mean, train(plain).posterior.mean
    short = train(build(replace(read(home / f"{engine}.toml"), rounds=1))).posterior.mean
    torch.testing.assert_close(short, start + 0.25 * (one - start))
    other = train(build(replace(read(home / f"{engine}.toml"), stages=())))
    again = fb.fit(
        network_of(read(home / f"{engine}.toml"), plain.clients.data),
        plain.clients,
        method=fb.methods.fedavg(epochs=1, batch=40),
        rounds=2,
        engine=engine,
        stages=[sys.modules["mine"].shrinking(0.25)],
    )
    assert torch.equal(again.posterior.mean, run.posterior.mean)
    assert not torch.equal(again.posterior.mean, other.posterior.mean)


def test_a_stages_state_is_kept_in_checkpoints(home, monkeypatch):
    whole = trained(home, monkeypatch, 'stages = ["mine:shrinking"]', "loop")
    config = home / "loop" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    monkeypatch.setattr(sys, "argv", ["fedbayes", "resume", str(home / "loop")])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert [record["counted"] for record in fb.load(home / "loop").journal] == [1, 2, 3]
    assert len(whole.journal) == 2


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ('["mine:shrikning"]', "stage 'mine:shrikning' can't be imported"),
        ('["shrinking"]', "stages must be a list of package.module:name"),
        ('"mine:shrinking"', "stages must be a list of package.module:name"),
        ("[{factor = 0.5}]", "stages must be a list"),
        ('[{stage = "mine:shrinking", fcator = 0.5}]', "did you mean 'factor'"),
        ('[{stage = "mine:still", factor = 0.5}]', "takes no options; leave factor out"),
        ('["mine:silent"]', "stage mine:silent needs 'labels'"),
        ('["mine:np"]', "is a module; it must be or give a fedbayes Stage"),
        ('["mine:still", "mine:still"]', "two are called 'still'"),
        ('["mine:emptied"]', "'emptied' must give the parts that it was given: model"),
        ('["mine:resized"]', "'resized': part 'model' must stay a Point over 650 weights"),
        ('["mine:crashed"]', "stage mine:crashed.*"),
        ('["mine:speechless"]', r"'speechless' must give \(parts, state, numbers"),
    ],
)
def test_a_stage_that_does_not_fit_is_refused_in_one_line(home, monkeypatch, capsys, stages, words):
    assert re.search(words, refusal(home, monkeypatch, capsys, f"stages = {stages}"))


def test_a_stage_must_not_take_the_name_of_the_methods_own(home, monkeypatch, capsys):
    said = refusal(home, monkeypatch, capsys, 'stages = ["mine:second_step"]', 'server = "sgd"\n')
    assert "two are called 'server step'" in said


def test_training_in_one_place_pools_nothing_and_has_no_stages(home):
    x = read(written(home, 'stages = ["mine:shrinking"]'))
    assert without_federation(x).stages == ()
    assert from_toml(to_toml(x)) == x
    assert "stages" not in to_toml(replace(x, stages=()))
    assert with_settings(x, ["stages=mine:still"], lambda method: ()).stages == ("mine:still",)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_client_of_the_users_own_does_the_work(home, monkeypatch, engine):
    run = trained(home, monkeypatch, "", engine, 'client = "mine:descent"\nclient_options = {shrink = 0.5}\n')
    x = replace(read(home / f"{engine}.toml"), rounds=1)
    usual = build(replace(x, options={"epochs": 1, "batch": 40}))
    start, one = usual.program.initial["model"].mean, train(usual).posterior.mean
    torch.testing.assert_close(train(build(x)).posterior.mean, start + 0.5 * (one - start))
    assert len(run.journal) == 2
    assert "notes" not in run.journal[-1]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_client_of_gaussians_is_pooled_as_such(home, monkeypatch, engine):
    run = trained(home, monkeypatch, "", engine, 'client = "mine:certain"\nrule = "nwa"\n', "fedvi")
    torch.testing.assert_close(run.posterior.scale, torch.full_like(run.posterior.scale, 0.01))


def test_members_of_a_sweep_with_a_client_of_the_users_own_are_trained_apart(home):
    def groups(options):
        x = replace(read(written(home, "", "stacked")), options={"epochs": 1, **options})
        members = members_of(x, ["lr=0.1,0.2"])
        return sweep._groups(members, sweep.build_members(members))

    assert len(groups({})) == 1
    assert len(groups({"client": "mine:descent"})) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('client = "mine:decsent"', "client 'mine:decsent' can't be imported"),
        ('client = "descent"', "client must be a function .*package.module:name, not 'descent'"),
        ('client = "mine:still"', "client must be a function"),
        ('client = "mine:certain"', "it uploads a Gaussian over 650 weights as part 'model'; the method pools a Point"),
        ('client = "mine:descent"\nclient_options = {shirnk = 0.5}', "did you mean 'shrink'"),
        ('client = "mine:broken"\n', "client mine:broken failed in .*mine.py, line"),
        ('rule = "mine:no_rule"', "rule 'mine:no_rule' can't be imported"),
        ('weighting = "mine:no_weights"', "weighting 'mine:no_weights' can't be imported"),
    ],
)
def test_a_client_that_does_not_fit_is_refused_in_one_line(home, monkeypatch, capsys, options, words):
    assert re.search(words, refusal(home, monkeypatch, capsys, "", options))


def test_flowers_table_is_checked_where_another_engine_trains(home, monkeypatch, capsys):
    said = refusal(home, monkeypatch, capsys, "flower = {timeot = 3}")
    assert "unknown key in flower 'timeot': did you mean 'timeout'?" in said
