"""Training in one place: on the pooled rows of all clients, and at the server before the federation begins."""

from dataclasses import replace

import pytest
import torch

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments import build as building
from fedbayes.experiments.build import build, clients_of, network_of, without_federation
from fedbayes.experiments.central import at_server
from fedbayes.experiments.experiment import Experiment, read
from fedbayes.runs.folder import load, run
from fedbayes.training.fit import train
from fedbayes.training.run import evaluate

DIGITS = Experiment(
    data="digits",
    network="linear",
    partition="labels_per_client",
    partition_options={"k": 2},
    clients=5,
    cohort=2,
    rounds=2,
    method="fedvi",
    options={"epochs": 3, "batch": 50, "test_draws": 2, "rule": "ws", "prior": "fixed", "kl": "1/n", "kl_weight": 1.0},
)
WARM = replace(
    DIGITS,
    cohort=None,
    rounds=1,
    partition_options={"k": 2, "server": 0.2},
    pretrain={"epochs": 8, "patience": 2, "validation": 0.25},
    options={**DIGITS.options, "rule": "dwc", "prior": "broadcast", "batch": 10, "epochs": 2},
)


def test_the_pooled_client_holds_every_row_once_and_a_round_is_an_epoch():
    central = without_federation(DIGITS)
    task = build(central)
    assert (len(task.clients), task.rounds, task.cohort) == (1, 6, 1)
    assert task.program.client.phases[0].epochs == 1
    every = clients_of(DIGITS)
    assert torch.equal(task.clients.train_rows(0), every.train.flat.sort().values)
    assert len(task.clients.test_rows(0)) == len(every.data.test_x)


def test_rows_that_clients_share_are_pooled_once():
    shared = replace(DIGITS, partition="dirichlet_own", partition_options={"volume": 600}, clients=10)
    rows = clients_of(replace(shared, central=True)).train_rows(0)
    assert len(rows) == len(rows.unique()) < 6000


def test_central_training_is_a_federation_of_one():
    run = train(build(without_federation(DIGITS)))
    clients = clients_of(DIGITS).pooled()
    method = fb.methods.fedvi(**{**DIGITS.options, "epochs": 1, "rule": "nwa"})
    alone = fb.fit(network_of(DIGITS, clients.data), clients, method=method, rounds=6)
    torch.testing.assert_close(run.posterior.mean, alone.posterior.mean)
    torch.testing.assert_close(run.posterior.scale, alone.posterior.scale)


def test_methods_with_different_epochs_cannot_be_pooled_at_once():
    both = replace(DIGITS, methods=("fedavg", "fedvi"), options={"fedavg": {"epochs": 1}, "fedvi": {"epochs": 2}})
    with pytest.raises(InputError, match="differ in epochs"):
        without_federation(both)


def test_the_federation_begins_with_what_the_server_learned_on_its_own_rows():
    task = build(WARM)
    begun = task.begin()
    assert 1 <= begun.pretrained["best"] <= begun.pretrained["epochs"] <= 8
    cold = build(replace(WARM, pretrain={})).begin()
    accuracy = [evaluate(task, progress.state)["accuracy"] for progress in (cold, begun)]
    assert accuracy[1] > accuracy[0] + 0.3
    # All digits, although each client holds two: it has seen the server's rows.
    assert begun.pretrained["accuracy"] > 0.5
    held = clients_of(WARM)
    assert not set(held.server.tolist()) & set(held.train.flat.tolist())


def test_the_first_record_says_how_the_server_fared_and_a_resumed_run_does_not_train_it_again(tmp_path, monkeypatch):
    made = run(replace(WARM, rounds=2), tmp_path / "warm")["fedvi"]
    assert {"epochs", "best", "accuracy", "nll"} <= made.journal[0]["pretrained"].keys()
    assert "pretrained" not in made.journal[1]
    assert "floored" in made.journal[0]

    def again(task):
        raise AssertionError("trained again")

    monkeypatch.setattr(building, "pretrained", again)
    assert torch.equal(load(tmp_path / "warm").posterior.mean, made.posterior.mean)


def test_the_server_may_pre_train_with_options_of_its_own(tmp_path):
    warm = replace(WARM, pretrain={**WARM.pretrain, "options": {"kl_weight": 0.5}})
    server = at_server(warm, fb.methods.fedvi(**warm.options))
    assert (server.options["kl_weight"], server.options["rule"], warm.options["kl_weight"]) == (0.5, "dwc", 1.0)
    other = run(warm, tmp_path / "other")["fedvi"]
    assert not torch.equal(other.posterior.mean, train(build(WARM)).posterior.mean)
    assert torch.equal(load(tmp_path / "other").posterior.mean, other.posterior.mean)
    assert read(tmp_path / "other" / "config.toml").pretrain["options"] == {"kl_weight": 0.5}


def test_callbacks_are_not_called_in_pre_training(tmp_path, monkeypatch):
    (tmp_path / "calls_in_training.py").write_text(
        "def first(run, record):\n    record['clients'] = len(run.task.clients)\n    return True\n"
    )
    monkeypatch.chdir(tmp_path)
    plain, stopped = build(WARM).begin(), build(replace(WARM, on_round=("calls_in_training:first",)))
    assert stopped.begin().pretrained == plain.pretrained
    assert [record["clients"] for record in train(stopped).journal] == [5]


def test_options_in_a_table_of_the_method_pre_train_alike():
    nested = replace(WARM, options={"fedvi": WARM.options})
    assert build(nested).begin().pretrained == build(WARM).begin().pretrained


def test_one_place_waits_for_nobody():
    late = {"schedule": "buffered", "schedule_options": {"buffer": 3}, "delays": "lognormal"}
    assert build(replace(WARM, **late)).begin().pretrained == build(WARM).begin().pretrained
    assert without_federation(replace(DIGITS, **late)) == without_federation(DIGITS)


def test_one_client_is_dealt_to_no_buckets():
    robust = {"rule": "trimmed_mean", "buckets": 3, "outliers": 0.1, "epochs": 1}
    warm = replace(WARM, method="fedavg", options=robust)
    assert build(warm).begin().pretrained["epochs"] > 0
    for options in (robust, {"fedavg": robust}):
        central = without_federation(replace(DIGITS, method="fedavg", options=options))
        assert train(build(central)).journal


def test_a_point_method_pre_trains_too():
    warm = replace(WARM, method="fedavg", options={"epochs": 1, "batch": 5})
    assert train(build(warm)).journal[0]["pretrained"]["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"partition_options": {"k": 2}}, "server has no rows"),
        ({"pretrain": {"epoch": 3}}, "epochs"),
        ({"pretrain": {"options": 3}}, "pretrain: options must be a table"),
        ({"pretrain": {"options": {"kl_wait": 3}}}, "kl_weight"),
        ({"monitor": "loss"}, "monitor"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_training(changes, word):
    with pytest.raises(InputError, match=word):
        build(replace(WARM, **changes))
