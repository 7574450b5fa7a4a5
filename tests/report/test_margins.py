"""The noise of closing scores: against the library's own scores, scikit-learn, and cases whose answer is known."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, confusion_matrix, roc_auc_score

from fedbayes.experiments.experiment import Experiment
from fedbayes.report.confusions import by_class, confusions
from fedbayes.report.material import Material, Shown
from fedbayes.runs.margins import (
    Margin,
    Measured,
    between_rounds,
    margins,
    over_last_rounds,
    resampled,
    scores_under,
    within,
)
from fedbayes.runs.numbers import confusion
from fedbayes.runs.records import RunFiles
from fedbayes.scores.by_site import Rows, figures

NONE = np.zeros(0)


def made_up(kind: str, rows: int = 300, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    if kind == "real":
        mean, parts = random.normal(size=(rows, 2)), random.uniform(0.2, 1, (2, rows, 2))
        labels = mean + random.normal(size=mean.shape)
        return {"kind": np.array(kind), "mean": mean, "aleatoric": parts[0], "epistemic": parts[1], "labels": labels}
    if kind == "survival":
        hazard, lost = random.exponential(size=(rows, 1)), random.exponential(2.0, rows).round(1)
        event, times = random.exponential(1 / hazard[:, 0]).round(1), np.array([0.3, 0.8, 2.0], np.float32)
        curves = np.exp(-times * hazard * random.uniform(0.5, 2, (rows, 1))).astype(np.float32)
        labels = np.column_stack([np.minimum(event, lost), event <= lost])  # times are tied
        return {"kind": np.array(kind), "survival": curves, "times": times, "labels": labels}
    if kind == "labels":
        probs = random.random((rows, 3))
        return {"kind": np.array(kind), "probs": probs, "labels": (random.random(probs.shape) < probs).astype(float)}
    probs = random.dirichlet(np.ones(2 if kind == "two classes" else 4) * 0.5, rows).round(2)  # some are tied
    probs /= probs.sum(1, keepdims=True)
    labels = np.array([random.choice(len(p), p=p) for p in probs])
    return {"kind": np.array("classes"), "probs": probs, "labels": labels}


@pytest.mark.parametrize("kind", ["classes", "two classes", "labels", "real", "survival"])
def test_scores_under_equal_weights_are_the_scores_and_their_errors_those_of_the_bootstrap(kind):
    arrays = made_up(kind)
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items() if array.ndim}
    predicted = {
        "real": lambda: (tensors["mean"], tensors["aleatoric"] + tensors["epistemic"]),
        "survival": lambda: (tensors["survival"],),
    }.get(kind, lambda: (tensors["probs"],))()
    options = {"times": tensors["times"]} if kind == "survival" else {}
    theirs = figures(str(arrays["kind"]), Rows(predicted, tensors["labels"], options), resamples=400)
    whole = scores_under(arrays, np.full((1, 300), 1 / 300))
    drawn = resampled(arrays)
    assert {"classes": 5, "two classes": 7, "labels": 6, "real": 3, "survival": 3}[kind] == len(whole)
    for name, value in whole.items():
        if name in theirs:  # there is no MCE of several labels
            assert value[0] == pytest.approx(theirs[name].value, rel=1e-9)
            if name != "mce":  # the largest of few rows' gaps: too wild for this comparison
                assert drawn[name].std() == pytest.approx(theirs[name].error, rel=0.25)


def test_ranks_under_weights_are_those_of_scikit_learn():
    arrays, weights = made_up("two classes"), np.random.default_rng(1).random((3, 300))
    ours = scores_under(arrays, weights / weights.sum(1, keepdims=True))
    truth, second = arrays["labels"], arrays["probs"][:, 1]
    for name, theirs in (("auroc", roc_auc_score), ("aupr", average_precision_score)):
        np.testing.assert_allclose(ours[name], [theirs(truth, second, sample_weight=w) for w in weights])
    assert "auroc" not in scores_under({**arrays, "labels": np.zeros_like(truth)}, weights)


def test_the_confusion_matrix_is_that_of_scikit_learn():
    arrays = made_up("classes")
    ours = confusion(arrays)
    assert np.array_equal(ours, confusion_matrix(arrays["labels"], arrays["probs"].argmax(1), labels=range(4)))


def test_the_area_of_each_class_against_the_others_is_that_of_scikit_learn():
    arrays = made_up("classes")
    areas = [area for _, area in by_class(Shown(0, "a", "c0", "", run_of([0.5], arrays), {}, {})).values()]
    theirs = roc_auc_score(arrays["labels"], arrays["probs"], multi_class="ovr", average=None)
    np.testing.assert_allclose(areas, theirs)


@pytest.mark.filterwarnings("error")
def test_test_rows_of_one_class_have_a_matrix_and_no_curve():
    arrays = made_up("classes")
    of_one = {**arrays, "labels": np.zeros_like(arrays["labels"])}
    runs = [Shown(i, "a", "c0", "", run_of([0.5], some), {}, {}) for i, some in enumerate((arrays, of_one))]
    both, alone = (confusions(Material(some, [], [])) for some in (runs, runs[1:]))
    assert [type(piece).__name__ for piece in both.body] == ["Figure", "Figure", "Figure", "Card"]
    assert [type(piece).__name__ for piece in alone.body] == ["Figure", "Card"]


def test_movement_between_rounds_is_found_beside_a_trend():
    random = np.random.default_rng(0)
    noise = 0.05 * random.normal(size=4000)
    assert between_rounds(noise) == pytest.approx(0.05, rel=0.1)
    assert between_rounds(noise + np.linspace(0, 5, 4000)) == pytest.approx(0.05, rel=0.1)
    assert between_rounds([0.1, 0.9]) == 0


def run_of(accuracies: list[float], arrays: dict[str, np.ndarray], seconds: tuple[float, ...] = ()) -> RunFiles:
    records = [{"round": i + 1, "test": {"accuracy": a}} for i, a in enumerate(accuracies)]
    for record, time in zip(records, seconds):
        record["seconds"] = time
    return RunFiles("a", Path("a"), Experiment(), records, arrays)


def test_a_lucky_last_round_is_no_winner_but_a_better_run_is():
    arrays = made_up("classes")
    wild = [0.6, 0.8] * 20 + [0.85]
    better = [0.84] * 41
    runs = [run_of(wild, arrays), run_of(better, arrays)]
    noise = [margins(run) for run in runs]
    last = [(run.scores["accuracy"], n["accuracy"]) for run, n in zip(runs, noise)]
    assert within(last, 0.85) == [True, True]
    means = [over_last_rounds(run, n)["accuracy"] for run, n in zip(runs, noise)]
    assert within(means, max(value for value, _ in means)) == [False, True]


def test_differences_are_compared_in_pairs_of_rows():
    random = np.random.default_rng(0)
    rows, labels = random.normal(0.8, 0.05, 200), np.arange(3)
    near = rows + 0.001 * random.normal(size=200)
    one, two = Margin(0.0, rows, labels), Margin(0.0, near, labels)
    assert one.apart(two) == pytest.approx(0.001, rel=0.2)
    assert one.apart(two._replace(labels=labels + 1)) == pytest.approx(0.05 * 2**0.5, rel=0.2)
    assert within([(0.80, one), (0.79, two), None], 0.80) == [True, False, False]
    assert Margin(0.3, NONE, NONE, measured=Measured(0.4, 0.0)).error == pytest.approx(0.5)


def test_runs_whose_draws_could_have_been_others_are_not_told_apart():
    rows, labels = np.random.default_rng(0).normal(0.9, 0.01, 200), np.arange(3)
    one, two = (Margin(0.0, rows + shift, labels, Measured(0.01, 0.02)) for shift in (0.0, 0.01))
    assert one.error == pytest.approx(0.05**0.5 / 10)
    assert one.apart(two) == pytest.approx(0.02 * 2**0.5)
    assert within([(0.90, one), (0.91, two)], 0.91) == [True, True]
    exact = [m._replace(measured=Measured(0.01, 0.0)) for m in (one, two)]
    assert within([(0.90, exact[0]), (0.91, exact[1])], 0.91) == [False, True]


def test_start_up_is_what_the_first_round_took_beyond_a_usual_one():
    run = run_of([0.1, 0.2, 0.3, 0.4], {}, (5.0, 1.0, 1.2, 1.1))
    assert run.start == pytest.approx(3.9)
    assert run_of([0.1, 0.2], {}, (5.0, 1.0)).start == 0
    assert run_of([0.1] * 3, {}, (0.5, 1.0, 1.0)).start == 0


def test_survival_under_weights_is_that_of_rows_taken_so_often():
    arrays, counts = made_up("survival", rows=40), np.random.default_rng(1).integers(0, 4, 40)
    again = {
        name: np.repeat(array, counts, 0) if len(array) == 40 else array for name, array in arrays.items() if array.ndim
    }
    ours = scores_under(arrays, counts[None] / counts.sum())
    theirs = scores_under(again | {"kind": arrays["kind"]}, np.full((1, counts.sum()), 1 / counts.sum()))
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-6)


def test_survival_without_censoring_or_without_events():
    arrays = made_up("survival", rows=30)
    time, one = arrays["labels"][:, 0], np.full((1, 30), 1 / 30)
    seen = scores_under({**arrays, "labels": np.column_stack([time, np.ones(30)])}, one)
    dead = (time[:, None] > arrays["times"]).astype(float)
    by_time = ((arrays["survival"] - dead) ** 2).mean(0)
    wanted = np.trapezoid(by_time, arrays["times"]) / (arrays["times"][-1] - arrays["times"][0])
    np.testing.assert_allclose(seen["brier"], wanted, rtol=1e-5)
    assert "concordance" not in scores_under({**arrays, "labels": np.column_stack([time, np.zeros(30)])}, one)


def of_survival(arrays: dict[str, np.ndarray]) -> RunFiles:
    scores = {name: float(value[0]) for name, value in scores_under(arrays, np.full((1, 300), 1 / 300)).items()}
    closing = {"score_names": np.array(list(scores)), "scores": np.array(list(scores.values()))}
    return RunFiles("a", Path("a"), Experiment(), [], arrays | closing)


def test_runs_of_survival_on_the_same_rows_are_compared_in_pairs():
    arrays = made_up("survival")
    near = of_survival({**arrays, "survival": arrays["survival"] ** 1.3})  # as good an order, worse chances
    one, other = margins(of_survival(arrays)), margins(near)
    for score in ("nll", "brier"):
        assert one[score].apart(other[score]) < 0.5 * np.hypot(one[score].error, other[score].error)
    assert one["concordance"].error > 0.01
    assert one["concordance"].apart(other["concordance"]) < 1e-3
    strangers = margins(of_survival(made_up("survival", seed=1)))
    apart = one["nll"].apart(strangers["nll"])
    assert apart == pytest.approx(np.hypot(one["nll"].error, strangers["nll"].error))


def test_scores_that_some_resamples_lack_have_the_errors_that_scores_by_site_have():
    names, errors = np.array(["count", "concordance", "nll"]), np.array([0.0, 0.04, 0.1])
    arrays = {"kind": np.array("survival"), "score_names": names, "scores": np.array([95.0, 0.73, 1.5])}
    run = RunFiles("a", Path("a"), Experiment(), [], {**arrays, "score_errors": errors})
    one, other = margins(run), margins(run)
    assert (one["concordance"].error, one["nll"].error) == (0.04, 0.1)
    assert within([(0.728, one["concordance"]), (0.727, other["concordance"])], 0.728) == [True, True]
    measured = {"concordance": Measured(0.05, 0.0)}  # by `fedbayes evaluate`
    assert margins(run, measured)["concordance"].error == 0.05
