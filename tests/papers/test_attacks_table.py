"""The table of attacks: its cells, what it says of them in sentences, and its heat map."""

import json
from dataclasses import replace

from fedbayes.experiments.build import method_of
from fedbayes.papers import attacks
from fedbayes.papers.cells import Request
from fedbayes.papers.tables import TABLES, run_published
from fedbayes.training.settings import ATTACKS


def row(group: str, name: str, column: str, accuracy: float, nll: float) -> list[dict[str, object]]:
    place = {"group": group, "row": name, "column": column}
    return [{**place, "metric": metric, "ours": ours} for metric, ours in (("accuracy", accuracy), ("nll", nll))]


ROWS = [
    *row("FedAvg", "plain", "none", 0.95, 0.2),
    *row("FedAvg", "plain", "noise", 0.5, 2.0),
    *row("FedAvg", "plain", "mimic", 0.945, 0.22),
    *row("FedAvg", "median", "none", 0.93, 0.25),
    *row("FedAvg", "median", "noise", 0.92, 0.26),
    *row("FedAvg", "median", "mimic", 0.91, 0.24),
    *row("FedAvg", "bounded", "none", 0.95, 0.2),
    *row("FedAvg", "bounded", "noise", 0.6, 0.3),
    *row("FedAvg", "bounded", "mimic", 0.95, 0.2),
]


def test_sentences_are_read_off_the_rows():
    plain, best, held, each, *missing = attacks.findings(ROWS)
    assert each == (
        "FedAvg: with the best defence for each attack, the worst is noise, 1.00 points less and +0.010 of NLL under "
        "median; the most of NLL is +0.010, by noise under median."
    )
    assert held == (
        "FedAvg: attacks, of 2, that cost less than one point and .05 of NLL: plain 1, median 0, bounded 1."
    )
    assert missing[0] == "FedAvg Dirichlet .3: not run."
    begun = attacks.missing([{**ROWS[0], "group": "FedAvg Dirichlet .3", "row": "plain"}])
    assert begun[0].startswith("FedAvg Dirichlet .3: not run: bounded, median,")
    assert plain == (
        "FedAvg: plain, 95.00 % and NLL 0.200 without attackers, 50.00 % under noise (45.00 points less), "
        "NLL 2.000 under noise (+1.800)."
    )
    assert best == (
        "FedAvg: the best under its worst attack is median, 93.00 % and NLL 0.250 without attackers, "
        "91.00 % under mimic (2.00 points less), NLL 0.260 under noise (+0.010); "
        "without attackers it costs 2.00 points of accuracy."
    )


def test_attacks_that_know_a_defence_are_told_apart_from_the_others():
    known = [*row("FedAvg", "median", "mimic apart", 0.7, 1.0), *row("FedAvg", "bounded", "mimic apart", 0.94, 0.2)]
    plain, best, held, each, adaptive, *_ = attacks.findings([*ROWS, *known])
    assert [plain, best, held, each] == attacks.findings(ROWS)[:4]
    assert adaptive == (
        "FedAvg: under mimic apart, whose senders know of twins, bounded has 94.00 % (1.00 points less)."
    )


def test_a_defence_that_met_some_attacks_only_is_not_called_the_best():
    rows = [r for r in ROWS if (r["row"], r["column"]) != ("bounded", "noise")]
    _, best, held, each, *_ = attacks.findings(rows)
    assert "the best under its worst attack is median" in best
    assert "bounded" not in held
    assert "under median" in each


def test_the_heat_map_has_every_number():
    picture = attacks.drawing(ROWS)
    assert picture.startswith("<svg")
    assert "nan" not in attacks.drawing(ROWS[:-2])  # a place without a cell stays empty


def test_every_attack_is_tried_on_every_defence():
    cells = attacks.cells()
    assert {cell.experiment.attack for cell in cells} == {None, *ATTACKS}
    assert len({(cell.group, cell.row, cell.column) for cell in cells}) == len(cells)
    for scale in attacks.SCALES.values():
        for experiment in {repr(cell.experiment.options): scale(cell.experiment) for cell in cells}.values():
            method_of(experiment)


def test_cells_are_trained_and_diverged_ones_have_scores_too(tmp_path, monkeypatch):
    tiny = lambda x: replace(attacks.small(x), rounds=2, evaluate_every=2)  # noqa: E731
    monkeypatch.setitem(TABLES, "attacks", TABLES["attacks"]._replace(scales={"tiny": tiny}))
    only = ["FedUAB Dirichlet .3", "plain", "none", "certain"]
    run_published("attacks", tmp_path, Request(only, "tiny"))
    rows = json.loads((tmp_path / "attacks-tiny.json").read_text())
    scores = {(r["column"], r["metric"]): r["ours"] for r in rows}
    assert scores["none", "nll"] < scores["certain", "nll"] <= attacks.WORST_NLL
    assert 0 <= scores["certain", "accuracy"] <= 1
    assert "<svg" in (tmp_path / "attacks-tiny.html").read_text()
