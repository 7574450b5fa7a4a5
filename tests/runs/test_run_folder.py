"""Run folders: what they hold, what they refuse, and that loading gives the run again."""

import csv
import fcntl
import json
from dataclasses import replace

import numpy as np
import own_code
import pytest
import torch
from run_content import content, same

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment, read, to_toml
from fedbayes.runs import checkpoint, sealed
from fedbayes.runs.folder import Watch, load, resume, run
from fedbayes.runs.records import arrays_in, runs_in
from fedbayes.training.fit import fit


def files(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_writes_its_files_and_loads_as_the_same_run(tiny, tmp_path):
    (made,) = run(tiny, tmp_path / "a").values()
    held = {path.name for path in (tmp_path / "a").iterdir()} - {".lock"}
    assert held == {"config.toml", "rounds.jsonl", "metrics.csv", "evaluation.npz", "checkpoints", "own"}
    again = fb.load(tmp_path / "a")
    assert same(again.parts, made.parts)
    assert again.journal == made.journal
    assert again.scores() == made.scores()
    x = own_code.blobs().test_x
    assert torch.equal(again.predict(x).probs, made.predict(x).probs)
    rows = list(csv.DictReader((tmp_path / "a" / "metrics.csv").open()))
    assert [float(row["test.nll"]) for row in rows] == [record["test"]["nll"] for record in made.journal]
    (shown,) = runs_in(tmp_path / "a")
    assert shown.scores == pytest.approx(made.scores())


def test_a_folder_and_memory_train_the_same_posterior(tiny, tmp_path):
    (made,) = run(tiny, tmp_path).values()
    task = build(tiny)
    network = own_code.net((2,), 3)
    network.load_state_dict(task.program.model.module.state_dict())
    other = fit(network, task.clients, method=own_code.momentum_at_home(), rounds=4, cohort=3, seed=0, engine="loop")
    assert torch.equal(other.posterior.mean, made.posterior.mean)


def test_two_runs_of_one_experiment_are_equal_and_another_seed_differs(tiny, tmp_path):
    for name, x in (("a", tiny), ("b", tiny), ("c", replace(tiny, seed=1))):
        run(x, tmp_path / name)
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert same(a, b)
    assert not same(a["checkpoint"]["broadcast"], c["checkpoint"]["broadcast"])


def test_a_comparison_makes_one_folder_a_method(tiny, tmp_path):
    both = replace(
        tiny, methods=("fedavg", "feduab"), method="feduab", rounds=2, options={"epochs": 1, "feduab": {"draws": 3}}
    )
    made = run(both, tmp_path)
    assert read(tmp_path / "feduab" / "config.toml").options == {"epochs": 1, "draws": 3}
    assert [shown.name for shown in runs_in(tmp_path)] == ["fedavg", "feduab"]
    assert isinstance(load(tmp_path).posterior, fb.Gaussian)
    assert torch.equal(load(tmp_path).posterior.mean, made["feduab"].posterior.mean)
    assert torch.equal(load(tmp_path / "fedavg").posterior.mean, made["fedavg"].posterior.mean)


def test_the_evaluation_holds_predictions_parts_and_clients(tiny, tmp_path):
    x = replace(tiny, data="digits", network="linear", method="feduab", rounds=1, options={"epochs": 1})
    (made,) = run(x, tmp_path).values()
    held = arrays_in(tmp_path / "evaluation.npz")
    n = len(held["labels"])
    assert held["probs"].shape == held["aleatoric"].shape == held["epistemic"].shape == (n, 10)
    np.testing.assert_allclose(held["entropy"], held["expected_entropy"] + held["mutual_information"], atol=1e-5)
    assert held["label_counts"].sum() == held["client_sizes"].sum() == 1442
    assert held["client_scores"].shape == (6, len(held["score_names"]))
    assert held["thumbnails"].shape == (len(held["thumbnail_rows"]), 8, 8)
    assert len(held["thumbnail_rows"]) >= 300
    rows = made.task.clients.test_rows(2)
    wanted = float((held["probs"][rows].argmax(-1) == held["labels"][rows]).mean())
    assert held["client_scores"][2, held["score_names"].tolist().index("accuracy")] == pytest.approx(wanted)
    shown = arrays_in(tmp_path / "samples.npz")
    assert shown["names"].tolist() == ["easy", "hard", "no class"]
    assert shown["images"].shape == (3, 8, 8)


def test_regression_is_evaluated_in_its_own_units(tiny, tmp_path):
    x = Experiment(
        data="diabetes", network="linear", clients=4, rounds=2, method="feduab", options={"epochs": 1},
        likelihood_options={"scale": 0.7, "learn": True},
    )  # fmt: skip
    (made,) = run(x, tmp_path).values()
    held = arrays_in(tmp_path / "evaluation.npz")
    assert held["labels"].mean() > 100
    scores = dict(zip(held["score_names"].tolist(), held["scores"].tolist()))
    assert scores == pytest.approx(made.scores())
    assert scores["rmse"] == pytest.approx(float(np.sqrt(((held["mean"] - held["labels"]) ** 2).mean())), rel=1e-5)


def test_a_finished_run_is_left_as_it_is(tiny, tmp_path):
    run(tiny, tmp_path)
    before, said = files(tmp_path), []
    resume(tmp_path, Watch(ended=lambda method, was_finished: said.append(was_finished)))
    assert files(tmp_path) == before
    assert said == [True]


def test_more_rounds_in_config_go_on_from_the_end(tiny, tmp_path):
    run(replace(tiny, rounds=2), tmp_path / "a")
    (tmp_path / "a" / "config.toml").write_text(to_toml(tiny))
    resume(tmp_path / "a")
    run(tiny, tmp_path / "b")
    assert same(content(tmp_path / "a"), content(tmp_path / "b"))


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_network_with_buffers_goes_on_exactly(tiny, tmp_path, method, engine):
    x = replace(tiny, network="own_code:norm_net", data="own_code:at_home", cohort=None, method=method, engine=engine)
    run(replace(x, rounds=2), tmp_path / "a")
    (tmp_path / "a" / "config.toml").write_text(to_toml(x))
    resume(tmp_path / "a")
    run(x, tmp_path / "b")
    assert same(content(tmp_path / "a"), content(tmp_path / "b"))


def test_code_that_can_not_be_imported_is_given(tiny, tmp_path):
    network, clients = own_code.norm_net(), own_code.at_home()
    x = replace(tiny, network="gone:net", data="gone:data", cohort=None, method="fedavg", rounds=2)
    (made,) = run(x, tmp_path, network=network, clients=clients).values()
    again = load(tmp_path, network=network, clients=clients)
    assert torch.equal(again.predict(clients.data.test_x).probs, made.predict(clients.data.test_x).probs)
    with pytest.raises(InputError, match="can't be imported"):
        load(tmp_path)


def test_early_stopping_survives_a_resume(tiny, tmp_path):
    x = replace(tiny, rounds=30, validation=0.3, patience=1, options={"lr": 5.0})
    (made,) = run(x, tmp_path).values()
    assert len(made.journal) < 30
    assert "stopped" in made.journal[-1]
    again = load(tmp_path)
    assert again.progress.stopped
    assert same(again.parts, made.progress.best.broadcast)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_checkpoint_is_named_and_deleting_it_goes_on_from_the_one_before(tiny, tmp_path, damage):
    run(tiny, tmp_path)
    before = content(tmp_path)
    last = checkpoint.paths(tmp_path)[-1]
    good = last.read_bytes()
    bad = {"cut": good[:-9], "flip": good[:-3] + bytes([good[-3] ^ 1]) + good[-2:], "empty": b"", "other": b"x" * 99}
    last.write_bytes(bad[damage])
    (tmp_path / "evaluation.npz").unlink()
    for act in (resume, load):
        with pytest.raises(InputError, match=f"{last.name}.*delete it to go on from the one before") as caught:
            act(tmp_path)
        assert "\n" not in str(caught.value)
    assert last.read_bytes() == bad[damage]
    last.unlink()
    resume(tmp_path)
    assert same(content(tmp_path), before)


def test_a_checkpoint_of_another_network_or_experiment_is_refused(tiny, tmp_path):
    run(tiny, tmp_path)
    with pytest.raises(InputError, match=r"another network.*'model' has 39 weights.*the network here 57"):
        load(tmp_path, network=own_code.net((2,), 3, width=9))
    (tmp_path / "config.toml").write_text(to_toml(replace(tiny, seed=5, options={"lr": 0.2})))
    with pytest.raises(InputError, match="another experiment \\(options, seed differ"):
        resume(tmp_path)


def test_a_lost_or_damaged_own_file_is_named(tiny, tmp_path):
    run(tiny, tmp_path)
    (tmp_path / "config.toml").write_text(to_toml(replace(tiny, rounds=6)))
    for path in (tmp_path / "own").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="own state of client"):
        resume(tmp_path)


