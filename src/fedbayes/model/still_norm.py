"""BatchNorm of a frozen layer: its statistics are constants like its weights, and stand still."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

HELD, MOVING = "held", "moving"  # of a layer: the buffers that became constants, and the class that moves them


class StillNorm(nn.Module):
    """BatchNorm by its stored statistics, in training too."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)  # type: ignore[arg-type]


def hold_still(layer: Any) -> None:
    """Make a layer's buffers frozen weights, in place: neither pooled nor sent. BatchNorm's statistics stand still."""
    own = tuple(key for key, buffer in layer._buffers.items() if buffer is not None)
    if not own:
        return
    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
        layer.__dict__[MOVING] = type(layer)
        layer.__class__ = StillNorm  # type: ignore[assignment]
    layer.__dict__[HELD] = own
    for key in own:
        layer.register_parameter(key, nn.Parameter(layer._buffers.pop(key), requires_grad=False))


def hold_norms_still(network: nn.Module, trained: set[str]) -> None:
    """Hold each BatchNorm still, in place, that has weights none of which are trained."""
    for name, layer in network.named_modules():
        own = [f"{name}.{key}".removeprefix(".") for key, p in layer._parameters.items() if p is not None]
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and own and trained.isdisjoint(own):
            hold_still(layer)


def let_move(layer: Any) -> None:
    """What `hold_still` did, undone."""
    for key in layer.__dict__.pop(HELD, ()):
        layer._buffers[key] = layer._parameters.pop(key).data
    if isinstance(layer, StillNorm):
        layer.__class__ = layer.__dict__.pop(MOVING)
