"""Scores by site: values are those of the rows alone, errors those of independent formulas, areas scikit-learn's."""

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import average_precision_score, roc_auc_score

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.scores.by_site import Figure, Rows, SiteScores, figures, site_scores


def binary(n=300, seed=0):
    random = np.random.default_rng(seed)
    p = random.beta(1, 4, n).round(2)  # with ties
    y = (random.random(n) < p).astype(int)
    return torch.tensor(np.stack([1 - p, p], 1)), torch.tensor(y)


def test_areas_are_scikit_learns():
    probs, y = binary()
    scores = figures("classes", Rows((probs,), y))
    assert scores["auroc"].value == pytest.approx(roc_auc_score(y, probs[:, 1]), abs=1e-12)
    assert scores["aupr"].value == pytest.approx(average_precision_score(y, probs[:, 1]), abs=1e-12)


def test_errors_of_means_are_standard_errors():
    probs, y = binary(400)
    scores = figures("classes", Rows((probs,), y), resamples=400)
    nll = -probs.gather(1, y[:, None]).clamp_min(1e-12).log()[:, 0]
    assert scores["nll"].error == pytest.approx(float(nll.std() / 20), rel=0.15)
    right = (probs.argmax(1) == y).double()
    assert scores["accuracy"].error == pytest.approx(float(right.std() / 20), rel=0.15)
    # DeLong's variance of the AUROC, from the placements of either side.
    positive, negative = (probs[y == c, 1] for c in (1, 0))
    above = (positive[:, None] > negative).double() + (positive[:, None] == negative).double() / 2
    variance = above.mean(1).var() / len(positive) + above.mean(0).var() / len(negative)
    assert scores["auroc"].error == pytest.approx(float(variance.sqrt()), rel=0.15)


def test_a_site_is_scored_by_its_own_rows_alone():
    probs, y = binary(120)
    homes = [torch.arange(50), torch.arange(50, 120), torch.zeros(0, dtype=torch.int64)]
    table = site_scores("classes", Rows((probs,), y), homes, ["a", "b", "c"], resamples=10)
    alone = fb.scores.classification_scores(fb.scores.classification_sums(probs[50:], y[50:]))
    for name in ("accuracy", "nll", "brier", "ece"):
        assert table["b"][name].value == alone[name]
        assert table["b"][name].error > 0
        assert np.isnan(table["c"][name].value)
    assert table.rows == (50, 70, 0)
    nll = {site: table[site]["nll"].value for site in ("a", "b")}
    assert table.worst("nll") == max(nll, key=nll.get)
    assert table.spread("nll") == pytest.approx(abs(nll["a"] - nll["b"]))
    assert "spread" in str(table)
    with pytest.raises(InputError, match="unknown site 'd'"):
        table["d"]


def test_a_site_of_one_class_has_no_area():
    probs, y = binary(60)
    y[:20] = 0
    y[20:22] = torch.tensor([0, 1])
    homes = [torch.arange(20), torch.arange(20, 60)]
    table = site_scores("classes", Rows((probs,), y), homes, ["one", "two"], resamples=5)
    assert np.isnan(table["one"]["auroc"].value)
    assert table["two"]["auroc"].value > 0
    assert table.worst("auroc") == "two"


def test_regressions_have_errors_too():
    random = torch.Generator().manual_seed(0)
    mean, y = (torch.randn(100, 1, generator=random) for _ in range(2))
    scores = figures("real", Rows((mean, torch.ones(100, 1)), y), resamples=200)
    squares = (y - mean).square()
    se = float(squares.std() / 10 / (2 * squares.mean().sqrt()))  # of a root, by its slope
    assert scores["rmse"].error == pytest.approx(se, rel=0.2)
    assert set(scores) == {"count", "rmse", "nll", "crps", "coverage50", "coverage90"}


@pytest.mark.parametrize("method", ["feduab", "pfedbayes"])
def test_scores_of_a_run_by_site(method):
    random = np.random.default_rng(0)
    sites = [(random.normal(size=(30, 2)), random.integers(0, 2, 30)) for _ in range(3)]
    clients = fb.data.from_clients(sites, [(x[:12], y[:12]) for x, y in sites])
    run = fb.fit(torch.nn.Linear(2, 2), clients, method=fb.methods.method_named(method, {"epochs": 1}), rounds=1)
    table = run.scores(by="site")
    assert table.rows == (12, 12, 12)
    for name in ("accuracy", "nll", "ece"):
        assert table.all[name].value == pytest.approx(run.scores()[name], abs=1e-6)
    with pytest.raises(InputError, match="unknown way to score by 'client'"):
        run.scores(by="client")


def test_in_a_narrow_terminal_errors_go_below_and_nothing_is_cut() -> None:
    names = ("accuracy", "nll", "brier", "ece", "mce", "auroc", "aupr")
    values = np.full((2, 7), 0.123)
    found = SiteScores(("va", "switzerland"), (40, 25), names, values, values, dict.fromkeys(names, Figure(0.5, 0.25)))
    text = {}
    for width in (80, 140):
        console = Console(width=width, no_color=True)
        with console.capture() as caught:
            console.print(found.table(width))
        text[width] = caught.get()
    assert text[140].count("0.123 ±.123") == 14
    assert all("switzerland" in shown and "…" not in shown for shown in text.values())
    assert "0.123 ±.123" not in text[80]
    assert text[80].count("±.123") == 14


def test_errors_of_many_survival_rows_follow_from_resamples_of_some(monkeypatch):
    random = np.random.default_rng(0)
    x = random.normal(size=240)
    event, lost = random.exponential(np.exp(-x)), random.exponential(2.0, 240)
    y = torch.tensor(np.column_stack([np.minimum(event, lost), event <= lost]))
    times = torch.tensor([0.5, 1.0, 1.5])
    rows = Rows((torch.exp(-torch.tensor(x).exp()[:, None] * times),), y, {"times": times})
    each = {}
    for most in (80, 240):
        monkeypatch.setattr("fedbayes.scores.by_site.PAIRED", most)
        each[most] = figures("survival", rows, resamples=200)
    for name in ("concordance", "nll", "brier"):
        assert each[80][name].error == pytest.approx(each[240][name].error, rel=0.25)
