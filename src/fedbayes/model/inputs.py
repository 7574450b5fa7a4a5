"""What goes into a network: as numbers, in the precision of its weights, one tensor or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedbayes.model.trees import mapped


def first_of(x: Any) -> Tensor:
    """The input, or the first of several."""
    return x if isinstance(x, Tensor) else tree_leaves(x)[0]


def to_float(x: Tensor) -> Tensor:
    """Bytes become numbers in [0, 1]; anything else is left as it is."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def as_it_is(x: Tensor) -> Tensor:
    """The same."""
    return x


def in_precision_of(module: nn.Module, x: Any) -> Any:
    """Floating inputs in the dtype of the module's weights."""
    first = next((p for p in module.parameters() if p.is_floating_point()), None)
    return mapped(lambda t: t if first is None or not t.is_floating_point() else t.to(first.dtype), x)
