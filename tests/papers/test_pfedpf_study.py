"""pFedPF's tables and figure: printed figures that no classifier can have, ours that all can, and Theorem 2."""

import json
from pathlib import Path

import pytest
import torch

from fedbayes.evaluate import ood
from fedbayes.experiments.experiment import experiment_of, table_of
from fedbayes.papers import pfedpf as printed
from fedbayes.papers.pfedpf_figures import SCALES, confidence_figure, confidences, digits_run
from fedbayes.papers.refinement import outlying, personal_figures, train_seconds, under
from fedbayes.papers.seeds import file_name

QUICK = {"refine": "flow", "flow_length": 3, "flow_epochs": 2, "flow_batch": 64}
ELSEWHERE = {"NOISE": "uniform-noise@2000", "far": "train@50"}


@pytest.fixture(scope="module")
def run():
    return digits_run(rounds=6, clients=4)


def test_published_pairs_of_auroc_and_fpr95_that_no_roc_has():
    """.95 (1 - FPR95) <= AUROC <= 1 - .05 FPR95."""
    found = []
    for pair, row in printed.TABLE_3.items():
        for method in ("FedAvg", "FedAvg-pf", "FedPer", "FedPer-pf", "LG-FedAvg", "LG-FedAvg-pf"):
            if outlying([(row[f"{method} auroc"], row[f"{method} fpr95"])]):
                found.append((pair, method))
    assert found == [
        ("MNIST-FMNIST", "FedAvg"),
        ("FMNIST-NOISE", "FedAvg"),
        ("CIFAR10-NOISE", "FedAvg"),
        ("CIFAR10-NOISE", "FedPer"),
        ("CIFAR10-NOISE", "LG-FedAvg"),
    ]
    areas = [(row["SVHN auroc"], row["SVHN fpr95"]) for row in printed.TABLE_1.values()]
    assert not outlying(areas)


def test_published_calibration_errors_that_no_classifier_has():
    """ECE <= NLL + error: confidence is at most 1, and 1 - p <= -log p."""
    found = [
        (data, method)
        for data in printed.DATA
        for method, row in printed.TABLE_2.items()
        if row[f"{data} ece"] > row[f"{data} nll"] + 1 - row[f"{data} accuracy"]
    ]
    assert found == [("MNIST", "FedAvg"), ("MNIST", "FedPer"), ("MNIST", "LG-FedAvg")]


def test_table_1_repeats_energys_figures_in_odins_row():
    energy, odin = printed.TABLE_1["Energy"], printed.TABLE_1["ODIN"]
    assert [name for name in energy if energy[name] == odin[name]] == [
        "SVHN aupr",
        *(f"{place} {metric}" for place in ("CIFAR100", "TEXTURE") for metric in ("fpr95", "auroc", "aupr")),
    ]


@pytest.mark.parametrize("name", printed.TABLES)
def test_a_table_names_its_metrics_and_its_experiments_can_be_read(name):
    table = printed.TABLES[name]
    files = [file_name(table.family, cell, cell.experiment) for cell in table.cells()]
    assert len(set(files)) == len(files)
    for cell in table.cells():
        assert set(cell.published) <= set(table.metrics) | set(printed.published(cell.column, cell.row)), cell.row
        for scale in table.scales.values():
            x = scale(cell.experiment)
            assert experiment_of(table_of(x)) == x
    absent = [cell for cell in table.cells() if cell.experiment.data in ("cifar100", "svhn")]
    assert not absent  # their training files are not at hand


def test_cells_of_several_tables_are_one_file():
    second, third, fourth = (printed.TABLES[f"pfedpf-{n}"].cells() for n in (2, 3, 4))
    names = [{file_name("pfedpf", cell, cell.experiment) for cell in cells} for cells in (second, third, fourth)]
    assert names[0] == names[1]
    assert names[2] < names[0]


def _obeys(figures: dict[str, float]) -> None:
    for name, area in figures.items():
        if name.endswith("auroc"):
            assert not outlying([(area, figures[name.removesuffix("auroc") + "fpr95"])]), name
        if name.endswith("ece"):
            word = name.removesuffix("ece")
            assert figures[name] <= figures[f"{word}nll"] + 1 - figures[f"{word}accuracy"] + 1e-9, name


def test_our_figures_obey_both_inequalities(run):
    figures = under(run, {"": {"refine": "none"}, "la": {"refine": "laplace"}, "pf": QUICK}, ELSEWHERE, most=100)
    assert {"accuracy", "la nll", "pf ece", "pf NOISE auroc", "la far fpr95", "far confidence"} <= set(figures)
    _obeys(figures)
    assert figures["la NOISE auroc"] > figures["NOISE auroc"] + 0.2


@pytest.mark.parametrize("path", sorted(Path("docs/results/cells").glob("*/pfedpf-*.json")), ids=lambda p: p.stem)
def test_committed_figures_obey_both_inequalities(path):
    _obeys(json.loads(path.read_text())["measured"])


def test_figures_of_a_client_are_those_of_its_personal_model(run):
    asked = run.refined("none")
    figures, scores = personal_figures(asked), asked.personal_scores()
    for name in ("accuracy", "nll", "ece"):
        assert figures[name] == pytest.approx(scores[name], rel=1e-6)


def test_other_scores_are_measured_where_a_model_has_them(run):
    figures = personal_figures(run.refined("none"), ELSEWHERE, only=printed.SCORES.values(), most=50)
    assert {"NOISE auroc", "energy NOISE auroc", "odin far aupr", "max_logit far fpr95"} <= set(figures)
    assert not any("mc_dropout" in name for name in figures)  # this network has no dropout
    _obeys(figures)


def test_a_network_that_all_clients_have_is_asked_once_about_a_set_from_elsewhere(run, monkeypatch):
    asked, scores = [], ood.scores

    def counted(run, x, **options):
        asked.append(len(x))
        return scores(run, x, **options)

    monkeypatch.setattr(ood, "scores", counted)
    clients = len(run.task.clients)
    for way, times in (("none", 1), ("laplace", clients)):
        asked.clear()
        personal_figures(run.refined(way), ELSEWHERE, most=37)
        assert asked.count(37) == times * len(ELSEWHERE)
        assert len(asked) == clients + times * len(ELSEWHERE)


def test_confidence_far_away_stays_below_one_with_a_posterior(run, tmp_path):
    """Theorem 2: the point network is certain of inputs scaled 2000 times, Laplace and the flow are not."""
    curves = confidences(run, **QUICK)
    assert curves["point"][-1] > 0.995
    for name in ("Laplace", "flow"):
        assert curves[name][-1] < 0.95
        assert abs(curves[name][-1] - curves[name][-2]) < 0.03  # a limit, not a slow way to one
    made = confidence_figure(tmp_path, curves)
    assert [path.suffix for path in made] == [".svg", ".png", ".json"]
    assert len(json.loads(made[-1].read_text())["flow"]) == len(SCALES)


def test_cost_is_a_clients_share_of_what_it_took(run):
    seconds = train_seconds(run)
    assert 0 < seconds < sum(r["seconds"] for r in run.journal)
    assert 0 < personal_figures(run.refined("laplace"))["seconds"] < 60


def test_a_flow_of_any_length_begins_where_its_base_is(run):
    still = personal_figures(run.refined(**{**QUICK, "flow_lr": 1e-12}))
    base = personal_figures(run.refined("laplace"))
    assert still["nll"] == pytest.approx(base["nll"], abs=1e-4)
    assert torch.isfinite(torch.tensor(list(base.values()))).all()
