"""FedPPD's cells: the published figures stand where they were printed, and every experiment can be built."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from fedbayes import data as fb_data
from fedbayes.errors import InputError
from fedbayes.experiments.build import method_of
from fedbayes.experiments.experiment import Experiment, from_toml, to_toml
from fedbayes.methods import fedavg
from fedbayes.papers import fedppd, figures
from fedbayes.papers.cells import Cell, Request, Table
from fedbayes.papers.fedppd import TABLES
from fedbayes.papers.rows import rows_of
from fedbayes.papers.seeds import SEEDS
from fedbayes.runs.active import Active
from fedbayes.training.fit import fit

PLACES = [
    ("fedppd-1", "MNIST", "FedAvg", "accuracy", 0.9774),
    ("fedppd-1", "MNIST", "FedPPD + Distill", "accuracy", 0.9808),
    ("fedppd-1", "CIFAR-10", "FedBE", "accuracy", 0.6018),
    ("fedppd-1", "CIFAR-10", "FedPA", "accuracy", 0.5088),
    ("fedppd-2", "CIFAR-10", "FedPPD", "ece", 0.0431),
    ("fedppd-2", "CIFAR-10", "FedAvg + SWAG", "mce", 0.2316),
    ("fedppd-2", "CIFAR-10", "FedPPD + Distill", "brier", 0.49),
    ("fedppd-3", "CIFAR-10", "FedPPD + Distill", "auroc", 0.765),
    ("fedppd-4", "CIFAR-10", "FedBE", "misclassified", 0.753),
    ("fedppd-suppl-4", "CIFAR-10", "FedPPD", "accuracy", 0.7491),
]


def test_a_servers_step_is_that_of_a_loss_which_is_a_mean_over_classes():
    """lr (grad of the sum + decay w), with their rate over C and their decay times C, is their step over C classes."""
    for data, rate in (("MNIST", 0.0010), ("CIFAR-10", 0.0015), ("CIFAR-100", 0.0015), ("FEMNIST", 0.0010)):
        options = fedppd.experiment_of(data, "FedBE").options
        classes = {"MNIST": 10, "CIFAR-10": 10, "CIFAR-100": 100, "FEMNIST": 52}[data]
        assert options["server_lr"] * classes == pytest.approx(rate)
        assert options["server_lr"] * options["server_weight_decay"] == pytest.approx(rate * 1e-4)
    distill = fedppd.experiment_of("CIFAR-10", "FedPPD + Distill").options
    assert distill["server_student_lr"] * 10 == pytest.approx(0.0025)


@pytest.mark.parametrize(("table", "group", "row", "metric", "figure"), PLACES)
def test_published_figures_stand_in_their_place(table, group, row, metric, figure):
    (cell,) = [c for c in TABLES[table].cells() if (c.group, c.row) == (group, row)]
    assert cell.published[metric] == pytest.approx(figure)


@pytest.mark.parametrize("table", TABLES)
def test_every_cell_has_a_method_and_comes_back_from_toml(table):
    published = TABLES[table]
    assert {cell.group for cell in published.cells()} <= {"MNIST", "CIFAR-10"}  # the others are absent
    for cell in published.cells():
        for scale in published.scales.values():
            x = scale(cell.experiment)
            method_of(x)
            assert from_toml(to_toml(x)) == x
        for metric in cell.published:
            assert metric in published.metrics


def test_fedppd_is_as_published_and_t_1_stands_beside_it():
    cold, warm = (fedppd.experiment_of("MNIST", row).options for row in ("FedPPD", "FedPPD at T = 1"))
    assert (cold["temperature"], cold["cooling"]) == (4.0, "1/n")
    assert "temperature" not in warm  # the method's own: the posterior
    assert cold["student"] == "fedppd_mnist_student"


def test_every_baseline_stands_there_with_the_students_network_too():
    baselines = [row for row in fedppd.ROWS if not row.startswith("FedPPD") and "student" not in row]
    for row in baselines:
        own, wide = (fedppd.experiment_of("MNIST", name) for name in (row, f"{row} with the student's network"))
        assert f"{row} with the student's network" in fedppd.ROWS
        assert wide == replace(own, network="fedppd_mnist_student")


def _digits_run():
    data = fb_data.load("digits")
    clients = data.split(fb_data.partition.iid(), clients=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return fit(net, clients, method=fedavg(epochs=2), rounds=2)


def test_the_measure_of_what_is_known(monkeypatch):
    run = _digits_run()
    inside = run.task.clients.data.test_x
    noise = torch.rand(500, *inside.shape[1:], generator=torch.Generator().manual_seed(0)) * 30
    monkeypatch.setattr(fedppd, "_svhn", lambda: noise.to(inside.dtype))
    found = fedppd.known_and_unknown(run)

    p = run.predict(inside)
    wrong = (p.probs.argmax(-1) != run.task.clients.data.test_y).numpy()
    assert found["misclassified"] == pytest.approx(roc_auc_score(wrong, p.entropy.numpy()))
    far = run.predict(noise.to(inside.dtype)).entropy.numpy()
    truth = np.r_[np.zeros(len(wrong)), np.ones(len(far))]
    whole = roc_auc_score(truth, np.r_[p.entropy.numpy(), far])
    assert found["auroc"] == pytest.approx(whole, abs=0.03)  # five draws of as many noise images as digits


def test_the_curve_of_figure_3_is_measured_by_stages(tmp_path):
    x = Experiment(data="digits", network="linear", clients=2, rounds=1, method="fedavg", options={"epochs": 1})
    measure = fedppd.asked_for_labels(x, Active("entropy", 100, 100, stages=2))
    cell = Cell("FedAvg", "active", x, {}, measure, "digits")
    table = Table("t", lambda: [cell], {"area": "measured.area"}, {"paper": lambda e: e}, "t", SEEDS)
    SEEDS.train(table, tmp_path, Request())
    (row,) = rows_of("t", table, tmp_path, "paper")
    assert 0 < row["ours"] < 1


def test_figure_2_is_drawn_from_the_cells_that_are_there(tmp_path):
    with pytest.raises(InputError, match="no cell of non-IID has been run yet: fedbayes table fedppd-fig-2"):
        figures.draw("fedppd-2", tmp_path)
    folder = tmp_path / "cells/paper"
    folder.mkdir(parents=True)
    for row, accuracy in (("fedavg", 0.5), ("fedppd", 0.6)):
        curve = [{"round": r, "accuracy": accuracy + r / 1000, "nll": 1.0 - r / 1000} for r in (10, 20)]
        content = {"experiment": {"rounds": 20}, "rounds": 20, "curve": curve}
        (folder / f"fedppd-cifar-10-{row}-non-iid-r20-s0.json").write_text(json.dumps(content))
    svg, png = figures.draw("fedppd-2", tmp_path)
    assert (svg.name, png.name) == ("fedppd-figure-2.svg", "fedppd-figure-2.png")
    text = svg.read_text()
    assert "FedPPD" in text
    assert "FedBE" not in text
