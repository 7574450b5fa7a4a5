"""Three hospitals with files of their own, from the files to the report: as a newcomer would go."""

import csv
import re

import numpy as np
import pytest

import fedbayes as fb
from fedbayes.data import from_csv
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.export.predictions import predict_file
from fedbayes.report import write
from fedbayes.runs import journal
from fedbayes.runs.folder import run

ORDERS = {
    "aachen": ("age", "dose", "ill"),
    "basel": ("ill", "dose", "age"),
    "cadiz": ("dose", "ill", "age"),
}


def patients(rows, seed):
    """Old patients with a low dose are ill."""
    random = np.random.default_rng(seed)
    age, dose = random.normal(50, 15, rows), random.normal(1000, 300, rows)
    ill = (age - 50) / 15 - (dose - 1000) / 300 > 0
    return {"age": age, "dose": dose, "ill": np.where(ill, "yes", "no")}


def write_csv(path, table, columns):
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(columns)
        out.writerows(zip(*(table[column].tolist() for column in columns)))


def hospitals(folder):
    """The user's own data function."""
    return from_csv(folder, "ill", kind="classes", name="hospitals")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("hospitals")
    (home / "data").mkdir()
    for seed, (name, order) in enumerate(ORDERS.items()):
        write_csv(home / "data" / f"{name}.csv", patients(60 + 20 * seed, seed), order)
    experiment = Experiment(
        data="test_hospitals:hospitals",
        data_options={"folder": str(home / "data")},
        partition="natural",
        clients=3,
        network="linear",
        rounds=4,
        personal_every=4,
        dropout=0.4,
        options={"epochs": 4, "lr": 0.3},
    )
    run(experiment, home / "run")
    return home


def test_predictions_find_columns_by_name(trained, tmp_path):
    table = patients(50, 9)
    run = fb.load(trained / "run")
    x = np.stack([table[name] for name in run.task.clients.data.columns], 1)
    p = run.predict(x)
    truth = table["ill"] == "yes"
    right = np.array(run.task.clients.data.class_names)[p.probs.argmax(1)] == np.where(truth, "yes", "no")
    assert right.mean() > 0.85
    for order in (("age", "dose"), ("dose", "age"), ("ill", "dose", "age")):
        write_csv(tmp_path / "new.csv", table, order)
        arrays, _ = predict_file(trained / "run", tmp_path / "new.csv")
        np.testing.assert_allclose(arrays["probs"], p.probs.numpy(), atol=1e-5)
    rows = [f"{row[0]!r},{row[1]!r},7" for row in x.tolist()]
    (tmp_path / "year.csv").write_text("\n".join([f"{','.join(run.task.clients.data.columns)},2024", *rows]))
    np.testing.assert_allclose(
        predict_file(trained / "run", tmp_path / "year.csv")[0]["probs"], p.probs.numpy(), atol=1e-5
    )
    np.savetxt(tmp_path / "bare.csv", x, delimiter=",", fmt="%.17g")  # no names: by position
    np.testing.assert_allclose(
        predict_file(trained / "run", tmp_path / "bare.csv")[0]["probs"], p.probs.numpy(), atol=1e-5
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("age,weight\n50,1000\n", "no column 'dose'; the run was trained on"),
        ("age,dose,dose\n50,1000,3\n", "two columns 'dose'"),
        ("age,dose\n50\n", "data row 1 has 1 fields under 2 columns"),
        ("50,1000,3\n", "3 columns; an input of hospitals has 2"),
        (",1000\n50,1000\n", "data row 1 is not 2 numbers: ,1000"),
    ],
)
def test_files_that_do_not_match_are_named(trained, tmp_path, text, says):
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(InputError, match=says):
        predict_file(trained / "run", tmp_path / "new.csv")


def test_sites_have_their_names_everywhere(trained):
    run = fb.load(trained / "run")
    assert run.task.clients.names == tuple(ORDERS)
    x = run.task.clients.data.test_x
    assert run.personal("basel").predict(x).probs.equal(run.personal(1).predict(x).probs)
    with pytest.raises(InputError, match=r"unknown client 'basle': did you mean 'basel'\?"):
        run.personal("basle")
    dropped = [site for record in journal.read(trained / "run") for site in record["dropped"]]
    assert dropped
    assert set(dropped) <= set(ORDERS)
    page = write([trained / "run"], trained / "report.html").read_text()
    for name in ORDERS:
        assert re.search(rf"<th scope=row>{name}</th>", page)
