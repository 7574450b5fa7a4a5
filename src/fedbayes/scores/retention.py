"""Accuracy of what is kept when the most uncertain predictions are handed on (Filos et al., 2019)."""

from typing import NamedTuple

import torch
from torch import Tensor

from fedbayes.scores import inputs


class Retention(NamedTuple):
    """The curve: fraction k / N retained, and the accuracy of the k most certain predictions, each [N]."""

    fraction: Tensor
    accuracy: Tensor


def retention_curve(uncertainty: Tensor, correct: Tensor) -> Retention:
    """Accuracy of the k most certain predictions for k = 1..N; a falling curve means that uncertainty is informative.

    Tied predictions are kept in random order and the expected accuracy is given: each counts as the mean of its ties.
    """
    uncertainty = inputs.ranked("uncertainty", uncertainty)
    values, order = uncertainty.sort()
    right = inputs.hits(correct, uncertainty)[order]
    group = torch.cat([values.new_zeros(1), (values[1:] != values[:-1]).double()]).cumsum(0).long()
    right = (group.bincount(right) / group.bincount())[group]
    size = torch.arange(1, len(values) + 1, dtype=torch.float64, device=values.device)
    return Retention(size / len(values), right.cumsum(0) / size)


def retention_area(uncertainty: Tensor, correct: Tensor) -> float:
    """Area under the retention curve, the mean accuracy over k = 1..N retained; higher is better.

    Constant uncertainty gives the plain accuracy.
    """
    return float(retention_curve(uncertainty, correct).accuracy.mean())
