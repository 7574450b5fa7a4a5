"""Bins, open below and closed above: which one a value falls into, and how many fell into each."""

import torch
from torch import Tensor

SLACK = 1e-6
"""A confidence this little above an edge lies on it, so that float32 and float64 agree on confidences such as 0.2."""


def width_index(values: Tensor, bins: int) -> Tensor:
    """The bin of a value among `bins` equal parts of [0, 1]; bin b is (b / bins, (b + 1) / bins], and 0 is in bin 0.

    Computed in float64 from any precision, with edges `SLACK` higher than their value.
    """
    return ((values.double() - SLACK) * bins).ceil().long().sub(1).clamp(0, bins - 1)


def histogram(values: Tensor, edges: Tensor, mask: Tensor | None = None) -> Tensor:
    """Counts [B + 1] of values [N] between rising edges [B]; histograms over the same edges add.

    Bin b holds edges[b-1] < value <= edges[b], the last one all above and NaN. Rows with mask 0 don't count.
    """
    index = torch.searchsorted(edges.to(values.device), values.double())
    live = torch.ones_like(index, dtype=torch.float64) if mask is None else mask.double()
    return torch.zeros(len(edges) + 1, dtype=torch.float64, device=values.device).scatter_add(0, index, live)
