"""Accuracy and proper scores against scikit-learn and hand-made answers."""

import numpy as np
import pytest
import torch
from sklearn import metrics

from fedbayes import scores


def _case(seed: int, rows: int = 200, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return probs, torch.randint(classes, (rows,), generator=generator)


def test_class_scores_equal_scikit_learn():
    probs, labels = _case(0)
    p, y = probs.numpy(), labels.numpy()
    assert scores.accuracy(probs, labels) == pytest.approx(metrics.accuracy_score(y, p.argmax(1)))
    assert scores.nll(probs, labels) == pytest.approx(metrics.log_loss(y, p, labels=range(5)), rel=1e-12)
    assert scores.brier(probs, labels) == pytest.approx(((p - np.eye(5)[y]) ** 2).sum(1).mean(), rel=1e-12)


def test_label_scores_equal_scikit_learn():
    generator = torch.Generator().manual_seed(1)
    probs, targets = torch.rand(100, 4, generator=generator), torch.randint(2, (100, 4), generator=generator)
    p, t = probs.double().numpy(), targets.numpy()
    said = (p > 0.5).astype(int)
    assert scores.exact_match(probs, targets) == pytest.approx(metrics.accuracy_score(t, said))
    assert scores.multilabel_accuracy(probs, targets) == pytest.approx(1 - metrics.hamming_loss(t, said))
    losses = [metrics.log_loss(t[:, c], p[:, c]) for c in range(4)]
    assert scores.multilabel_nll(probs, targets) == pytest.approx(sum(losses), rel=1e-9)
    briers = [metrics.brier_score_loss(t[:, c], p[:, c]) for c in range(4)]
    assert scores.multilabel_brier(probs, targets) == pytest.approx(sum(briers), rel=1e-9)


def test_a_sure_and_wrong_prediction_has_finite_scores_at_their_ends():
    probs, labels = torch.tensor([[1.0, 0.0]]), torch.tensor([1])
    assert scores.accuracy(probs, labels) == 0
    assert scores.brier(probs, labels) == 2
    assert scores.nll(probs, labels) == pytest.approx(-np.log(1e-12))


def test_half_precision_probabilities_are_accepted():
    probs, labels = _case(2)
    assert scores.nll(probs.half(), labels) == pytest.approx(scores.nll(probs, labels), rel=1e-2)
