"""Predictions from files: every format gives the same, flags keep 95 % of the test set, mistakes are named."""

import csv

import numpy as np
import pytest

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.evaluate.unseen import quantile
from fedbayes.experiments.experiment import Experiment
from fedbayes.export.predictions import predict_file, prediction_table
from fedbayes.runs.folder import run


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    home = tmp_path_factory.mktemp("predict") / "digits"
    run(Experiment(network="linear", clients=8, cohort=3, rounds=2, options={"epochs": 1, "test_draws": 6}), home)
    return home


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    home = tmp_path_factory.mktemp("predict") / "diabetes"
    run(Experiment(data="diabetes", network="linear", clients=4, rounds=2, options={"epochs": 1}), home)
    return home


def written(folder, x, form):
    """The inputs as a file of one form."""
    path = folder / f"x-{form}"
    flat = x.reshape(len(x), -1)
    match form:
        case "npy":
            np.save(path.with_suffix(".npy"), x)
            return path.with_suffix(".npy")
        case "big-endian":
            np.save(path.with_suffix(".npy"), x.astype(">f4"))
            return path.with_suffix(".npy")
        case "npz" | "one.npz":
            path = path.with_suffix(".npz")
            np.savez(path, **({"x": x, "y": np.zeros(3)} if form == "npz" else {"anything": x}))
            return path
        case _:
            head = ",".join(f"f{i}" for i in range(flat.shape[1])) if form == "named.csv" else ""
            path = path.with_suffix(".csv")
            np.savetxt(path, flat, delimiter=",", fmt="%.9g", header=head, comments="")
            return path


@pytest.mark.parametrize("form", ["npy", "big-endian", "npz", "one.npz", "csv", "named.csv"])
def test_every_form_of_a_file_gives_the_same(digits, tmp_path, form):
    x = fb.data.load("digits").test_x[:9].numpy()
    arrays, _ = predict_file(digits, written(tmp_path, x, form))
    np.testing.assert_allclose(arrays["probs"], fb.load(digits).predict(x).probs.numpy(), atol=1e-6)


def test_numbers_that_are_too_large_for_what_is_stored_are_refused(digits, tmp_path):
    np.save(tmp_path / "x.npy", np.full((2, 1, 8, 8), 1e300))  # finite, but not in float32
    with pytest.raises(InputError, match="too large for float32"):
        predict_file(digits, tmp_path / "x.npy")


def test_a_csv_file_holds_what_the_arrays_hold(digits, tmp_path):
    x = fb.data.load("digits").test_x[:30].numpy()
    arrays, flags = predict_file(digits, written(tmp_path, x, "npy"), tmp_path / "out.csv", ood="entropy")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    np.testing.assert_allclose([[float(r[f"p_{c}"]) for c in range(10)] for r in rows], arrays["probs"], rtol=1e-6)
    assert [int(r["class"]) for r in rows] == arrays["probs"].argmax(1).tolist()
    np.testing.assert_allclose([float(r["epistemic"]) for r in rows], arrays["epistemic"].sum(1), rtol=1e-5)
    assert [r["ood"] == "1" for r in rows] == flags.outside.tolist()


