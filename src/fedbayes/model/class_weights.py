"""Classes that count more in training, for outcomes that are rare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbayes.errors import InputError
from fedbayes.model.likelihood import Likelihood, Weights

BALANCED = "balanced"


def class_weights(given: str | Sequence[float], counts: Tensor) -> Tensor:
    """One weight for each class, with a mean of 1 over rows: those given, or rows / (classes * rows of the class)."""
    if isinstance(given, str):
        weights = counts.sum() / (len(counts) * counts.double().clamp(min=1))
    else:
        weights = torch.tensor([float(v) for v in given], dtype=torch.float64)
        if len(weights) != len(counts):
            raise InputError(f"class_weights: {len(weights)} numbers for {len(counts)} classes; give one for each")
    return weights * counts.sum() / (weights * counts).sum().clamp(min=1e-12)


def weighted(likelihood: Likelihood, weights: Tensor) -> Likelihood:
    """A likelihood of classes whose rows count by the weight of their class; what it predicts is what it was."""

    def log_prob(output: Tensor, target: Tensor, parameters: Weights) -> Tensor:
        return weights.to(output)[target] * likelihood.log_prob(output, target, parameters)

    return likelihood._replace(log_prob=log_prob)
