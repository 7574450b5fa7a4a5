"""Bad input to any direct score: an error that names the quantity, never a silent NaN."""

import math

import pytest
import torch

from fedbayes import scores

NAN = torch.nan
PROBS, LABELS = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([0, 1])
BY_CLASS = [scores.accuracy, scores.nll, scores.brier, scores.ece, scores.mce, scores.classwise_ece, scores.reliability]
BY_LABEL = [scores.multilabel_accuracy, scores.exact_match, scores.multilabel_nll, scores.multilabel_brier]
RANKING = [scores.auroc, scores.aupr, scores.aupr_in, scores.fpr95]
REGRESSION = [scores.rmse, scores.normal_nll, scores.crps, scores.sharpness, scores.coverage]


@pytest.mark.parametrize("score", BY_CLASS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.empty(0, 2), torch.empty(0, dtype=torch.long), "probs is empty"),
        (torch.tensor([[NAN, 1.0], [0.5, 0.5]]), LABELS, "probs must be finite: 1 of 4"),
        (torch.tensor([[3.0, -2.0], [0.5, 0.5]]), LABELS, "logits"),
        (torch.tensor([[0.2, 0.2], [0.5, 0.5]]), LABELS, "sum to one"),
        (PROBS[:, :1], LABELS, "two classes"),
        (PROBS[:, 0], LABELS, "probs must be"),
        (PROBS.expand(3, 2, 2), LABELS, "Average the draws"),
        (PROBS, torch.tensor([0, 2]), r"labels must lie in 0..1: 1 of 2"),
        (PROBS, torch.tensor([-1, 0]), r"first: -1"),
        (PROBS, LABELS.float(), "labels must be integers"),
        (PROBS, torch.eye(2).long(), "one-hot"),
        (PROBS, LABELS[:1], r"labels must be \[2\]"),
    ],
)
def test_class_scores_refuse(score, probs, labels, message):
    with pytest.raises(ValueError, match=message):
        score(probs, labels)


@pytest.mark.parametrize("score", [*BY_LABEL, scores.multilabel_ece], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (torch.empty(0, 2), torch.empty(0, 2), "probs is empty"),
        (torch.full((2, 2), NAN), torch.zeros(2, 2), "probs must be finite"),
        (torch.full((2, 2), 1.5), torch.zeros(2, 2), "logits"),
        (torch.rand(2, 3), torch.zeros(2), "targets must be"),
        (torch.rand(2, 3), torch.full((2, 3), 2), "zeros and ones"),
        (torch.rand(2), torch.zeros(2), "probs must be"),
    ],
)
def test_label_scores_refuse(score, probs, targets, message):
    with pytest.raises(ValueError, match=message):
        score(probs, targets)


