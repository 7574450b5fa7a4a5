"""Published tables: cells are trained once and kept, rows say how they were made, pages hold ours beside theirs."""

import json
import os

import pytest
import torch

import fedbayes as fb
from fedbayes.data import from_arrays
from fedbayes.errors import InputError
from fedbayes.papers import folds
from fedbayes.papers import regression_tables as tables
from fedbayes.papers.regression_tables import TABLES, page, run_table


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

    monkeypatch.setattr(tables.folds, "cell", cell)
    return seen


def test_cells_are_trained_once_and_kept(calls, tmp_path):
    rows = run_table("fedag-2", tmp_path, only=["yacht", "BLR"])
    assert calls == [("blr", "yacht", None)]
    run_table("fedag-2", tmp_path, only=["yacht", "BLR", "DE"])
    assert calls == [("blr", "yacht", None), ("deep_ensemble", "yacht", None)]
    run_table("fedag-3", tmp_path, only=["yacht", "BLR"])
    assert len(calls) == 2
    (row,) = [row for row in rows if row["column"] == "BLR"]
    assert (row["ours"], row["error"], row["published"], row["published_error"]) == (3.0, 1.0, 3.63, 0.05)
    assert {"table", "row", "column", "metric", "rounds", "seeds", "test_draws", "device", "commit"} <= set(row)
    assert json.loads((tmp_path / "fedag-2.json").read_text())[0]["row"] == "yacht"
    text = (tmp_path / "fedag-2.md").read_text()
    assert "3.00 ± 1.00 / 3.63 (-0.63)" in text
    assert "50 / 90" in text


def test_a_small_table_is_kept_apart(calls, tmp_path):
    run_table("fedag-4", tmp_path, only=["boston", "DE"], scale="small")
    assert calls == [("deep_ensemble", "boston", 2)]
    assert (tmp_path / "fedag-4-small.md").exists()


def test_wrong_names_are_answered(calls, tmp_path):
    with pytest.raises(InputError, match="fedag-2"):
        run_table("fedag-5", tmp_path)
    with pytest.raises(InputError, match="yacht"):
        run_table("fedag-2", tmp_path, only=["yatch"])
    with pytest.raises(InputError, match="small"):
        run_table("fedag-2", tmp_path, scale="tiny")
    with pytest.raises(InputError, match="no cell"):
        page(TABLES["fedag-2"], [])


def test_published_figures_are_read_as_printed():
    assert TABLES["fedag-2"].published["naval"]["FedAG network"] == (-3.21, 0.01)
    assert TABLES["fedag-3"].published["yacht"]["DE"] == (1.58, 0.48)
    assert TABLES["fedag-4"].published["power"]["FedAG network"] == (4.30, None)
    assert all(len(table.published) == 9 for table in TABLES.values())


@pytest.mark.data
@pytest.mark.skipif(not os.environ.get("FEDBAYES_DATA"), reason="FEDBAYES_DATA is not set: no benchmark files to read")
def test_fedag_on_yacht_is_as_good_as_published():
    scores = folds.cell("fedag_network", "yacht", 3)["FedAG network"]
    assert sum(fold["nll"] for fold in scores) / 3 < 1.98
    assert 0.8 < sum(fold["coverage90"] for fold in scores) / 3 <= 1
