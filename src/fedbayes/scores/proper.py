"""Accuracy and proper scores of class probabilities, and of independent labels; each is a mean over rows."""

import torch
from torch import Tensor

from fedbayes.scores import inputs

FLOOR = 1e-12
"""Probabilities are taken no smaller than this in a logarithm, so that no row costs more than 27.6 nats."""


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Share of rows whose most probable class is the label; higher is better. Of tied classes the first counts."""
    probs, labels = inputs.class_probs(probs, labels)
    return float((probs.argmax(1) == labels).double().mean())


def nll(probs: Tensor, labels: Tensor) -> float:
    """Negative log-likelihood in nats, mean of -log max(p_label, 1e-12); lower is better."""
    probs, labels = inputs.class_probs(probs, labels)
    return float(-probs.gather(1, labels[:, None]).clamp_min(FLOOR).log().mean())


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean of sum_c (p_c - [label = c])^2, from 0 to 2; lower is better (Brier, 1950)."""
    probs, labels = inputs.class_probs(probs, labels)
    return float((probs - torch.nn.functional.one_hot(labels, probs.shape[1])).square().sum(1).mean())


def multilabel_accuracy(probs: Tensor, targets: Tensor) -> float:
    """Share of the N x C labels on the right side of one half; higher is better. One half itself counts as "no"."""
    probs, targets = inputs.label_probs(probs, targets)
    return float(((probs > 0.5) == (targets > 0.5)).double().mean())


def exact_match(probs: Tensor, targets: Tensor) -> float:
    """Share of rows with all C labels on the right side of one half; higher is better."""
    probs, targets = inputs.label_probs(probs, targets)
    return float(((probs > 0.5) == (targets > 0.5)).all(1).double().mean())


def multilabel_nll(probs: Tensor, targets: Tensor) -> float:
    """Mean over rows of -sum_c log max(p(target_c), 1e-12) in nats; lower is better."""
    probs, targets = inputs.label_probs(probs, targets)
    of_truth = torch.where(targets > 0.5, probs, 1 - probs)
    return float(-of_truth.clamp_min(FLOOR).log().sum(1).mean())


def multilabel_brier(probs: Tensor, targets: Tensor) -> float:
    """Mean over rows of sum_c (p_c - target_c)^2, from 0 to C; lower is better."""
    probs, targets = inputs.label_probs(probs, targets)
    return float((probs - targets).square().sum(1).mean())