@pytest.mark.parametrize("score", RANKING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("side", ["inside", "outside"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [(torch.empty(0), "is empty"), (torch.tensor([1.0, NAN]), "has 1 NaN of 2"), (torch.ones(2, 2), "must be")],
)
def test_ranking_scores_refuse(score, side, bad, message):
    with pytest.raises(ValueError, match=f"{side} {message}"):
        score(**{"inside": torch.ones(3), "outside": torch.ones(3), side: bad})


@pytest.mark.parametrize("score", REGRESSION, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("scale", torch.zeros(3), "scale must be positive: 3 of 3"),
        ("scale", torch.tensor([1.0, -1.0, 1.0]), "log-scale"),
        ("scale", torch.ones(1), "scale must be .3. like mean"),
        ("target", torch.ones(3, 1), "target must be"),
        ("target", torch.tensor([1.0, NAN, 1.0]), "target must be finite: 1 of 3"),
        ("mean", torch.full((3,), torch.inf), "mean must be finite"),
        ("mean", torch.empty(0), "mean is empty"),
    ],
)
def test_regression_scores_refuse(score, name, bad, message):
    with pytest.raises(ValueError, match=message):
        score(**{"mean": torch.ones(3), "scale": torch.ones(3), "target": torch.ones(3), name: bad})


ONES, ZEROS, DRAWS = torch.ones(4), torch.zeros(4), PROBS.expand(3, 2, 2)
COUNTS, EDGES = torch.ones(3), torch.tensor([0.0, 1.0], dtype=torch.float64)
SUMS = scores.mahalanobis_sums(torch.ones(4, 2), torch.zeros(4, dtype=torch.long), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scores.ece(PROBS, LABELS, bins=0), "bins must be at least 1"),
        (lambda: scores.ece(PROBS, LABELS, binning="even"), "binning must be"),
        (lambda: scores.coverage(ONES, ONES, ONES, 90), "level must lie strictly"),
        (lambda: scores.misclassification_auroc(ONES, ONES), "all predictions are right"),
        (lambda: scores.misclassification_auroc(ONES, ZEROS), "all predictions are wrong"),
        (lambda: scores.misclassification_auroc(ONES, 2 * ONES), "correct must be booleans"),
        (lambda: scores.misclassification_auroc(NAN * ONES, ONES), "uncertainty has 4 NaN"),
        (lambda: scores.retention_area(torch.empty(0), torch.empty(0)), "uncertainty is empty"),
        (lambda: scores.retention_curve(ONES, ONES[:2]), "correct must be .4."),
        (lambda: scores.retention_curve(ONES, NAN * ONES), "correct must be booleans"),
        (lambda: scores.resampled(scores.auroc, ONES, ONES, number=5), "number must lie in 1..4"),
        (lambda: scores.resampled(scores.auroc, ONES, ONES, times=0), "times must be"),
        (lambda: scores.auroc_of_counts(ONES, ZEROS), "outside counts"),
        (lambda: scores.fpr95_of_counts(ONES, ONES[:2]), "same edges"),
        (lambda: scores.energy_score(torch.ones(5, 4), ONES), "draws must be"),
        (lambda: scores.energy_score(torch.ones(5, 4, 1), NAN * torch.ones(4, 1)), "target must be finite"),
        (lambda: scores.covariance_sharpness(torch.zeros(2, 3, 3)), "positive definite: 2 of 2"),
        (lambda: scores.covariance_sharpness(torch.ones(2, 3)), "covariance must be"),
        (lambda: scores.entropy(torch.tensor([[2.0, -1.0]])), "logits"),
        (lambda: scores.msp(torch.full((2, 2), NAN)), "probs must be finite"),
        (lambda: scores.energy(torch.full((2, 2), NAN)), "logits must be finite"),
        (lambda: scores.energy(PROBS, 0.0), "temperature must be positive"),
        (lambda: scores.max_logit(torch.empty(0, 3)), "logits is empty"),
        (lambda: scores.mutual_information(PROBS), "draws must be"),
        (lambda: scores.epistemic_trace(2 * DRAWS), "draws must lie"),
        (lambda: scores.odin(lambda x: x, torch.ones(2, 3, dtype=torch.long)), "x must be floating"),
        (lambda: scores.mahalanobis_fit(SUMS), "constant within every class"),
        (lambda: scores.mahalanobis_fit({k: 0 * v for k, v in SUMS.items()}), "count is 0"),
        (lambda: scores.mahalanobis_fit(SUMS | {"total": NAN * SUMS["total"]}), "not finite"),
        (
            lambda: scores.mahalanobis(scores.Mahalanobis(torch.ones(2, 3), torch.eye(3)), ONES[None]),
            "features must be",
        ),
        (lambda: scores.conformal_threshold(COUNTS, EDGES, 1.0), "coverage must lie strictly"),
        (lambda: scores.conformal_threshold(0 * COUNTS, EDGES), "counts are all 0"),
        (lambda: scores.conformal_threshold(COUNTS[:2], EDGES), "counts must be .3."),
        (lambda: scores.temperature({"count": torch.tensor(0.0), "nll": torch.zeros(121)}), "count is 0"),
        (lambda: scores.temperature({"count": torch.tensor(1.0), "nll": torch.full((121,), NAN)}), "nll is not finite"),
        (lambda: scores.tempered(PROBS, -1.0), "temperature must be positive"),
    ],
)
def test_the_others_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("score", [f for f in BY_CLASS if f is not scores.reliability], ids=lambda f: f.__name__)
@pytest.mark.parametrize("labels", [torch.zeros(5, dtype=torch.long), torch.tensor([0, 1, 2, 0, 1])])
def test_constant_predictions_and_a_single_class_have_values(score, labels):
    assert math.isfinite(score(torch.full((5, 3), 1 / 3), labels))
