"""FedAG's tables: cells over folds are trained once, rows say how they were made, pages hold ours beside theirs."""

import json
import os

import pytest
import torch

import fedbayes as fb
from fedbayes.data import from_arrays
from fedbayes.errors import InputError
from fedbayes.papers import fedag, folds
from fedbayes.papers.cells import Request
from fedbayes.papers.fedag import TABLES
from fedbayes.papers.tables import run_published


def some_folds(count: int = 2) -> list[fb.data.Dataset]:
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        x = torch.randn(70, 3, generator=random)
        y = 5 * x.sum(1, keepdim=True).sin() + 20 + 0.5 * torch.randn(70, 1, generator=random)
        made.append(from_arrays(x[:60], y[:60], x[60:], y[60:], kind="real", standardise=True).as_seen())
    return made


@pytest.mark.parametrize("kind", ["blr", "fedag_linear", "fedag_network"])
def test_every_row_of_a_cell_has_all_scores_of_every_fold(kind):
    made = folds.CELLS[kind][0](some_folds(), "made")
    assert tuple(made) == folds.CELLS[kind][1]
    for scores in made.values():
        assert len(scores) == 2
        assert set(scores[0]) == {"nll", "rmse", "sharpness", "crps", "coverage50", "coverage90"}
        assert all(fold["rmse"] < 8 for fold in scores)  # in original units, where the targets have deviation 3.5


@pytest.mark.parametrize("kind", ["vi", "deep_ensemble", "feduab"])
def test_the_central_methods_and_feduab_give_their_rows(kind, monkeypatch):
    for name in ("fedvi", "fedavg", "feduab"):
        make = getattr(folds, name)
        monkeypatch.setattr(folds, name, lambda make=make, **options: make(**{**options, "epochs": 2}))
    monkeypatch.setattr(folds, "ROUNDS", 1)
    made = folds.CELLS[kind][0](some_folds(1), "made")
    assert tuple(made) == folds.CELLS[kind][1]
    assert all(torch.isfinite(torch.tensor(v)) for scores in made.values() for v in scores[0].values())


def test_an_ensemble_is_a_mixture_with_the_members_own_variances():
    like = folds.mean_variance()
    output, y = torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([[0.5], [4.0]])
    mean, variance = like.moments(output, {})
    expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(like.log_prob(output, y, {}), expected)
    torch.testing.assert_close(variance[:, 0], torch.nn.functional.softplus(output[:, 1]) + 1e-6)


@pytest.fixture
def calls(monkeypatch):
    seen = []

    def cell(kind, name, count=None, device="cpu"):
        seen.append((kind, name, count))
        scores = {"nll": 2.0, "rmse": 3.0, "sharpness": 1.0, "crps": 1.0, "coverage50": 0.5, "coverage90": 0.9}
        return {row: [scores, {**scores, "nll": 4.0}] for row in folds.CELLS[kind][1]}

    monkeypatch.setattr(fedag.folds, "cell", cell)
    return seen


def written(folder, name: str, **request) -> list[dict]:
    """The rows of a table's file after a request."""
    run_published(name, folder, Request(**request))
    end = "" if request.get("scale", "paper") == "paper" else f"-{request['scale']}"
    return json.loads((folder / f"{name}{end}.json").read_text())


def test_cells_are_trained_once_and_kept(calls, tmp_path):
    rows = written(tmp_path, "fedag-2", only=["yacht", "BLR"])
    assert calls == [("blr", "yacht", None)]
    written(tmp_path, "fedag-2", only=["yacht", "BLR", "DE"])
    assert calls == [("blr", "yacht", None), ("deep_ensemble", "yacht", None)]
    written(tmp_path, "fedag-3", only=["yacht", "BLR"])
    assert len(calls) == 2
    row, other = rows
    assert (row["row"], row["column"], other["column"]) == ("yacht", "BLR", "BLR by evidence")
    assert (row["ours"], row["error"], row["published"], row["published_error"]) == (3.0, 1.0, 3.63, 0.05)
    assert (row["seeds"], row["rounds"], row["test_draws"], row["coverage90"]) == (2, 1, 10, 0.9)
    assert (other["published"], other["published_error"]) == (None, None)


def test_the_page_has_two_digits_and_the_share_of_targets_in_intervals(calls, tmp_path):
    written(tmp_path, "fedag-2", only=["yacht", "BLR"])
    text = (tmp_path / "fedag-2.md").read_text()
    assert "| set | BLR | BLR by evidence |" in text
    assert "| yacht | 3.00 ± 1.00 / 3.63 (-0.63) | 3.00 ± 1.00 |" in text
    assert "| yacht | 50 / 90 | 50 / 90 |" in text
    page = (tmp_path / "fedag-2.html").read_text()
    assert "3.00 <small>± 1.00</small><br><small>3.63 <span class=good>-0.63</span></small>" in page
    assert "<td>50 / 90</td>" in page
    written(tmp_path, "fedag-3", only=["yacht", "BLR"])
    assert "50 / 90" not in (tmp_path / "fedag-3.md").read_text()


def test_only_printed_methods_are_trained_unless_others_are_named(calls, tmp_path):
    written(tmp_path, "fedag-4", only=["yacht"])
    assert calls == [("fedag_network", "yacht", None), ("deep_ensemble", "yacht", None)]
    written(tmp_path, "fedag-4", only=["yacht", "FedUAB"])
    assert calls[2:] == [("feduab", "yacht", None)]


def test_a_small_table_has_files_of_its_own(calls, tmp_path):
    written(tmp_path, "fedag-4", only=["boston", "DE"], scale="small")
    assert calls == [("deep_ensemble", "boston", 2)]
    assert (tmp_path / "fedag-4-small.md").exists()


def test_nothing_is_trained_where_only_pages_are_wanted(calls, tmp_path):
    with pytest.raises(InputError, match="no cell of fedag-2 has been run"):
        run_published("fedag-2", tmp_path, Request(), train=False)
    assert calls == []


def test_a_wrong_set_is_answered_with_those_there_are(calls, tmp_path):
    with pytest.raises(InputError, match="yacht"):
        run_published("fedag-2", tmp_path, Request(only=["yatch"]))


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (Request(changes={"rounds": 3}), "rounds"),
        (Request(seeds=(0, 1, 2)), "seeds"),
        (Request(keep=True), "keep"),
    ],
)
def test_a_table_over_folds_refuses_what_it_would_not_heed(calls, tmp_path, request_, name):
    with pytest.raises(InputError, match=f"{name}: a table over folds"):
        run_published("fedag-2", tmp_path, request_)
    assert calls == []


def test_published_figures_are_read_as_printed():
    places = {(name, c.row, c.column): c.published for name in TABLES for c in TABLES[name].cells()}
    assert places["fedag-2", "naval", "FedAG network"] == {"nll": -3.21, "error": 0.01}
    assert places["fedag-3", "yacht", "DE"] == {"rmse": 1.58, "error": 0.48}
    assert places["fedag-4", "power", "FedAG network"] == {"sharpness": 4.30}
    assert all(len({c.row for c in table.cells()}) == 9 for table in TABLES.values())


@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("FEDBAYES_DATA"), reason="FEDBAYES_DATA is not set: no benchmark files to read")
def test_fedag_on_yacht_is_as_good_as_published():
    scores = folds.cell("fedag_network", "yacht", 3)["FedAG network"]
    assert sum(fold["nll"] for fold in scores) / 3 < 1.98
    assert 0.8 < sum(fold["coverage90"] for fold in scores) / 3 <= 1