def test_a_short_journal_is_named(tiny, tmp_path):
    run(tiny, tmp_path)
    (tmp_path / "rounds.jsonl").write_text("")
    with pytest.raises(InputError, match="ends at round 0, the checkpoint is of round 4"):
        resume(tmp_path)


def test_a_folder_of_something_else_is_refused(tiny, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not empty and holds no run"):
        run(tiny, tmp_path)
    run(tiny, tmp_path / "a")
    with pytest.raises(InputError, match=r"another experiment \(rounds differ\).*resume.*--output"):
        run(replace(tiny, rounds=9), tmp_path / "a")
    with pytest.raises(InputError, match="is no run folder"):
        resume(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_in_use_is_refused(tiny, tmp_path):
    with (tmp_path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="in use by another process"):
            run(tiny, tmp_path)


def test_a_client_that_diverges_is_named_in_the_journal_and_the_run_stays_finite(tiny, tmp_path):
    (made,) = run(replace(tiny, method="own_code:diverging"), tmp_path).values()
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    sizes = made.task.clients.sizes.tolist()
    out = {int(client) for line in lines for client in line["left_out"]}
    assert out
    assert all(sizes[client] > 15 for client in out)
    assert any(len(line["left_out"]) < line["cohort"] for line in lines)
    assert torch.isfinite(made.posterior.mean).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "fedavgg"}, "did you mean 'fedavg'"),
        ({"method": "feduab", "options": {"drwas": 3}}, "did you mean 'draws'"),
        ({"method": "feduab", "options": {"fedavgg": {"lr": 1}}}, "did you mean 'fedavg'"),
        ({"cohort": 99}, "cohort: 99 clients"),
        ({"partition": "dirichlett"}, "did you mean 'dirichlet'"),
        ({"partition_options": {}}, "partition dirichlet needs 'alpha'"),
        ({"partition_options": {"alfa": 1}}, "did you mean 'alpha'"),
        ({"network": "mpl"}, "did you mean 'mlp'"),
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"data": "own_code:nothing"}, "can't be imported"),
        ({"data": "own_code:broken_blobs"}, "x is not finite in 1 of 96 rows"),
        ({"data": "own_code:blobs", "data_options": {"row": 3}}, "data: .*'row'"),
        ({"clients": 97}, "partition: "),
        ({"network": "no_such_module:x"}, "can't be imported"),
        ({"network": "own_code:blobs"}, "must give a torch.nn.Module"),
        ({"likelihood": "poisson"}, "unknown likelihood"),
        ({"engine": "lop"}, "did you mean 'loop'"),
        ({"precision": "float23"}, "did you mean 'float32'"),
        ({"device": "gpu7"}, "device 'gpu7'"),
        ({"frozen": ("head.*",)}, "no weight matches"),
    ],
)
def test_a_wrong_name_is_one_line_and_leaves_nothing(tiny, tmp_path, change, said):
    with pytest.raises(InputError, match=said) as caught:
        run(replace(tiny, **change), tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "a" / "config.toml").exists()


