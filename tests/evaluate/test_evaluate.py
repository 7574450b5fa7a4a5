"""`evaluate` on run folders: every figure with its error, files that agree with it, and laws that no figure breaks."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn import metrics
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app, score_tables
from fedbayes.errors import InputError
from fedbayes.evaluate.outside import outside
from fedbayes.evaluate.scoring import check_laws, evaluate, score_run
from fedbayes.experiments.experiment import Experiment
from fedbayes.runs.folder import run

SETS = ("gaussian-noise", "train@50", "uniform-noise@2000")
PAIR = Experiment(
    data="digits",
    network="mlp",
    network_options={"hidden": [20]},
    partition="labels_per_client",
    partition_options={"k": 3, "volume": 30},
    clients=20,
    cohort=10,
    rounds=6,
    methods=("fedavg", "feduab"),
    method="feduab",
    evaluate_every=6,
    options={"lr": 0.1, "feduab": {"test_draws": 6, "initial": 0.2}},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "pair"
    run(PAIR, folder)
    return folder


@pytest.fixture(scope="module")
def made(folder):
    return evaluate(folder, ood=SETS, repeats=3)


def figures(made):
    """Every (method, set, score) and its row of figures."""
    for method, scores in made.items():
        for name, table in scores["ood"]["tables"].items():
            for score, row in table.items():
                yield f"{method} {name} {score}", row


def test_values_are_those_of_the_run_and_errors_those_of_its_draws(folder, made):
    for method, scores in made.items():
        direct = fb.load(folder / method).scores()
        found = scores["scores"]
        for name, value in direct.items():
            assert found[name]["value"] == pytest.approx(value, abs=1e-9)
        assert scores["rounds"] == 6
    assert all(figure["error"] in (0.0, None) for figure in made["fedavg"]["scores"].values())
    errors = {name: figure["error"] for name, figure in made["feduab"]["scores"].items() if name != "count"}
    assert all(error > 0 for error in errors.values()), errors
    assert errors["nll"] < 0.2


def test_errors_of_the_test_rows_are_those_of_a_mean(folder, made):
    for method, scores in made.items():
        row, n = scores["scores"]["accuracy"], scores["rows"]
        binomial = (row["value"] * (1 - row["value"]) / n) ** 0.5
        assert row["sampling"] == pytest.approx(binomial, rel=0.4)  # 50 resamples: 10 % is one standard error
        p = fb.load(folder / method).predict(fb.data.load("digits").test_x)
        losses = -p.probs[range(n), fb.data.load("digits").test_y].clamp_min(1e-12).log()
        assert scores["scores"]["nll"]["sampling"] == pytest.approx(float(losses.std()) / n**0.5, rel=0.4)


def test_every_printed_roc_and_calibration_error_obeys_its_inequality(made):
    seen = 0
    for what, row in figures(made):
        area, passed = row["auroc"]["value"], row["fpr95"]["value"]
        assert 0.95 * (1 - passed) - 1e-9 <= area <= 1 - 0.05 * passed + 1e-9, what
        seen += 1
    for scores in made.values():
        nll, accuracy = scores["scores"]["nll"]["value"], scores["scores"]["accuracy"]["value"]
        for name in ("ece", "classwise_ece"):
            assert scores["scores"][name]["value"] <= nll + 1 - accuracy + 1e-9
        t = scores["temperature"]
        for when in ("before", "after"):
            assert t[f"ece_{when}"] <= t[f"nll_{when}"] + 1 - t[f"accuracy_{when}"] + 1e-9
            seen += 1
    assert seen == 3 * (6 + 8) + 4
    wrong = {**made["fedavg"], "scores": {**made["fedavg"]["scores"], "ece": {"value": 9.0, "error": 0.0}}}
    with pytest.raises(RuntimeError, match="ECE of 9"):
        check_laws(wrong)


def test_files_hold_what_was_returned_and_what_a_report_needs(folder, made):
    for method, scores in made.items():
        assert json.loads((folder / method / "scores.json").read_text()) == json.loads(json.dumps(scores))
        with np.load(folder / method / "ood.npz", allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        meta = json.loads(str(arrays.pop("meta")))
        assert (meta["method"], meta["data"]) == (method, "digits")
        assert meta["ood"] == json.loads(json.dumps(scores["ood"]))
        for name in SETS:
            assert arrays[f"thumbs/{name}"].dtype == np.uint8
            assert arrays[f"thumbs/{name}"].shape[1:] == (8, 8)
            for score, row in scores["ood"]["tables"][name].items():
                inside, out = arrays[f"inside/{score}"], arrays[f"outside/{name}/{score}"]
                assert (inside.dtype, out.dtype, inside.ndim, out.ndim) == (np.float32, np.float32, 1, 1)
                truth = np.r_[np.zeros(len(inside)), np.ones(len(out))]
                area = metrics.roc_auc_score(truth, np.r_[inside, out])
                assert row["auroc"]["value"] == pytest.approx(area, abs=0.02 + 3 * row["auroc"]["spread"])
                assert row["auroc"]["spread"] >= 0
        assert not list((folder / method).glob(".*.????????"))


def test_distance_knows_what_confidence_does_not(made):
    for scores in made.values():
        far = scores["ood"]["tables"]["uniform-noise@2000"]
        assert far["mahalanobis"]["auroc"]["value"] > 0.99
        assert far["mahalanobis"]["auroc"]["error"] is None
    assert made["fedavg"]["ood"]["tables"]["uniform-noise@2000"]["msp"]["auroc"]["value"] < 0.3


def test_conformal_and_temperature_are_judged_by_other_rows(made):
    for scores in made.values():
        assert scores["calibrated_by"] == "half of the test set"
        for row in scores["conformal"].values():
            assert row["calibration_rows"] + row["judging_rows"] <= 355
            assert row["site_least"] <= row["site_tenth"]
            assert 0.8 < row["coverage"] <= 1
        assert scores["temperature"]["nll_after"] < scores["temperature"]["nll_before"] + 0.02


def test_evaluating_again_repeats_and_keeps_the_outside_tables(folder, made):
    again = evaluate(folder, repeats=2)
    for method, scores in again.items():
        assert scores["ood"] == json.loads(json.dumps(made[method]["ood"]))
        assert scores["scores"]["nll"]["value"] == made[method]["scores"]["nll"]["value"]
    fewer = evaluate(folder, draws=2, repeats=2)
    assert fewer["feduab"]["ood"] is None
    assert fewer["feduab"]["scores"]["nll"]["error"] > made["feduab"]["scores"]["nll"]["error"]


def test_the_command_prints_both_tables_and_names_its_files(folder):
    said = CliRunner().invoke(
        app, ["evaluate", str(folder), "--ood", "uniform-noise,train@2000", "--repeats", "2"], catch_exceptions=False
    )
    assert said.exit_code == 0
    for word in ("NLL", "±", "90% sets by class: coverage", "outside: train@2000", "mahalanobis", "AUROC"):
        assert word in said.output
    assert str(folder / "feduab" / "scores.json") in said.output.replace("\n", "")
    assert max(map(len, said.output.splitlines()[:40])) <= 80


def test_sets_that_do_not_fit_are_refused_with_the_mend(folder):
    made = fb.load(folder)
    for name, words in [
        ("train", "inside"),
        ("kmnits", "did you mean 'kmnist'"),
        ("own_code:blobs", r"shape \[2\], the run was trained on \[1, 8, 8\]: resize"),
        ("own_code:net", "ood own_code:net"),
        ("uniform-noise@far", "could not convert"),
    ]:
        with pytest.raises(InputError, match=words):
            outside(name, made)


def test_outside_sets_come_as_the_network_sees_them(folder):
    made = fb.load(folder)
    data = made.task.clients.data
    far = outside("train@50", made, most=100)
    assert len(far.x) == 100
    torch.testing.assert_close(far.x[0], 50 * data.x[0])
    assert outside("gaussian-noise", made).x.shape[1:] == data.shape


def test_a_regression_has_its_own_scores_and_intervals(tmp_path):
    x = Experiment(data="diabetes", network="linear", clients=4, rounds=2, options={"test_draws": 4, "lr": 0.01})
    run(x, tmp_path / "real")
    scores = evaluate(tmp_path / "real", ood=["train@30"], repeats=2)["feduab"]
    assert {"rmse", "nll", "crps", "coverage90", "sharpness"} <= set(scores["scores"])
    assert scores["conformal"]["pooled"]["width"] > 0
    assert set(scores["ood"]["tables"]["train@30"]) == {"epistemic", "mahalanobis"}
    assert "90% intervals: width" in "".join(dict(score_tables._rows(scores)))


def test_scores_without_a_value_say_so(folder):
    made = fb.load(folder / "fedavg")
    data = made.task.clients.data
    right = made.predict(data.test_x).probs.argmax(-1) == data.test_y

    def judged(rows):
        clients = replace(made.task.clients, data=replace(data, test_x=data.test_x[rows], test_y=data.test_y[rows]))
        clients = replace(clients, test=fb.data.Ragged.of_lists([np.arange(int(rows.sum()))] * len(clients)))
        return score_run(replace(made, task=replace(made.task, clients=clients)))

    found = judged(right)["scores"]
    assert found["accuracy"]["value"] == 1
    assert found["misclassification_entropy"]["value"] is None  # nothing wrong to be told from right
    assert found["retention_entropy"]["value"] == 1
    assert found["retention_epistemic"]["value"] is None  # a point has no draws to disagree
    one = judged(data.test_y == 3)["scores"]
    assert 0 < one["nll"]["value"] < 10
    with pytest.raises(InputError, match="no test rows"):
        judged(data.test_y == 99)


@pytest.mark.parametrize("rows", [1, 2])
def test_of_one_or_two_test_rows_there_is_no_table_of_calibration(folder, rows):
    made = fb.load(folder / "fedavg")
    data = made.task.clients.data
    clients = replace(made.task.clients, data=replace(data, test_x=data.test_x[:rows], test_y=data.test_y[:rows]))
    few = np.arange(rows)[: rows - 1]  # of two rows all sites hold the first, which calibrates or judges
    clients = replace(clients, test=fb.data.Ragged.of_lists([few] * len(clients)))
    found = score_run(replace(made, task=replace(made.task, clients=clients)))
    assert found["rows"] == rows
    assert found["scores"]["nll"]["value"] > 0
    assert not {"temperature", "conformal", "calibrated_by"} & set(found)
    assert list(score_tables._rows(found))


def test_an_event_with_nobody_after_it_has_no_concordance():
    random = np.random.default_rng(0)
    x = random.standard_normal((40, 2)).astype(np.float32)
    y = np.column_stack([random.exponential(size=40), np.ones(40)])
    test = np.column_stack([np.arange(1.0, 7.0), [0, 0, 0, 0, 0, 1]])
    clients = fb.data.from_clients([(x[:20], y[:20]), (x[20:], y[20:])], test=(x[:6], test), kind="survival")
    made = fb.fit(torch.nn.Linear(2, 1), clients, method="fedavg", rounds=1)
    found = score_run(made)["scores"]
    assert "concordance" not in found
    assert found["concordance_ipcw"]["value"] is None
    assert found["brier"]["value"] >= 0


def test_a_diverged_run_is_named_and_not_scored(folder, tmp_path):
    x = replace(PAIR, methods=(), method="fedavg", rounds=0, options={})
    run(x, tmp_path / "nan")
    made = fb.load(tmp_path / "nan")
    broadcast = {part: replace(q, mean=q.mean * torch.nan) for part, q in made.parts.items()}
    progress = made.progress._replace(state=made.progress.state._replace(broadcast=broadcast))
    with pytest.raises(ValueError, match="not finite"):
        score_run(replace(made, progress=progress))
    with pytest.raises(InputError, match="at least 1"):
        evaluate(tmp_path / "nan", draws=0)


@pytest.mark.slow  # the same laws hold on the small digits above
@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("FEDBAYES_DATA"), reason="FEDBAYES_DATA is not set: no benchmark files to read")
def test_digits_are_told_from_clothing_and_noise_and_coverage_is_kept(tmp_path):
    x = replace(
        PAIR,
        data="mnist",
        partition="iid",
        partition_options={"volume": 50},
        clients=100,
        rounds=5,
        engine="stacked",
        network_options={},
        methods=(),
        method="fedavg",
        options={"lr": 0.1},
        evaluate_every=5,
    )
    run(x, tmp_path / "mnist")
    scores = evaluate(tmp_path / "mnist", ood=["fashion-mnist", "uniform-noise@2000"])["fedavg"]
    tables = scores["ood"]["tables"]
    assert tables["fashion-mnist"]["entropy"]["auroc"]["value"] > 0.55
    assert tables["uniform-noise@2000"]["msp"]["auroc"]["value"] < 0.1
    assert tables["uniform-noise@2000"]["mahalanobis"]["auroc"]["value"] > 0.99
    assert scores["conformal"]["pooled"]["coverage"] == pytest.approx(0.9, abs=0.025)  # one split: 4 standard errors
