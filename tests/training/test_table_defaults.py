"""What is taken where the user says nothing: the rule for tables, a network by name, weights of classes, a bar."""

import io
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import from_toml
from fedbayes.model.class_weights import class_weights, weighted
from fedbayes.model.likelihood import categorical
from fedbayes.training.prepare import prepare
from fedbayes.training.settings import FOR_TABLES
from fedbayes.training.showing import following


def tables(kind="classes", n=40):
    random = np.random.default_rng(0)
    sites = {}
    for site in ("a", "b"):
        x = random.normal(size=n)
        y = x + random.normal(0, 0.5, n)
        sites[site] = {"x": x, "y": np.where(y > 0.8, "ill", "well") if kind == "classes" else y}
    return fb.data.from_tables(sites, "y")


def test_tables_have_defaults_of_their_own():
    task = prepare("linear", tables())
    assert (task.method, task.rounds) == (FOR_TABLES.method, FOR_TABLES.rounds)
    assert task.program.prediction.draws == FOR_TABLES.options["test_draws"]
    plain = prepare(nn.Linear(2, 2), [(np.zeros((4, 2)), [0, 1, 0, 1])])
    assert (plain.method, plain.rounds) == ("feduab", 50)
    assert prepare("linear", tables(), method="fedavg", rounds=3).rounds == 3


def test_an_experiment_on_tables_has_them_too():
    x = from_toml('data = "tables"\n[data_options]\nsites = "here"\ntarget = "y"\n[options]\nepochs = 3')
    assert (x.method, x.network, x.rounds) == (FOR_TABLES.method, FOR_TABLES.network, FOR_TABLES.rounds)
    assert x.options == {**FOR_TABLES.options, "epochs": 3}
    named = from_toml('data = "tables"\nmethod = "fedavg"\nnetwork = "mlp"\nrounds = 5')
    assert (named.method, named.network, named.rounds, named.options) == ("fedavg", "mlp", 5, {})
    assert from_toml('data = "digits"').method == "feduab"


def test_the_noise_of_a_regression_on_tables_is_learned():
    task = prepare("linear", tables("real"))
    assert "likelihood.log_scale" in task.program.model.layouts["points"].names
    run = fb.fit("linear", tables("real"), rounds=4)
    assert run.scores()["rmse"] < 0.8


@pytest.mark.parametrize(("network", "says"), [("lineer", "did you mean 'linear'"), (3, "torch.nn.Module or a name")])
def test_networks_that_are_none(network, says):
    with pytest.raises(InputError, match=says):
        fb.fit(network, tables())


def test_balanced_weights_have_a_mean_of_one_over_rows():
    counts = torch.tensor([90, 10])
    weights = class_weights("balanced", counts)
    torch.testing.assert_close(weights, torch.tensor([100 / 180, 5.0]).double())
    given = class_weights([1.0, 9.0], counts)
    torch.testing.assert_close(given, weights)
    with pytest.raises(InputError, match="3 numbers for 2 classes"):
        class_weights([1, 2, 3], counts)
    plain, heavy = categorical(), weighted(categorical(), weights)
    output, target = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 1, 0])
    expected = weights.float()[target] * plain.log_prob(output, target, {})
    torch.testing.assert_close(heavy.log_prob(output, target, {}), expected)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_rare_class_counts_more(engine):
    clients = tables(n=60)
    method = fb.methods.fedavg(lr=0.5, epochs=10, batch=64)
    runs = {
        w: fb.fit("linear", clients, method=method, rounds=3, class_weights=w, engine=engine)
        for w in (None, "balanced")
    }
    share = {w: float(run.predict(clients.data.test_x).probs[:, 0].mean()) for w, run in runs.items()}
    assert clients.data.class_names[0] == "ill"
    assert share["balanced"] > share[None] + 0.05
    with pytest.raises(InputError, match="class_weights: tables has real targets"):
        fb.fit("linear", tables("real"), class_weights="balanced")
    with pytest.raises(InputError, match="class_weights must be balanced, or a list of positive numbers"):
        fb.fit("linear", clients, class_weights=[1, -1])
    listed, array = (
        fb.fit("linear", clients, rounds=1, class_weights=w).posterior.mean for w in ([1.0, 9.0], np.array([1.0, 9.0]))
    )
    assert torch.equal(listed, array)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_comes_when_training_takes_longer(monkeypatch):
    monkeypatch.setattr("fedbayes.training.showing.SECONDS", -1.0)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with following("pvi", 3) as follow:
        follow({"round": 1, "test": {"nll": 0.5}})
        follow({"round": 2})
    assert "pvi" in shown.getvalue()
    assert "nll 0.500" in shown.getvalue()
    monkeypatch.setattr(sys, "stderr", silent := io.StringIO())
    with following("pvi", 3) as follow:
        follow({"round": 1})
    assert not silent.getvalue()
