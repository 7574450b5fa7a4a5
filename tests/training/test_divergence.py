"""Training that goes wrong says so: who was left out, when nobody is left, and what cannot be scored."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import Diverged, InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs import journal
from fedbayes.runs.folder import load, resume, run
from fedbayes.runs.sweep import sweep


def sites(bad=(), test=True, count=4):
    """Clients with labels of one rule; the bad ones hold numbers that make any step jump."""
    random = torch.Generator().manual_seed(0)
    pairs = []
    for k in range(count):
        x = torch.randn(12, 3, generator=random)
        pairs.append((x * (1e25 if k in bad else 1.0), (x[:, 0] > 0).long()))
    x = torch.randn(20, 3, generator=random)
    return fb.data.from_clients(pairs, (x, (x[:, 0] > 0).long()) if test else None, classes=2)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


STEEP = fb.methods.fedavg(lr=1e20, epochs=3)
ENGINES = ["loop", "stacked"]


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_that_diverge_are_named_once(engine):
    with pytest.warns(UserWarning, match=r"round 1: 2 of 4 clients left out \(first: client 1\): its upload") as said:
        run = fb.fit(network(), sites(bad=(1, 3)), method=fb.methods.fedavg(lr=1.0), rounds=3, engine=engine)
    assert len([w for w in said if "left out" in str(w.message)]) == 1
    count = sum(len(record["left_out"]) for record in run.journal)
    assert count > 2
    assert f"{count} uploads left out" in repr(run)


@pytest.mark.parametrize("engine", ENGINES)
def test_nobody_left_is_an_error(engine):
    says = r"round 1: nobody is left, the uploads of all 4 clients were not finite; training diverged: try a smaller lr"
    with pytest.raises(InputError, match=says), pytest.warns(UserWarning, match="4 of 4 clients left out"):
        fb.fit(network(), sites(), method=STEEP, rounds=3, engine=engine)


def test_clients_that_drop_out_are_no_divergence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = fb.fit(network(), sites(), method="fedavg", rounds=4, cohort=1, dropout=0.9)
    assert len(run.journal) == 4
    assert any(record["cohort"] == 0 for record in run.journal)


class Later(nn.Module):
    """A network whose clients diverge when they have been trained a while: at weights beyond a bound."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        far = self.layer.weight.abs().max() > 0.6
        return torch.where(far, torch.nan, 1.0) * self.layer(x)


def later(shape, outputs):
    return Later()


def blobs():
    return sites().data


def wrong_later(**changes):
    options = {"lr": 0.5, "epochs": 1, "batch": 4}
    return Experiment(
        data="test_divergence:blobs", network="test_divergence:later", clients=3, partition="iid", rounds=12,
        **{"method": "fedavg", "options": options, "engine": "loop", "checkpoint_every": 100, **changes},
    )  # fmt: skip


def test_a_run_folder_keeps_what_was_finished(tmp_path):
    for _ in range(2):
        with pytest.raises(Diverged, match=r"nobody is left.*what fedavg had learned before is kept in"):
            run(wrong_later(), tmp_path / "run")
    with pytest.raises(Diverged, match="nobody is left"):
        resume(tmp_path / "run")
    records = journal.read(tmp_path / "run")
    assert 1 < len(records) < 12
    assert all(not record["left_out"] for record in records[:-1])
    there = load(tmp_path / "run")
    assert there.progress.state.round == len(records)
    assert there.posterior.mean.isfinite().all()
    assert there.scores()["accuracy"] > 0.5
    assert "stopped: round" in repr(there)


def test_a_comparison_trains_the_others(tmp_path):
    options = {"epochs": 5, "batch": 4, "fedavg": {"lr": 3e38}, "feduab": {"lr": 0.1}}
    x = replace(wrong_later(options=options), methods=("fedavg", "feduab"), method="feduab", network="linear", rounds=1)
    with pytest.raises(Diverged):
        run(x, tmp_path / "run")
    assert load(tmp_path / "run" / "feduab").scores()["accuracy"] > 0


def test_a_sweep_goes_on_without_those_that_diverged(tmp_path):
    x = Experiment(data="digits", network="linear", clients=4, method="fedavg", rounds=2, options={"epochs": 1})
    made = sweep(x, ["lr=0.1,3e38"], tmp_path / "some")
    assert len(made["lr=0.1"].journal) == 2
    assert "diverged" in journal.read(tmp_path / "some" / "lr=3e38")[-1]
    with pytest.raises(Diverged, match="all 2 members diverged"):
        sweep(x, ["lr=2e38,3e38"], tmp_path / "none")


def test_scores_without_test_rows_say_so():
    run = fb.fit(network(), sites(test=False), method="fedavg", rounds=1)
    for ask in (run.scores, run.personal_scores):
        with pytest.raises(InputError, match="own has no test rows to score"):
            ask()
    assert "test" not in run.journal[-1] or not run.journal[-1]["test"]


@pytest.mark.parametrize("method", ["fedavg", "feduab", "fedbe"])
def test_a_run_prints_as_a_short_summary(method):
    clients = fb.data.load("digits").split(fb.partition.iid(server=70), clients=3)
    options = {"epochs": 1, "batch": 400}
    run = fb.fit(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        clients,
        method=fb.methods.method_named(method, options),
        rounds=2,
        server_data=clients.server,
    )
    text = repr(run)
    assert str(run) == text
    assert len(text) < 400
    accuracy = run.journal[-1]["test"]["accuracy"]
    start = f"Run({method}: 3 clients of digits, 650 weights; 2 of 2 rounds; accuracy {accuracy:.4f}, nll "
    assert text.startswith(start)
    assert len(repr(run.personal(0))) < 500


@pytest.mark.parametrize("engine", ENGINES)
def test_a_posterior_whose_predictions_are_not_finite_has_diverged(engine):
    """Clients that were told a lie of this size are finite themselves: what they predict is not."""
    says = "round 1: what the posterior predicts is not finite; training diverged: try a smaller lr"
    with pytest.raises(Diverged, match=says):
        fb.fit(network(), sites(), method="fedavg", rounds=2, attack="ipm", attack_strength=1e30, engine=engine)


def test_a_member_whose_predictions_are_not_finite_does_not_end_the_others(tmp_path):
    experiment = Experiment(data="digits", clients=5, rounds=1, method="fedavg")
    lying = replace(experiment, attack="ipm", options={"epochs": 1, "batch": 50}, engine="stacked")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = sweep(lying, ["attack_strength=0.5,1e36"], tmp_path)
    last = {name: run.journal[-1] for name, run in runs.items()}
    assert "test" in last["attack_strength=0.5"]
    assert "diverged" in last["attack_strength=1e36"]