def test_a_row_of_several_labels_has_those_above_one_half(tmp_path, monkeypatch):
    (tmp_path / "signs.py").write_text(
        "import torch, fedbayes as fb\n"
        "def signs():\n"
        "    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))\n"
        "    return fb.data.from_arrays(x, x > 0, x, x > 0, kind='labels')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    x = Experiment(data="signs:signs", network="linear", method="fedavg", clients=2, rounds=30, options={"lr": 0.5})
    run(x, tmp_path / "run")
    source = written(tmp_path, np.array([[5.0, -5, 5], [-5, -5, -5]]), "csv")
    arrays, _ = predict_file(tmp_path / "run", source, tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["labels"] for row in rows] == ["0|2", ""]
    assert "class" not in rows[0]
    shown = prediction_table(arrays)
    assert [column.header for column in shown.columns] == ["row", "labels", "aleatoric", "epistemic"]
    both, none = shown.columns[1].cells
    assert both.startswith("0 ")
    assert ", 2 " in both
    assert none == "none"


@pytest.mark.parametrize("measure", ["entropy", "epistemic", "distance"])
def test_the_threshold_keeps_95_percent_of_the_test_set(digits, tmp_path, measure):
    x = fb.data.load("digits").test_x.numpy()
    _, flags = predict_file(digits, written(tmp_path, x, "npy"), tmp_path / "out.npz", ood=measure)
    kept = 1 - flags.outside.mean()
    assert 0.95 <= kept < 0.95 + 2 / len(x)
    with np.load(tmp_path / "out.npz") as file:
        np.testing.assert_array_equal(file["ood"], flags.outside)
        assert file["ood_measure"].tolist() == [measure]
        assert file["ood_threshold"].tolist() == [*flags.thresholds.values()]


def test_inputs_sixteen_times_too_large_and_empty_ones_are_flagged(digits, tmp_path):
    x = fb.data.load("digits").test_x.numpy()
    for strange in (16 * x, 0 * x):  # a network is certain of the first, and the second lie near the middle
        _, flags = predict_file(digits, written(tmp_path, strange, "npy"), ood="usual")
        assert list(flags.thresholds) == ["distance", "entropy"]
        assert flags.outside.mean() > 0.95
    _, flags = predict_file(digits, written(tmp_path, x, "npy"), ood="usual")
    assert flags.outside.mean() <= 0.05
    assert "false alarms: 5% of rows" in str(flags)


def test_the_rate_of_false_alarms_holds_for_rows_that_set_no_threshold():
    drawn = np.random.default_rng(0).normal(size=(2000, 40))
    beyond = [row[39] > quantile(row[:39], 0.05) for row in drawn]
    assert np.mean(beyond) == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / 2000) ** 0.5)
    with pytest.raises(InputError, match=r"18 test rows are too few for a rate of 0\.05; at least 19"):
        quantile(drawn[0, :18], 0.05)


def test_tables_are_given_in_their_own_units(table, tmp_path):
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    rows = np.arange(len(y)) % 5 == 4  # the test rows of this set
    arrays, flags = predict_file(table, written(tmp_path, x[rows], "csv"), tmp_path / "out.csv", ood="epistemic")
    ours = fb.load(table)
    expected = ours.predict(ours.task.clients.data.test_x)
    np.testing.assert_allclose(arrays["mean"], expected.mean.numpy(), rtol=1e-4)
    assert "mean_0" in (tmp_path / "out.csv").read_text().splitlines()[0]
    assert 0 < flags.outside.mean() <= 0.051


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,3\n", "3 columns; an input of digits has 64"),
        ("a,b\n", "no rows of numbers"),
        ("1,2\n3\n", "data row 2 is not 2 numbers"),
        ("1,2\n3,x\n", "data row 2"),
        (",".join(["", *"3" * 63]) + "\n" + ",".join("3" * 64), "data row 1 is not 64 numbers: ,3,3"),
        ("," * 63 + "\n" + ",".join("3" * 64), "data row 1 is not 64 numbers"),
    ],
)
def test_a_csv_file_that_does_not_fit_is_named(digits, tmp_path, text, words):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        predict_file(digits, tmp_path / "x.csv")


def test_other_mistakes_are_named(digits, table, tmp_path):
    x = fb.data.load("digits").test_x[:3].numpy()
    path = written(tmp_path, x, "npy")
    with pytest.raises(InputError, match=r"must end in \.npz or \.csv"):
        predict_file(digits, path, tmp_path / "out.txt")
    with pytest.raises(InputError, match="there are distance, entropy, epistemic, usual"):
        predict_file(digits, path, ood="mahalanobis")
    with pytest.raises(InputError, match="flagged by epistemic"):
        predict_file(table, written(tmp_path, np.zeros((2, 10)), "npy"), ood="entropy")
    np.savez(tmp_path / "two.npz", a=x, b=x)
    with pytest.raises(InputError, match="name the array of inputs x"):
        predict_file(digits, tmp_path / "two.npz")


def test_a_point_estimate_has_no_epistemic_part_to_flag_by(tmp_path):
    run(Experiment(method="fedavg", network="linear", clients=4, rounds=1, options={"epochs": 1}), tmp_path / "run")
    path = written(tmp_path, fb.data.load("digits").test_x[:3].numpy(), "npy")
    with pytest.raises(InputError, match="point estimate: use distance"):
        predict_file(tmp_path / "run", path, ood="epistemic")