def test_values_come_back_from_sealed_files_as_they_were(tmp_path):
    value = {
        "a": torch.arange(3, dtype=torch.int16),
        "b": [torch.zeros(2, dtype=torch.bfloat16), (1, 2.5, None, "x", True)],
        "c": fb.Gaussian(torch.ones(2), torch.ones(2), fb.Layout(("w",), ((2,),))),
        "d": {},
    }
    sealed.write(tmp_path / "x", {"1": value, "2": value})
    assert same(sealed.read(tmp_path / "x", "2"), value)
    with pytest.raises(InputError, match="a set at a can't be written"):
        sealed.write(tmp_path / "y", {"1": {"a": {1}}})


def test_one_method_may_have_its_options_in_a_table_of_its_own(tmp_path):
    experiment = Experiment(
        data="digits",
        network="linear",
        clients=3,
        rounds=1,
        method="feduab",
        options={"epochs": 1, "feduab": {"draws": 2}},
    )
    made = run(experiment, tmp_path / "r")["feduab"]
    again = fb.load(tmp_path / "r")
    assert again.task.program.prediction.draws == 2
    assert torch.equal(again.posterior.mean, made.posterior.mean)
    assert torch.equal(resume(tmp_path / "r")["feduab"].posterior.mean, made.posterior.mean)
